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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CHUNKS = 256


@dataclass(frozen=True)
class Unit:
    """Inputs of the second layer (``columns``) and outputs of each first one that go together."""

    columns: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]

    @property
    def kind(self) -> tuple[int, ...]:
        """Units of one kind are alike in size."""
        return len(self.columns), *(len(own) for own in self.channels)


class Dependence:
    """Between ``leaves`` (A's outputs, (..., N_a)) and ``x`` (B's input, (..., K)), computed from them."""

    def __init__(self, x: Tensor, leaves: Sequence[Tensor]) -> None:
        self.x, self.leaves = x, list(leaves)
        self.generator = torch.Generator(device=x.device).manual_seed(7)

    def reached(self, columns: Tensor) -> Tensor:
        """Which channels of all leaves, joined, the given columns depend on (bool)."""
        start = torch.zeros_like(self.x)
        shape = (*self.x.shape[:-1], len(columns))
        start[..., columns] = torch.randn(shape, generator=self.generator, device=start.device).to(
            start.dtype
        )
        grads = torch.autograd.grad(self.x, self.leaves, start, retain_graph=True, allow_unused=True)
        found = []
        for grad, leaf in zip(grads, self.leaves, strict=True):
            if grad is None:
                found.append(torch.zeros(leaf.shape[-1], dtype=torch.bool, device=leaf.device))
            else:
                found.append((grad != 0).flatten(0, -2).any(0))  # nan is not 0
        return torch.cat(found).cpu()

    def units(self) -> list[Unit] | None:
        """The connected pieces, by their first column; None if some channel has no part in any."""
        chunks = self._chunks()
        total = sum(leaf.shape[-1] for leaf in self.leaves)
        root, owner = list(range(len(chunks))), torch.full((total,), -1)

        def find(i: int) -> int:
            while root[i] != i:
                i = root[i]
            return i

        for index, chunk in enumerate(chunks):
            reached = self.reached(chunk)
            for other in owner[reached].unique().tolist():
                if other >= 0:
                    a, b = sorted((find(other), find(index)))
                    root[b] = a
            owner[reached] = index
        if bool((owner < 0).any()):
            return None
        columns: dict[int, list[int]] = {}
        channels: dict[int, list[int]] = {}
        for index, chunk in enumerate(chunks):
            columns.setdefault(find(index), []).extend(chunk.tolist())
        for channel, index in enumerate(owner.tolist()):
            channels.setdefault(find(index), []).append(channel)
        if columns.keys() != channels.keys():
            return None
        return [Unit(tuple(columns[key]), self._by_leaf(channels[key])) for key in sorted(columns)]

    def agrees(self, columns: Sequence[int], channels: Sequence[Sequence[int]]) -> bool:
        """Whether ``columns`` depend on nothing but ``channels`` of each leaf."""
        if not columns:
            return True
        allowed = torch.zeros(sum(leaf.shape[-1] for leaf in self.leaves), dtype=torch.bool)
        offset = 0
        for leaf, own in zip(self.leaves, channels, strict=True):
            allowed[[offset + channel for channel in own]] = True
            offset += leaf.shape[-1]
        return not bool((self.reached(torch.tensor(columns)) & ~allowed).any())

    def _by_leaf(self, channels: list[int]) -> tuple[tuple[int, ...], ...]:
        found, offset = [], 0
        for leaf in self.leaves:
            size = leaf.shape[-1]
            found.append(tuple(c - offset for c in channels if offset <= c < offset + size))
            offset += size
        return tuple(found)

    def _chunks(self) -> list[Tensor]:
        """Runs of columns to ask about together: one each, or, where they are many, what surely belongs
        together or is fine enough to be dealt out."""
        size = self.x.shape[-1]
        width = 1
        if size > MOST_CHUNKS:
            width = self._run()
            if width == 1 or size % width:
                fitting = [w for w in range(1, size + 1) if size % w == 0 and size // w <= MOST_CHUNKS]
                width = next((w for w in fitting if w % 8 == 0 and w <= 64), fitting[0])
        return list(torch.arange(size).split(width))

    def _run(self) -> int:
        """How many columns from the first on share a channel with it."""
        first = self.reached(torch.tensor([0]))
        low, high = 1, self.x.shape[-1]
        while low < high:
            middle = (low + high + 1) // 2
            if bool((self.reached(torch.tensor([middle - 1])) & first).any()):
                low = middle
            else:
                high = middle - 1
        return low
