"""Which tokens of a sequence each rank of a sequence team has.

``context`` ranks form a ring; the sequence is cut into twice as many chunks, and rank r has chunks
r and 2 context - 1 - r, an early one and a late one, so that causal attention gives everybody the
same work (the zig-zag order):

    context = 3      chunk   0 1 2 3 4 5
                     rank    0 1 2 2 1 0

Each ring rank's tokens are dealt on, in order, to its ``heads`` ranks, who exchange heads for
tokens (Ulysses).  Nothing is padded: chunks differ by a token where lengths do not divide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.parallel.shard_spec import Span, split_evenly


@dataclass(frozen=True)
class SequencePartition:
    """``cp_size`` x ``ulysses_size`` ranks, the latter varying faster, and this rank's place among them."""

    cp_size: int = 1
    ulysses_size: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        """Ranks of the team."""
        return self.cp_size * self.ulysses_size

    @property
    def coords(self) -> tuple[int, int]:
        """This rank in the ring, and among those that exchange heads."""
        return divmod(self.rank, self.ulysses_size)

    def cp_spans(self, length: int, cp_rank: int) -> tuple[Span, ...]:
        """The tokens of a ring rank: chunks in rising order, of which the last may be empty."""
        if self.cp_size == 1:
            return ((0, length),)
        chunks = split_evenly(length, 2 * self.cp_size)
        return chunks[cp_rank], chunks[2 * self.cp_size - 1 - cp_rank]

    def ulysses_token_counts(self, length: int) -> list[int]:
        """Tokens of each rank that exchanges heads with this one."""
        total = sum(stop - start for start, stop in self.cp_spans(length, self.coords[0]))
        return [stop - start for start, stop in split_evenly(total, self.ulysses_size)]

    def token_spans(self, length: int) -> list[Span]:
        """This rank's tokens, in rising order.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        if length < self.size:
            raise ValueError(
                f"a sequence of {length} token{'s' * (length != 1)} cannot be divided among {self.size} "
                "ranks: pad it, or set sequence_parallel_size and context_parallel_size to 1"
            )
        cp_rank, ulysses_rank = self.coords
        chunks = self.cp_spans(length, cp_rank)
        start, stop = split_evenly(sum(stop - start for start, stop in chunks), self.ulysses_size)[ulysses_rank]
        local_spans, num_before = [], 0
        for low, high in chunks:
            overlap = max(low, low + start - num_before), min(high, low + stop - num_before)
            num_before += high - low
            if overlap[0] < overlap[1]:
                local_spans.append(overlap)
        return local_spans

    def local_tokens(self, value: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of ``value``, whose ``dim`` is the sequence; contiguous."""
        slices = [value.narrow(dim, start, stop - start) for start, stop in self.token_spans(value.shape[dim])]
        return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Indices of this rank's tokens in the sequence (own T,)."""
        return spans_to_index(self.token_spans(length), device)


def spans_to_index(spans: list[Span] | tuple[Span, ...], device: torch.device | str) -> Tensor:
    """The indices that spans cover, one behind the other."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])
