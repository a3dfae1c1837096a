"""Things that go together: as many at a time as a limit (of bytes, say) allows."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def iter_buckets(
    items: Iterable[T], size_of: Callable[[T], int], limit: float, max_items: float = math.inf
) -> Iterator[list[T]]:
    """Yield runs of ``items``, in their order, of at most ``limit`` together; a larger one comes alone."""
    bucket: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if bucket and (total + size > limit or len(bucket) >= max_items):
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket
