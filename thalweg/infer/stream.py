"""ZeRO-Inference: weights that lie in a file and pass by layer by layer (Aminabadi et al. 2022, section 5).

The picture, for a model of 8 segments and memory for 4 of them::

    file     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |      packed weights, as the kernels read them (packfile.py)
    memory   | 0 | a | b | c |                      segment 0 stays; a, b, c are a ring
    a step     0  1a  2b  3c  4a  5b ...            compute i, and read i + 3 into the slot that i has left

A step takes the segments in a fixed order, the next step begins where this one ends, and the number of
segments that are not resident is a multiple of the ring's slots: each segment has one address for good, and
the runner's tapes are laid once.  The more sequences a step works on, the more tokens a byte read is worth.

A segment is a layer, or less: at least two dozen make up a model, so that a ring of three holds an eighth.

Two ways to get at the file:

- *mapped* (``stream="cpu"``): the kernels read the page cache itself.  Nothing is copied, several replicas
  share the pages, and under pressure the system drops pages instead of killing anybody.
- *read* (``stream="nvme"``): threads read ahead into the ring, past the page cache, which a model larger
  than it would only churn.  Memory is bounded by what was asked for.

Invariants: a slot is read into only after its tape has run; a tape runs only when its segment has arrived; an
error of the disk is an exception of the step that needed the bytes, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.api import EngineOptions
from thalweg.infer.describe import MLP, Decoder, Linear
from thalweg.infer.packfile import PackedFile, bytes_of
from thalweg.infer.weights import Packed, head_form, line_up, linears, packed_bytes
from thalweg.ops import native
from thalweg.ops.table import get_cache_dir
from thalweg.plan.cluster import available_host_memory, local_cluster
from thalweg.store.io import IoFuture
from thalweg.store.paged import EvictableMemory
from thalweg.store.regions import round_up

_SLOTS = (4, 3, 2)
_SEGMENTS = 24  # at least, of weights that are large enough to be cut
_SMALLEST = 1 << 16  # bytes of a segment worth a transfer
_SHARE = 0.25  # of the free memory, for weights, where nobody says how much


@dataclass(frozen=True)
class Circuit:
    """The segments of a step and where each of them lies: the first ``resident`` for good, the others in
    turns in ``slots`` buffers."""

    sizes: tuple[int, ...]
    resident: int
    slots: int

    @property
    def passing(self) -> int:
        """Segments that are read in every step."""
        return len(self.sizes) - self.resident

    @property
    def slot_bytes(self) -> int:
        """Size of a buffer."""
        return max(self.sizes[self.resident :], default=0)

    @property
    def memory(self) -> int:
        """Bytes of all buffers."""
        return sum(self.sizes[: self.resident]) + self.slots * self.slot_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes read in every step."""
        return sum(self.sizes[self.resident :])

    def offset(self, segment: int) -> int:
        """Where a segment begins in memory."""
        if segment < self.resident:
            return sum(self.sizes[:segment])
        turn = (segment - self.resident) % self.slots
        return sum(self.sizes[: self.resident]) + turn * self.slot_bytes

    def after(self, segment: int) -> int:
        """The segment that takes the place of this one."""
        return self.resident + (segment - self.resident + self.slots) % self.passing


def circuit(sizes: Sequence[int], memory: int) -> Circuit:
    """Return the circuit that reads least in each step within ``memory`` bytes.

    Raises ValueError, naming the least that will do, where there is none.
    """
    count = len(sizes)
    if sum(sizes) <= memory:
        return Circuit(tuple(sizes), count, 0)
    found = [
        Circuit(tuple(sizes), resident, slots)
        for slots in _SLOTS
        for resident in range(count)
        if (count - resident) % slots == 0
    ]
    fitting = [c for c in found if c.memory <= memory]
    if not fitting:
        least = min((c.memory for c in found), default=sum(sizes))
        raise ValueError(
            f"stream_memory of {memory} bytes is too little for weights that pass by: the least is {least}"
        )
    # Two buffers keep a disk busy only while nothing stalls, so a third is worth as much as it holds.
    return min(fitting, key=lambda c: (c.read_bytes + (c.slots == 2) * c.slot_bytes, -c.slots))


