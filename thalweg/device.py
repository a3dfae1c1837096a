"""The device a rank computes on, and what the C allocator does with freed memory."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.utils.env import DEVICE_VARIABLE

# mallopt(3) parameters of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_TRIM_THRESHOLD_BYTES = 1 << 30
# From this size on blocks come and go singly where memory is short.
LARGE_BLOCK_BYTES = 4 << 20


def pick_device(local_rank: int = 0, name: str = "auto", num_local_ranks: int = 1) -> torch.device:
    """The device of this name (see :func:`resolve_device`) for one of so many ranks on this host, made the current one.

    A kind without an index means the device of this local rank.

    Raises:
        ValueError: torch sees no such device here, or there are fewer of them than ranks on this host.
    """
    device = _find_device(name)
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count()
    index, lacks = (local_rank, local_rank >= count) if device.index is None else (device.index, num_local_ranks > 1)
    if lacks and not _may_share(device.type, count):
        raise ValueError(
            f"local rank {local_rank} has no {device.type} device of its own: this process sees {count}, and "
            f"collectives between two ranks on one device fail. Start at most {count} ranks on this host, each with "
            f'device "auto", or train on the CPU (`thalweg run --device cpu`, or "device": "cpu" in the config)'
        )
    _complete_module(device.type)
    torch.accelerator.set_device_index(index % count)
    return torch.device(device.type, index % count)


def enter_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, whose first one is device 0 whatever other threads have: to ask
    an event, or wait for one, would make a context of this process there (half a GiB)."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _may_share(kind: str, count: int) -> bool:
    """Whether this rank was given the one device that it sees, or its group talks through the host's memory."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    given = next((os.environ[name] for name in names if os.environ.get(name)), "")
    if count == 1 and given and "," not in given:
        return True
    return dist.is_initialized() and goes_through_host(kind)


def goes_through_host(kind: str) -> bool:
    """Whether the job's group carries tensors of this kind of device by gloo: sums and gathers, no messages."""
    return f"{kind}:gloo" in str(dist.get_backend_config()).split(",")


class _OnlyStream:
    """The stream of a device that has no other: what is queued on it is in order already."""

    stream_id = device_index = device_type = 0  # what torch 2.15 hands on, to an operator that uses none of them

    def wait_stream(self, stream: Any) -> None:
        """Nothing is out of order."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> torch.Event:
        """An event of what is queued so far."""
        return torch.accelerator.current_stream().record_event()


def _complete_module(kind: str) -> None:
    """Give a device's module the names that meshes and FSDP2 ask of it and ``torch.mps`` of 2.13 has not."""
    only = _OnlyStream()
    added: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": torch.accelerator.current_device_index,
        "Stream": lambda device=None, priority=0: only,
        "current_stream": lambda device=None: only,
        "stream": nullcontext,
    }
    names = vars(torch.get_device_module(kind))
    for name, value in ({} if "Stream" in names else added).items():
        names.setdefault(name, value)


def current_accelerator() -> torch.device:
    """The accelerator of this process, whichever kind; the CPU where there is none, or the environment says so."""
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def communication_backend(device_type: str) -> str:
    """What collectives of such a device's tensors run on by default."""
    return "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """The device of this name, with its index; ``auto``: the accelerator where there is one, else the CPU.

    A kind without an index means this local rank's own device under a launcher, else the current one.

    Raises:
        ValueError: torch sees no such device here, or this rank has none of its own.
    """
    device = _find_device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ:
        return pick_device(int(os.environ["LOCAL_RANK"]))
    return torch.device(device.type, torch.accelerator.current_device_index())


def _find_device(name: str | torch.device) -> torch.device:
    """The device of this name, with an index where the name has one; ValueError where torch sees none here."""
    if name == "auto":
        name = os.environ.get(DEVICE_VARIABLE) or "auto"
    accelerator = current_accelerator()
    device = None
    with suppress(RuntimeError):  # a kind that torch has never heard of
        device = torch.device(accelerator.type if name == "auto" else name)
    if device is not None and device.type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count() if device is not None and device.type == accelerator.type else 0
    if device is None or (device.index or 0) >= count:
        found = f"{count} of that kind" if count else "no such device"
        raise ValueError(f"device {name}: torch sees {found} here; leave it out, or say cpu for the processor")
    return device


def takes_tensors_of(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of ``group`` take tensors of ``device``: all take their accelerator's, few the host's too."""
    return device.type != "cpu" or any(row.startswith("cpu:") for row in str(dist.get_backend_config(group)).split(","))


