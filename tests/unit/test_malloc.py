"""glibc's cache of small chunks beside large blocks, and what takes them out of it."""

import ctypes
import json
import subprocess
import sys

import pytest

from thalweg.device import MallocThreadCache

_TEXT = """
import ctypes, json, sys
from thalweg.device import MallocThreadCache, retain_freed_memory
assert retain_freed_memory()
library = ctypes.PyDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
cache, large = MallocThreadCache(), 32 << 20
elsewhere = library.malloc(1 << 20)  # where the other chunks will come from, as from any heap's small holes
cache.swap_chunks()
first = library.malloc(large)
between = library.malloc(72)
while between < first:  # holes of this size elsewhere, and what the cache holds, are used up
    between = library.malloc(72)
second, end = library.malloc(large), library.malloc(4096)
for block in (first, between, second, elsewhere):
    library.free(block)
if "exchange" in sys.argv:
    cache.swap_chunks()
print(json.dumps({"beside": first < between < second < first + large + 4096,
                  "again": library.malloc(2 * large) <= first}))
"""


def _fits(*arguments: str) -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _TEXT, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_two_free_blocks_with_a_cached_chunk_between_them_become_one_by_an_exchange():
    left = _fits()
    if not left["beside"]:
        pytest.skip("small objects lie elsewhere here")
    assert not left["again"], "without the exchange the cached chunk keeps them apart"
    assert _fits("exchange") == {"beside": True, "again": True}


def test_nothing_is_done_where_the_allocator_is_the_user_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THALWEG_MALLOC", "default")
    cache = MallocThreadCache()
    cache.swap_chunks()
    assert cache._malloc is None
