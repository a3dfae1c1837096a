"""The combinations of ``matrix.py`` against one plain process: losses, first gradients, last parameters.

The gate runs those in which each pair of features occurs, for 4 steps; the nightly run all of them for 20.  All
combinations of a world size run in one fork of that many ranks, when the first is asked for; each is a test of its
own, and ``-k`` runs only what it selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.dist import matrix
from tests.dist.matrix import (
    UNSUPPORTED_PAIRS,
    Combination,
    combinations,
    covering_combinations,
    tuples_shown,
)
from tests.dist.matrix_run import (
    STEPS,
    collect_errors,
    compare_to_plain,
    compare_with_wrong_lr,
    compare_with_wrong_mean,
    get_tolerance,
)
from tests.harness import run_ranks
from tests.marks import nightly

Differences = dict[str, float]
GATE_STEPS = 4
TESTS = {GATE_STEPS: "test_each_pair_equals_one_process", STEPS: "test_equals_one_process"}
CONTROLS = ("s3 dp2 remat", "s1 dp2 host", "s2 tp2", "s0 sp2", "s3 dp2 lora")


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Combination, int], Differences]:
    """Differences by combination and number of steps; runs the selected ones of a world together."""
    results: dict[tuple[int, int], dict[str, Differences] | AssertionError] = {}

    def get_differences(combination: Combination, steps: int) -> Differences:
        key = combination.world_size, steps
        if key not in results:
            selected = [
                item.callspec.params["combination"]
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and (item.path, item.originalname) == (request.path, TESTS[steps])
                and item.get_closest_marker("skip") is None
            ]
            names = [one.name for one in selected if one.world_size == combination.world_size]
            folder = str(tmp_path_factory.mktemp("tiers"))
            try:
                results[key] = run_ranks(compare_to_plain, combination.world_size, names, folder, steps, timeout=300)[0]
            except AssertionError as error:  # it is the error of all of them: one that hangs takes the rest along
                results[key] = error
        result = results[key]
        if isinstance(result, AssertionError):
            raise result
        return result[combination.name]

    return get_differences


def check(combination: Combination, differences: Differences) -> None:
    bounds = get_tolerance(combination)
    assert all(value <= bounds[key] for key, value in differences.items()), differences


@pytest.mark.parametrize("combination", covering_combinations(), ids=lambda combination: combination.id)
def test_each_pair_equals_one_process(
    found: Callable[[Combination, int], Differences], combination: Combination
) -> None:
    check(combination, found(combination, GATE_STEPS))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("combination", combinations(), ids=lambda combination: combination.id)
def test_equals_one_process(found: Callable[[Combination, int], Differences], combination: Combination) -> None:
    check(combination, found(combination, STEPS))


ON_A_DEVICE = [one for one in covering_combinations() if "compile" not in one.degrees]  # which knows no simulated one
TELLING = ("s2 dp4 ep4 nvme", "s0 dp2 tp2 ep2", "s3 sp2 pp2", "s3 dp2 cp2 paged")


@pytest.mark.parametrize(
    ("world", "names"),
    [(4, TELLING), *(nightly(world, [c.name for c in ON_A_DEVICE if c.world_size == world]) for world in (2, 4))],
    ids=["gate", "all of two", "all of four"],
)
def test_an_accelerator_gives_the_same(world: int, names: Sequence[str], tmp_path: Path) -> None:
    """The combinations on a simulated device, against one plain process on the CPU."""
    found = run_ranks(compare_to_plain, world, list(names), str(tmp_path), 3, timeout=300, device="sim")[0]
    for name in names:
        check(Combination.parse(name), found[name])


def test_the_gate_shows_each_pair_and_triple_that_the_table_shows() -> None:
    def shown(lines: Iterable[Combination]) -> set[tuple[str, ...]]:
        return set().union(*map(tuples_shown, lines))

    gate = covering_combinations()
    assert shown(gate) == shown(combinations())
    assert all(shown(other for other in gate if other is not one) < shown(gate) for one in gate), "none is too many"
    assert max(one.world_size for one in gate) <= 4


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
