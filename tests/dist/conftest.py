"""Tests with one body and many parameters share one fork of the ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

Values = dict[str, Any]


def _one_by_one(rank: int, world: int, fn: Callable[..., Any], cases: list[Values]) -> list[Any]:
    """``fn`` for each of ``cases``; each begins with the environment and the random numbers of the first."""
    results, environment = [], dict(os.environ)
    for values in cases:
        torch.manual_seed(0)
        try:
            results.append(fn(rank, world, **values))
        except BaseException as error:
            raise AssertionError(f"{fn.__name__} with {values}: {type(error).__name__}: {error}") from error
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
    return results


@pytest.fixture(scope="module")
def _finished() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def together(
    request: pytest.FixtureRequest, _finished: dict[tuple[str, int], Any]
) -> Callable[..., list[Any]]:
    """``together(fn, world, timeout=...)``: what ``fn(rank, world, **parameters)`` returns on each rank, the
    parameters being those of the test but ``world``.

    All selected tests of the same function and world run in one fork, when the first of them asks.  An
    error in one of them is an error of all.  For what ends ranks, measures their memory or changes a module
    for good, each test needs ranks of its own: ``run_ranks``.
    """

    def of(fn: Callable[..., Any], world: int, timeout: float = 240.0) -> list[Any]:
        def values_of(item: Any) -> Values:
            return {key: value for key, value in item.callspec.params.items() if key != "world"}

        function = request.node.originalname
        same = [
            item
            for item in request.session.items
            if getattr(item, "originalname", None) == function
            and item.path == request.node.path
            and item.callspec.params.get("world", world) == world
        ]
        key = (f"{function} {fn.__name__}", world)
        if key not in _finished:
            cases = [values_of(item) for item in same]
            try:
                _finished[key] = run_ranks(_one_by_one, world, fn, cases, timeout=timeout)
            except AssertionError as error:
                _finished[key] = error
        found = _finished[key]
        if isinstance(found, AssertionError):
            raise found
        place = same.index(request.node)
        return [rank[place] for rank in found]

    return of
