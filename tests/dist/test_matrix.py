"""Every combination of ``matrix.py`` against one plain process: 20 steps, first gradients, last parameters.

All combinations of a world size run in one fork of that many ranks, when the first is asked for; each is
a test of its own, and ``-k`` runs only what it selects.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist import matrix
from tests.dist.matrix import UNSUPPORTED_PAIRS, Combination, combinations
from tests.dist.matrix_run import (
    collect_errors,
    compare_to_plain,
    compare_with_wrong_lr,
    compare_with_wrong_mean,
    get_tolerance,
)
from tests.harness import run_ranks

Differences = dict[str, float]
CONTROLS = ("s3 dp2 remat", "s1 dp2 host", "s2 tp2", "s0 sp2")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Differences]:
    """Differences by combination; runs the selected ones of a world together."""
    asked = [item.callspec.params.get("one") for item in request.session.items if hasattr(item, "callspec")]
    results: dict[int, dict[str, Differences] | AssertionError] = {}

    def of(one: Combination) -> Differences:
        if one.world_size not in results:
            same = [
                other.name for other in asked if isinstance(other, Combination) and other.world_size == one.world_size
            ]
            folder = str(tmp_path_factory.mktemp("tiers"))
            try:
                results[one.world_size] = run_ranks(compare_to_plain, one.world_size, same, folder, timeout=300)[0]
            except AssertionError as error:  # it is the error of all of them: one that hangs takes the rest along
                results[one.world_size] = error
        result = results[one.world_size]
        if isinstance(result, AssertionError):
            raise result
        return result[one.name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("one", combinations(), ids=lambda one: one.id)
def test_equals_one_process(found: Callable[[Combination], Differences], one: Combination) -> None:
    differences, bounds = found(one), get_tolerance(one)
    assert all(value <= bounds[key] for key, value in differences.items()), differences


def test_at_least_sixty_combinations() -> None:
    names = [one.name for one in combinations()]
    assert len(names) == len(set(names)) >= 60
    assert {one.world_size for one in combinations()} == {2, 4, 8}


@pytest.mark.parametrize(
    ("wrong", "where"), [(compare_with_wrong_lr, "parameter"), (compare_with_wrong_mean, "gradient")]
)
def test_negative_controls_fail(wrong: Callable[..., dict[str, Differences]], where: str, tmp_path: Path) -> None:
    names = [name for name in CONTROLS if wrong is not compare_with_wrong_mean or "dp" in name]
    for name, differences in run_ranks(wrong, 2, names, str(tmp_path))[0].items():
        assert differences[where] > 1e-4, f"{name}: {differences}"


def test_what_does_not_go_together_says_so() -> None:
    told = {}
    for world in {Combination.parse(refusal.combination).world_size for refusal in UNSUPPORTED_PAIRS.values()}:
        names = [
            r.combination for r in UNSUPPORTED_PAIRS.values() if Combination.parse(r.combination).world_size == world
        ]
        told |= dict(zip(names, run_ranks(collect_errors, world, names)[0], strict=True))
    for pair, refusal in UNSUPPORTED_PAIRS.items():
        assert set(pair) <= Combination.parse(refusal.combination).degrees.keys(), pair
        assert refusal.message in told[refusal.combination], f"{pair}: {told[refusal.combination]!r}"


def test_a_pair_is_shown_or_refused_or_open_but_not_two_of_them() -> None:
    for pair in (*UNSUPPORTED_PAIRS, *matrix.UNCOVERED_PAIRS):
        assert not matrix.combinations_with(*pair), pair
    assert not UNSUPPORTED_PAIRS.keys() & matrix.UNCOVERED_PAIRS.keys()
