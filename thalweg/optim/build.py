"""From the names in a ``ds_config.json`` to an optimiser and a schedule; the config has checked keys and values."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.config import Config
from thalweg.config.schema.optimizer import canonical_name, get_params_schema
from thalweg.config.schema.zero import ZenFlow
from thalweg.optim.algorithms.adafactor import Adafactor
from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS, has_fused_kernel
from thalweg.optim.algorithms.lamb import Lamb
from thalweg.optim.algorithms.lion import Lion
from thalweg.optim.algorithms.low_bit import LowBitAdam, LowBitLion
from thalweg.optim.algorithms.muon import Muon
from thalweg.optim.algorithms.muon_params import get_param, group_members, muon_groups
from thalweg.optim.algorithms.onebit import COMPRESSED_OPTIMIZERS, MomentumLink, OneBitAdam, ZeroOneAdam
from thalweg.optim.algorithms.zenflow import ZenFlowAdam
from thalweg.optim.lr_scheduler import LRRangeTest, LRScheduler, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULERS: dict[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    **ELEMENTWISE_OPTIMIZERS,
    **{cls.__name__: cls for cls in (Adafactor, Lamb, Lion, Muon)},
    **COMPRESSED_OPTIMIZERS,
}

_ADAM_NAMES = frozenset({"Adam", "AdamW"})
# Keys that may be given as false (or 0): what they switch on is not to be had.
_UNSUPPORTED_FLAGS = {
    "differentiable": "a step on local pieces has no gradient of its own",
    "capturable": "a step on local pieces is not captured into a CUDA graph",
    "max_grad_norm": 'optimisers do not clip here; set the top-level "gradient_clipping"',
}
# The classes that keep their moments in fewer bits ("state_dtype").
_LOW_BIT_CLASSES: dict[str, Any] = {"Adam": LowBitAdam, "AdamW": LowBitAdam, "Lion": LowBitLion}


def build_optimizer(
    type_name: str,
    params: Iterable[Any],
    hyper: Mapping[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    replicate_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    zenflow_policy: ZenFlow | None = None,
    link: MomentumLink | None = None,
) -> torch.optim.Optimizer:
    """Return the optimiser called ``type_name`` (case does not matter) over ``params``.

    ``params``: parameters, ``(name, parameter)`` pairs, or dicts of parameter groups, plain or ``DTensor``.
    ``hyper``: its keywords, as in ``optimizer.params`` of a ``ds_config.json``. Groups may override them.
    For Muon alone, ``model``: the module whose parameters these are, so that it can tell a hidden matrix from
    an embedding by the modules' types; ``pp_group``: the ranks that have its other stages; and ``replicate_group``:
    those that hold the plain parameters as copies, so that they share the work out among them.  For Adam and AdamW,
    ``zenflow_policy``: which columns wait.
    For those that send momentum in bits, ``link``: what they share with the gradients' reducers.

    Names: those of the config's table. Habits are DeepSpeed's: **Adam means AdamW**
    unless ``adam_w_mode`` is false; ``weight_decay`` defaults to 0 for both (``torch_adam: true`` brings
    torch's own default, 0.01 for AdamW); ``bias_correction: false`` and ``amsgrad`` work for both.
    Adam, AdamW and Lion take ``state_dtype``: "fp32", "bf16" or "int8" (see ``algorithms/moment_codec.py``). Where
    torch has a fused kernel it is used, unless ``fused`` or ``foreach`` says otherwise. Steps run on local
    pieces, ``state`` and ``state_dict()`` hold tensors of the parameters' layout; for 16-bit parameters see
    ``dtensor_local.py``.

    Raises ``ValueError``, before anything is allocated, for an unknown name, a switch that there is not, and an empty
    parameter list.
    """
    hyper = hyper or {}
    name = _find_name("optimizer", type_name)
    if name in _ADAM_NAMES:
        name = "AdamW" if name == "AdamW" or _decouples_decay(hyper) else "Adam"
    groups = _param_groups(params)
    tensors = [get_param(member) for group in groups for member in group["params"]]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"an optimiser works on tensors or (name, tensor) pairs, not on {type(tensor).__name__}")
    if not tensors:
        raise ValueError("the optimiser got no parameters: the model has none, or all of them were left out")
    cls, hyper = _resolve_state_dtype(name, hyper)
    if zenflow_policy is not None:
        if cls not in (ELEMENTWISE_OPTIMIZERS["Adam"], ELEMENTWISE_OPTIMIZERS["AdamW"]):
            raise ValueError(f"zenflow delays the updates of Adam and AdamW with fp32 state, not of {name}")
        cls = ZenFlowAdam
    keywords = _make_keywords(name, cls, hyper)
    if "fused" in _keyword_names(cls) and keywords.keys().isdisjoint({"fused", "foreach"}):
        keywords["fused"] = has_fused_kernel(name, tensors) or None
    if cls is ZenFlowAdam:
        keywords["policy"] = zenflow_policy
    if cls in COMPRESSED_OPTIMIZERS.values():
        keywords["link"] = link
    if cls is Muon:
        keywords["replicate_group"] = replicate_group
        groups = groups if model is None else muon_groups(model, groups, pp_group)
    return cls(groups, **keywords)


def get_optimizer_params(config: Config) -> dict[str, Any]:
    """The keywords of the config's optimizer; none where it names none."""
    params = dict(config.optimizer.params) if config.optimizer is not None else {}
    if config.bf16.bf16_optimizer_states:
        params.setdefault("state_dtype", "bf16")
    return params


def build_lr_scheduler(type_name: str, params: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule called ``type_name`` over ``optimizer``'s groups, the first update's rates
    already set.

    Names: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle (see ``lr_scheduler.py``) and those of
    ``torch.optim.lr_scheduler`` that the config's table has. ``params``: the keywords of ``scheduler.params``. The
    result has ``step()``, ``get_last_lr()``, ``state_dict()`` and ``load_state_dict()``; call ``step()`` once
    after each update.

    Raises ``ValueError`` for an unknown name and for values that make no schedule.
    """
    name = _find_name("scheduler", type_name)
    cls: Any = LR_SCHEDULERS.get(name) or getattr(torch.optim.lr_scheduler, name)
    return cls(optimizer, **(params or {}))


def _find_name(block: str, type_name: Any) -> str:
    name = canonical_name(block, type_name)
    if name is None:
        raise ValueError(f"unknown {block} {type_name!r}: its names are those of {block}.type in a config")
    return name


def _decouples_decay(hyper: Mapping[str, Any]) -> bool:
    return bool(hyper.get("adam_w_mode", hyper.get("adamw_mode", True)) or hyper.get("decoupled_weight_decay"))


def _resolve_state_dtype(name: str, hyper: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The class that keeps its state as ``state_dtype`` says, and the keywords for it."""
    dtype_name = hyper.get("state_dtype", "fp32")
    if dtype_name == "fp32":
        return OPTIMIZERS[name], {key: value for key, value in hyper.items() if key != "state_dtype"}
    if name not in _LOW_BIT_CLASSES:
        raise ValueError(f"optimizer {name}: state_dtype = {dtype_name!r} is there for Adam, AdamW and Lion alone")
    return _LOW_BIT_CLASSES[name], hyper


def _make_keywords(name: str, cls: Any, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords for ``cls``: of those that the config's table has, what it has a use for."""
    schema = get_params_schema("optimizer", name)
    assert schema is not None, name
    if unknown := sorted(hyper.keys() - schema.model_fields.keys()):
        raise ValueError(f"optimizer {name} takes no {', '.join(unknown)}")
    known = _keyword_names(cls) - _UNSUPPORTED_FLAGS.keys()
    if name in _ADAM_NAMES or cls in (OneBitAdam, ZeroOneAdam):
        known -= {"decoupled_weight_decay"}
    if cls in COMPRESSED_OPTIMIZERS.values():
        known -= {"amsgrad", "eps_inside_sqrt"}
    for key in hyper.keys() & {*_UNSUPPORTED_FLAGS, "amsgrad", "eps_inside_sqrt"} - known:
        if hyper[key]:
            reason = _UNSUPPORTED_FLAGS.get(key, f"{name} has no such variant")
            raise ValueError(f"optimizer {name}: {key} = {hyper[key]!r} is not possible: {reason}")
    keywords = {key: value for key, value in hyper.items() if key in known}
    if name in _ADAM_NAMES and not hyper.get("torch_adam", False):
        keywords.setdefault("weight_decay", 0.0)
    if cls in (LowBitAdam, ZenFlowAdam):
        keywords["decoupled_weight_decay"] = name == "AdamW"
    if cls in (OneBitAdam, ZeroOneAdam):
        keywords["decoupled_weight_decay"] = _decouples_decay(hyper)
    return keywords


def _keyword_names(cls: type) -> set[str]:
    """What the constructor of ``cls`` takes; what those of its bases take too, where it passes keywords on."""
    names: set[str] = set()
    for base in inspect.getmro(cls):
        constructor = vars(base).get("__init__")
        if constructor is not None and inspect.isfunction(constructor):
            parameters = inspect.signature(constructor).parameters.values()
            names |= {p.name for p in parameters}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _param_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise ValueError("params must be an iterable of parameters or of groups, not one tensor")
    items: list[Any] = list(params)
    if items and all(isinstance(item, Mapping) for item in items):
        for item in items:  # kept as objects: a schedule that was made for another optimizer may hold them
            item["params"] = _group_members(item)
        return [item for item in items if item["params"]]
    return [{"params": items}]


def _group_members(group: Mapping[str, Any]) -> list[Any]:
    if "params" not in group:
        raise ValueError(f"a parameter group needs the key 'params'; this one has {sorted(group)}")
    return group_members(group)
