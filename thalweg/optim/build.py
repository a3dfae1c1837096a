"""From the names in a ``ds_config.json`` to an optimiser and a schedule, with every key checked first."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.optim.elementwise import ELEMENTWISE
from thalweg.optim.names import check_keys, nearest, parameters_of, pick
from thalweg.optim.schedules import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}

# Accepted because old configs carry them; nothing here has a use for them.
_NO_EFFECT = frozenset({"set_grad_none", "torch_adam", "adam_w_mode", "fp32_optimizer_states"})
# A gradient through the step, or a step inside a CUDA graph, is not something that local pieces can offer.
_WITHHELD = frozenset({"params", "differentiable", "capturable", "decoupled_weight_decay"})
_FUSED_DEVICES = {
    "Adam": ("cpu", "cuda"),
    "AdamW": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}


def build_optimizer(
    type_name: str, params: Iterable[Any], hyper: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser called ``type_name`` (case does not matter) over ``params``.

    ``params``: parameters, ``(name, parameter)`` pairs, or dicts of parameter groups, plain or ``DTensor``.
    ``hyper``: its keywords, as in ``optimizer.params`` of a ``ds_config.json``. Groups may override them.

    Names: Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, and the elementwise classes of ``torch.optim``. As
    in DeepSpeed, **Adam means AdamW** unless ``adam_w_mode`` is false, and ``weight_decay`` defaults to 0
    for both (with ``torch_adam: true`` to torch's own: 0.01 for AdamW). ``bias_correction: false`` and
    ``amsgrad`` work for both. Where torch has a fused kernel it is used, unless ``fused`` or ``foreach``
    says otherwise; the step runs on local pieces, while ``state`` and ``state_dict()`` hold tensors of the
    parameters' layout.

    Raises ``ValueError``, before anything is allocated, for an unknown name or keyword (with the nearest), a
    value of the wrong kind, an empty parameter list, and optimisers that cannot work on shards.
    """
    hyper = dict(hyper or {})
    name = _optimizer_name(type_name, hyper)
    groups = _groups(params)
    tensors = [p for group in groups for p in _tensors(group["params"])]
    if not tensors:
        raise ValueError(
            "the optimiser got no parameters: the model has none, or all of them were filtered out"
        )
    cls = _optimizer_class(name, tensors)
    keywords = _keywords(name, cls, hyper)
    known = parameters_of(cls, without=_WITHHELD)
    check_keys(f"optimizer {name}", keywords, known)
    for key, value in keywords.items():
        keywords[key] = _checked(f"optimizer {name}: {key}", value, known[key].default)
    if (
        "fused" in known
        and "fused" not in keywords
        and keywords.get("foreach") is None
        and _can_fuse(name, tensors)
    ):
        keywords["fused"] = True
    return cls(groups, **keywords)


def build_schedule(type_name: str, params: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule called ``type_name`` over ``optimizer``'s groups, the first update's rates
    already set.

    Names: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle (see ``schedules.py``) and the
    classes of ``torch.optim.lr_scheduler``. ``params``: the keywords of ``scheduler.params``. The result
    has ``step()``, ``get_last_lr()``, ``state_dict()`` and ``load_state_dict()``; call ``step()`` once
    after each update.

    Raises ``ValueError`` for an unknown name or key (with the nearest) and for values that make no schedule.
    """
    keywords = dict(params or {})
    torch_classes = {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.lr_scheduler.LRScheduler)
        and cls is not torch.optim.lr_scheduler.LRScheduler
        and not name.startswith("_")
    }
    classes: dict[str, Any] = {**torch_classes, **SCHEDULES}
    name = pick("scheduler", type_name, classes)
    check_keys(f"scheduler {name}", keywords, parameters_of(classes[name], without=("optimizer",)))
    return classes[name](optimizer, **keywords)


def _optimizer_name(type_name: Any, hyper: dict[str, Any]) -> str:
    name = pick("optimizer", type_name, {*ELEMENTWISE, *_torch_classes()})
    if "max_grad_norm" in hyper:
        raise ValueError(
            f"optimizer {name} does not clip: remove optimizer.params.max_grad_norm and set the top-level "
            f'"gradient_clipping": {hyper["max_grad_norm"]!r}'
        )
    return "AdamW" if name == "Adam" and hyper.get("adam_w_mode", True) else name


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }


def _optimizer_class(name: str, params: Sequence[Tensor]) -> Any:
    if name in ELEMENTWISE:
        return ELEMENTWISE[name]
    if name == "LBFGS":
        raise ValueError(
            "LBFGS calls the loss again and again within one step, which engine.step() cannot do: use it in "
            "a loop of your own, or choose AdamW"
        )
    if any(isinstance(p, DTensor) for p in params):
        others = ", ".join(sorted(ELEMENTWISE))
        raise ValueError(
            f"torch.optim.{name} does not work on each element alone, and would see shards as if they "
            f'were whole parameters: use "zero_optimization": {{"stage": 0}}, or one of {others}'
        )
    return _torch_classes()[name]


def _keywords(name: str, cls: Any, hyper: Mapping[str, Any]) -> dict[str, Any]:
    own = parameters_of(cls)
    keywords = {key: value for key, value in hyper.items() if key not in _NO_EFFECT or key in own}
    if name in ("Adam", "AdamW") and not hyper.get("torch_adam", False):
        keywords.setdefault("weight_decay", 0.0)
    return keywords


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise ValueError("params must be an iterable of parameters or of groups, not one tensor")
    items: list[Any] = list(params)
    if items and all(isinstance(item, Mapping) for item in items):
        groups = [{**item, "params": _as_list(item)} for item in items]
        return [group for group in groups if group["params"]]
    return [{"params": items}]


def _as_list(group: Mapping[str, Any]) -> list[Any]:
    if "params" not in group:
        raise ValueError(f"a parameter group needs the key 'params'; this one has {sorted(group)}")
    members = group["params"]
    return [members] if isinstance(members, Tensor) else list(members)


def _tensors(members: Iterable[Any]) -> list[Tensor]:
    tensors: list[Any] = [m[1] if isinstance(m, tuple) and len(m) == 2 else m for m in members]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"an optimiser works on tensors or (name, tensor) pairs, not on {type(tensor).__name__}"
            )
    return tensors


def _can_fuse(name: str, params: Sequence[Tensor]) -> bool:
    devices = _FUSED_DEVICES.get(name, ())
    return all(p.device.type in devices and p.is_floating_point() for p in params)


def _checked(where: str, value: Any, default: Any) -> Any:
    """Return ``value`` in the kind that the optimiser expects; a string or NaN for a number is an error."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, not {value!r}")
        return value
    if isinstance(default, tuple) or isinstance(value, list | tuple):
        values = value if isinstance(value, list | tuple) else (value,)
        length = len(default) if isinstance(default, tuple) else len(values)
        if len(values) != length or not all(_is_number(v) for v in values):
            raise ValueError(f"{where} must be a list of {length} numbers, not {value!r}")
        return tuple(float(v) for v in values)
    if isinstance(default, int | float) and not isinstance(value, Tensor) and not _is_number(value):
        raise ValueError(f"{where} must be a finite number, not {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["SCHEDULES", "build_optimizer", "build_schedule", "nearest"]
