"""ZeRO-Inference: weights stay in a file and are read layer by layer (Aminabadi et al. 2022, section 5).

The picture, for a model of 8 segments and memory for 4 of them::

    file     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |      packed weights, as the kernels read them (packed_file.py)
    memory   | 0 | a | b | c |                      segment 0 stays; a, b, c are a ring
    a step     0  1a  2b  3c  4a  5b ...            compute i, and read i + 3 into the slot that i has left

A step takes the segments in a fixed order, the next step begins where this one ends, and the number of
segments that are not resident is a multiple of the ring's slots: each segment has one address for good, and
the runner's programs are built once.  The more sequences a step works on, the more tokens a byte read is worth.

A segment is a layer, or less: at least two dozen make up a model, so that a ring of three holds an eighth.

Two sources:

- the *page cache* (``weight_offload="cpu"``): every segment is resident in the mapped file, and the kernels read the
  page cache itself.  Nothing is copied, several replicas share the pages, and under pressure the system drops pages
  instead of killing anybody.
- the *disk* (``weight_offload="nvme"``): threads read ahead into the ring, past the page cache, which a model larger
  than it would only churn.  Memory is bounded by what was asked for.

A device has a ring of its own, :class:`DeviceWeightRing`, of linear layers that come out of pinned memory.

Invariants: a slot is read into only after its program has run; a program runs only when its segment has arrived; an
error of the disk is an exception of the step that needed the bytes, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.device import pin, resolve_device
from thalweg.infer.config import EngineConfig
from thalweg.infer.models.spec import DecoderSpec, LinearSpec, list_linears
from thalweg.infer.offload.module_offload import begin_copy
from thalweg.infer.offload.packed_file import CorruptFileError, PackedWeightsFile, default_weights_folder
from thalweg.infer.runners import packed_weights
from thalweg.infer.runners.packed_weights import PackedWeight, WeightStore, layer_linears, lm_head_format, packed_bytes
from thalweg.ops import cpu_kernels
from thalweg.plan.spec.cluster import local_cluster
from thalweg.plan.spec.devices import local_device
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import EvictableMemory
from thalweg.storage_io.io_threads import IoFuture
from thalweg.utils.procfs import available_host_memory

_RING_SIZES = (4, 3, 2)
_SAMPLED_OUTPUTS = 32  # of each layer of a file that is found; whole panels
_MIN_SEGMENTS = 24  # at least, of weights that are large enough to be cut
_MIN_SEGMENT_BYTES = 1 << 16  # bytes of a segment worth a transfer
_MEMORY_FRACTION = 0.25  # of the free memory, for weights, where nobody says how much


@dataclass(frozen=True)
class RingPlan:
    """The segments of a step and where each of them lies: the first ``resident`` for good, the others in
    turns in ``slots`` buffers."""

    sizes: tuple[int, ...]
    num_resident: int
    num_slots: int

    @property
    def num_streamed(self) -> int:
        """Segments that are read in every step."""
        return len(self.sizes) - self.num_resident

    @property
    def slot_bytes(self) -> int:
        """Size of a buffer."""
        return max(self.sizes[self.num_resident :], default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.sizes[: self.num_resident]) + self.num_slots * self.slot_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes read in every step."""
        return sum(self.sizes[self.num_resident :])

    def offset(self, segment: int) -> int:
        """Where a segment begins in memory."""
        if segment < self.num_resident:
            return sum(self.sizes[:segment])
        slot = (segment - self.num_resident) % self.num_slots
        return sum(self.sizes[: self.num_resident]) + slot * self.slot_bytes

    def next_in_slot(self, segment: int) -> int:
        """The segment that takes the place of this one."""
        return self.num_resident + (segment - self.num_resident + self.num_slots) % self.num_streamed


