"""What DeepSpeed shows on each parameter at stage 3, over Thalweg's: ``ds_id``, ``ds_shape``, ``ds_status`` and so on.

A program that finds ``ds_id`` on a parameter takes it for one that is sharded, so models have these names at stage 3
alone.  Nothing is written onto a parameter: its class becomes one of four here, which read what there is.

    not sharded yet  DeferredView   of ``zero.Init``; ``ds_tensor`` is a copy of the rows that will be this rank's
    between passes   ShardView      a DTensor; ``ds_tensor`` is this rank's rows
    within a unit    UnshardedView  FSDP2's gathered parameter, another object with the same ``ds_id``
    gathered         GatheredView   within ``GatheredParameters`` and from ``all_gather()`` to ``partition()``
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Self, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from thalweg.deferred_init.context import Init
from thalweg.deferred_init.deferred_tensor import DeferredParameter, DeferredTensor, is_deferred, materialize_tensor
from thalweg.deferred_init.tensor_swap import FullParameter, deepcopy_plain
from thalweg.parallel_dims import init_distributed
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle, get_fsdp_groups, untraced
from thalweg.zero.full_state_dict import write_to_shard
from thalweg.zero.gathered_parameters import GatheredParameters, get_sharded
from thalweg.zero.whole_tensors import to_local

_ids = WeakIdKeyDictionary()  # of sharded and of gathered objects
_shards = WeakIdKeyDictionary()  # the sharded parameter of each object that FSDP2 gathers into
_gathered = WeakIdKeyDictionary()  # parameters that a program has gathered by themselves, each with its context
_next_id = count()


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises where a checkpoint does not fit, which Thalweg loads or answers with a CheckpointError; and
    for a program's own optimizer with offload, which Thalweg takes unless ``zero_force_ds_cpu_optimizer`` is set."""


class ZeroParamStatus(Enum):
    """Whether a parameter is whole."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: ``zero.Init`` replaces none of torch's."""
    return fn


class GatherHandle:
    """What ``all_gather_coalesced`` returns: the parameters are whole by then."""

    def wait(self, **_: Any) -> None:
        """Nothing to wait for."""


class MultipleAllGatherHandles:
    """Several handles as one."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for each of them."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


class _ParamNames:
    """The names, for a tensor class to inherit."""

    __slots__ = ()
    ds_status = ZeroParamStatus.AVAILABLE
    ds_persist = False  # no parameter stays whole for being small

    @property
    def ds_id(self) -> int:
        """One number for a parameter, whichever object shows it."""
        return _ids[self]

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """The modules that hold it whole on their own account: none, units gather and free by themselves."""
        return set()

    @property
    def ds_shape(self) -> Any:
        """Its whole shape."""
        return _get_shard(self).shape

    @property
    def ds_numel(self) -> int:
        """Its number of elements, whole."""
        return _get_shard(self).numel()

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's part, flat; what is written to it counts.  Ranks have whole rows, in their order."""
        return to_local(get_sharded(_get_shard(self)).detach()).view(-1)

    def partition_numel(self) -> int:
        """Elements of this rank's part."""
        return self.ds_tensor.numel()

    def ds_summary(self, use_debug_name: bool = False) -> dict[str, Any]:
        """The same in a mapping, for a log."""
        tensor: Any = self
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": tensor.numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(tensor.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": tensor.requires_grad,
            "grad_shape": None if tensor.grad is None else tuple(tensor.grad.shape),
            "persist": self.ds_persist,
            "ds_tensor.shape": self.ds_tensor.shape,
        }

    def all_gather(self, param_list: Iterable[Tensor] | None = None, async_op: bool = False, **_: Any) -> GatherHandle:
        """Make these parameters (by default this one) whole until :meth:`partition`; collective."""
        for shard in _list_shards(self, param_list):
            if shard not in _gathered:
                _gathered[shard] = context = DeepSpeedGatheredParameters(shard)
                context.__enter__()
        return GatherHandle()

    all_gather_coalesced = all_gather

    def partition(self, param_list: Iterable[Tensor] | None = None, has_been_updated: bool = False, **_: Any) -> None:
        """Undo :meth:`all_gather`; with ``has_been_updated`` each rank keeps what it wrote into its own part."""
        for shard in _list_shards(self, param_list):
            if (context := _gathered.pop(shard, None)) is not None:
                value = shard.detach()
                context.__exit__(None, None, None)
                if has_been_updated:
                    write_to_shard(shard, value)


