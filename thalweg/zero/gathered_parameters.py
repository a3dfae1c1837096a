"""GatheredParameters: the same parameter objects, whole for a while.

The picture.  After sharding, the object that a user holds (``model.head.weight``) is a
DTensor whose local tensor is a view of FSDP2's padded shard.  Inside the context the very
same Python object is a full, plain parameter; on exit it is the DTensor again, over the
same local storage.

    phase     the user's object        the spare object
    before    DTensor                  (none)
    inside    full tensor              DTensor
    after     DTensor                  (dropped)

* **Enter.**  Each DTensor is all-gathered, and the two objects exchange their tensors (class
  and storage; the attributes and the identity of the user's object stay).  Where FSDP2 shows
  an unsharded copy at the moment, that object becomes an alias of the same full tensor.
* **Exit.**  With ``modifier_rank=r`` the value of rank ``r`` is broadcast over the
  parameter's mesh and each rank copies its part *into* the shard that was there before:
  FSDP2 gathers from that storage and the optimizer's state hangs on that object.

A parameter of a model built under ``zero.Init`` that is not sharded yet has a recorded value:
inside it has that value, and what is kept on exit becomes part of the record.

Invariants: parameters are visited in the same order on each rank (the caller passes the
same list everywhere); an exception restores every object and changes no value.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thalweg.comm import CommsLog
from thalweg.deferred_init.deferred_tensor import is_deferred, materialize_tensor
from thalweg.deferred_init.op_graph import is_meta
from thalweg.deferred_init.tensor_swap import FullParameter, swap_tensors
from thalweg.parallel_dims import control_group
from thalweg.utils.log import get_logger
from thalweg.zero.fsdp2.private_api import get_fsdp_groups
from thalweg.zero.full_state_dict import all_gather_full, write_to_shard
from thalweg.zero.whole_parameter import WholeParameter, get_shard

_log = get_logger(__name__)


@dataclass(eq=False)
class _GatheredParam:
    """One parameter while it is full: the user's object, and the spare that keeps the DTensor."""

    param: Tensor
    sharded: Any  # a DTensor while the context is open
    version: int


# Parameters that are full at present, by the id of the user's object: a context inside
# another one finds here what the outer one has gathered.
_gathered: dict[int, _GatheredParam] = {}

# Roots of the sharded models of this process, with the ledger of each.
_ledgers_by_root: weakref.WeakKeyDictionary[nn.Module, CommsLog] = weakref.WeakKeyDictionary()


def register_sharded_model(root: nn.Module, ledger: CommsLog | None = None) -> None:
    """Make known that ``root`` has been sharded with ``fully_shard`` (the core calls this once).

    Between a forward and the next reshard FSDP2 shows unsharded parameters in its modules;
    with this knowledge a context finds the shards behind them.
    """
    if ledger is not None or root not in _ledgers_by_root:
        _ledgers_by_root[root] = ledger or CommsLog()