RngState = tuple[Tensor, Tensor | None]


def get_rng_state() -> RngState:
    """Which random numbers come next: on the host, and on the current accelerator where one is in use."""
    module = _accelerator_in_use()
    return torch.get_rng_state(), None if module is None else module.get_rng_state()


def set_rng_state(state: RngState) -> None:
    """Go on as after :func:`get_rng_state`."""
    host, accelerator = state
    torch.set_rng_state(host)
    module = _accelerator_in_use()
    if module is not None and accelerator is not None:
        module.set_rng_state(accelerator)


def seed_rng(seed: int) -> None:
    """Seed the generators of the host and of the current accelerator."""
    torch.default_generator.manual_seed(seed)
    module = _accelerator_in_use()
    if module is not None:
        module.manual_seed(seed)


def _accelerator_in_use() -> Any:
    """``torch.cuda`` or what stands for it, if this process has begun to use its device."""
    accelerator = current_accelerator()
    if accelerator.type == "cpu":
        return None
    module: Any = torch.get_device_module(accelerator)
    return module if getattr(module, "is_initialized", lambda: True)() else None


def retain_freed_memory() -> bool:
    """Let glibc keep freed blocks instead of returning each to the kernel; True if it did.

    A training step frees and allocates the same large tensors over and over.  By default
    each of them is a fresh mapping whose pages the kernel zeroes on first touch: 0.4 s a
    GiB here, ten times the cost of writing them, and a sixth of a step on CPU.  Peak
    memory does not change, as the next step needs it again.  ``THALWEG_MALLOC=default``
    leaves the allocator alone.
    """
    return _mallopt((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))


def request_huge_pages() -> None:
    """Let torch ask Linux for huge pages for tensors of 2 MiB and more in host memory.

    A step that gives its large blocks back (:func:`release_large_blocks`) meets a page fault for each 4 KiB of them
    otherwise.  Torch reads the wish when it makes its first tensor, after which this comes too late; ``thalweg run``
    starts its ranks with it.
    """
    if sys.platform == "linux":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def release_large_blocks() -> bool:
    """Let glibc take large blocks from the kernel and give each back when it is freed; True if it did.

    The opposite choice, for models that barely fit: a small block that lives on in the middle of a freed
    large one would keep the next large one out, and the heap would grow with every layer.
    """
    return _mallopt((_M_MMAP_MAX, 1 << 16), (_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES))


