"""The optimisers' view of a parameter: this rank's piece of it, as a plain tensor.

    parameter   what the user and the checkpoint see: a ``DTensor`` of logical shape, or a plain tensor
    local       the rank's own piece of it (for a plain tensor: itself), sharing memory with the parameter
    state       what an optimiser keeps: ``DTensor`` of the parameter's layout, so that it has a logical shape
    work        the tensor that the arithmetic runs on: the local piece, or an fp32 copy of a 16-bit one

Why not hand the ``DTensor`` s to torch's kernels: dispatching one fused AdamW step over 100 of them costs
1.4 ms here, 8% of the step over 32 M elements; on local tensors it is a tenth of a millisecond. An update
that is elementwise gives the same numbers on pieces as on the whole, whatever the placement, so nothing else
changes.

16-bit parameters: moments of fp16 underflow (eps 1e-8 is zero there) and an update below half a unit in the
last place of bf16 is lost. So the state of 16-bit parameters is fp32, the step runs on an fp32 copy of the
piece, and the result is rounded back once. The parameter itself still has 16 bits: keep fp32 masters unless
memory forbids it.

*Shard groups* of a parameter: the process groups over which its pieces are spread, one for each axis of its mesh
that shards it. A plain tensor, or a ``DTensor`` replicated everywhere, has none: each rank holds all
of it, and adding up over ranks would count it more than once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from thalweg.device import takes_tensors_of
from thalweg.optim import foreach
from thalweg.parallel_dims import control_group
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.zero.full_state_dict import make_dtensor, on_mesh_device

ShardGroups = tuple[dist.ProcessGroup, ...]
F = TypeVar("F", bound=Callable[..., Any])


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a ``DTensor``, or the plain tensor itself.

    ``DTensor.to_local()`` under ``no_grad`` is the same tensor behind 1 us of checks (and, for a parameter, a
    new ``Parameter`` around it), four times for each parameter and step; hence the attribute.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_grad(param: Tensor) -> Tensor:
    """Return the piece of ``param.grad`` that matches the piece of ``param``; partial sums are reduced."""
    grad = param.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(param, DTensor) and grad.placements is not param.placements and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements).to_local()
    return grad._local_tensor


def as_dtensor_like(piece: Tensor, param: Tensor) -> Tensor:
    """Return ``piece`` with the layout of ``param``: the ``DTensor`` whose local tensor it is.

    Arithmetic and casts go through here and not through ``DTensor``, which gives their results a plain
    ``Shard`` in place of any placement derived from it.
    """
    return make_dtensor(piece, param.placements, param) if isinstance(param, DTensor) else piece


def trainable_params(optimizer: Any) -> list[Tensor]:
    """Return the parameters of ``optimizer`` that are not frozen, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def default_state_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which moments of ``param`` are kept."""
    return torch.float32 if param.dtype in HALF_DTYPES else param.dtype


def zeros_state_like(param: Tensor) -> Tensor:
    """Return zeros with the layout of ``param`` in :func:`default_state_dtype`."""
    zeros = torch.zeros_like(to_local(param), dtype=default_state_dtype(param), requires_grad=False)
    return as_dtensor_like(zeros, param)


@contextmanager
def working_pieces(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield pieces to update, gradients or not; fp32 copies of 16-bit pieces are rounded back after."""
    pieces = [to_local(p) for p in params]
    work = [upcast_half(t) for t in pieces]
    yield work
    write_back([(piece, w) for piece, w in zip(pieces, work, strict=True) if piece is not w])


