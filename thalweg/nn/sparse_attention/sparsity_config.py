"""Which blocks of keys the queries of a block attend to: DeepSpeed's six patterns.

    fixed, 4 local, 1 global     bigbird, unidirectional     bslongformer, global 0
    x x x x . . . x              x . . . . . . .             x x x x x x x x
    x x x x . . . x              x x . . . . . .             x x x . . . . .
    x x x x . . . x              x x x . . . . .             x x x x . . . .
    x x x x . . . x              x . x x . . . .             x . x x x . . .
    . . . x x x x x              x r . x x . . .             x . . x x x . .
    . . . x x x x x              x . . . x x . .             x . . . x x x .
    . . . x x x x x              x . r . . x x .             x . . . . x x x
    . . . x x x x x              x . . r . . x x             x . . . . . x x

Names, order and defaults of the arguments are those that DeepSpeed's users type.  Where its documentation and its
code differ, this is the documentation: ``unidirectional`` leaves nothing above the diagonal.  A sequence shorter than
a window is attended to whole, and random blocks are the same in every process.

Sources: Child et al. 2019 (arXiv 1904.10509; fixed), Zaheer et al. 2020 (2007.14062; BigBird), Beltagy et al. 2020
(2004.05150; Longformer).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from thalweg.config.schema.training import SparseAttention

Attention = Literal["bidirectional", "unidirectional"]


@dataclass(frozen=True)
class SparsityConfig:
    """A pattern for ``num_heads`` heads in blocks of ``block`` tokens; one of your own overrides :meth:`head_layout`.

    ``different_layout_per_head``: each head has a layout of its own, where the pattern knows several.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    # No options of this class: each pattern that has one lists it in its own place.
    attention = "bidirectional"
    horizontal_global_attention = False
    global_block_indices = ()
    global_block_end_indices = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, list):
                object.__setattr__(self, one.name, tuple(value))
        if self.attention not in ("bidirectional", "unidirectional"):
            raise ValueError(f'attention is {self.attention!r}: it is "bidirectional" or "unidirectional"')
        starts, ends = self.global_block_indices, self.global_block_end_indices
        if ends is not None and (len(starts) != len(ends) or any(s >= e for s, e in zip(starts, ends, strict=True))):
            raise ValueError(
                f"global_block_end_indices {list(ends)} must give an end above each of global_block_indices "
                f"{list(starts)}"
            )
        if self.horizontal_global_attention and self.attention != "bidirectional":
            raise ValueError('horizontal_global_attention looks ahead: it needs attention to be "bidirectional"')

    def make_layout(self, seq_len: int) -> Tensor:
        """bool (num_heads, N, N) for ``seq_len`` tokens in N blocks: whether queries of a block see keys of another.

        Raises:
            ValueError: ``seq_len`` is no whole number of blocks.
        """
        if seq_len % self.block:
            raise ValueError(f"a sequence of {seq_len} tokens is no whole number of blocks of {self.block}: pad it")
        num_blocks, rng = seq_len // self.block, random.Random(0)
        num_layouts = self.num_heads if self.different_layout_per_head else 1
        layout = torch.stack([self.head_layout(head, num_blocks, rng) for head in range(num_layouts)])
        if self.attention == "unidirectional":
            layout = layout.tril()
        return layout.expand(self.num_heads, -1, -1)

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        """bool (num_blocks, num_blocks) of one head; ``make_layout`` drops what a unidirectional one sees ahead."""
        raise NotImplementedError(f"{type(self).__name__} is no pattern: take FixedSparsityConfig or another, or "
                                  "override head_layout")  # fmt: skip

    def _random_blocks(self, num_blocks: int, count: int, rng: random.Random) -> Tensor:
        layout = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
        for row in range(num_blocks):
            choices = row + 1 if self.attention == "unidirectional" else num_blocks
            layout[row, rng.sample(range(choices), min(count, choices))] = True
        return layout


def _sliding_window(num_blocks: int, size: int) -> Tensor:
    place = torch.arange(num_blocks)
    return (place[:, None] - place).abs() <= size // 2


