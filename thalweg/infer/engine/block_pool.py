"""The KV cache's blocks: which are in use, and which hold a prefix that may be used again.

A block is held by some sequences (a reference count), or free; a free block may still hold a full block of a
prefix, which can be found until the block is evicted, the least recently used first.

A prefix is found block by block: the key of a block is the identity of the block before it and its own
tokens, compared exactly, never by a hash alone; the first block's predecessor is the request's salt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BlockKey = tuple[Hashable, tuple[int, ...]]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._block_by_key: dict[BlockKey, tuple[int, int]] = {}
        self._key_by_block: dict[int, BlockKey] = {}
        self._last_id = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that still hold a prefix."""
        return len(self._evictable)

    def allocate(self) -> int:
        """Hand out a block; the caller has seen that one is available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_by_key[self._key_by_block.pop(block)]
        self._ref_counts[block] = 1
        return block

    def incref(self, blocks: Sequence[int]) -> None:
        """Hold blocks that :meth:`find_prefix` returned."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks; the last ones are the first to be reused."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released more often than allocated"
            if self._ref_counts[block] == 0:
                if block in self._key_by_block:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def find_prefix(
        self, tokens: Sequence[int], root_key: Hashable, require_full: bool = False
    ) -> tuple[list[int], int]:
        """Return the blocks that hold a prefix of ``tokens``, and how many of them nobody holds.

        At least one token is left over, as there must be something to compute.  ``require_full``: all of them
        or none, the last block maybe not full.
        """
        blocks: list[int] = []
        num_evictable, parent = 0, root_key
        for start in range(
            0, len(tokens) if require_full else (len(tokens) - 1) // self.block_size * self.block_size, self.block_size
        ):
            entry = self._block_by_key.get((parent, tuple(tokens[start : start + self.block_size])))
            if entry is None:
                return ([], 0) if require_full else (blocks, num_evictable)
            block, parent = entry
            blocks.append(block)
            num_evictable += self._ref_counts[block] == 0
        return blocks, num_evictable

    def cache_block(self, block: int, parent: Hashable, tokens: Sequence[int]) -> Hashable:
        """Record that a held block is full of these tokens; returns the identity that the next one follows."""
        if not self.prefix_caching:
            return None
        key = (parent, tuple(tokens))
        entry = self._block_by_key.get(key)
        if entry is not None:  # computed twice at the same time, or taken over from the cache
            return entry[1]
        self._last_id += 1
        self._block_by_key[key] = (block, self._last_id)
        self._key_by_block[block] = key
        return self._last_id
