"""Cutting a list of layers into stages of about equal cost.

The cut is the one whose dearest stage is cheapest (the linear partition problem, solved
exactly), so no stage holds up the others longer than it must.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

FitsFn = Callable[[int, int, int], bool]


def partition_balanced(
    costs: Sequence[float], num_stages: int, min_layers: int = 0, fits: FitsFn | None = None
) -> list[range]:
    """Split layers ``0..n-1`` into ``num_stages`` runs; the largest sum of ``costs`` is least.

    With fewer layers than stages some runs are empty, the later ones.  Among equally good cuts,
    the one whose stages are most alike (least sum of squares).  ``min_layers``: layers that every
    run must have.  ``fits(stage, start, stop)``: whether the stage has room for these layers.

    Raises:
        ValueError: no cut gives every stage what fits.
    """
    num_layers = len(costs)
    cost_before = [0.0, *accumulate(float(cost) for cost in costs)]
    infinite = (float("inf"), float("inf"))
    # best[s][i]: (dearest stage, squares) of the first i layers in s stages; begin: where the last starts.
    best = [[infinite] * (num_layers + 1) for _ in range(num_stages + 1)]
    last_start = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0.0)
    for stage in range(1, num_stages + 1):
        for stop in range(num_layers + 1):
            for start in range(stop - min_layers + 1):
                max_cost, squares = best[stage - 1][start]
                if fits is not None and not fits(stage - 1, start, stop):
                    continue
                cost = cost_before[stop] - cost_before[start]
                score = (max(max_cost, cost), squares + cost * cost)
                if score < best[stage][stop]:
                    best[stage][stop], last_start[stage][stop] = score, start
    if best[num_stages][num_layers] == infinite:
        raise ValueError(f"no cut into {num_stages} stages fits: take more stages, or a larger memory limit")
    cuts = [num_layers]
    for stage in range(num_stages, 0, -1):
        cuts.append(last_start[stage][cuts[-1]])
    cuts.reverse()
    non_empty = [range(a, b) for a, b in pairwise(cuts) if a < b]
    return non_empty + [range(num_layers, num_layers)] * (num_stages - len(non_empty))