def _mark(num_blocks: int, starts: Sequence[int], ends: Sequence[int] | None) -> Tensor:
    """bool (num_blocks,): blocks ``starts[i]`` to ``ends[i]`` (exclusive), or ``starts`` alone."""
    marked = torch.zeros(num_blocks, dtype=torch.bool)
    for start, end in zip(starts, ends or [start + 1 for start in starts], strict=True):
        marked[start:end] = True
    return marked


@dataclass(frozen=True)
class DenseSparsityConfig(SparsityConfig):
    """Every block."""

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        return torch.ones(num_blocks, num_blocks, dtype=torch.bool)


@dataclass(frozen=True)
class FixedSparsityConfig(SparsityConfig):
    """Windows of ``num_local_blocks``, whose last ``num_global_blocks`` everybody sees.

    With ``num_different_global_patterns`` the next head takes the blocks before these, and so on in turn.
    ``horizontal_global_attention``: global blocks see everybody, too.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"  # type: ignore[misc]
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        patterns, local, shared = self.num_different_global_patterns, self.num_local_blocks, self.num_global_blocks
        if local % shared:
            raise ValueError(f"num_local_blocks {local} must be a multiple of num_global_blocks {shared}")
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns {patterns} needs different_layout_per_head to be true")
        if patterns > local // shared:
            raise ValueError(
                f"num_different_global_patterns {patterns} is above num_local_blocks / num_global_blocks = "
                f"{local // shared}: a window has no more"
            )

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        size, shared = self.num_local_blocks, self.num_global_blocks
        place = torch.arange(num_blocks)
        layout = place[:, None] // size == place // size
        first = size - (1 + head % self.num_different_global_patterns) * shared
        # A last window that is cut short has its global blocks where they fit.
        starts = [min(start + first, max(0, num_blocks - shared)) for start in range(0, num_blocks, size)]
        marked = _mark(num_blocks, starts, [start + shared for start in starts])
        layout |= marked
        return layout | marked[:, None] if self.horizontal_global_attention else layout


@dataclass(frozen=True)
class VariableSparsityConfig(SparsityConfig):
    """Windows of ``local_window_blocks`` (the last size goes on), random blocks, and global ones by index."""

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Attention = "bidirectional"  # type: ignore[misc]
    horizontal_global_attention: bool = False

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        sizes = [*self.local_window_blocks]
        sizes += [sizes[-1]] * num_blocks
        window = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[:num_blocks]
        marked = _mark(num_blocks, self.global_block_indices, self.global_block_end_indices)
        layout = self._random_blocks(num_blocks, self.num_random_blocks, rng) | (window[:, None] == window) | marked
        return layout | marked[:, None] if self.horizontal_global_attention else layout


@dataclass(frozen=True)
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, random blocks in each row, and global blocks at the beginning."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: Attention = "bidirectional"  # type: ignore[misc]

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        marked = torch.arange(num_blocks) < self.num_global_blocks
        layout = self._random_blocks(num_blocks, self.num_random_blocks, rng)
        return layout | _sliding_window(num_blocks, self.num_sliding_window_blocks) | marked | marked[:, None]


@dataclass(frozen=True)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and global blocks by index, which see everybody and are seen by everybody."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: Attention = "bidirectional"  # type: ignore[misc]

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        marked = _mark(num_blocks, self.global_block_indices, self.global_block_end_indices)
        return _sliding_window(num_blocks, self.num_sliding_window_blocks) | marked | marked[:, None]


@dataclass(frozen=True)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: Attention = "unidirectional"  # type: ignore[misc]

    def head_layout(self, head: int, num_blocks: int, rng: random.Random) -> Tensor:
        return _sliding_window(num_blocks, self.num_sliding_window_blocks)


_BY_MODE: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
}


def build_sparsity_config(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """The pattern that a config's ``sparse_attention`` block describes.

    Raises:
        ValueError: options of the block contradict each other.
    """
    pattern = _BY_MODE[section.mode]
    options = {one.name: getattr(section, one.name) for one in fields(pattern) if one.name != "num_heads"}
    try:
        return pattern(num_heads, **options)
    except ValueError as error:
        raise ValueError(f"sparse_attention: {error}") from None
