"""Elementwise optimisers of torch: equal to torch's own, with what is added, and with every key checked."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS
from thalweg.optim.build import OPTIMIZERS, build_optimizer
from thalweg.optim.dtensor_local import LocalStepMixin

torch.set_num_threads(1)
SHAPES = [(5, 3), (4,), (), (0, 3), (2, 3, 2)]


def make_params(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 6, skip: int = -1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if i == 1 and step == skip else grad
        optimizer.step()
    return [param.detach().clone() for param in params]


def worst(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x.double() - y.double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel())


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ELEMENTWISE_OPTIMIZERS),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.9)}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": False, "foreach": False}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-5, 10.0)}),
]


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_equals_torch(name: str, hyper: dict[str, Any]) -> None:
    """Bit for bit, a missing gradient included; another learning rate is seen."""
    hyper = {"lr": 0.02, **hyper}
    ours, theirs, control = make_params(), make_params(), make_params()
    deepspeed = {"adam_w_mode": False} if name == "Adam" else {}
    reference = dict(hyper)
    if name == "AdamW":
        reference.setdefault("weight_decay", 0.0)
    if name in ("Adam", "AdamW", "SGD", "Adagrad") and not {"fused", "foreach"} & hyper.keys():
        reference["fused"] = True
    got = train(build_optimizer(name.upper(), ours, {**hyper, **deepspeed}), ours, skip=2)
    want = train(getattr(torch.optim, name)(theirs, **reference), theirs, skip=2)
    assert worst(got, want) == 0.0
    off = train(build_optimizer(name, control, {**hyper, **deepspeed, "lr": 0.021}), control, skip=2)
    assert worst(off, want) > 1e-6


def test_adam_means_adamw_as_in_deepspeed() -> None:
    kinds = {
        "AdamW": [("Adam", {}), ("Adam", {"adam_w_mode": True}), ("AdamW", {"adam_w_mode": False})],
        "Adam": [("Adam", {"adam_w_mode": False}), ("adam", {"adamw_mode": False, "torch_adam": True})],
    }
    for want, cases in kinds.items():
        for name, hyper in cases:
            assert type(build_optimizer(name, make_params(), hyper)).__name__ == want
    assert build_optimizer("AdamW", make_params(), {}).param_groups[0]["weight_decay"] == 0.0
    assert build_optimizer("AdamW", make_params(), {"torch_adam": True}).param_groups[0]["weight_decay"] == 0.01
    assert isinstance(build_optimizer("Adam", make_params(), {}), torch.optim.AdamW)


@pytest.mark.parametrize("fused", [True, False])
def test_without_bias_correction(fused: bool) -> None:
    """Against the rule written out: p -= lr (m / (sqrt(v) + eps) + decay p)."""
    params = make_params(shapes=[(5, 3)])
    hyper = {"lr": 0.1, "bias_correction": False, "weight_decay": 0.1, "fused": fused}
    p = params[0].detach().double().clone()
    got = train(build_optimizer("AdamW", params, hyper), params)[0]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        g = torch.randn(5, 3, generator=generator).double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 0.1 * (m / (v.sqrt() + 1e-8) + 0.1 * p)
    torch.testing.assert_close(got.double(), p, rtol=1e-5, atol=1e-6)
    corrected = make_params(shapes=[(5, 3)])
    other = train(build_optimizer("AdamW", corrected, {**hyper, "bias_correction": True}), corrected)[0]
    assert (other.double() - p).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_16_bit_parameters_are_stepped_in_fp32(name: str, dtype: torch.dtype) -> None:
    """The result is the fp32 step rounded once, and the state stays fp32, through a state dict, too."""
    shapes = [(5, 3), (4,)]
    hyper = {"lr": 2.0**-6}  # exact in 16 bits: Rprop's state starts from it
    half = make_params(dtype, shapes)
    full = [nn.Parameter(p.detach().float()) for p in half]
    ours, wide = build_optimizer(name, half, hyper), build_optimizer(name, full, hyper)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for p, q in zip(half, full, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
            with torch.no_grad():
                q.copy_(p)
        ours.step()
        wide.step()
        for p, q in zip(half, full, strict=True):
            assert p.dtype == dtype
            torch.testing.assert_close(p.detach(), q.detach().to(dtype), rtol=0, atol=0)
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            ours = build_optimizer(name, half, hyper)
            ours.load_state_dict(saved)
    for p in half:
        for value in ours.state[p].values():
            assert value.dtype == torch.float32


def test_tiny_fp16_gradients_do_not_explode() -> None:
    """fp16 moments would underflow: v = 0, and the step would be m / eps."""
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = build_optimizer("AdamW", [param], {"lr": 1e-2})
    param.grad = torch.full_like(param, 1e-4)
    optimizer.step()
    torch.testing.assert_close(param.detach().float(), torch.full((4,), 0.99), rtol=1e-3, atol=0)


def test_hooks_run_once_and_lr_is_read_from_the_groups() -> None:
    torch.optim.AdamW(make_params())
    params = make_params()
    optimizer = build_optimizer("AdamW", params, {"lr": 0.1})
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    assert worst(train(optimizer, params, steps=2), before) == 0.0
    assert len(calls) == 2


def test_closure_and_state_dict_are_torchs() -> None:
    params, twin = make_params(), make_params()
    ours, theirs = (
        build_optimizer("SGD", params, {"lr": 0.1, "momentum": 0.9}),
        torch.optim.SGD(twin, 0.1, 0.9, fused=True),
    )
    train(ours, params)
    train(theirs, twin)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert ours.state_dict()["state"][0].keys() == theirs.state_dict()["state"][0].keys()
    loaded = make_params()
    other = build_optimizer("SGD", loaded, {"lr": 0.1, "momentum": 0.9})
    other.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for p, q in zip(loaded, params, strict=True):
            p.copy_(q)
    assert worst(train(other, loaded), train(ours, params)) == 0.0
    for name in OPTIMIZERS:
        some = make_params(shapes=[(3, 2)])
        optimizer = build_optimizer(name, some, {"lr": 0.1})
        some[0].grad = torch.ones(3, 2)
        assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0  # pyright: ignore


def test_groups_and_names() -> None:
    a, b = make_params()[:2]
    groups = [{"params": [a], "lr": 0.5, "weight_decay": 0.0}, {"params": b}]
    optimizer = build_optimizer("AdamW", groups, {"lr": 0.1, "weight_decay": 0.2})
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.0), (0.1, 0.2)]
    named = build_optimizer("AdamW", [("a", a), ("b", b)], {})
    assert named.param_groups[0]["param_names"] == ["a", "b"]


def test_every_torch_optimizer_is_built_or_refused() -> None:
    known = {"LBFGS": "unknown", "SparseAdam": "unknown", "Muon": None}
    for name, cls in vars(torch.optim).items():
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer":
            if known.get(name):
                with pytest.raises(ValueError, match=known[name]):
                    build_optimizer(name, make_params(), {})
            else:
                assert isinstance(build_optimizer(name, make_params(), {}), torch.optim.Optimizer)
                assert name in OPTIMIZERS or name in known, "a new class of torch.optim: is it elementwise?"


def test_torchs_private_list_builder_is_where_we_exchange_the_lists() -> None:
    """``LocalStepMixin`` leans on ``_init_group`` filling lists that begin with parameters and gradients."""
    for name, cls in ELEMENTWISE_OPTIMIZERS.items():
        base = getattr(torch.optim, name)
        assert hasattr(base, "_init_group"), name
        if issubclass(cls, LocalStepMixin):
            optimizer = base(make_params(shapes=[(2,)]), lr=0.1)
            param = optimizer.param_groups[0]["params"][0]
            param.grad = torch.ones(2)
            arguments = list(inspect.signature(base._init_group).parameters)[2:]
            lists: list[list[Any]] = [[] for _ in arguments]
            optimizer._init_group(optimizer.param_groups[0], *lists)
            assert lists[0] == [param] and lists[1] == [param.grad], name
            if name in ("Adam", "AdamW"):
                assert arguments[-1] == "state_steps"


@pytest.mark.parametrize(
    ("name", "hyper", "says"),
    [
        ("AdamW", {"lr": -1.0}, "(?i)learning rate"),
        ("AdamW", {"betas": [0.9, 1.5]}, "beta"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("AdamW", {"capturable": True}, "capturable"),
        ("Lamb", {"amsgrad": True}, "amsgrad"),
        ("Lamb", {"max_coeff": 0.001}, "min_coeff"),
        ("Muon", {"momentum": 1.5}, "momentum"),
        ("Muon", {"ns_method": "svd"}, "gram"),
        ("OneBitAdam", {"freeze_step": 0}, "freeze_step must be a whole number of at least 1"),
        ("OneBitAdam", {"amsgrad": True}, "amsgrad"),
        ("OneBitLamb", {"factor_min": 5.0}, "factor_min <= factor_max"),
        ("OneBitLamb", {"eps_inside_sqrt": True}, "eps_inside_sqrt"),
        ("ZeroOneAdam", {"local_step_clipper": 0}, "local_step_clipper must be at least 1"),
        ("AdamWW", {}, "unknown optimizer 'AdamWW'"),
        ("LBFGS", {}, "unknown optimizer 'LBFGS'"),
        ("AdamW", {"weight_decya": 0.1, "epps": 1e-8}, "takes no epps, weight_decya"),
        ("Lion", {"eps": 1e-8}, "Lion takes no eps"),
        ("SGD", {"set_grad_none": True}, "set_grad_none"),
        (None, {}, "unknown optimizer None"),
    ],
)
def test_bad_input_is_named(name: Any, hyper: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_optimizer(name, make_params(), hyper)


def test_keys_that_have_no_effect_are_taken() -> None:
    keys = {"set_grad_none": True, "capturable": False, "max_grad_norm": 0.0, "fp32_optimizer_states": False}
    build_optimizer("AdamW", make_params(), {**keys, "amsgrad": False})
    build_optimizer("Lamb", make_params(), {"set_grad_none": True, "max_grad_norm": 0.0, "amsgrad": False})
    build_optimizer("Adagrad", make_params(), {"amsgrad": False, "fp32_optimizer_states": True})


@pytest.mark.parametrize("params", [[], iter(()), [{"params": []}]])
def test_no_parameters(params: Any) -> None:
    with pytest.raises(ValueError, match="no parameters"):
        build_optimizer("AdamW", params, {})


def test_things_that_are_not_parameters() -> None:
    with pytest.raises(ValueError, match="not one tensor"):
        build_optimizer("AdamW", torch.zeros(2), {})  # pyright: ignore
    with pytest.raises(ValueError, match="not on int"):
        build_optimizer("AdamW", [1], {})
    with pytest.raises(ValueError, match="needs the key 'params'"):
        build_optimizer("AdamW", [{"parms": make_params()}], {})
