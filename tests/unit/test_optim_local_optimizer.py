"""Optimisers that the user has built: taken over with their state, hooks and schedule."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thalweg.optim.algorithms.adafactor import Adafactor
from thalweg.optim.dtensor_local import LocalStepMixin
from thalweg.optim.local_optimizer import to_local_optimizer

torch.set_num_threads(1)
NAMES = [
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


def params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 3), (2, 5)]]


def steps(optimizer: Any, params: list[nn.Parameter], seed: int, schedule: Any = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("name", NAMES)
def test_an_adopted_optimizer_goes_on_as_it_would_have(name: str) -> None:
    """State, hooks and a torch schedule stay attached; the numbers agree to rounding."""
    cls = getattr(torch.optim, name)
    ours_params, theirs_params = params(), params()
    ours, theirs = cls(ours_params, lr=0.05), cls(theirs_params, lr=0.05)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    calls: list[int] = []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    steps(ours, ours_params, 1, schedules[0])
    steps(theirs, theirs_params, 1, schedules[1])
    assert to_local_optimizer(ours) is ours and isinstance(ours, cls | type(ours)) and type(ours) is not cls
    got = steps(ours, ours_params, 2, schedules[0])
    want = steps(theirs, theirs_params, 2, schedules[1])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(calls) == 6 and ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.05 / 8
    control = steps(cls(ours_params, lr=0.2), ours_params, 2)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(control, got, strict=True))


def test_the_fused_kernel_is_a_default_and_not_an_order() -> None:
    kinds = [({}, True), ({"foreach": True}, None), ({"fused": False}, False)]
    for keywords, fused in kinds:
        optimizer = to_local_optimizer(torch.optim.AdamW(params(), **keywords))
        assert isinstance(optimizer, LocalStepMixin) and optimizer.param_groups[0]["fused"] is fused


def test_16_bit_parameters_work_after_adoption() -> None:
    """The rounding back hangs on a hook, which torch installs only when an object of the class is made."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = to_local_optimizer(torch.optim.NAdam([param], lr=0.5))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (param < 0.9).all() and optimizer.state[param]["exp_avg"].dtype == torch.float32


def test_other_classes_are_left_alone() -> None:
    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (Mine(params()), torch.optim.LBFGS(params()), Adafactor(params())):
        before = type(optimizer)
        assert to_local_optimizer(optimizer) is optimizer and type(optimizer) is before


def test_classes_that_cannot_step_on_shards_are_refused_with_what_can() -> None:
    bitsandbytes: Any = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    for cls in (bitsandbytes, type("Mine", (bitsandbytes,), {})):
        with pytest.raises(ValueError, match=r"cannot step on .*\"state_dtype\": \"int8\""):
            to_local_optimizer(cls(params()))
    optimization = pytest.importorskip("transformers.optimization", reason="the extra [hf] is not installed")
    with pytest.raises(ValueError, match=r'"optimizer": \{"type": "Adafactor"\}'):
        to_local_optimizer(optimization.Adafactor(params()))
