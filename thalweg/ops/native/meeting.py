"""Kernels by which tapes of several processes meet in memory that they share.

Each rank has a counter on a cache line of its own, which it alone writes: to meet is to raise one's counter
and to wait until those of all others are there.  A word beside them says that a rank is gone; then nobody
waits any more, and the step's result is void.  Waiting spins for a few microseconds, then yields the core.
"""

from __future__ import annotations

from typing import Any

from thalweg.ops.native.ir import I32, I64, VOID, Code, vec

LINE = 128  # bytes from one counter to the next
_SPINS = 2000

MEET = ("counters", "rank", "size", "gone")
"""``counters``: address of the first rank's; ``gone``: address of the word that ends all waiting."""
JOIN = ("out", "out_stride", "parts", "part_stride", "between", "size", "rows", "width")
"""``parts``: address of the first rank's rows, the next rank's ``between`` bytes further on."""


def meet(module: Any) -> str:
    """Add the kernel that waits for the other ranks; arguments: :data:`MEET`."""
    code = Code(module, "meet")
    counters, rank, size, gone = (code.arg(i) for i in range(len(MEET)))
    b = code.b
    with code.when(b.icmp_signed("==", code.thread, code.i(0))):
        mine = b.inttoptr(code.add(counters, code.mul(rank, LINE)), I64.as_pointer())
        wanted = code.add(b.load_atomic(mine, "monotonic", 8, typ=I64), 1)
        b.store_atomic(wanted, mine, "release", 8)
        with code.range(0, size) as peer:
            theirs = b.inttoptr(code.add(counters, code.mul(peer, LINE)), I64.as_pointer())
            _wait(code, theirs, wanted, b.inttoptr(gone, I64.as_pointer()))
    code.ret()
    return "meet"


def _wait(code: Code, counter: Any, wanted: Any, gone: Any) -> None:
    b = code.b
    turns = code.var(code.i(0))
    look, idle, done = (code.function.append_basic_block(name) for name in ("look", "idle", "met"))
    b.branch(look)
    b.position_at_end(look)
    here = b.icmp_signed(">=", b.load_atomic(counter, "acquire", 8, typ=I64), wanted)
    over = b.icmp_signed("!=", b.load_atomic(gone, "monotonic", 8, typ=I64), code.i(0))
    b.cbranch(b.or_(here, over), done, idle)
    b.position_at_end(idle)
    code.call("llvm.x86.sse2.pause", VOID, [])
    turns.value = code.add(turns.value, 1)
    with code.when(b.icmp_signed(">", turns.value, code.i(_SPINS))):
        code.call("sched_yield", I32, [])
    b.branch(look)
    b.position_at_end(done)


def join(module: Any) -> str:
    """Add the kernel that adds up the ranks' rows, in their order; arguments: :data:`JOIN`."""
    code = Code(module, "join")
    out, out_stride, parts, part_stride, between, size, rows, width = (code.arg(i) for i in range(len(JOIN)))
    first, last = code.share(code.load(I64, rows, 8))
    with code.range(first, last) as row:
        to = code.add(out, code.mul(row, out_stride))
        of = code.add(parts, code.mul(row, part_stride))
        with code.range(0, width, 16) as i:
            at = code.add(of, code.mul(i, 4))
            total = code.var(code.load(vec(16), at))
            with code.range(1, size) as rank:
                more = code.load(vec(16), code.add(at, code.mul(rank, between)))
                total.value = code.b.fadd(total.value, more)
            code.store(total.value, code.add(to, code.mul(i, 4)))
    code.ret()
    return "join"
