"""The mode under which a model is built: what is real, what is pending.

* What has at most ``small`` elements, and whatever is computed from real data, is *real*: an
  ordinary CPU tensor, computed at once, so that constructors may look at it as they like.
* What is bigger is *pending* (:mod:`.pending`), and so is what is computed from it.

When the context is left, the real parameters that were made in it become pending as well,
their values constants, so that the whole model is on meta.  What existed before (another
model, an array) stays as it is, even where a module built here uses it.  Buffers stay too:
small ones real, big ones pending.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.zero.flat import flatten, flatten_call, leaves_of, rebuild
from thalweg.zero.pending import (
    CPU,
    adopt,
    is_pending,
    pending_like,
    perform,
    random_state,
    record_op,
    set_data,
)
from thalweg.zero.record import Facts, cells, facts_of, is_meta
from thalweg.zero.replay import local


class _Assignments(TorchFunctionMode):
    """``real.data = pending``, which torch refuses and no dispatch shows."""

    _SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self._SET_DATA and is_pending(args[1]):
            return set_data(*args)
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Dispatch mode of one thread in which big new CPU tensors are pending."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (1.3 s) to keep it away from this mode

    def __init__(self, small: int) -> None:
        super().__init__()
        self.small = small
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._made: dict[int, StorageWeakRef] = {}
        self._limit = 4096
        self._hooks: list[Any] = []
        self._assignments = _Assignments()

    def __enter__(self) -> Recorder:
        cells.clean()
        mine = local  # the hooks are called in every thread

        def note(module: nn.Module, name: str, member: object) -> None:
            if mine.depth:
                self._modules.add(module)

        self._hooks = [
            register_module_parameter_registration_hook(note),
            register_module_module_registration_hook(note),
        ]
        super().__enter__()
        self._assignments.__enter__()
        local.depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        local.depth -= 1
        local.known = None
        self._assignments.__exit__(*error)
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        if error[0] is None:
            self._adopt_parameters()
        self._made.clear()

    def _adopt_parameters(self) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        for param in {id(p): p for module in list(self._modules) for p in module.parameters()}.values():
            plain = type(param) is nn.Parameter and param.layout is torch.strided and param.device == CPU
            if plain and param.grad is None and param.untyped_storage()._cdata in self._made:
                adopt(param, storages)

    def _note_made(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        """Remember the storages that ``result`` brought into being."""
        known = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        for leaf in leaves_of(result):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.device != CPU:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in known or func is torch.ops.aten.lift_fresh.default:
                self._made[storage._cdata] = StorageWeakRef(storage)
        if len(self._made) > self._limit:
            self._made = {key: ref for key, ref in self._made.items() if not ref.expired()}
            self._limit = max(4096, 2 * len(self._made))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if local.busy:
            return func(*args, **kwargs)
        leaves, _ = flatten_call(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(is_pending(tensor) for tensor in tensors):
            return perform(func, args, kwargs)
        facts = facts_of(func)
        if func._schema.name == "aten::_to_copy" and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": CPU}  # x.to(pending) must not lose the value of x
        state = random_state(leaves) if facts.random else None
        result = func(*args, **kwargs)
        self._note_made(func, tensors, result)
        if facts.written or (self._has_data(tensors) and not facts.blind):
            return result
        return self._defer(func, facts, args, kwargs, tensors, result, state)

    def _has_data(self, tensors: list[Tensor]) -> bool:
        return any(tensor.numel() > self.small and not is_meta(tensor) for tensor in tensors)

    def _defer(
        self,
        func: Any,
        facts: Facts,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        result: Any,
        state: Tensor | None,
    ) -> Any:
        """Replace the big tensors of ``result`` by pending ones; the values just computed are dropped."""
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        known = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        new = {}
        for position, leaf in enumerate(leaves):
            if self._is_big(leaf) and leaf.untyped_storage()._cdata not in known:
                new[position] = leaves[position] = pending_like(leaf)
        if not new:
            return result
        if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            dtype = next(iter(new.values())).dtype
            if not tensors and any(argument.name == "dtype" for argument in func._schema.arguments):
                kwargs = {
                    **kwargs,
                    "dtype": kwargs.get("dtype") or dtype,
                }  # the default may change until replay
            inputs, input_spec = flatten_call(args, kwargs)
            record_op(func, inputs, input_spec, state, new)
        return rebuild(spec, iter(leaves))

    def _is_big(self, leaf: Any) -> bool:
        return (
            type(leaf) is Tensor
            and leaf.device == CPU
            and leaf.layout is torch.strided
            and leaf.numel() > self.small
        )
