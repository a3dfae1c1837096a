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

import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from thalweg.deferred_init.deferred_tensor import become_deferred, deferred_like, drop_record
from thalweg.deferred_init.op_graph import make_view_ref
from thalweg.deferred_init.record_mode import RecordMode

_RESET_METHODS = ("reset_parameters", "_reset_parameters", "init_weights")

# For each module that ties: (module, key, parameter) of the places to give back.
_Ties = dict[int, list[tuple[nn.Module, str, nn.Parameter]]]


def record_module_init(module: nn.Module, meta_tensors: dict[str, Tensor]) -> None:
    """Make the plain meta tensors ``named`` of ``module`` pending, with recorded values.

    Raises:
        ValueError: some of them are not written by any initialisation; nothing is changed.
    """
    if not meta_tensors:
        return
    for tensor in meta_tensors.values():
        become_deferred(tensor, tensor.detach())
    tensor_ids = {id(tensor) for tensor in meta_tensors.values()}
    ties, stand_ins = _untie(module, tensor_ids)
    initialized, own_ids = set[int](), tensor_ids | stand_ins
    try:
        with RecordMode(max_real_numel=0):
            for owner in _modules_post_order(module):
                init_weights: Any = getattr(owner, "_init_weights", None)
                is_pretrained = callable(init_weights) and hasattr(owner, "config")  # one of Transformers'
                for submodule in _modules_post_order(owner) if is_pretrained else ():
                    if id(submodule) not in initialized and _has_only(submodule, own_ids):
                        initialized.add(id(submodule))
                        init_weights(submodule)
                _tie(ties.pop(id(owner), []))
                if not is_pretrained and _has_only(owner, own_ids):
                    methods = (getattr(owner, name, None) for name in _RESET_METHODS)
                    reset = next((m for m in methods if callable(m) and _has_no_required_args(m)), None)
                    if reset is not None:
                        reset()
    finally:
        for tied_locations in ties.values():
            _tie(tied_locations)
    missing = {name for name, t in meta_tensors.items() if make_view_ref(t).version is None and t.numel()}
    if missing:
        for tensor in meta_tensors.values():
            drop_record(tensor)
        owners = {name: type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in missing}
        kinds = sorted(f"{name} ({kind})" for name, kind in owners.items())
        listed = ", ".join(kinds[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else "")
        raise ValueError(
            f"these tensors are on meta and nothing says what their values are: {listed}. Build the model "
            "under `with thalweg.zero.Init():` instead of torch.device('meta'), or give the modules a "
            "reset_parameters() method, or load a checkpoint with assign=True"
        )


def _modules_post_order(module: nn.Module, visited: set[int] | None = None) -> Iterator[nn.Module]:
    visited = set() if visited is None else visited
    if id(module) in visited:
        return
    visited.add(id(module))
    for child in module.children():
        yield from _modules_post_order(child, visited)
    yield module


def _untie(root: nn.Module, tensor_ids: set[int]) -> tuple[_Ties, set[int]]:
    """Put stand-ins into the later places of tied parameters; return what to give back, and when."""
    locations: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is not None and id(param) in tensor_ids:
                locations.setdefault(id(param), []).append((path, module, key))
    ties: _Ties = {}
    stand_ins: set[int] = set()
    for tied in locations.values():
        paths = ["/" + path.replace(".", "/") for path, _, _ in tied]
        ancestor = os.path.commonpath(paths).strip("/").replace("/", ".")
        for _, module, key in tied[1:]:
            param = module.get_parameter(key)
            stand_in = nn.Parameter(deferred_like(param), param.requires_grad)
            ties.setdefault(id(root.get_submodule(ancestor)), []).append((module, key, param))
            module._parameters[key] = stand_in
            stand_ins.add(id(stand_in))
    return ties, stand_ins


def _tie(locations: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, key, param in locations:
        module._parameters[key] = param


def _has_only(owner: nn.Module, tensor_ids: set[int]) -> bool:
    """Whether ``owner`` has tensors, and a reset would touch none that has a value."""
    tensors = [*owner.parameters(), *owner.buffers()]
    return bool(tensors) and all(id(tensor) in tensor_ids for tensor in tensors)


def _has_no_required_args(method: Any) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in kinds for p in parameters)