def plan_ring(sizes: Sequence[int], max_bytes: int) -> RingPlan:
    """Return the ring that reads least in each step within ``max_bytes``.

    Raises ValueError, naming the least that will do, where there is none.
    """
    count = len(sizes)
    if sum(sizes) <= max_bytes:
        return RingPlan(tuple(sizes), count, 0)
    candidates = [
        RingPlan(tuple(sizes), resident, slots)
        for slots in _RING_SIZES
        for resident in range(count)
        if (count - resident) % slots == 0
    ]
    fitting = [c for c in candidates if c.total_bytes <= max_bytes]
    if not fitting:
        min_bytes = min((c.total_bytes for c in candidates), default=sum(sizes))
        raise ValueError(
            f"weight_offload_bytes of {max_bytes} bytes is too little for the ring: the least is {min_bytes}"
        )
    # Two buffers keep a disk busy only while nothing stalls, so a third is worth as much as it holds.
    return min(fitting, key=lambda c: (c.read_bytes + (c.num_slots == 2) * c.slot_bytes, -c.num_slots))


def split_into_segments(decoder: DecoderSpec, weight_format: str) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Cut the weights: for each linear layer its ranges (start, stop, segment), and the segments' bytes.

    A segment is as much of consecutive weights as the largest layer has, or a part of the whole; the head
    begins with one of its own.  Ranges are whole panels, bytes whole pages.
    """
    layers = [[(x, weight_format) for x in layer_linears(layer)] for layer in decoder.layers]
    layers.append([(decoder.lm_head, lm_head_format(weight_format))])
    layer_bytes = [[packed_bytes(x.out_features, x.in_features, kind) for x, kind in layer] for layer in layers]
    total = sum(map(sum, layer_bytes))
    limit = min(max(map(sum, layer_bytes[:-1])), max(total // _MIN_SEGMENTS, _MIN_SEGMENT_BYTES))
    ranges: list[list[tuple[int, int, int]]] = []
    sizes = [0]
    for number, layer in enumerate(layers):
        if number == len(layers) - 1:
            sizes.append(0)
        for x, kind in layer:
            panels = -(-x.out_features // 32)
            num_parts = min(-(-packed_bytes(x.out_features, x.in_features, kind) // limit), panels)
            stops = [min(panels * (i + 1) // num_parts * 32, x.out_features) for i in range(num_parts)]
            ranges.append([])
            for start, stop in pairwise([0, *stops]):
                size = packed_bytes(stop - start, x.in_features, kind)
                if sizes[-1] and sizes[-1] + size > limit:
                    sizes.append(0)
                sizes[-1] += size
                ranges[-1].append((start, stop, len(sizes) - 1))
    return ranges, [round_up(size) for size in sizes]


class WeightRing(WeightStore):
    """A model's packed weights in a file, each segment at an address that stays, for the programs of a runner.

    On the first load they are packed into the file; ``weights_id``: what the model was loaded from, or None for a live
    one.  ``options``: their ``weight_offload`` is ``cpu`` (the page cache) or ``nvme`` (the disk).
    """

    def __init__(self, decoder: DecoderSpec, weight_format: str, options: EngineConfig, weights_id: Any = None) -> None:
        assert options.weight_offload is not None, "only offloaded weights are in a ring"
        folder = Path(options.weight_offload_dir) if options.weight_offload_dir else default_weights_folder()
        self._ranges, sizes = split_into_segments(decoder, weight_format)
        self.file = PackedWeightsFile(folder, sizes, None if weights_id is None else [weights_id, weight_format])
        self._layer_index, self._current_segment, self._offset = 0, -1, 0
        self._futures: dict[int, IoFuture] = {}
        self._is_mapped, max_bytes = options.weight_offload == "cpu", options.weight_offload_bytes
        try:
            if self._is_mapped:  # every segment is resident, where the page cache has it
                self.ring = RingPlan(tuple(sizes), len(sizes), 0)
                self._buffers = self.file.map()
                return
            if max_bytes is None:
                max_bytes = int(_MEMORY_FRACTION * (available_host_memory() or 2**32))
                max_bytes = max(max_bytes, len(_RING_SIZES) * max(sizes))
            self.ring = plan_ring(sizes, max_bytes)
        except BaseException:
            self.file.close()
            raise
        memory = EvictableMemory(self.ring.total_bytes)
        self._buffers = [memory.tensor(self.ring.offset(s), (size,), torch.uint8) for s, size in enumerate(sizes)]

    # Packing

    def pack(self, layer: LinearSpec, weight_format: str) -> Iterator[PackedWeight]:
        """Write the weights to the file; yield where they will be in memory.

        Of weights that an earlier engine has packed, the first outputs of each layer are packed once more and compared.
        Raises CorruptFileError where the file has others.
        """
        ranges = self._ranges[self._layer_index]
        self._layer_index += 1
        for start, stop, segment in ranges:
            # Mapped segments need no waiting, so that a program may run over all of them.
            starts_segment = segment != self._current_segment and not self._is_mapped
            if segment != self._current_segment:
                self._current_segment, self._offset = segment, 0
            part = layer.slice_outputs((start, stop))
            offsets, self._offset = packed_weights.lay_out(part, weight_format, self._offset)
            if not self.file.complete:
                for at, piece in packed_weights.iter_packed_pieces(part, weight_format, offsets):
                    self.file.write(segment, at, piece)
            elif start == 0:
                sample = part.slice_outputs((0, min(_SAMPLED_OUTPUTS, stop)))
                for at, piece in packed_weights.iter_packed_pieces(sample, weight_format, offsets):
                    if self.file.peek(segment, at, piece.numel()) != piece.numpy().tobytes():
                        raise CorruptFileError(
                            f"{self.file.name} was packed from other weights than this model's: delete it to have it"
                            " written anew"
                        )
            base = self._buffers[segment].data_ptr()
            yield PackedWeight.at(base, offsets, part, weight_format, start, starts_segment)

    def finalize(self) -> None:
        """Every layer is packed: begin to read."""
        if not self.file.complete:
            self.file.finalize()
            if not self._is_mapped:
                self.file.drop_page_cache()
        if not self._is_mapped:
            for segment in range(min(self.ring.num_resident + self.ring.num_slots, len(self.ring.sizes))):
                self._fetch(segment)

    # Steps

    def _fetch(self, segment: int) -> None:
        self._futures[segment] = self.file.read(segment, self._buffers[segment])

    def _wait_segment(self, segment: int) -> None:
        if not self._is_mapped:
            self._futures[segment].wait()
            self.file.verify(segment, self._buffers[segment].numpy().data)

    def _release_segment(self, segment: int) -> None:
        if segment >= self.ring.num_resident:
            del self._futures[segment]
            self._fetch(self.ring.next_in_slot(segment))

    def run(self, programs: Sequence[cpu_kernels.Program], first_segment: int) -> None:
        """Run each segment's program when the segment has arrived, then let another segment take its place."""
        for segment, program in enumerate(programs, first_segment):
            self._wait_segment(segment)
            program.run()
            self._release_segment(segment)

    def skip(self, first_segment: int) -> None:
        """Let the segments pass that this step does not need."""
        for segment in range(first_segment, len(self.ring.sizes)):
            self._wait_segment(segment)
            self._release_segment(segment)

    def close(self) -> None:
        """Wait for reads under way; close the file."""
        for future in self._futures.values():
            future.wait_ignoring_errors()
        self._futures.clear()
        self.file.close()


