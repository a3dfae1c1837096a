"""Where a runner's packed weights lie, seen from the runner.

For each linear layer a runner hands the weights over and gets back, for one or several ranges of outputs,
addresses that stand for them in its calls.  Where the weights of a range belong to another segment than those
before, a new tape begins; at each step the runner has the tapes of all segments run in order.  Whether the
bytes have been there all along or arrive just in time is not its business: ``Resident`` keeps them in memory,
``stream.py`` brings them from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from thalweg.infer.describe import MLP, Decoder, Encoder, Layer, Linear
from thalweg.ops import native
from thalweg.store.paged import EvictableMemory

LINE = 64  # bytes: every part of a packed weight begins on a cache line


@dataclass(frozen=True)
class Packed:
    """Packed weights of outputs ``start`` to ``stop``: addresses of them and of their scales (0: there are
    none), and the bytes of both."""

    start: int
    stop: int
    weight: int
    scale: int
    nbytes: int
    fresh: bool = False
    """Whether a segment begins here."""


class Weights(Protocol):
    """Keeps packed weights."""

    def put(self, layer: Linear, form: str) -> Iterator[Packed]:
        """Take the next layer's weights; yield its ranges of outputs in order."""
        ...

    def run(self, tapes: Sequence[native.Program], first: int) -> None:
        """Run the tapes of segments ``first`` and on, each when its weights are there."""
        ...

    def skip(self, first: int) -> None:
        """The segments from ``first`` to the last are not needed this time."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


def linears(layer: Layer) -> list[Linear]:
    """Return a layer's linear layers in the order in which a runner lays them down."""
    a, m, cross = layer.attention, layer.mlp, layer.cross
    assert isinstance(m, MLP), "mixtures have runners of their own"
    if layer.parallel:
        return [a.qkv, m.up, a.out, m.down]
    return [a.qkv, a.out, *(() if cross is None else (cross.q, cross.out)), m.up, m.down]


def every(stack: Decoder | Encoder, form: str, mixtures: bool = False) -> list[tuple[Linear, str]]:
    """Return all linear layers of a model whose weights are in a form, each with its own form.

    ``mixtures``: of layers with a mixture, those of the attention.
    """
    found = []
    for layer in stack.layers:
        alone = mixtures and not isinstance(layer.mlp, MLP)
        found += [
            (x, form) for x in ((layer.attention.qkv, layer.attention.out) if alone else linears(layer))
        ]
    if isinstance(stack, Encoder):
        return found
    found.append((stack.head, head_form(form)))
    if stack.encoder is not None:
        found += every(stack.encoder, form)
        found += [(layer.cross.kv, form) for layer in stack.layers if layer.cross is not None]
    return found


def head_form(form: str) -> str:
    """Return the form of the head for weights in a form: int4 keeps it in int8."""
    return "int8" if form == "int4" else form


def line_up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def packed_bytes(outputs: int, inputs: int, form: str) -> int:
    """Return the bytes that a packed layer takes, its parts on lines of their own."""
    return sum(line_up(size) for size in native.packed_nbytes(outputs, inputs, form).values())


class Resident:
    """All weights in one piece of memory, on huge pages where the system has them."""

    def __init__(self, stack: Decoder | Encoder, form: str) -> None:
        total = sum(packed_bytes(x.outputs, x.inputs, kind) for x, kind in every(stack, form))
        self._memory = EvictableMemory(total)
        self._bytes = self._memory.tensor(0, (total,), torch.uint8)
        self._at = 0

    def put(self, layer: Linear, form: str) -> Iterator[Packed]:
        """Pack into the memory, in one range."""
        start = {}
        for part, size in native.packed_nbytes(layer.outputs, layer.inputs, form).items():
            start[part] = self._at
            self._at += line_up(size)
        place = dict(start)
        for block in native.iter_packed_blocks((layer.outputs, layer.inputs), layer.copy_rows, form):
            for part, piece in block.items():
                self._bytes[place[part] : place[part] + piece.numel()] = piece
                place[part] += piece.numel()
        base = self._bytes.data_ptr()
        scale = base + start["scale"] if "scale" in start else 0
        nbytes = sum(place[part] - start[part] for part in start)
        yield Packed(0, layer.outputs, base + start["weight"], scale, nbytes)

    def run(self, tapes: Sequence[native.Program], first: int) -> None:
        """Run the tapes."""
        for tape in tapes:
            tape.run()

    def skip(self, first: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Drop the memory."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
