"""Build a model twice from one random state, ordinarily and under zero.Init, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.deferred_init.context import materialize_module
from thalweg.deferred_init.record_mode import RecordMode

SMALL_SIZES = [0, 64, 4096]  # what counts as small: nothing, biases, nearly everything in a test model


def build_plain_and_recorded(
    build: Callable[[], nn.Module], small_numel: int, after_build: Callable[[Any], Any] | None = None
) -> tuple[Any, Any]:
    """Return (ordinary, recorded) models built by ``build`` from seed 7, after ``then(model)`` on each."""
    torch.manual_seed(7)
    plain = build()
    if after_build is not None:
        after_build(plain)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with RecordMode(small_numel):
        model = build()
    if after_build is not None:
        after_build(model)
    assert torch.equal(torch.get_rng_state(), state), "the random state differs from an ordinary build's"
    return plain, model


def materialized_values(model: nn.Module) -> dict[str, Tensor]:
    """Materialise ``model``; return what the sink got, and what was real, by name."""
    values_by_name: dict[str, Tensor] = {}

    def sink(name: str, meta: Tensor, value: Tensor) -> None:
        assert name not in values_by_name, "called twice"
        assert (meta.shape, meta.dtype) == (value.shape, value.dtype)
        assert type(value) is Tensor
        values_by_name[name] = value.clone()

    materialize_module(model, sink)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            values_by_name[name] = tensor.detach()
    return values_by_name


def matches_plain(plain: nn.Module, model: nn.Module) -> bool:
    """Whether ``model``, materialised, has exactly the values of ``plain``."""
    expected = {name: tensor.detach() for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]}
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    actual = materialized_values(model)
    assert actual.keys() == expected.keys()
    if any(actual[name].dtype != tensor.dtype for name, tensor in expected.items()):
        return False
    return all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
