"""Tests with one body and many parameters share one fork of the ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

Params = dict[str, Any]


def _run_cases(rank: int, world: int, fn: Callable[..., Any], cases: list[Params]) -> list[Any]:
    """``fn`` for each of ``cases``; each begins with the environment and the random numbers of the first."""
    results, environment = [], dict(os.environ)
    for params in cases:
        torch.manual_seed(0)
        try:
            results.append(fn(rank, world, **params))
        except BaseException as error:
            raise AssertionError(f"{fn.__name__} with {params}: {type(error).__name__}: {error}") from error
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
    return results


@pytest.fixture(scope="module")
def _finished() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def together(request: pytest.FixtureRequest, _finished: dict[tuple[str, int], Any]) -> Callable[..., list[Any]]:
    """``together(fn, world, timeout=...)``: what ``fn(rank, world, **parameters)`` returns on each rank, the
    parameters being those of the test but ``world``.

    All selected tests of the same function and world run in one fork, when the first of them asks.  An
    error in one of them is an error of all.  For what ends ranks, measures their memory or changes a module
    for good, each test needs ranks of its own: ``run_ranks``.
    """

    def run_case(fn: Callable[..., Any], world: int, timeout: float = 240.0) -> list[Any]:
        def get_params(item: Any) -> Params:
            return {key: value for key, value in item.callspec.params.items() if key != "world"}

        function = request.node.originalname
        items = [
            item
            for item in request.session.items
            if getattr(item, "originalname", None) == function
            and item.path == request.node.path
            and item.callspec.params.get("world", world) == world
        ]
        key = (f"{function} {fn.__name__}", world)
        if key not in _finished:
            cases = [get_params(item) for item in items]
            try:
                _finished[key] = run_ranks(_run_cases, world, fn, cases, timeout=timeout)
            except AssertionError as error:
                _finished[key] = error
        results = _finished[key]
        if isinstance(results, AssertionError):
            raise results
        index = items.index(request.node)
        return [rank[index] for rank in results]

    return run_case