class ShardView(DTensor, _ParamNames):
    """A sharded parameter."""

    ds_status = ZeroParamStatus.NOT_AVAILABLE
    __deepcopy__ = deepcopy_plain


class UnshardedView(nn.Parameter, _ParamNames):
    """A parameter that FSDP2 has gathered for its unit."""


class GatheredView(FullParameter, _ParamNames):
    """A parameter that the program has gathered."""


class DeferredView(DeferredParameter, _ParamNames):
    """A parameter of ``zero.Init`` before ``initialize()``."""

    ds_status = ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> Tensor:
        """The rows that will be this rank's, flat, a copy; ``GatheredParameters`` writes them."""
        rows = materialize_tensor(self).chunk(dist.get_world_size())
        return rows[dist.get_rank()].flatten() if dist.get_rank() < len(rows) else rows[0].flatten()[:0]


_VIEWS = {
    DTensor: ShardView,
    nn.Parameter: UnshardedView,
    FullParameter: GatheredView,
    DeferredParameter: DeferredView,
    DeferredTensor: DeferredView,
}


class DeepSpeedInit(Init):
    """``zero.Init`` as Hugging Face uses it: the process group exists within it, for its loaders ask for ranks, and
    after it parameters have ``ds_status`` and the other names."""

    def __enter__(self) -> Self:
        if self.enabled:
            init_distributed()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        recorder = self._entered[-1][0] if self.enabled else None
        super().__exit__(*error)
        if recorder is not None:
            for param in filter(is_deferred, recorder.built_parameters()):
                _ids[param] = next(_next_id)
                _show_names(param)


class DeepSpeedGatheredParameters(GatheredParameters):
    """``GatheredParameters``, within which the parameters have these names and say that they are whole."""

    def __enter__(self) -> None:
        super().__enter__()
        for param in self.params:
            if param in _ids:
                _show_names(param)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The plain model with whole parameters, to generate with; collective."""
    module = getattr(model, "module", model)
    with DeepSpeedGatheredParameters(list(module.parameters())):
        yield module


def show_ds_names(model: nn.Module) -> None:
    """Give the parameters of a model at stage 3 these names."""
    for group in get_fsdp_groups(model):
        for param in group.params:
            _ids[param.sharded_param] = next(_next_id)
            _show_names(param.sharded_param)
        hooks: list[RemovableHandle] = []
        hook = untraced(partial(_show_on_unsharded, group, hooks))
        hooks.append(cast(nn.Module, group.module).register_forward_pre_hook(hook))


def _show_on_unsharded(group: FSDPGroupHandle, hooks: list[RemovableHandle], *_: Any) -> None:
    """At a unit's first forward pass: the objects that FSDP2 gathers into are made by then, once and for all."""
    for param in group.params:
        if (unsharded := param.unsharded_param) is not None:
            _ids[unsharded], _shards[unsharded] = _ids[param.sharded_param], param.sharded_param
            _show_names(unsharded)
    for hook in hooks:
        hook.remove()


def _show_names(tensor: Tensor) -> None:
    tensor.__class__ = _VIEWS.get(type(tensor), type(tensor))


def _get_shard(tensor: Any) -> Tensor:
    """The parameter that the model has between passes."""
    return cast(Tensor, _shards.get(tensor, tensor))


def _list_shards(tensor: Any, param_list: Iterable[Tensor] | None) -> list[Tensor]:
    params = [tensor] if param_list is None else list(param_list)
    return [_get_shard(param) for param in params if param in _ids]
