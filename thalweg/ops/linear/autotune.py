"""Time the candidates of one product, undisturbed and undisturbing.

It runs isolated from whatever is set up around the caller, and on constant operands, so
that no random state is touched.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thalweg.ops.autograd import run_in_clean_thread
from thalweg.ops.linear.kernels import KERNELS, REFERENCE, is_usable, make_operands

_NUM_ROUNDS = 5
_TIME_BUDGET_S = 0.012  # for all timed rounds of one product, once each candidate has run twice
_WIN_RATIO = 0.97  # a challenger must win by 3%: less is noise, and torch's own operator is the simpler one
_CALL_OVERHEAD_S = 8e-6  # a third of what the autograd.Function around three products costs in Python
_GIVE_UP_RATIO = 1.5  # times the best so far: no further rounds
_TRIAL_FLOPS = {torch.float32: 5.0e8}
_TRIAL_FLOPS_HALF = 1.0e8  # less, as torch's own fp16 product may run at 1 GFLOP/s


def shrink_shape(rows: int, k: int, n: int, max_flops: float) -> tuple[int, int, int]:
    """Halve the longest dimension until the product costs at most ``max_flops`` (2 rows k n)."""
    dims = [rows, k, n]
    while 2.0 * dims[0] * dims[1] * dims[2] > max_flops and max(dims) > 128:
        longest = dims.index(max(dims))
        dims[longest] = -(-dims[longest] // 2)
    return dims[0], dims[1], dims[2]


def benchmark_kernels(kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> dict[str, float]:
    """Return the best time in seconds of each usable candidate on a product of about this shape.

    Uses as many threads as torch has now.  Large products are measured on a smaller one
    (:func:`shrink_shape`), so the times rank candidates and mean nothing else.
    """
    return run_in_clean_thread(_benchmark, kind, dtype, rows, k, n)


def _benchmark(kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> dict[str, float]:
    names = [name for name in KERNELS[kind] if is_usable(kind, name, dtype)]
    if names == [REFERENCE]:
        return {REFERENCE: 0.0}
    # CPU time of this thread does not count what other processes take; with more threads the
    # slowest one decides, and only the wall clock sees it.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    args = make_operands(kind, *shrink_shape(rows, k, n, _TRIAL_FLOPS.get(dtype, _TRIAL_FLOPS_HALF)), dtype)
    best: dict[str, float] = {}
    for name in reversed(names):  # torch's own last: where it is hopeless, once is enough
        best[name] = _time_call(KERNELS[kind][name], args, clock)
        if best[name] < 10 * min(best.values()):
            best[name] = min(best[name], _time_call(KERNELS[kind][name], args, clock))
    deadline = time.perf_counter() + _TIME_BUDGET_S
    for _ in range(_NUM_ROUNDS):
        limit = _GIVE_UP_RATIO * min(best.values())
        for name in names:
            if best[name] <= limit:
                best[name] = min(best[name], _time_call(KERNELS[kind][name], args, clock))
        if time.perf_counter() > deadline:
            break
    return best


def _time_call(kernel: Callable[..., Tensor], args: tuple[Tensor, ...], clock: Callable[[], float]) -> float:
    start = clock()
    kernel(*args)
    return clock() - start


def select_fastest(times: Mapping[str, float]) -> str:
    """Return the fastest candidate, or torch's own where that one wins by less than 3% or 8 us."""
    fastest = min(times, key=lambda name: times[name])
    limit = min(_WIN_RATIO * times[REFERENCE], times[REFERENCE] - _CALL_OVERHEAD_S)
    return fastest if times[fastest] < limit else REFERENCE
