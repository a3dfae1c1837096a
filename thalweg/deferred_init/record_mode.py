"""The mode under which a model is built: what is real, what is pending.

* What has at most ``small`` elements, and whatever is computed from real data, is *real*: an
  ordinary CPU tensor, computed at once, so that constructors may look at it as they like.
* What is bigger is *pending* (:mod:`.deferred_tensor`), and so is what is computed from it.

When the context is left, the real parameters that were made in it become pending as well,
their values constants, so that the whole model is on meta.  What existed before (another
model, an array) stays as it is, even where a module built here uses it.  Buffers stay too:
small ones real, big ones pending.
"""

import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.deferred_init import deferred_tensor
from thalweg.deferred_init.deferred_tensor import CPU
from thalweg.deferred_init.op_graph import get_op_traits, is_meta
from thalweg.deferred_init.pytree import flatten, flatten_call, unflatten
from thalweg.deferred_init.replay import thread_state


class _SetDataMode(TorchFunctionMode):
    """``real.data = pending``, which torch refuses and no dispatch shows."""

    _SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self._SET_DATA and deferred_tensor.is_deferred(args[1]):
            return deferred_tensor.set_data(*args)
        return func(*args, **(kwargs or {}))


class RecordMode(TorchDispatchMode):
    """Dispatch mode of one thread in which big new CPU tensors are pending."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (1.3 s) to keep it away from this mode

    def __init__(self, max_real_numel: int) -> None:
        super().__init__()
        self.max_real_numel = max_real_numel
        self._built_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Not a WeakSet: the Python objects of large storages that go at once would scatter the heap.
        self._new_storages: dict[int, StorageWeakRef] = {}
        self._cleanup_threshold = 4096
        self._registration_hooks: list[Any] = []
        self._set_data_mode = _SetDataMode()

    def __enter__(self) -> Self:
        def on_register(module: nn.Module, name: str, member: object) -> None:  # called in every thread
            if thread_state.num_open_contexts:
                self._built_modules.add(module)

        self._registration_hooks = [
            register_module_parameter_registration_hook(on_register),
            register_module_module_registration_hook(on_register),
        ]
        super().__enter__()
        self._set_data_mode.__enter__()
        thread_state.num_open_contexts += 1
        return self

    def __exit__(self, *error: Any) -> None:
        thread_state.num_open_contexts -= 1
        thread_state.cached_storages = None
        self._set_data_mode.__exit__(*error)
        super().__exit__(*error)
        for hook in self._registration_hooks:
            hook.remove()
        storages: dict[int, torch.UntypedStorage] = {}
        for param in self.built_parameters() if error[0] is None else ():
            is_plain = type(param) is nn.Parameter and param.layout is torch.strided and param.device == CPU
            if is_plain and param.grad is None and param.untyped_storage()._cdata in self._new_storages:
                deferred_tensor.defer_parameter(param, storages)
        self._new_storages.clear()

    def built_parameters(self) -> list[nn.Parameter]:
        """The distinct parameters of the modules that were built in it."""
        return list({id(p): p for module in list(self._built_modules) for p in module.parameters()}.values())

    def _track_new_storages(self, leaves: list[Any], known_storages: set[int]) -> None:
        """Remember the storages that a result brought into being."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device == CPU:
                storage = leaf.untyped_storage()
                if storage._cdata not in known_storages:
                    self._new_storages[storage._cdata] = StorageWeakRef(storage)
        if len(self._new_storages) > self._cleanup_threshold:
            self._new_storages = {key: ref for key, ref in self._new_storages.items() if not ref.expired()}
            self._cleanup_threshold = max(4096, 2 * len(self._new_storages))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if thread_state.num_pauses:
            return func(*args, **kwargs)
        inputs, _ = flatten_call(args, kwargs)
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        if any(deferred_tensor.is_deferred(tensor) for tensor in tensors):
            return deferred_tensor.dispatch_deferred(func, args, kwargs)
        traits = get_op_traits(func)
        if func._schema.name == "aten::_to_copy" and kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": CPU}  # x.to(pending) must not lose the value of x
        rng_state = deferred_tensor.get_call_rng_state(inputs) if traits.is_random else None
        result = func(*args, **kwargs)
        leaves, spec = flatten(result)
        known_storages = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        is_lifted = func is torch.ops.aten.lift_fresh.default  # what it returns is new, though it has the storage
        self._track_new_storages(leaves, set() if is_lifted else known_storages)
        reads_large = any(tensor.numel() > self.max_real_numel and not is_meta(tensor) for tensor in tensors)
        if traits.written_args or (reads_large and not traits.is_shape_only):
            return result
        new_tensors = {}  # the big ones become pending; the values just computed are dropped
        for position, leaf in enumerate(leaves):
            if self._is_large(leaf) and leaf.untyped_storage()._cdata not in known_storages:
                new_tensors[position] = leaves[position] = deferred_tensor.deferred_like(leaf)
        if not new_tensors:
            return result
        if not deferred_tensor.returns_uninitialized(func):
            if not tensors and any(argument.name == "dtype" for argument in func._schema.arguments):
                # the default may change until replay
                dtype = kwargs.get("dtype") or next(iter(new_tensors.values())).dtype
                kwargs = {**kwargs, "dtype": dtype}
            deferred_tensor.record_op(func, *flatten_call(args, kwargs), rng_state, new_tensors)
        return unflatten(spec, iter(leaves))

    def _is_large(self, leaf: Any) -> bool:
        is_plain = type(leaf) is Tensor and leaf.device == CPU and leaf.layout is torch.strided
        return is_plain and leaf.numel() > self.max_real_numel
