"""Where a runner's packed weights lie, seen from the runner.

For each linear layer a runner passes the weights and gets, for one or several ranges of outputs, the addresses
for its calls.  Where the weights of a range belong to another segment than those before, a new program begins;
at each step the store runs the programs of all segments in order.  Whether the bytes are always in memory
(:class:`InMemoryWeights`) or read from a file just in time (``offload/weight_ring.py``) is the store's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.models.spec import DecoderLayerSpec, DecoderSpec, EncoderSpec, LinearSpec, MLPSpec, list_linears
from thalweg.ops import cpu_kernels
from thalweg.storage_io.evictable_memory import EvictableMemory

CACHE_LINE = 64  # bytes: every part of a packed weight begins on a cache line


@dataclass(frozen=True)
class PackedWeight:
    """Packed weights of outputs ``start`` to ``stop``: addresses of them and of their scales (0: there are
    none), and the bytes of both."""

    start: int
    stop: int
    weight_address: int
    scale_address: int
    nbytes: int
    # Whether a segment begins here.
    starts_segment: bool = False

    @classmethod
    def at(
        cls, base: int, offsets: Mapping[str, int], layer: LinearSpec, weight_format: str, start: int, new_segment: bool
    ) -> PackedWeight:
        """Return where a layer's parts lie, ``offsets`` behind an address; its first output is number ``start``."""
        scale = base + offsets["scale"] if "scale" in offsets else 0
        nbytes = sum(cpu_kernels.packed_nbytes(layer.out_features, layer.in_features, weight_format).values())
        return cls(start, start + layer.out_features, base + offsets["weight"], scale, nbytes, new_segment)


class WeightStore:
    """Stores packed weights; here with all of them always in memory."""

    def pack(self, layer: LinearSpec, weight_format: str) -> Iterator[PackedWeight]:
        """Take the next layer's weights; yield its ranges of outputs in order."""
        raise NotImplementedError

    def run(self, programs: Sequence[cpu_kernels.Program], first_segment: int) -> None:
        """Run the programs of the segments from ``first_segment``, each when its weights are in memory."""
        for program in programs:
            program.run()

    def skip(self, first_segment: int) -> None:
        """The segments from ``first_segment`` on do not run in this step."""

    def refill(self, layer: LinearSpec, new: LinearSpec) -> None:
        """Pack another layer's weights where a layer's are."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give the memory back until all layers have been refilled."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the memory."""


def embedding_writer(
    spec: DecoderSpec | EncoderSpec, weight_format: str, *, in_place: bool = False
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return ``write(out, tokens, positions)``, which puts the embeddings that a program begins with into the first
    rows of ``out``.  ``in_place``: the table is read row by row where it lies."""
    dtype, scale = torch.float32 if weight_format == "fp32" else torch.bfloat16, spec.embed_scale
    table = spec.embed if in_place else spec.embed.to(dtype)
    position_table = None if spec.position_embeddings is None else spec.position_embeddings.float()

    def write(out: Tensor, tokens: Tensor, positions: Tensor) -> None:
        x = F.embedding(tokens, table).to(dtype)
        if scale != 1.0:
            x = x.float() * scale
        if position_table is not None:
            x = x.float() + position_table[positions]
        out[: len(tokens)] = x

    return write


def layer_linears(layer: DecoderLayerSpec) -> list[LinearSpec]:
    """Return a layer's linear layers in the order in which a program runs them."""
    a, m, cross = layer.attention, layer.mlp, layer.cross_attention
    assert isinstance(m, MLPSpec), "mixtures of experts run by torch operators"
    if layer.parallel_residual:
        return [a.qkv, m.up, a.out, m.down]
    return [a.qkv, a.out, *(() if cross is None else (cross.q, cross.out)), m.up, m.down]


def lm_head_format(weight_format: str) -> str:
    """Return the format of the head for a weight format: with int4 it is int8."""
    return "int8" if weight_format == "int4" else weight_format


def packed_bytes(out_features: int, in_features: int, weight_format: str) -> int:
    """Return the bytes that a packed layer takes, its parts on lines of their own."""
    sizes = cpu_kernels.packed_nbytes(out_features, in_features, weight_format).values()
    return sum(cpu_kernels.round_up(size, CACHE_LINE) for size in sizes)


def lay_out(layer: LinearSpec, weight_format: str, offset: int) -> tuple[dict[str, int], int]:
    """Return where the parts of a packed layer begin, from ``offset`` on, and where the next layer may."""
    offsets = {}
    for name, size in cpu_kernels.packed_nbytes(layer.out_features, layer.in_features, weight_format).items():
        offsets[name] = offset
        offset += cpu_kernels.round_up(size, CACHE_LINE)
    return offsets, offset


def iter_packed_pieces(
    layer: LinearSpec,
    weight_format: str,
    offsets: Mapping[str, int],
    buffers: tuple[cpu_kernels.PackingBuffer, cpu_kernels.PackingBuffer] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Pack a layer whose parts begin at ``offsets``: yield its bytes piece by piece, each with its own offset.

    What is yielded is overwritten by the next block.
    """
    cursors, shape = dict(offsets), (layer.out_features, layer.in_features)
    for block in cpu_kernels.iter_packed_blocks(shape, layer.copy_rows, weight_format, buffers):
        for name, piece in block.items():
            yield cursors[name], piece
            cursors[name] += piece.numel()


class InMemoryWeights(WeightStore):
    """All weights in one piece of memory, on huge pages where the system has them."""

    def __init__(self, spec: DecoderSpec | EncoderSpec, weight_format: str) -> None:
        head = spec.lm_head if isinstance(spec, DecoderSpec) else None
        kinds = [(x, lm_head_format(weight_format) if x is head else weight_format) for x in list_linears(spec)]
        total = sum(packed_bytes(x.out_features, x.in_features, kind) for x, kind in kinds)
        self._memory = EvictableMemory(total)
        self._bytes = self._memory.tensor(0, (total,), torch.uint8)
        self._offset = 0
        self._places: dict[int, tuple[str, dict[str, int]]] = {}
        self._buffers = cpu_kernels.PackingBuffer(), cpu_kernels.PackingBuffer()

    def pack(self, layer: LinearSpec, weight_format: str) -> Iterator[PackedWeight]:
        """Pack into the memory, in one range."""
        offsets, self._offset = lay_out(layer, weight_format, self._offset)
        self._places[id(layer)] = weight_format, offsets
        self._fill(layer, weight_format, offsets)
        yield PackedWeight.at(self._bytes.data_ptr(), offsets, layer, weight_format, 0, False)

    def _fill(self, layer: LinearSpec, weight_format: str, offsets: dict[str, int]) -> None:
        for at, piece in iter_packed_pieces(layer, weight_format, offsets, self._buffers):
            self._bytes[at : at + piece.numel()] = piece

    def refill(self, layer: LinearSpec, new: LinearSpec) -> None:
        """Pack another layer's weights where a layer's are."""
        place = self._places.pop(id(layer))
        self._fill(new, *place)
        self._places[id(new)] = place

    def sleep(self) -> None:
        """Give the pages back until all layers have been refilled."""
        self._memory.release()

    def close(self) -> None:
        """Drop the memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
