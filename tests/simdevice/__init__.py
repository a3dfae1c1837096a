"""A simulated accelerator, ``sim``, for what must hold on a GPU where there is none.

``build()`` compiles it (g++, once for a machine, a torch and these sources; half a minute) and ``register()`` makes it
the accelerator of this process for good: ``torch.accelerator`` finds it, ``torch.sim`` is its module, and process
groups have its backend ``simccl``.  A process of tests that others share must not do so:
``run_ranks(..., device="sim")`` gives ranks that have.  ``device.cpp`` says what it refuses and what *late* work is;
it knows no kernels of its own and no speed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thalweg.plan.spec.devices import DEVICES, Device

DEVICE, NAME = "sim", "simulated"
_SOURCES = ("device.cpp", "collectives.cpp", "autocast.cpp", "attention.cpp", "fused.cpp")
_HERE = Path(__file__).parent


def missing_tool() -> str | None:
    """Why the device cannot be built here, or None."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux alone"
    if shutil.which("g++") is None:
        return "the simulated accelerator needs a compiler: g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated accelerator needs Python's headers: Python.h"
    return None


@cache
def build() -> Path:
    """The compiled device; a folder of the user's cache keeps it for later runs."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sources = b"".join((_HERE / name).read_bytes() for name in ("device.h", *_SOURCES))
    version = f"{torch.__version__} {sys.version} {torch.compiled_with_cxx11_abi()}".encode()
    folder = cache_home / "thalweg-tests" / f"simdevice-{hashlib.sha256(sources + version).hexdigest()[:16]}"
    library = folder / "simdevice.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder, library)
    return library


def _compile(folder: Path, library: Path) -> None:
    """All sources as one: torch's headers, which take most of the time, are read once (28 s where it was 71)."""
    from torch.utils.cpp_extension import include_paths, library_paths

    flags = ["-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=simdevice", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    unfinished = library.with_suffix(".unfinished")
    command = ["g++", "-shared", *flags, "-x", "c++", "-", "-o", str(unfinished), *libraries]
    sources = "".join(f'#include "{_HERE / name}"\n' for name in _SOURCES)
    found = subprocess.run(command, input=sources, stderr=subprocess.PIPE, text=True)
    if found.returncode:
        raise RuntimeError(f"the simulated accelerator does not compile:\n{found.stderr[-4000:]}")
    unfinished.rename(library)


def register(num_devices: int = 1, memory_bytes: int = 4 << 30, like_mps: bool = False) -> None:
    """Make it the accelerator of this process, with so many devices of so much memory; once.

    ``like_mps``: with what Apple's MPS lacks gone: fp64, page-locked memory, all streams but one, a library for
    collectives, and the names that ``torch.mps`` of 2.13 does not have.
    """
    if is_registered():
        return
    os.environ.update(THALWEG_SIM_DEVICES=str(num_devices), THALWEG_SIM_BYTES=str(memory_bytes))
    os.environ["THALWEG_SIM_LIKE_MPS"] = str(int(like_mps))
    torch.utils.rename_privateuse1_backend(DEVICE)
    spec = importlib.util.spec_from_file_location("simdevice", build())
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    _library.impl("histc", _histc, "PrivateUse1")
    module = _make_module(native)
    if like_mps:
        for name in _NOT_OF_MPS:
            delattr(module, name)
        module.Event = _MpsEvent  # type: ignore[attr-defined]
    torch._register_device_module(DEVICE, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _make_backend, extended_api=True, devices=[DEVICE])
    dist.Backend.default_device_backend_map[DEVICE] = "gloo" if like_mps else "simccl"
    # Of no importance, but there: each process would measure them anew, for up to five seconds.
    figures = dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), 1e11)
    DEVICES[NAME] = Device(NAME, memory_bytes, figures, 1e10, 5e9, 5e9, "made up")


_library = torch.library.Library("aten", "IMPL")


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Of whole numbers too, which a processor's does not take."""
    index = ((x.double() - min) * bins / (max - min)).long().clamp(max=bins - 1)
    there = ((x >= min) & (x <= max)).to(x.dtype)
    return x.new_zeros(bins).scatter_add_(0, index.clamp(min=0).flatten(), there.flatten())


def is_registered() -> bool:
    """Whether this process has it."""
    return hasattr(torch, DEVICE)


def restore(device_index: int) -> None:
    """As a rank has it at its start, for the next test."""
    if is_registered():
        native().set_late(False)
    torch.accelerator.set_device_index(device_index % torch.accelerator.device_count())
    torch.get_device_module(accelerator()).manual_seed_all(0)
    torch.accelerator.reset_peak_memory_stats()
    if is_registered():
        reset_counts()


def _make_backend(options: Any, _: Any) -> Any:
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, options.timeout)
    return native().make_backend(gloo, dist.PrefixStore("devices", store), rank, size)


def native() -> Any:
    """The compiled half, once registered."""
    return torch.get_device_module(DEVICE).native


