"""Parameters that stay out of ZeRO's units: scalars, and experts that lie on ranks of their own.

FSDP2 cannot shard a scalar, and experts must not be gathered, so that no rank waits for another's
tokens.  An expert parameter (a stack of experts) is a DTensor on a mesh with the axes "ep", rows along
it, and "copies": the data ranks that hold the same rows.  Modules compute with another tensor, this
rank's rows of it:

    phase           parameter (what users, optimisers and checkpoints see)     rows (what modules use)
    first forward                                                              gathered, if sharded
    backward                                                                   collect gradients
    end of window   .grad: the mean over all data ranks                        without gradients
    update          new values                                                 stale, if sharded

Where ZeRO shards states (stages 1 to 3) a parameter is *sharded*: each copy keeps and updates its own part
of the rows, its gradient ends in a reduce-scatter over the copies, and the rows are memory of their
own.  One that is frozen, or has no dim to shard, is whole on every copy: parameter and rows are the
same memory, and its gradient is added up.

Invariants: ranks of one mesh hold the same parameters in the same order; copies' ranks alone have
exchanges to agree on, all of them at the first forward of a layer of experts or at a window's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thalweg.comm import CommsLog
from thalweg.comm.collectives.wire import AllToAllReduce, WireAllGather, pad_to_length
from thalweg.parallel_dims import control_group
from thalweg.utils.buckets import iter_buckets
from thalweg.zero.full_state_dict import make_dtensor

_BUCKET_BYTES = 32 << 20  # bytes of rows that travel together
_SMALL_GRAD_BYTES = 1 << 18  # bytes of a gradient that is added up with others
_MESH_AXES = ("ep", "copies")


def is_expert_param(parameter: Tensor) -> bool:
    """Whether a parameter of a model that is not sharded yet lies on ranks of its own."""
    return isinstance(parameter, DTensor)


@dataclass(eq=False)
class _ReplicatedExpert:
    """A parameter and this rank's ``rows`` of it."""

    parameter: nn.Parameter
    rows: Tensor
    mesh: DeviceMesh

    @classmethod
    def from_parameter(cls, parameter: nn.Parameter) -> _ReplicatedExpert:
        """One that is whole on each copy."""
        assert isinstance(parameter, DTensor)
        rows = parameter._local_tensor.detach().requires_grad_(parameter.requires_grad)
        return cls(parameter, rows, parameter.device_mesh)

    @property
    def num_replicas(self) -> int:
        """Copies there are."""
        return self.mesh.get_group("copies").size()

    def accumulate_grad(self, new_grad: Tensor) -> None:
        """Add ``new_grad``, of the parameter's local shape, to its gradient."""
        grad, parameter = self.parameter.grad, self.parameter
        if grad is not None:
            assert isinstance(grad, DTensor)
            grad._local_tensor.add_(new_grad)
            return
        assert isinstance(parameter, DTensor)
        parameter.grad = make_dtensor(new_grad.contiguous(), parameter.placements, parameter)


