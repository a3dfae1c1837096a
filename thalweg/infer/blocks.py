"""The KV cache's blocks: who holds which, and which hold a prefix that somebody may want again.

A block is held by some sequences (a count), or free; a free block may still hold a full block of a prefix,
and stays findable until it is needed for something else, the one that was used longest ago first.

A prefix is found block by block: the key of a block is the identity of the block before it and its own
tokens, compared exactly, never by a hash alone; the first block's predecessor is the request's salt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Key = tuple[Hashable, tuple[int, ...]]


class BlockPool:
    """``num_blocks`` blocks of ``size`` tokens."""

    def __init__(self, num_blocks: int, size: int, remember: bool = True) -> None:
        self.num_blocks, self.size, self.remember = num_blocks, size, remember
        self._fresh = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._block_of: dict[Key, tuple[int, int]] = {}
        self._key_of: dict[int, Key] = {}
        self._last_identity = 0

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._fresh) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that still hold a prefix."""
        return len(self._cached)

    def take(self) -> int:
        """Hand out a block; the caller has seen that one is available."""
        if self._fresh:
            block = self._fresh.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that :meth:`match` found."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks; the last ones are the first to be reused."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released more often than taken"
            if self._holders[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._fresh.append(block)

    def match(self, tokens: Sequence[int], root: Hashable, whole: bool = False) -> tuple[list[int], int]:
        """Return the blocks that hold a prefix of ``tokens``, and how many of them nobody holds.

        At least one token is left over, as there must be something to compute.  ``whole``: all of them or
        none, the last block maybe not full.
        """
        blocks: list[int] = []
        idle, before = 0, root
        for start in range(
            0, len(tokens) if whole else (len(tokens) - 1) // self.size * self.size, self.size
        ):
            found = self._block_of.get((before, tuple(tokens[start : start + self.size])))
            if found is None:
                return ([], 0) if whole else (blocks, idle)
            block, before = found
            blocks.append(block)
            idle += self._holders[block] == 0
        return blocks, idle

    def record(self, block: int, before: Hashable, tokens: Sequence[int]) -> Hashable:
        """Note that a held block is full of these tokens; returns the identity that the next one follows."""
        if not self.remember:
            return None
        key = (before, tuple(tokens))
        found = self._block_of.get(key)
        if found is not None:  # computed twice at the same time, or taken over from the cache
            return found[1]
        self._last_identity += 1
        self._block_of[key] = (block, self._last_identity)
        self._key_of[block] = key
        return self._last_identity
