"""What an update reads and writes, cut into chunks that fit a buffer.

    item      one parameter in this step, with its operands
    operand   one flat tensor of it: the master, the gradient, each state tensor, the compute copy
    piece     elements [start, stop) of an item, the same for all its operands
    chunk     pieces whose operands fit one buffer together

An operand has an ``offset`` if it lies in the swap file on a page boundary; then its bytes pass through the
buffer.  Any other is used where it is.  Pieces are cut at multiples of ``GRAIN`` elements from the start of
the parameter, for two reasons: such a cut is a page boundary in every dtype, and it is a multiple of every
vector length, so that torch's kernels treat each element as they would in one call over the whole parameter
(their scalar tails may round differently).

Invariant: a tensor that begins on a page boundary of the swap file owns the pages up to its end.  Hence no
page belongs to two chunks, and neighbours in the file can be read and written in one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from thalweg.store import SwapFile, Ticket, together
from thalweg.store.regions import PAGE, round_up

GRAIN = PAGE


@dataclass
class Operand:
    """A flat tensor, whether it is needed and changed, and its place in the swap file if it has one; new
    values go there, or to ``twin``, another place that is as large."""

    tensor: Tensor
    offset: int | None
    read: bool = True
    write: bool = False
    twin: int | None = None

    @property
    def room(self) -> int:
        """Bytes that it takes in the swap file."""
        return round_up(self.tensor.nbytes)


@dataclass
class Item:
    """One parameter in this step; ``scalars`` is the part of its state that is not cut."""

    group: dict[str, Any]
    param: Tensor
    numel: int
    operands: dict[str, Operand]
    keys: tuple[str, ...]
    scalars: dict[str, Any]
    fresh: bool
    new_scalars: dict[str, Any] = field(default_factory=dict)

    def swapped_bytes(self, count: int) -> int:
        """Bytes of buffer that ``count`` elements take."""
        return sum(
            round_up(count * operand.tensor.itemsize)
            for operand in self.operands.values()
            if operand.offset is not None
        )


class Span(NamedTuple):
    """Bytes that move together between the file and a buffer."""

    offset: int
    start: int
    nbytes: int


@dataclass
class Piece:
    """Elements ``[start, stop)`` of an item; ``places`` is where its operands lie in the buffer."""

    item: Item
    start: int
    stop: int
    places: dict[str, int] = field(default_factory=dict)

    def tensor(self, name: str, buffer: Tensor | None) -> Tensor:
        """The operand's elements, in the buffer or in memory."""
        operand, place = self.item.operands[name], self.places.get(name)
        if place is None:
            return operand.tensor[self.start : self.stop]
        assert buffer is not None
        nbytes = (self.stop - self.start) * operand.tensor.itemsize
        return buffer[place : place + nbytes].view(operand.tensor.dtype)


@dataclass
class Chunk:
    """Pieces that share a buffer, and the transfers that fill and empty it."""

    pieces: list[Piece]
    reads: list[Span]
    writes: list[Span]

    def begin_read(self, swap: SwapFile, buffer: Tensor) -> Ticket:
        """Fill the buffer."""
        return together(swap.read(s.offset, buffer[s.start : s.start + s.nbytes]) for s in self.reads)

    def begin_write(self, swap: SwapFile, buffer: Tensor) -> Ticket:
        """Store what has changed."""
        return together(swap.write(s.offset, buffer[s.start : s.start + s.nbytes]) for s in self.writes)


def cut_chunks(items: Iterable[Item], buffer_bytes: int, max_elements: int) -> list[Chunk]:
    """Cut ``items``, in their order, into chunks of at most ``buffer_bytes`` and ``max_elements``.

    Raises:
        ValueError: not even ``GRAIN`` elements of an item fit a buffer.
    """
    chunks: list[list[Piece]] = [[]]
    room, left = buffer_bytes, max_elements
    for item in items:
        start = 0
        while True:
            count = _fitting(item, item.numel - start, room, left)
            if count is None:
                if not chunks[-1]:
                    raise ValueError(
                        f"buffers of {buffer_bytes} bytes are too small for this optimiser: it needs at "
                        f"least {item.swapped_bytes(GRAIN)}; raise buffer_size"
                    )
                chunks.append([])
                room, left = buffer_bytes, max_elements
                continue
            chunks[-1].append(Piece(item, start, start + count))
            room, left, start = room - item.swapped_bytes(count), left - count, start + count
            if start >= item.numel:
                break
    return [_with_transfers(pieces) for pieces in chunks if pieces]


def _fitting(item: Item, wanted: int, room: int, left: int) -> int | None:
    if wanted <= left and item.swapped_bytes(wanted) <= room:
        return wanted
    grain_bytes = item.swapped_bytes(GRAIN)
    grains = min(left // GRAIN, room // grain_bytes if grain_bytes else left)
    return min(grains * GRAIN, wanted) if grains > 0 else None


def _with_transfers(pieces: list[Piece]) -> Chunk:
    ranges = []
    for piece in pieces:
        for name, operand in piece.item.operands.items():
            if operand.offset is not None and piece.stop > piece.start:
                size = operand.tensor.itemsize
                nbytes = round_up((piece.stop - piece.start) * size)
                ranges.append((operand.offset + piece.start * size, nbytes, piece, name, operand))
    # In the order of the file, so that neighbours there are neighbours in the buffer.
    ranges.sort(key=lambda r: r[0])
    reads: list[Span] = []
    writes: list[Span] = []
    at = 0
    for offset, nbytes, piece, name, operand in ranges:
        piece.places[name] = at
        if operand.read:
            _extend(reads, Span(offset, at, nbytes))
        if operand.write:
            moved = 0 if operand.twin is None or operand.offset is None else operand.twin - operand.offset
            _extend(writes, Span(offset + moved, at, nbytes))
        at += nbytes
    return Chunk(pieces, reads, writes)


def _extend(spans: list[Span], span: Span) -> None:
    last = spans[-1] if spans else None
    if last and last.offset + last.nbytes == span.offset and last.start + last.nbytes == span.start:
        spans[-1] = Span(last.offset, last.start, last.nbytes + span.nbytes)
    else:
        spans.append(span)


def batches(pieces: Sequence[Piece], max_elements: int) -> list[list[Piece]]:
    """Cut the pieces of a chunk further, into batches of about ``max_elements`` that stay in the cache."""
    found: list[list[Piece]] = [[]]
    left = max_elements
    for piece in pieces:
        start = piece.start
        while True:
            wanted = piece.stop - start
            count = wanted if wanted <= left else min(left // GRAIN * GRAIN, wanted)
            if count <= 0 < wanted:
                found.append([])
                left = max_elements
                continue
            found[-1].append(_part(piece, start, start + count))
            start, left = start + count, left - count
            if start >= piece.stop:
                break
    return [batch for batch in found if batch]


def _part(piece: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (piece.start, piece.stop):
        return piece
    places = {
        name: place + (start - piece.start) * piece.item.operands[name].tensor.itemsize
        for name, place in piece.places.items()
    }
    return Piece(piece.item, start, stop, places)