@contextmanager
def working_copies(params: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield (pieces, gradient pieces) to compute on; see :func:`working_pieces`."""
    grads = [local_grad(p) for p in params]
    with working_pieces(params) as work:
        yield work, [g.to(w.dtype) if g.dtype != w.dtype else g for g, w in zip(grads, work, strict=True)]


def upcast_half(piece: Tensor) -> Tensor:
    """Return ``piece``, or its fp32 copy if it has 16 bits."""
    return piece.float() if piece.dtype in HALF_DTYPES else piece


@torch.no_grad()
def write_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Round each fp32 work tensor into its 16-bit piece."""
    if pairs:
        foreach.copy_([piece for piece, _ in pairs], [work for _, work in pairs])


class StateLoadMixin:
    """Mixin before an ``Optimizer``: loading does not round state to the dtype of the parameter, as torch's does.

    The state of 16-bit parameters becomes fp32; with ``keeps_saved_dtype`` all state stays in the dtype it was
    saved in.
    """

    keeps_saved_dtype = False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but for dtypes."""
        super().load_state_dict(state_dict)  # pyright: ignore[reportAttributeAccessIssue]
        params = [p for group in self.param_groups for p in group["params"]]  # pyright: ignore[reportAttributeAccessIssue]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if self.keeps_saved_dtype:
                    if value.dim() == 0:
                        continue
                    loaded = to_local(value).to(device=param.device, copy=True)
                elif param.dtype in HALF_DTYPES and value.is_floating_point() and key != "step":
                    loaded = to_local(value).to(device=param.device, dtype=torch.float32)
                else:
                    continue
                self.state[param][key] = as_dtensor_like(loaded, value)  # pyright: ignore[reportAttributeAccessIssue]


def tells_schedulers(step: F) -> F:
    """Mark a ``step`` that sets ``_opt_called`` on its object.

    torch's schedulers wrap the step of the object that they are given to see whether it comes before their own.
    The wrapper is lost where the object's class is exchanged or another object steps in its place, and the scheduler
    then warns of an order that is right.  What bears this mark they leave alone, and ask for ``_opt_called``.
    """
    vars(step)["_wrapped_by_lr_sched"] = True
    return step


class StepMixin(StateLoadMixin):
    """Mixin before an ``Optimizer`` that says in ``_update_params`` how it steps."""

    @tells_schedulers
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss if one is given.

        Where the update needs other ranks, all of a process group must have gradients for the same parameters.
        """
        loss, self._opt_called = None, True
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_params()
        return loss

    def _update_params(self) -> None:
        raise NotImplementedError


class LocalStepMixin(StateLoadMixin):
    """Mixin before an elementwise ``torch.optim`` class: its kernels run on local pieces, its state stays
    logical.

    Every such class collects what it works on in ``_init_group(group, params, grads, state lists...)``. The
    lists are filled by torch, from ``DTensor`` s, and exchanged here for the pieces just before they reach
    the kernel. That method is torch's own (2.11 to 2.13); ``tests/unit/test_optim_torch.py`` says so when
    it moves.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any], **named: list[Any]) -> Any:
        result = super()._init_group(group, *lists, **named)  # pyright: ignore[reportAttributeAccessIssue]
        all_lists = [*lists, *named.values()]
        params, grads = all_lists[0], all_lists[1]
        owner_params = list(params)
        replaced: dict[int, Tensor] = {}  # new 16-bit state made fp32, by the old tensor's id
        for param in owner_params:
            if param.dtype in HALF_DTYPES:
                state = self.state[param]  # pyright: ignore[reportAttributeAccessIssue]
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
                        state[key] = replaced[id(value)] = as_dtensor_like(to_local(value).float(), value)
        for tensors in all_lists[2:]:
            tensors[:] = [to_local(replaced.get(id(t), t)) if isinstance(t, Tensor) else t for t in tensors]
        grads[:] = [local_grad(p) for p in owner_params]
        params[:] = [to_local(p) for p in owner_params]
        if replaced or any(p.dtype in HALF_DTYPES for p in params):
            self._upcast_params(params, grads)
        return result

    def _upcast_params(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Exchange 16-bit pieces for fp32 copies, to be rounded back when the step is over."""
        if "_unrounded" not in self.__dict__:
            self._unrounded: list[tuple[Tensor, Tensor]] = []
            self.register_step_post_hook(_round_back)  # pyright: ignore[reportAttributeAccessIssue]
        for i, piece in enumerate(params):
            work = upcast_half(piece)
            if work is not piece:
                self._unrounded.append((piece, work))
                params[i], grads[i] = work, grads[i].float()


def _round_back(optimizer: Any, args: Any, kwargs: Any) -> None:
    write_back(optimizer._unrounded)
    optimizer._unrounded.clear()


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` cuts over its mesh axis, or None."""
    not_sharded = placement.is_replicate() or placement.is_partial()
    return None if not_sharded else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def is_chunk_sharded(placement: Placement) -> bool:
    """Return whether ``placement`` cuts a dim as ``torch.chunk`` does."""
    return type(placement) is Shard or bool(getattr(placement, "chunked", False))


def get_sharded_axes(param: Tensor) -> tuple[tuple[dist.ProcessGroup, int], ...]:
    """Return (process group, tensor dim) for each mesh axis of more than one rank that cuts ``param``."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    dims = [(axis, sharded_dim(placement)) for axis, placement in enumerate(param.placements)]
    return tuple((mesh.get_group(axis), dim) for axis, dim in dims if dim is not None and mesh.size(axis) > 1)


def get_shard_groups(params: Iterable[Tensor]) -> list[ShardGroups]:
    """Return the shard groups of each parameter; equal layouts share one look-up."""
    cache: dict[tuple[object, object], ShardGroups] = {}
    shard_groups = []
    for param in params:
        key = (param.device_mesh, param.placements) if isinstance(param, DTensor) else (None, None)
        if key not in cache:
            cache[key] = tuple(group for group, _ in get_sharded_axes(param))
        shard_groups.append(cache[key])
    return shard_groups


def all_reduce_tensors_(
    tensors: Sequence[Tensor], shard_groups: Sequence[ShardGroups], op: Any = dist.ReduceOp.SUM
) -> None:
    """Add up each tensor (or ``op``) over its shard groups, in place; shapes may differ, the dtype may not.

    Tensor i has ``shard_groups[i]``. All tensors of one group travel in one all-reduce; one that has two groups (two
    axes of a mesh) passes through both. Every rank of a group must hold the same shard groups in the same order,
    which it does if the ranks hold the same parameters.
    """
    for group in dict.fromkeys(group for tensor_groups in shard_groups for group in tensor_groups):
        chosen = [tensor for tensor, its_groups in zip(tensors, shard_groups, strict=True) if group in its_groups]
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        if not takes_tensors_of(group, flat.device):  # of offloaded pieces, in host memory
            group = control_group(group)
        dist.all_reduce(flat, op, group=group)
        totals = flat.split([tensor.numel() for tensor in chosen])
        foreach.copy_(chosen, [total.view_as(tensor) for tensor, total in zip(chosen, totals, strict=True)])


def match_layout(tensor: Tensor, param: Tensor, placements: Sequence[Placement]) -> Tensor:
    """``tensor`` on the mesh of ``param`` with ``placements``, resting where ``param`` does; a checkpoint may have
    brought it in another layout."""
    if not isinstance(param, DTensor):
        return tensor
    mesh, device = param.device_mesh, to_local(param).device
    if not isinstance(tensor, DTensor):
        tensor = make_dtensor(tensor.to(device), [Replicate()] * mesh.ndim, param, tensor.shape)
    if tensor.placements == tuple(placements):
        return tensor
    moved = on_mesh_device(tensor).redistribute(mesh, placements)
    return make_dtensor(moved.to_local().to(device), placements, moved)


def get_worker_axis(param: Tensor) -> int | None:
    """The mesh axis of several ranks along which ``param`` is replicated; of hosts (or sites), where there are some."""
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    axes = range(1 if "dp_outer" in (mesh.mesh_dim_names or ()) else mesh.ndim)
    return next((axis for axis in axes if param.placements[axis].is_replicate() and mesh.size(axis) > 1), None)


def _row_placements(param: DTensor, by_worker: bool) -> list[Any]:
    """Where (workers, *shape) lies: the first dim over workers (or everywhere), the others as ``param``."""
    axis = get_worker_axis(param)
    first = Shard(0) if by_worker else Replicate()
    return [first if i == axis else _shift(placement) for i, placement in enumerate(param.placements)]


def _shift(placement: Any) -> Any:
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def get_worker_rows(state: Tensor, param: Tensor) -> Tensor:
    """The rows of all workers of a ``state`` of shape (workers, *shape), as far as this rank has ``param``."""
    placements = _row_placements(param, by_worker=False) if isinstance(param, DTensor) else ()
    return to_local(match_layout(state, param, placements))


def as_rows_of_workers(piece: Tensor, param: Tensor) -> Tensor:
    """This worker's row of a state of shape (workers, *shape)."""
    assert isinstance(param, DTensor)
    shape = torch.Size((param.device_mesh.size(get_worker_axis(param)), *param.shape))
    return make_dtensor(piece.unsqueeze(0), _row_placements(param, by_worker=True), param, shape)
