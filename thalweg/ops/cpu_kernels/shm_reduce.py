"""All-reduce for programs of several processes, in memory that they share: a barrier and a sum.

Each rank has a counter on a cache line of its own, which it alone writes: the barrier raises it, then waits until
those of all others have come as far.  A word beside them says that a rank has died; then no rank waits any more,
and the step's result is void.  Waiting spins for a few microseconds, then yields the core.
"""

from functools import partial
from typing import Any

from thalweg.ops.cpu_kernels.kernel_builder import I64, KernelBuilder, vec

CACHE_LINE_BYTES = 128  # bytes from one counter to the next
_SPINS = 2000

# ``counters``: address of the first rank's; ``aborted``: address of the word that ends all waiting.
BARRIER_ARGS = ("counters", "rank", "size", "aborted")
# ``inputs``: address of the first rank's rows; each next rank's begin ``rank_stride`` bytes later.
REDUCE_SUM_ARGS = ("out", "out_stride", "inputs", "input_stride", "rank_stride", "size", "rows", "width")


def emit_barrier(module: Any) -> str:
    """Add the kernel that waits for the other ranks; arguments: :data:`BARRIER_ARGS`."""
    code = KernelBuilder(module, "barrier")
    counters, rank, size, aborted = (code.load_arg(i) for i in range(len(BARRIER_ARGS)))
    b = code.builder
    with code.if_then(b.icmp_signed("==", code.thread_id, code.int_const(0))):
        own_counter = b.inttoptr(code.add(counters, code.mul(rank, CACHE_LINE_BYTES)), I64.as_pointer())
        target = code.add(b.load_atomic(own_counter, "monotonic", 8, typ=I64), 1)
        b.store_atomic(target, own_counter, "release", 8)
        with code.range(0, size) as peer:
            peer_counter = b.inttoptr(code.add(counters, code.mul(peer, CACHE_LINE_BYTES)), I64.as_pointer())
            code.spin_until(partial(_is_over, code, peer_counter, target, aborted), _SPINS, 0)
    return code.ret()


def _is_over(code: KernelBuilder, counter: Any, target: Any, aborted: Any) -> Any:
    b = code.builder
    is_reached = b.icmp_signed(">=", b.load_atomic(counter, "acquire", 8, typ=I64), target)
    abort_word = b.load_atomic(b.inttoptr(aborted, I64.as_pointer()), "monotonic", 8, typ=I64)
    return b.or_(is_reached, b.icmp_signed("!=", abort_word, code.int_const(0)))


def emit_reduce_sum(module: Any) -> str:
    """Add the kernel that adds up the ranks' rows, in their order; arguments: :data:`REDUCE_SUM_ARGS`."""
    code = KernelBuilder(module, "reduce_sum")
    out, out_stride, inputs, input_stride, rank_stride, size, rows, width = code.load_args(REDUCE_SUM_ARGS).values()
    with code.thread_items(code.load(I64, rows, 8)) as row:
        to = code.add(out, code.mul(row, out_stride))
        of = code.add(inputs, code.mul(row, input_stride))
        with code.range(0, width, 16) as i:
            at = code.add(of, code.mul(i, 4))
            total = code.stack_var(code.load(vec(16), at))
            with code.range(1, size) as rank:
                value = code.load(vec(16), code.add(at, code.mul(rank, rank_stride)))
                total.value = code.builder.fadd(total.value, value)
            code.store(total.value, code.add(to, code.mul(i, 4)))
    return code.ret()