@dataclass(eq=False)
class _ShardedExpert(_ReplicatedExpert):
    """One of which each copy keeps its shard along ``dim``."""

    local_shard: Tensor  # the parameter's local tensor
    dim: int
    version: int = -1  # of the shard that the rows were gathered from

    @classmethod
    def from_parameter(cls, parameter: nn.Parameter) -> _ShardedExpert | _ReplicatedExpert:
        """Shard ``parameter``, whole on each copy until now, along its longest dim, if one is left."""
        assert isinstance(parameter, DTensor)
        mesh, rows = parameter.device_mesh, parameter._local_tensor.detach()
        num_replicas = mesh.get_group("copies").size()
        *outer_placements, replica_placement = parameter.placements
        sharded_dims = {placement.dim for placement in outer_placements if isinstance(placement, Shard)}
        dims = [d for d in range(rows.ndim) if d not in sharded_dims and rows.size(d) >= num_replicas]
        if num_replicas == 1 or not parameter.requires_grad or not replica_placement.is_replicate() or not dims:
            return _ReplicatedExpert.from_parameter(parameter)
        dim = max(dims, key=lambda d: (rows.size(d) % num_replicas == 0, rows.size(d)))
        chunks = rows.split(-(-rows.size(dim) // num_replicas), dim)
        rank = mesh.get_local_rank("copies")
        local_shard = chunks[rank] if rank < len(chunks) else rows.narrow(dim, 0, 0)
        local_shard = local_shard.clone(memory_format=torch.contiguous_format)
        placements = (*outer_placements, Shard(dim))  # pyright: ignore[reportCallIssue]
        sharded_param = nn.Parameter(make_dtensor(local_shard, placements, parameter))
        assert isinstance(sharded_param, DTensor)
        return cls(sharded_param, rows.requires_grad_(), mesh, sharded_param._local_tensor, dim)

    def padded_shape(self) -> torch.Size:
        """That of the longest shard."""
        shape = list(self.rows.shape)
        shape[self.dim] = -(-shape[self.dim] // self.num_replicas)
        return torch.Size(shape)

    def get_flat_shard(self) -> Tensor:
        """The shard as the others receive it."""
        return pad_to_length(self.local_shard, self.dim, self.padded_shape()[self.dim]).reshape(-1)

    def set_rows(self, shards: Tensor) -> None:
        """Put together what :meth:`get_flat_shard` gave on each copy, (copies, elements)."""
        gathered = shards.unflatten(1, self.padded_shape()).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        self.rows.detach().copy_(gathered.narrow(self.dim, 0, self.rows.size(self.dim)))
        self.version = self.local_shard._version

    def pop_flat_grads(self) -> Tensor:
        """The rows' gradient by the copy that each shard belongs to, (copies, elements); taken away."""
        length = self.padded_shape()[self.dim]
        grad, self.rows.grad = self.rows.grad, None
        grad = torch.zeros_like(self.rows) if grad is None else grad
        padded = pad_to_length(grad, self.dim, self.num_replicas * length)
        shards = padded.unflatten(self.dim, (self.num_replicas, length))
        return shards.movedim(self.dim, 0).reshape(self.num_replicas, -1)

    def accumulate_mean(self, flat: Tensor) -> None:
        """Add this rank's shard of a gradient."""
        local_grad = flat.view(self.padded_shape()).narrow(self.dim, 0, self.local_shard.size(self.dim))
        self.accumulate_grad(local_grad.clone(memory_format=torch.contiguous_format))


class ScalarParams:
    """0-dim parameters, whole on every rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        # ``_touched``: those to which a backward pass has added since the last reduction; others are the program's.
        self._parameters, self._group, self._touched = parameters, group, set[nn.Parameter]()
        # Of each parameter: the gradient that was reduced last, and what it was then.
        self._reduced: dict[nn.Parameter, tuple[Tensor | None, Tensor]] = {}

    def __bool__(self) -> bool:
        return len(self._parameters) > 0

    @torch.no_grad()
    def reduce_grads(self, divisor: float) -> None:
        """Add up over the group what has come since the last call and divide it; collective.  A parameter that has a
        gradient on some rank has one on all of them afterwards."""
        trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trainable:
            return
        known = torch.stack([self._known_part(parameter) for parameter in trainable])
        grads = [k if p.grad is None else p.grad.float() for p, k in zip(trainable, known, strict=True)]
        has_grad = [torch.full_like(k, p.grad is not None) for p, k in zip(trainable, known, strict=True)]
        local = torch.stack([torch.stack(grads) - known, torch.stack(has_grad)])
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(local, group=self._group)
        for parameter, value, count in zip(trainable, known + local[0] / divisor, local[1], strict=True):
            if parameter.grad is None and count > 0:  # the host waits for a device only where a gradient is missing
                parameter.grad = value.to(parameter.dtype, copy=True)
            elif parameter.grad is not None:
                parameter.grad.copy_(value)
            if parameter not in self._reduced:
                parameter.register_post_accumulate_grad_hook(self._touched.add)
            self._reduced[parameter] = parameter.grad, value.to(parameter.dtype).to(torch.float32, copy=True)
        self._touched.clear()

    def _known_part(self, parameter: nn.Parameter) -> Tensor:
        grad, value = self._reduced.get(parameter, (None, None))
        if value is None or grad is None or grad is not parameter.grad:  # or there is a new one
            return torch.zeros((), device=parameter.device)
        return value if parameter in self._touched else grad.float()

    def clear_grads(self) -> None:
        """Forget gradients that are not reduced yet: theirs are those that the optimizer clears."""

    def mark_updated(self) -> None:
        """Somebody may write parameters in a way that tensors do not count."""


class ZeroExpertParams:
    """The expert parameters of a model (:meth:`adopt`), sharded over their copies if ``shard_replicas``."""

    def __init__(self, ledger: CommsLog, shard_replicas: bool) -> None:
        self._ledger, self._shard_replicas = ledger, shard_replicas
        self._experts: list[_ReplicatedExpert] = []
        self._by_id: dict[int, _ReplicatedExpert] = {}
        self._sharded: list[_ShardedExpert] = []

    def __bool__(self) -> bool:
        return len(self._experts) > 0

    def adopt(self, model: nn.Module) -> None:
        """Take the model's expert parameters; sharding exchanges the modules' parameters for others."""
        expert_type = _ShardedExpert if self._shard_replicas else _ReplicatedExpert
        expert_by_id: dict[int, _ReplicatedExpert] = {}  # by the parameter as it was
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and is_expert_param(parameter):
                    expert = expert_by_id.get(id(parameter)) or expert_type.from_parameter(parameter)
                    expert_by_id[id(parameter)] = expert
                    module._parameters[key] = expert.parameter
        self._experts = list(expert_by_id.values())
        self._by_id = {id(one.parameter): one for one in self._experts}
        self._sharded = [one for one in self._experts if isinstance(one, _ShardedExpert)]

    # Forward

    def get_rows(self, parameter: Tensor) -> Tensor | None:
        """This rank's rows of a parameter, as :meth:`refresh_rows` left them; None if it is no expert's."""
        expert = self._by_id.get(id(parameter))
        if expert is None:
            return None
        if expert.rows.requires_grad != parameter.requires_grad:
            expert.rows.requires_grad_(parameter.requires_grad)
        return expert.rows

    @torch.no_grad()
    def refresh_rows(self) -> None:
        """Gather what has changed since the last time; collective over the copies."""
        for bucket in _iter_buckets([one for one in self._sharded if one.version != one.local_shard._version]):
            group = bucket[0].mesh.get_group("copies")
            sent = torch.cat([one.get_flat_shard() for one in bucket])
            gathered = sent.new_empty(bucket[0].num_replicas, sent.numel())
            WireAllGather("experts", self._ledger)(gathered.view(-1), sent, group)
            lengths = [one.padded_shape().numel() for one in bucket]
            for one, shards in zip(bucket, gathered.split(lengths, 1), strict=True):
                one.set_rows(shards)

    def mark_updated(self) -> None:
        """Somebody may write parameters in a way that tensors do not count."""
        for expert in self._sharded:
            expert.version = -1

    # Gradients

    def clear_grads(self) -> None:
        """Forget gradients that are not reduced yet."""
        for expert in self._experts:
            expert.rows.grad = None

    @torch.no_grad()
    def reduce_grads(self, divisor: float) -> None:
        """Add up what has come since the last call over the copies and divide it; collective.

        A parameter that has a gradient on some rank of its mesh has one on all of them afterwards, and one
        that has none anywhere stays without, as in a plain run.
        """
        self.mark_updated()  # an update comes, and not all of them count what they write
        by_mesh: dict[DeviceMesh, list[_ReplicatedExpert]] = {}
        for expert in self._experts:
            by_mesh.setdefault(expert.mesh, []).append(expert)
        for mesh, experts in by_mesh.items():
            with_grad = _select_with_grad(mesh, experts)
            self._all_reduce_grads(mesh, [one for one in with_grad if not isinstance(one, _ShardedExpert)], divisor)
            sharded = [one for one in with_grad if isinstance(one, _ShardedExpert)]
            for bucket in _iter_buckets(sharded):
                self._reduce_scatter_grads(bucket, divisor)
            for expert in sharded:
                if not expert.rows.numel():  # another rank's expert: its gradient is there, and empty
                    expert.rows.grad = None
                    expert.accumulate_grad(torch.zeros_like(expert.local_shard))

    def _reduce_scatter_grads(self, bucket: list[_ShardedExpert], divisor: float) -> None:
        group = bucket[0].mesh.get_group("copies")
        rows = torch.cat([one.pop_flat_grads() for one in bucket], 1)
        mean = torch.empty_like(rows[0])
        with self._ledger.timed("reduce_scatter", "experts", "wire", rows.nbytes, len(rows)) as call:
            AllToAllReduce(group).reduce_rows(rows, mean, 1.0 / divisor, call, rows.dtype)
        lengths = [one.padded_shape().numel() for one in bucket]
        for one, local_grad in zip(bucket, mean.split(lengths), strict=True):
            one.accumulate_mean(local_grad)

    def _all_reduce_grads(self, mesh: DeviceMesh, experts: list[_ReplicatedExpert], divisor: float) -> None:
        grads = [torch.zeros_like(one.rows) if one.rows.grad is None else one.rows.grad for one in experts]
        if mesh.get_group("copies").size() > 1:
            self._all_reduce_bucketed(grads, mesh.get_group("copies"))
        for one, grad in zip(experts, grads, strict=True):
            one.rows.grad = None
            one.accumulate_grad(grad.div_(divisor))

    def _all_reduce_bucketed(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        """Sum each over ``group``; small ones travel together."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.nbytes > _SMALL_GRAD_BYTES:
                self._all_reduce(tensor, group)
            elif tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for same_dtype in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
            self._all_reduce(flat, group)
            for tensor, total in zip(same_dtype, flat.split([t.numel() for t in same_dtype]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        size = dist.get_world_size(group)
        with self._ledger.timed("all_reduce", "experts", "wire", tensor.nbytes, size):
            dist.all_reduce(tensor, group=group)


def _select_with_grad(mesh: DeviceMesh, experts: list[_ReplicatedExpert]) -> list[_ReplicatedExpert]:
    """Those that have a gradient on some rank of the mesh."""
    flags = torch.tensor([one.rows.grad is not None for one in experts]).byte()
    for axis in _MESH_AXES:
        if mesh.get_group(axis).size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control_group(mesh.get_group(axis)))
    return [one for one, flag in zip(experts, flags.tolist(), strict=True) if flag]


def _iter_buckets(experts: Sequence[_ShardedExpert]) -> Iterator[list[_ShardedExpert]]:
    """Those that travel together, in the same order on every rank."""
    by_mesh_and_dtype: dict[tuple[DeviceMesh, torch.dtype], list[_ShardedExpert]] = {}
    for expert in experts:
        if expert.rows.numel():
            by_mesh_and_dtype.setdefault((expert.mesh, expert.local_shard.dtype), []).append(expert)
    for same_kind in by_mesh_and_dtype.values():
        yield from iter_buckets(same_kind, lambda expert: expert.rows.nbytes, _BUCKET_BYTES)
