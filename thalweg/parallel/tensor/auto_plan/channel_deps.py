"""Which channels depend on which, asked of autograd.

The picture: one linear layer, or several side by side, feed another through something that nobody
has described (an activation, a gate, attention with any layout of heads).

    A outputs   q q q q k k k k v v v v
                 \\ \\ |  |  |  |           only channels of one head meet
    B inputs        h0 h0 | h1 h1

A gradient that starts in some channels of B's input reaches just the channels of A's outputs that
they depend on.  Channels of B that share any channel of A belong together: the connected pieces
(*units*) are single features in an MLP, heads or groups of heads in attention, whatever the order
in which a model keeps them.  One unit means that everything depends on everything (a norm across
the features, a softmax over them), and then nothing can be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CHUNKS = 256


@dataclass(frozen=True)
class ChannelGroup:
    """Inputs of the second layer (``in_channels``) and outputs of each first one that go together."""

    in_channels: tuple[int, ...]
    out_channels: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units of one kind are alike in size."""
        return len(self.in_channels), *(len(own) for own in self.out_channels)


class ChannelDependence:
    """Between ``leaves`` (A's outputs, (..., N_a)) and ``x`` (B's input, (..., K)), computed from them."""

    def __init__(self, x: Tensor, leaves: Sequence[Tensor]) -> None:
        self.x, self.leaves = x, list(leaves)
        self.generator = torch.Generator(device=x.device).manual_seed(7)

    def depends_on(self, in_channels: Tensor) -> Tensor:
        """Which channels of all leaves, joined, the given columns depend on (bool)."""
        start = torch.zeros_like(self.x)
        shape = (*self.x.shape[:-1], len(in_channels))
        start[..., in_channels] = torch.randn(shape, generator=self.generator, device=start.device).to(start.dtype)
        grads = torch.autograd.grad(self.x, self.leaves, start, retain_graph=True, materialize_grads=True)
        return torch.cat([(grad != 0).flatten(0, -2).any(0) for grad in grads]).cpu()  # nan is not 0

    def channel_groups(self) -> list[ChannelGroup] | None:
        """The connected pieces, by their first column; None if some channel has no part in any."""
        chunks = self._in_channel_chunks()
        total = sum(leaf.shape[-1] for leaf in self.leaves)
        parent, last_chunk = list(range(len(chunks))), torch.full((total,), -1)

        def find(i: int) -> int:
            while parent[i] != i:
                i = parent[i]
            return i

        for index, chunk in enumerate(chunks):
            reached = self.depends_on(chunk)
            for other in last_chunk[reached].unique().tolist():
                if other >= 0:
                    a, b = sorted((find(other), find(index)))
                    parent[b] = a
            last_chunk[reached] = index
        if bool((last_chunk < 0).any()):
            return None
        in_channels: dict[int, list[int]] = {}
        out_channels: dict[int, list[int]] = {}
        for index, chunk in enumerate(chunks):
            in_channels.setdefault(find(index), []).extend(chunk.tolist())
        for channel, index in enumerate(last_chunk.tolist()):
            out_channels.setdefault(find(index), []).append(channel)
        if in_channels.keys() != out_channels.keys():
            return None
        return [ChannelGroup(tuple(in_channels[k]), self._split_by_leaf(out_channels[k])) for k in sorted(in_channels)]

    def depends_only_on(self, in_channels: Sequence[int], out_channels: Sequence[Sequence[int]]) -> bool:
        """Whether ``in_channels`` depend on nothing but ``out_channels`` of each leaf."""
        if not in_channels:
            return True
        allowed = [
            torch.isin(torch.arange(leaf.shape[-1]), torch.tensor(own, dtype=torch.long))
            for leaf, own in zip(self.leaves, out_channels, strict=True)
        ]
        return not bool((self.depends_on(torch.tensor(in_channels)) & ~torch.cat(allowed)).any())

    def _split_by_leaf(self, out_channels: list[int]) -> tuple[tuple[int, ...], ...]:
        by_leaf, offset = [], 0
        for leaf in self.leaves:
            size = leaf.shape[-1]
            by_leaf.append(tuple(c - offset for c in out_channels if offset <= c < offset + size))
            offset += size
        return tuple(by_leaf)

    def _in_channel_chunks(self) -> list[Tensor]:
        """Runs of columns to ask about together: one each, or, where they are many, what surely belongs
        together or is fine enough to be dealt out."""
        size = self.x.shape[-1]
        width = 1
        if size > MAX_CHUNKS:
            width = self._shared_run_length()
            if width == 1 or size % width:
                fitting = [w for w in range(1, size + 1) if size % w == 0 and size // w <= MAX_CHUNKS]
                width = next((w for w in fitting if w % 8 == 0 and w <= 64), fitting[0])
        return list(torch.arange(size).split(width))

    def _shared_run_length(self) -> int:
        """How many columns from the first on share a channel with it."""
        first = self.depends_on(torch.tensor([0]))
        low, high = 1, self.x.shape[-1]
        while low < high:
            middle = (low + high + 1) // 2
            if bool((self.depends_on(torch.tensor([middle - 1])) & first).any()):
                low = middle
            else:
                high = middle - 1
        return low