class GatheredParameters:
    """Context in which sharded parameters are full plain tensors, under their own identity.

    Args:
        params: parameters, an iterable of them, or one parameter; each may be sharded (a
            DTensor on any mesh), replicated or plain.  Every rank passes the same ones.  ``None``, as of a
            layer without bias, is passed over.
        modifier_rank: global rank whose modifications are kept: on exit its values are
            broadcast and sharded again.  ``None``: the full tensors are for reading, and what
            is written to them is dropped on exit (as in DeepSpeed).  A parameter that is not
            sharded *is* the full tensor: nothing is dropped there, and ``modifier_rank``
            broadcasts it.
        fwd_module: the sharded model (or a part of it) that the parameters belong to; needed
            only for models that ``thalweg.initialize`` has not made.
        enabled: ``False`` makes the context do nothing.

    ``.grad`` is ``None`` inside and back after exit.  ``requires_grad`` set inside is kept.
    A forward pass inside (after the model's first one) uses the values from before the context.

    Raises ``ValueError`` for anything that is not a parameter, a ``modifier_rank`` outside of
    the parameter's mesh, or a parameter whose shape was changed inside.
    """

    def __init__(
        self,
        params: Iterable[Tensor | None] | Tensor,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled, self.modifier_rank, self.fwd_module = enabled, modifier_rank, fwd_module
        listed = [] if not enabled else [params] if isinstance(params, Tensor) else [p for p in params if p is not None]
        for param in listed:
            if not isinstance(param, Tensor):
                raise ValueError(
                    f"GatheredParameters takes parameters, but got {type(param).__name__}: "
                    "pass model.parameters() or [model.head.weight]"
                )
        self.params = list({id(param): param for param in listed}.values())
        self._entered: list[_GatheredParam] = []
        self._full_params: list[Tensor] = []
        self._aliases: list[tuple[Tensor, Tensor]] = []
        self._roots: list[nn.Module] = []
        self._ledger = CommsLog()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        if self.fwd_module is not None:
            register_sharded_model(self.fwd_module)
        param_ids = {id(param) for param in self.params}
        self._roots = [
            root
            for root in list(_ledgers_by_root)
            if any(id(p) in param_ids for pair in _list_current_and_sharded(root) for p in pair)
        ]
        self._ledger = next((_ledgers_by_root[root] for root in self._roots), self._ledger)
        shard_by_unsharded: dict[int, Tensor] = {}
        unsharded_by_shard: dict[int, Tensor] = {}
        for root in self._roots:
            pairs = _list_unsharded(root)
            shard_by_unsharded |= {id(param): shard for param, shard in pairs}
            # Gathered copies are freed, so that a forward inside gathers by itself; under a live graph they stay, as it
            # may have saved them.
            if pairs and all(param._use_count() == 1 for param, _ in pairs):  # pyright: ignore[reportAttributeAccessIssue]
                for module in root.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            unsharded_by_shard |= {id(shard): param for param, shard in _list_unsharded(root)}
        try:
            for param in self.params:
                target = shard_by_unsharded.get(id(param), param)
                self._gather_param(target)
                for other in (param, unsharded_by_shard.get(id(target), target)):
                    if other is not target:
                        self._alias_unsharded(other, target)
        except BaseException:
            self._restore()
            raise

    def _gather_param(self, param: Tensor) -> None:
        record = _gathered.get(id(param))
        _check_modifier_rank(self.modifier_rank, record.sharded if record else get_shard(param))
        if isinstance(param, DTensor) or is_deferred(param):
            with self._log_collective("all_gather", param):
                self._entered.append(_swap_in_full(param))
        elif is_meta(param):
            raise ValueError("this parameter is on meta and has no value yet: call thalweg.initialize first")
        elif param.numel() and not param.untyped_storage().size():
            raise ValueError(
                "this parameter is a gathered copy that has been freed since; take it from the module again "
                "(model.parameters()), or pass fwd_module=model"
            )
        if not any(param is full for full in self._full_params):
            self._full_params.append(param)

    def _alias_unsharded(self, unsharded: Tensor, full: Tensor) -> None:
        """Make FSDP2's unsharded object the same full tensor, so that a write to either counts."""
        if any(unsharded is x for x, _ in self._aliases):
            return
        spare = nn.Parameter(full.detach(), full.requires_grad)
        swap_tensors(unsharded, spare)
        self._aliases.append((unsharded, spare))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        values: list[tuple[Tensor, Tensor]] = []
        try:
            if kind is None:
                values = self._broadcast_values()
        finally:
            self._restore()
        for param, value in values:
            write_to_shard(param, value)
        # Gathered copies that FSDP2 holds now it would use again as they are.
        value_by_shard = {id(param): value for param, value in values}
        for root in self._roots if values else ():
            for unsharded, shard in _list_unsharded(root):
                if id(shard) in value_by_shard and unsharded.untyped_storage().size():
                    unsharded.data.copy_(value_by_shard[id(shard)])

    @torch.no_grad()
    def _broadcast_values(self) -> list[tuple[Tensor, Tensor]]:
        """Broadcast what the modifier left; return (parameter, value) to write once they are DTensors."""
        for record in self._entered:
            if record.param.shape != record.sharded.shape:
                raise ValueError(
                    f"a gathered parameter was resized from {tuple(record.sharded.shape)} to "
                    f"{tuple(record.param.shape)}: the shape of a sharded parameter is fixed; resize the model "
                    "before thalweg.initialize"
                )
        if self.modifier_rank is None:
            if written := sum(record.param._version != record.version for record in self._entered):
                _log.warning(
                    "GatheredParameters: %d parameter(s) were written to and modifier_rank is None, so the writes "
                    "are dropped; pass modifier_rank=0 to keep those of rank 0",
                    written,
                )
            return []
        values = []
        for param in self._full_params:
            value = param.detach().contiguous()
            record = _gathered.get(id(param))
            with self._log_collective("broadcast", record.sharded if record else param):
                _broadcast_over_mesh(value, self.modifier_rank, record.sharded if record else get_shard(param))
            if record in self._entered:
                values.append((param, value))
                continue
            param.copy_(value)
            if record is not None:  # an outer context keeps it open; its shard takes the value now
                write_to_shard(record.sharded, value)
        return values

    @contextmanager
    def _log_collective(self, kind: str, param: Tensor) -> Iterator[None]:
        """Count the body as one collective on ``param`` (sharded), whose full value it moves."""
        size = param.device_mesh.size() if isinstance(param, DTensor) else 1
        full_bytes, topology = param.numel() * param.itemsize, self._ledger.topology
        with self._ledger.timed(kind, "GatheredParameters", "wire", full_bytes, size) as call:
            yield
            if size == 1 or topology is None:
                return
            if kind == "all_gather":
                call.add_bytes(*topology.ring_bytes(full_bytes // len(topology.host_ids)))
            elif dist.get_rank() == self.modifier_rank:
                call.add_bytes(*topology.all_to_all_bytes(full_bytes))

    def _restore(self) -> None:
        for param, alias in reversed(self._aliases):
            swap_tensors(param, alias)
        for record in reversed(self._entered):
            requires_grad = record.param.requires_grad
            swap_tensors(record.param, record.sharded)
            record.param.requires_grad_(requires_grad)
            del _gathered[id(record.param)]
        self._entered, self._aliases, self._full_params = [], [], []


def get_sharded(param: Tensor) -> Tensor:
    """The DTensor of ``param``, also while a context shows it whole."""
    record = _gathered.get(id(param))
    return param if record is None else record.sharded


def _list_current_and_sharded(root: nn.Module) -> list[tuple[Any, Tensor]]:
    """Return (object that the modules show now, sharded parameter) for all of FSDP2's in ``root``."""
    params = [param for group in get_fsdp_groups(root) for param in group.params]
    located = [(param.locations[0], param.sharded_param) for param in params]
    return [(module._parameters[key], shard) for (module, key), shard in located]


def _list_unsharded(root: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return (object that the modules show, its shard) for what is unsharded in ``root`` now."""
    pairs = _list_current_and_sharded(root)
    return [(param, shard) for param, shard in pairs if param is not shard and not isinstance(param, WholeParameter)]


@torch.no_grad()
def _swap_in_full(param: Tensor) -> _GatheredParam:
    """Make the object ``param`` the full tensor."""
    if isinstance(param, DTensor):
        spare = torch.Tensor._make_subclass(FullParameter, all_gather_full(param), param.requires_grad)
    else:
        spare = nn.Parameter(materialize_tensor(param), param.requires_grad)
    swap_tensors(param, spare)
    record = _GatheredParam(param, spare, param._version)
    _gathered[id(param)] = record
    return record


def _broadcast_over_mesh(value: Tensor, rank: int, sharded: Tensor | None) -> None:
    """Give every rank of the mesh (of the world, for a plain tensor) the value of ``rank``, in place."""
    if not isinstance(sharded, DTensor):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(value, rank, group=control_group(None, value.device))
        return
    mesh = sharded.device_mesh
    coordinates = (mesh.mesh == rank).nonzero()[0].tolist()
    # Axis by axis: after axis i each rank holds the value of the rank that has the source's
    # coordinates on the axes up to i and its own on the others.
    for axis, coordinate in enumerate(coordinates):
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            dist.broadcast(value, group_src=coordinate, group=control_group(group, value.device))


def _check_modifier_rank(rank: int | None, param: Tensor) -> None:
    if rank is None:
        return
    if isinstance(param, DTensor):
        ranks = param.device_mesh.mesh.flatten().tolist()
    else:
        ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    if rank not in ranks:
        named = str(ranks) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)}"
        raise ValueError(
            f"GatheredParameters(modifier_rank={rank}): the parameter lives on ranks {named}; "
            "name one of them, or None to read only"
        )
