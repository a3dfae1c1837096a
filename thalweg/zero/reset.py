"""Values for models on meta that nobody recorded (built under ``torch.device("meta")``).

The initialisation that modules bring along is run, and recorded: every module is asked in
the order in which constructors finish, children before parents, so that a model whose
constructors do nothing else gets the values that an ordinary build draws at this point.

* ``reset_parameters()`` (torch's convention), ``_reset_parameters()`` (attention and
  Transformer layers of torch), ``init_weights()`` (torchtitan's);
* for Transformers, ``_init_weights(module)`` of the enclosing pre-trained model.

Ties are made by the constructor of a common ancestor, after its parts have been initialised
with weights of their own; until that ancestor's turn comes, all places of a tied parameter
but the first hold a stand-in, whose values are lost, as in an ordinary build.

What none of these writes has no value, which is an error that names the modules.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from thalweg.zero.pending import make_pending, pending_like, settle
from thalweg.zero.record import ref_of
from thalweg.zero.recorder import Recorder

_METHODS = ("reset_parameters", "_reset_parameters", "init_weights")

# For each module that ties: (module, key, parameter) of the places to give back.
_Ties = dict[int, list[tuple[nn.Module, str, nn.Parameter]]]


def record_resets(module: nn.Module, named: dict[str, Tensor]) -> None:
    """Make the plain meta tensors ``named`` of ``module`` pending, with recorded values.

    Raises:
        ValueError: some of them are not written by any initialisation; nothing is changed.
    """
    if not named:
        return
    for tensor in named.values():
        make_pending(tensor)
    wanted = {id(tensor) for tensor in named.values()}
    ties, stand_ins = _untie(module, wanted)
    done: set[int] = set()
    try:
        with Recorder(small=0):
            for owner in _children_first(module):
                if _is_pretrained(owner):
                    _reset_pretrained(owner, wanted | stand_ins, done)
                _tie(ties.pop(id(owner), []))
                if not _is_pretrained(owner):
                    _reset(owner, wanted | stand_ins)
    finally:
        for places in ties.values():
            _tie(places)
    missing = {name for name, tensor in named.items() if ref_of(tensor).version is None and tensor.numel()}
    if missing:
        for tensor in named.values():
            settle(tensor)
        raise ValueError(_complaint(module, missing))


def _complaint(module: nn.Module, missing: set[str]) -> str:
    def kind(name: str) -> str:
        return type(module.get_submodule(name.rpartition(".")[0])).__name__

    kinds = sorted(f"{name} ({kind(name)})" for name in missing)
    shown = ", ".join(kinds[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else "")
    return (
        f"these tensors are on meta and nothing says what their values are: {shown}. Build the model "
        "under `with thalweg.zero.Init():` instead of torch.device('meta'), or give the modules a "
        "reset_parameters() method, or load a checkpoint with assign=True"
    )


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _untie(root: nn.Module, wanted: set[int]) -> tuple[_Ties, set[int]]:
    """Put stand-ins into the later places of tied parameters; return what to give back, and when."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is not None and id(param) in wanted:
                places.setdefault(id(param), []).append((path, module, key))
    ties: _Ties = {}
    stand_ins: set[int] = set()
    for tied in places.values():
        paths = ["/" + path.replace(".", "/") for path, _, _ in tied]
        ancestor = os.path.commonpath(paths).strip("/").replace("/", ".")
        for _, module, key in tied[1:]:
            param = module._parameters[key]
            assert param is not None
            stand_in = nn.Parameter(pending_like(param), param.requires_grad)
            ties.setdefault(id(root.get_submodule(ancestor)), []).append((module, key, param))
            module._parameters[key] = stand_in
            stand_ins.add(id(stand_in))
    return ties, stand_ins


def _tie(places: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, key, param in places:
        module._parameters[key] = param


def _reset(owner: nn.Module, wanted: set[int]) -> None:
    if not _all_wanted(owner, wanted):
        return
    for method in (getattr(owner, name, None) for name in _METHODS):
        if callable(method) and _takes_nothing(method):
            method()
            return


def _reset_pretrained(model: Any, wanted: set[int], done: set[int]) -> None:
    for part in _children_first(model):
        if id(part) not in done and _all_wanted(part, wanted):
            done.add(id(part))
            model._init_weights(part)


def _all_wanted(owner: nn.Module, wanted: set[int]) -> bool:
    """Whether ``owner`` has tensors, and a reset would touch none that has a value."""
    mine = [*owner.parameters(), *owner.buffers()]
    return bool(mine) and all(id(tensor) in wanted for tensor in mine)


def _takes_nothing(method: Any) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in kinds for p in parameters)


def _is_pretrained(module: nn.Module) -> bool:
    return callable(getattr(module, "_init_weights", None)) and hasattr(module, "config")