def segments(decoder: Decoder, form: str) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Cut the weights: for each linear layer its ranges (start, stop, segment), and the segments' bytes.

    A segment is as much of consecutive weights as the largest layer has, or a part of the whole; the head
    begins with one of its own.  Ranges are whole panels, bytes whole pages.
    """
    layers = [[(x, form) for x in linears(layer)] for layer in decoder.layers]
    layers.append([(decoder.head, head_form(form))])
    weigh = [[packed_bytes(x.outputs, x.inputs, kind) for x, kind in layer] for layer in layers]
    total = sum(map(sum, weigh))
    limit = min(max(map(sum, weigh[:-1])), max(total // _SEGMENTS, _SMALLEST))
    ranges: list[list[tuple[int, int, int]]] = []
    sizes = [0]
    for number, layer in enumerate(layers):
        if number == len(layers) - 1:
            sizes.append(0)
        for x, kind in layer:
            panels = -(-x.outputs // 32)
            parts = min(-(-packed_bytes(x.outputs, x.inputs, kind) // limit), panels)
            stops = [min(panels * (i + 1) // parts * 32, x.outputs) for i in range(parts)]
            ranges.append([])
            for start, stop in pairwise([0, *stops]):
                size = packed_bytes(stop - start, x.inputs, kind)
                if sizes[-1] and sizes[-1] + size > limit:
                    sizes.append(0)
                sizes[-1] += size
                ranges[-1].append((start, stop, len(sizes) - 1))
    return ranges, [round_up(size) for size in sizes]


class _InFile:
    """What both ways have in common: on the first load the weights are packed into the file."""

    own_tapes = False
    """Whether a segment has a tape of its own."""

    def __init__(self, decoder: Decoder, form: str, folder: Path, key: Any) -> None:
        self._ranges, sizes = segments(decoder, form)
        self.file = PackedFile(folder, sizes, key)
        self._layer, self._segment, self._at = 0, -1, 0

    def _base(self, segment: int) -> int:
        """Return the address at which a segment lies, or will lie."""
        raise NotImplementedError

    def put(self, layer: Linear, form: str) -> Iterator[Packed]:
        """Write the weights to the file, unless they are there; yield where they will be."""
        ranges = self._ranges[self._layer]
        self._layer += 1
        for start, stop, segment in ranges:
            fresh = segment != self._segment
            if fresh:
                self._segment, self._at = segment, 0
            yield self._put(layer.part(start, stop), form, start, stop, fresh and self.own_tapes)

    def _put(self, part: Linear, form: str, start: int, stop: int, fresh: bool) -> Packed:
        places, nbytes = {}, 0
        for name, size in native.packed_nbytes(part.outputs, part.inputs, form).items():
            places[name] = self._at
            self._at += line_up(size)
            nbytes += size
        if not self.file.complete:
            at = dict(places)
            for block in native.iter_packed_blocks((part.outputs, part.inputs), part.copy_rows, form):
                for name, piece in block.items():
                    self.file.write(self._segment, at[name], piece)
                    at[name] += piece.numel()
        base = self._base(self._segment)
        scale = base + places["scale"] if "scale" in places else 0
        return Packed(start, stop, base + places["weight"], scale, nbytes, fresh)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Mapped(_InFile):
    """The kernels read the file where the page cache has it."""

    def __init__(self, decoder: Decoder, form: str, folder: Path, key: Any) -> None:
        super().__init__(decoder, form, folder, key)
        self._bases = self.file.map()

    def _base(self, segment: int) -> int:
        return self._bases[segment]

    def seal(self) -> None:
        """All weights were put."""
        self.file.seal()

    def run(self, tapes: Sequence[native.Program], first: int) -> None:
        """Run the tapes."""
        for tape in tapes:
            tape.run()

    def skip(self, first: int) -> None:
        """Nothing is under way."""


class Streamed(_InFile):
    """Threads read the file into a ring, ahead of the tapes; ``circuit`` says what lies where."""

    own_tapes = True

    def __init__(self, decoder: Decoder, form: str, folder: Path, key: Any, memory: int | None) -> None:
        super().__init__(decoder, form, folder, key)
        if memory is None:
            memory = int(_SHARE * (available_host_memory() or 2**32))
            memory = max(memory, len(_SLOTS) * max(self.file.sizes))
        try:
            self.circuit = circuit(self.file.sizes, memory)
        except ValueError:
            self.file.close()
            raise
        self._memory = EvictableMemory(self.circuit.memory)
        self._tickets: dict[int, IoFuture] = {}
        self._seen: set[int] = set()

    def _base(self, segment: int) -> int:
        return self._place(segment).data_ptr()

    def _place(self, segment: int) -> Tensor:
        offset = self.circuit.offset(segment)
        return self._memory.tensor(offset, (self.file.sizes[segment],), torch.uint8)

    def seal(self) -> None:
        """All weights were put: fill the memory."""
        if not self.file.complete:
            self.file.seal()
            self.file.forget_cached()
        c = self.circuit
        for segment in range(min(c.resident + c.slots, len(c.sizes))):
            self._fetch(segment)

    def _fetch(self, segment: int) -> None:
        self._tickets[segment] = self.file.read(segment, self._place(segment))

    def _arrive(self, segment: int) -> None:
        ticket = self._tickets[segment]
        ticket.wait()
        if segment not in self._seen:
            self.file.verify(segment, bytes_of(self._place(segment)))
            self._seen.add(segment)

    def _leave(self, segment: int) -> None:
        if segment >= self.circuit.resident:
            del self._tickets[segment]
            self._fetch(self.circuit.after(segment))

    def run(self, tapes: Sequence[native.Program], first: int) -> None:
        """Run each tape when its segment has arrived, then let another take its place."""
        for segment, tape in enumerate(tapes, first):
            self._arrive(segment)
            tape.run()
            self._leave(segment)

    def skip(self, first: int) -> None:
        """Let the segments pass that this step does not need."""
        for segment in range(first, len(self.file.sizes)):
            self._arrive(segment)
            self._leave(segment)

    def close(self) -> None:
        """Wait for what is under way; close the file."""
        for ticket in self._tickets.values():
            ticket.wait_ignoring_errors()
        self._tickets.clear()
        super().close()


def streamed_weights(decoder: Decoder, form: str, options: EngineOptions, key: Any) -> Mapped | Streamed:
    """Return weights in a file, as ``options.stream`` asks; the runner that uses them puts them there.

    ``key``: what the model was loaded from, or None for a live one.
    """
    folder = Path(options.stream_folder) if options.stream_folder else _default_folder()
    key = None if key is None else [key, form]
    if options.stream == "cpu":
        return Mapped(decoder, form, folder, key)
    return Streamed(decoder, form, folder, key, options.stream_memory)


def _default_folder() -> Path:
    base = get_cache_dir()
    if base is None:
        raise ValueError("there is no cache directory for streamed weights: set stream_folder")
    return base / "weights"


def best_batch(
    *, read_bytes: int, read_rate: float, macs: int, mac_rate: float, sequence_bytes: int, memory: int
) -> int:
    """Return how many sequences a step should work on, at least 1.

    More of them cost nothing while the weights take longer to come than to be used: up to
    ``read_bytes / read_rate = batch * macs / mac_rate`` (bytes of a step, products of a token), and as many
    as the ``memory`` for KV holds at ``sequence_bytes`` each.
    """
    balance = (read_bytes / read_rate) / (macs / mac_rate)
    return max(1, min(int(balance + 0.999), memory // sequence_bytes))


def planned_batch(decoder: Decoder, form: str, options: EngineOptions, length: int) -> int:
    """Return the batch for the most tokens a second on this machine: see :func:`best_batch`."""
    machine = local_cluster()
    every = [x for layer in decoder.layers if isinstance(layer.mlp, MLP) for x in linears(layer)]
    every.append(decoder.head)
    per_token = sum(2 * x.attention.kv_heads * x.attention.dim for x in decoder.layers)
    speed = machine.peak_flops(torch.float32 if form == "fp32" else torch.bfloat16)
    free = available_host_memory() or 2**32
    rate = machine.host_memory_bandwidth if options.stream == "cpu" else machine.disk_read_bandwidth
    return best_batch(
        read_bytes=sum(packed_bytes(x.outputs, x.inputs, form) for x in every),
        read_rate=rate,
        macs=sum(x.outputs * x.inputs for x in every),
        mac_rate=speed / 2 * (2 if options.quantize else 1),  # integer products run at twice bf16's rate
        sequence_bytes=per_token * length * (4 if form == "fp32" else 2),
        memory=options.kv_memory or int(_SHARE * free),
    )