class Stream(torch.Stream):
    """What ``torch.cuda.Stream`` is there."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        """A stream of ``device``, by default of the current one."""
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=_device(device), priority=priority)


def _event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """What ``torch.cuda.Event`` is there; a function, as torch compares times of its own class alone."""
    return torch.Event(device=DEVICE, enable_timing=enable_timing)


_NOT_OF_MPS = (
    "Stream", "stream", "current_stream", "default_stream", "set_stream", "device", "current_device", "set_device",
    "is_initialized", "_initialized", "init", "initial_seed", "is_bf16_supported", "get_device_name",
    "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats", "mem_get_info",
)  # fmt: skip


class _MpsEvent:
    """What ``torch.mps.Event`` is: no ``torch.Event``, which streams do not take."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._event = torch.Event(device=DEVICE)

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()


def _device(device: Any = None) -> torch.device:
    found = torch.device(DEVICE if device is None else device) if not isinstance(device, int) else None
    index = device if isinstance(device, int) else found.index  # type: ignore[union-attr]
    return torch.device(DEVICE, native().current_device() if index is None else index)


@contextlib.contextmanager
def _stream_context(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _make_module(compiled: Any) -> types.ModuleType:
    def generator(device: Any = None) -> torch.Generator:
        return compiled.default_generator(_device(device).index)

    def manual_seed_all(seed: int) -> None:
        for index in range(compiled.device_count()):
            compiled.default_generator(index).manual_seed(seed)

    def default_stream(device: Any = None) -> torch.Stream:
        where = _device(device)
        kind = torch.accelerator.current_stream(where).device_type
        return torch.Stream(stream_id=0, device_index=where.index, device_type=kind)

    module = types.ModuleType(f"torch.{DEVICE}")
    vars(module).update(
        native=compiled,
        Stream=Stream,
        Event=_event,
        stream=_stream_context,
        current_stream=lambda device=None: torch.accelerator.current_stream(_device(device)),
        default_stream=default_stream,
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(_device(device)),
        device=lambda device: torch.accelerator.device_index(_device(device).index),
        device_count=compiled.device_count,
        current_device=compiled.current_device,
        set_device=lambda device: compiled.set_device(_device(device).index),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,  # without, torch 2.11 takes it for a device that nobody uses, and waits for nothing
        _initialized=True,  # which torch's checkpoint asks for
        _is_in_bad_fork=lambda: False,
        init=lambda: None,
        manual_seed=lambda seed: generator().manual_seed(seed),
        manual_seed_all=manual_seed_all,
        initial_seed=lambda: generator().initial_seed(),
        get_rng_state=lambda device=DEVICE: generator(device).get_state(),
        set_rng_state=lambda state, device=DEVICE: generator(device).set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        get_device_name=lambda device=None: NAME,
        memory_allocated=lambda device=None: torch.accelerator.memory_allocated(_device(device)),
        max_memory_allocated=lambda device=None: torch.accelerator.max_memory_allocated(_device(device)),
        memory_reserved=lambda device=None: torch.accelerator.memory_reserved(_device(device)),
        reset_peak_memory_stats=lambda device=None: torch.accelerator.reset_peak_memory_stats(_device(device)),
        mem_get_info=lambda device=None: torch.accelerator.get_memory_info(_device(device)),
        empty_cache=lambda: None,
    )
    return module


@contextlib.contextmanager
def late_work() -> Iterator[None]:
    """Within it, work on side streams runs only when something waits for it; what is left runs at its end."""
    if not is_registered():  # a real device is as late as it is
        yield
        return
    native().set_late(True)
    try:
        yield
    finally:
        native().set_late(False)


def accelerator() -> torch.device:
    """The accelerator of this process, simulated or real, without an index."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


class _CudaCounts:
    """What a simulated device counts by itself, of a real one: torch's warnings of syncs, the profiler's kernels."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._warnings = warnings.catch_warnings(record=True)

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._recorded = self._warnings.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        self._profiler.__enter__()

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        self.syncs = Counter(
            f"{found.filename}:{found.lineno}"
            for found in self._recorded or ()
            if "synchronizing CUDA" in str(found.message)
        )
        events = self._profiler.events() or ()
        self.launches = sum(not event.name.lower().startswith(("memcpy", "memset")) for event in events)


_cuda_counts: list[_CudaCounts] = []  # of the last reset_counts(), until they are asked for


def _counts() -> tuple[int, int, dict[str, int]]:
    """Launches, syncs, and what the syncs were for."""
    if is_registered():
        return native().counts()
    counts = _cuda_counts[-1]
    if not hasattr(counts, "launches"):
        counts.end()
    return counts.launches, counts.syncs.total(), dict(counts.syncs)


def num_syncs() -> tuple[int, dict[str, int]]:
    """How often the host has waited for the device since :func:`reset_counts`, and for what."""
    _, count, causes = _counts()
    return count, dict(causes)


def num_launches() -> int:
    """How many kernels were launched since :func:`reset_counts`."""
    return _counts()[0]


def num_copied_bytes() -> tuple[int, int]:
    """Bytes that went over the link since :func:`reset_counts`: to the device, and to the host."""
    return native().copied_bytes()


def reset_counts() -> None:
    """Begin to count anew; on a real device, until the counts are asked for."""
    if is_registered():
        native().reset_counts()
        return
    _cuda_counts[:] = [_CudaCounts()]
    _cuda_counts[0].begin()
