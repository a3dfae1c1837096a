"""Which tokens of a sequence each rank of a sequence team has.

``context`` ranks form a ring; the sequence is cut into twice as many chunks, and rank r has chunks
r and 2 context - 1 - r, an early one and a late one, so that causal attention gives everybody the
same work (the zig-zag order):

    context = 3      chunk   0 1 2 3 4 5
                     rank    0 1 2 2 1 0

Each ring rank's tokens are dealt on, in order, to its ``heads`` ranks, who exchange heads for
tokens (Ulysses).  Nothing is padded: chunks differ by a token where lengths do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.parallel.cuts import Span, even


@dataclass(frozen=True)
class Shares:
    """``context`` x ``heads`` ranks, the latter varying faster, and this rank's place among them."""

    context: int = 1
    heads: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        """Ranks of the team."""
        return self.context * self.heads

    @property
    def place(self) -> tuple[int, int]:
        """This rank in the ring, and among those that exchange heads."""
        return divmod(self.rank, self.heads)

    def ring(self, length: int, context_rank: int) -> tuple[Span, ...]:
        """The tokens of a ring rank: chunks in rising order, of which the last may be empty."""
        if self.context == 1:
            return ((0, length),)
        chunks = even(length, 2 * self.context)
        return chunks[context_rank], chunks[2 * self.context - 1 - context_rank]

    def sizes(self, length: int) -> list[int]:
        """Tokens of each rank that exchanges heads with this one."""
        total = sum(stop - start for start, stop in self.ring(length, self.place[0]))
        return [stop - start for start, stop in even(total, self.heads)]

    def spans(self, length: int) -> list[Span]:
        """This rank's tokens, in rising order.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        if length < self.size:
            raise ValueError(
                f"a sequence of {length} token{'s' * (length != 1)} cannot be divided among {self.size} "
                "ranks: pad it, or set sequence_parallel_size and context_parallel_size to 1"
            )
        ring, heads = self.place
        chunks = self.ring(length, ring)
        start, stop = even(sum(stop - start for start, stop in chunks), self.heads)[heads]
        found, before = [], 0
        for low, high in chunks:
            own = max(low, low + start - before), min(high, low + stop - before)
            before += high - low
            if own[0] < own[1]:
                found.append(own)
        return found

    def take(self, value: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of ``value``, whose ``dim`` is the sequence; contiguous."""
        parts = [value.narrow(dim, start, stop - start) for start, stop in self.spans(value.shape[dim])]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Indices of this rank's tokens in the sequence (own T,)."""
        return index_of(self.spans(length), device)


def index_of(spans: list[Span] | tuple[Span, ...], device: torch.device | str) -> Tensor:
    """The indices that spans cover, one behind the other."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])