def _mallopt(*options: tuple[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if _tunes_malloc() else None  # musl and others have none
    return mallopt is not None and all(mallopt(key, value) for key, value in options)


def _tunes_malloc() -> bool:
    return sys.platform == "linux" and os.environ.get("THALWEG_MALLOC") != "default"


def configure_malloc(low_memory: bool) -> bool:
    """The one or the other; True if the allocator took it."""
    return release_large_blocks() if low_memory else retain_freed_memory()


def trim_malloc() -> None:
    """Give back what :func:`retain_freed_memory` has kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class MallocThreadCache:
    """glibc's cache of small freed chunks, and how to get them out of the way of large ones.

    torch asks for aligned blocks, so glibc asks its heap for 96 bytes more and gives the head and the tail
    back; these few bytes are what a small object gets next.  When that is freed, its chunk waits in the
    thread's cache (seven of each size) and counts as in use: the block beside it, freed too, cannot grow
    together with it and is some bytes too small for the next tensor of its size, beside which the heap then
    grows.  :meth:`swap_chunks` fills the cache with other chunks, so that those return to the heap.
    """

    # What glibc caches: seven of each size.
    _SIZES = tuple(24 + 16 * index for index in range(64) for _ in range(7))
    # Between two exchanges of a listener: short steps, which hold little, would spend a tenth of their time on three.
    _PAUSE_SECONDS = 0.025

    def __init__(self) -> None:
        self._malloc = self._free = None
        self._last_exchange = -math.inf
        if not _tunes_malloc():
            return
        library = ctypes.PyDLL(None)  # keeps the interpreter's lock: a call takes a tenth of a microsecond
        if hasattr(library, "gnu_get_libc_version"):
            self._malloc, self._free = library.malloc, library.free
            self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]

    def swap_chunks(self) -> None:
        """Let this thread's cache hold other chunks than now; 0.4 to 0.8 ms."""
        malloc, free = self._malloc, self._free
        if malloc is None or free is None:
            return
        cached = [malloc(size) for size in self._SIZES]
        others = [malloc(size) for size in self._SIZES]
        for chunk in others:  # the cache is full then,
            free(chunk)
        for chunk in cached:  # and these go back to the heap
            free(chunk)

    def _swap_seldom(self, result: object = None) -> None:
        if time.monotonic() - self._last_exchange >= self._PAUSE_SECONDS:
            self.swap_chunks()
            self._last_exchange = time.monotonic()

    # A listener of training steps (``optim/accumulation.py``): before and after each backward pass, after each update.
    before_backward = after_backward = after_step = _swap_seldom

    def discard(self) -> None:
        """Nothing to do."""

    close = discard


def synchronize(device: torch.device | None = None) -> None:
    """Wait for queued work, where the device queues any; None: for that of this process's accelerator."""
    if (device is None and _accelerator_in_use() is not None) or (device is not None and device.type != "cpu"):
        torch.accelerator.synchronize(device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, in the order of its stream: the host does not wait for an accelerator.

    From pageable memory it might: the copy goes through page-locked memory, which torch keeps for the next one.  Where
    there is none such it waits, as the tensor may be gone before the device has read it."""
    if device.type != "cpu" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = pin(tensor)
    return tensor.to(device, non_blocking=can_pin())


def iter_host_parts(tensor: Tensor, part_numel: int) -> Iterator[Tensor]:
    """A 1-D tensor of an accelerator in parts on the host, each valid until the next is asked for.

    Two page-locked buffers take turns, so that one part is copied while the caller works on the one before."""
    parts = tensor.split(part_numel)
    buffers = [pin(torch.empty_like(part, device="cpu")) for part in parts[:2]]
    copies: list[tuple[Tensor, torch.Event]] = []

    def start_copy(index: int) -> None:
        if index < len(parts):
            host = buffers[index % 2][: parts[index].numel()].copy_(parts[index], non_blocking=True)
            copies.append((host, torch.accelerator.current_stream(tensor.device).record_event()))

    start_copy(0)
    for index in range(len(parts)):
        start_copy(index + 1)
        host, done = copies[index]
        done.synchronize()
        yield host


def lock_pages(memory: Tensor) -> bool:
    """Page-lock host memory where it lies, so that copies to and from the device need no host; whether it worked.

    Of all accelerators torch offers this for CUDA alone."""
    if current_accelerator().type != "cuda":
        return False
    runtime: Any = torch.cuda.cudart()
    try:
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0 and memory.is_pinned()
    except RuntimeError:
        return False


def unlock_pages(address: int, *_kept: Tensor) -> None:
    """Undo :func:`lock_pages` of the memory at ``address``."""
    runtime: Any = torch.cuda.cudart()
    with suppress(RuntimeError):
        runtime.cudaHostUnregister(address)


def pin(tensor: Tensor) -> Tensor:
    """Return a host tensor in memory that the accelerator reads by itself; where there is none such, the tensor."""
    if not can_pin():
        return tensor
    is_expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Page-locked memory has the strides of what it is of, and is written to place by place.
    return (tensor.contiguous() if is_expanded else tensor).pin_memory()


@cache
def can_pin() -> bool:
    """Whether the accelerator has page-locked memory of the host's; one that shares its memory has not."""
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except RuntimeError:
        return False


def graph_module(device: torch.device) -> Any:
    """The device's module where it can launch many kernels as one (CUDA graphs), else None."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "CUDAGraph") else None


@contextmanager
def attention_of_many_shapes() -> Iterator[None]:
    """Leave out cuDNN's attention, which plans each new shape for longer than a step computes (35 ms on an H200)."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on a device that has none."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32