class DeviceWeightRing:
    """A described model's linear layers for a device, which each come from the host just in time.

    The picture, with a copy that runs ahead of the products by up to two layers::

        copies     a    b    c    d    e ...       on a stream of their own, out of pinned memory
        products        a    b    c    d ...       each waits for its copy, on the device

    The order is that of the last step.  ``keep_pinned``: all weights stay in pinned memory, for models that the host
    has room for; else each is put there anew, out of the mapped files.
    """

    _NUM_AHEAD = 2

    def __init__(self, device: torch.device, dtype: torch.dtype, keep_pinned: bool) -> None:
        self._device, self._dtype, self._keep_pinned = device, dtype, keep_pinned
        self._stream = torch.Stream(device)
        self._pinned: dict[int, tuple[Tensor, ...]] = {}
        # By identity of the layer, which the description keeps alive.
        self._next: dict[int, LinearSpec] = {}
        self._pending: dict[int, Callable[[], list[Tensor]]] = {}
        self._last: LinearSpec | None = None

    def get(self, layer: LinearSpec) -> list[Tensor]:
        """Return the layer's weight, and its bias where it has one, for what this stream computes from here on."""
        if self._last is not None:
            self._next[id(self._last)] = layer
        self._last = layer
        if id(layer) not in self._pending:  # another order than last time
            self._pending.clear()
            self._start(layer)
        tensors = self._pending.pop(id(layer))()
        following = self._next.get(id(layer))
        while following is not None and len(self._pending) < self._NUM_AHEAD and id(following) not in self._pending:
            self._start(following)
            following = self._next.get(id(following))
        return tensors

    def _start(self, layer: LinearSpec) -> None:
        pinned = self._pinned.get(id(layer))
        if pinned is None:
            pinned = tuple(pin(t.to("cpu", self._dtype)) for t in (layer.weight, layer.bias) if t is not None)
            if self._keep_pinned:
                self._pinned[id(layer)] = pinned
        self._pending[id(layer)] = begin_copy(pinned, self._device, self._stream)

    def close(self) -> None:
        """Drop what is on its way and what is pinned."""
        self._pending.clear()
        self._pinned.clear()


