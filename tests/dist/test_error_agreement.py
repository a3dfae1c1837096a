"""An error of one rank while it makes something is an error of all ranks, whatever its type."""

from __future__ import annotations

import time

import pytest

from tests.harness import run_ranks
from thalweg.comm.error_agreement import all_ranks_or_raise
from thalweg.parallel_dims import new_subgroup

ERRORS: dict[str, Exception] = {
    "ValueError": ValueError("no room for 3 GiB"),
    "OSError": OSError(28, "No space left on device"),
    "KeyError": KeyError("a defect"),
}


def _build_and_meet(rank: int, world: int, kind: str, failing_rank: int) -> tuple[str, str, float]:
    import torch.distributed as dist

    def build() -> int:
        if rank == failing_rank:
            raise ERRORS[kind]
        return 10 + rank

    group = new_subgroup(list(range(world)), dist.group.WORLD)  # type: ignore[arg-type]
    start = time.monotonic()
    try:
        result = all_ranks_or_raise(build, "a swap file", group)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    dist.barrier()  # where a rank that knows of nothing would wait
    return "", str(result), time.monotonic() - start


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_one_rank_is_one_of_all(kind: str) -> None:
    ends = run_ranks(_build_and_meet, 3, kind, 1, timeout=20)
    assert ends[1][:2] == (kind, str(ERRORS[kind])), "the rank's own error, as it was"
    words = str(ERRORS[kind]) if kind == "ValueError" else f"{kind}: {ERRORS[kind]}"
    other = "ValueError" if kind == "ValueError" else "RuntimeError"
    assert ends[0][:2] == ends[2][:2] == (other, f"rank 1 cannot have a swap file: {words}")
    assert all(seconds < 10 for *_, seconds in ends)


def test_negative_control_without_an_error_each_has_its_own() -> None:
    assert [end[:2] for end in run_ranks(_build_and_meet, 3, "OSError", -1)] == [("", str(10 + r)) for r in range(3)]


def _meet_after_own_groups(rank: int, world: int) -> list[float]:
    import torch
    import torch.distributed as dist

    groups = [new_subgroup([rank]) for _ in range(3 * rank)]  # unequally many, as where experts are on one stage
    groups += [dist.new_group(), new_subgroup(range(world), dist.group.WORLD), dist.new_group()]
    sums = []
    for group in groups[-3:]:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        sums.append(float(value))
    return sums


def test_ranks_with_unequally_many_groups_meet_in_the_next() -> None:
    """torch 2.14 counts groups of some ranks as well, by which it names those of all."""
    assert run_ranks(_meet_after_own_groups, 3, timeout=30) == [[3.0] * 3] * 3