# A device could use thousands of sequences for the time that weights take to it; the host's work on each counts then.
_MAX_DEVICE_BATCH = 512


def optimal_batch_size(
    *, read_bytes: int, read_rate: float, macs: int, mac_rate: float, sequence_bytes: int, kv_memory: int
) -> int:
    """Return how many sequences a step should work on, at least 1.

    More of them cost nothing while the weights take longer to come than to be used: up to
    ``read_bytes / read_rate = batch * macs / mac_rate`` (bytes of a step, products of a token), and as many
    as the ``memory`` for KV holds at ``sequence_bytes`` each.
    """
    balance = (read_bytes / read_rate) / (macs / mac_rate)
    return max(1, min(int(balance + 0.999), kv_memory // sequence_bytes))


def throughput_batch_size(decoder: DecoderSpec, weight_format: str, options: EngineConfig, max_length: int) -> int:
    """Return the batch for the most tokens a second on this machine: see :func:`optimal_batch_size`."""
    linears = list_linears(decoder)
    per_token = sum(2 * x.attention.num_kv_heads * x.attention.head_dim for x in decoder.layers)
    dtype, device = torch.float32 if weight_format == "fp32" else torch.bfloat16, resolve_device(options.device)
    if device.type == "cpu":
        machine, free = local_cluster(), available_host_memory() or 2**32
        speed = machine.peak_flops(dtype)
        rate = machine.host_memory_bandwidth if options.weight_offload == "cpu" else machine.disk_read_bandwidth
    else:
        accelerator, free = local_device(device), torch.accelerator.get_memory_info(device)[0]
        speed, rate = accelerator.peak_flops(dtype), accelerator.host_bandwidth
    batch_size = optimal_batch_size(
        read_bytes=sum(packed_bytes(x.out_features, x.in_features, weight_format) for x in linears),
        read_rate=rate,
        macs=sum(x.out_features * x.in_features for x in linears),
        mac_rate=speed / 2 * (2 if options.quantization else 1),  # integer products run at twice bf16's rate
        sequence_bytes=per_token * max_length * (4 if weight_format == "fp32" else 2),
        kv_memory=options.kv_cache_bytes or int(_MEMORY_FRACTION * free),
    )
    return batch_size if device.type == "cpu" else min(batch_size, _MAX_DEVICE_BATCH)
