"""Parameters that stay out of ZeRO's units: scalars, and what is spread over ranks before sharding.

FSDP2 cannot shard a scalar, and experts must not be gathered, so that no rank waits for another's
tokens.  A spread parameter (a stack of experts) is a DTensor on a mesh with the axes "ep", rows along
it, and "copies": the data ranks that have the same rows.  Where ZeRO divides states (stages 1 to 3)
each copy keeps and updates a part of the rows alone, and forward passes use the whole of them:

    phase           parameter (what users, optimisers and checkpoints see)     rows (what modules use)
    at rest         DTensor cut over "ep" and "copies"                         stale after an update
    first forward   the same                                                   gathered over "copies"
    backward        the same                                                   collect gradients
    end of window   .grad: the mean's own part, by a reduce-scatter            without gradients

A parameter that is frozen, or has no dim to divide, is whole on every copy; its gradient is complete
on each for the tokens that came there and is added up.  Either way it is divided as ZeRO divides the
rest, and the copies' ranks alone have these exchanges to agree on.

Invariant: ranks of one mesh hold the same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thalweg.comm import Ledger
from thalweg.comm.plain import PlainAllGather, Swap

_TOGETHER = 32 << 20  # bytes of rows that travel together
_SMALL = 1 << 18
_AXES = ("ep", "copies")


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter of a model that is not sharded yet lies on ranks of its own."""
    return isinstance(parameter, DTensor)


@dataclass(eq=False)
class _Divided:
    """A parameter of which this rank has a part along ``dim``, and all of its ``rows``."""

    parameter: nn.Parameter
    rows: Tensor
    part: Tensor  # the parameter's local tensor
    mesh: DeviceMesh
    dim: int
    version: int = -1  # of the part that the rows were gathered from

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Divided | None:
        """``parameter``, whole on each copy, divided along its longest dim; None if no dim is left."""
        assert isinstance(parameter, DTensor)
        mesh, rows = parameter.device_mesh, parameter._local_tensor.detach()
        number = _size(mesh, "copies")
        *before, last = parameter.placements
        cut = {placement.dim for placement in before if isinstance(placement, Shard)}
        dims = [d for d in range(rows.ndim) if d not in cut and rows.size(d) >= number]
        if number == 1 or not parameter.requires_grad or not last.is_replicate() or not dims:
            return None
        dim = max(dims, key=lambda d: (rows.size(d) % number == 0, rows.size(d)))
        chunks = rows.split(-(-rows.size(dim) // number), dim)
        rank = mesh.get_local_rank("copies")
        part = chunks[rank] if rank < len(chunks) else rows.narrow(dim, 0, 0)
        part = part.clone(memory_format=torch.contiguous_format)
        placements = (*before, Shard(dim))  # pyright: ignore[reportCallIssue]
        shown = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        divided = nn.Parameter(shown)
        assert isinstance(divided, DTensor)
        return cls(divided, rows.requires_grad_(), divided._local_tensor, mesh, dim)

    @property
    def is_stale(self) -> bool:
        return self.version != self.part._version

    @property
    def kind(self) -> tuple[object, ...]:
        """Those of one kind can travel together."""
        return self.mesh, self.part.dtype

    def padded_shape(self) -> torch.Size:
        """That of the longest part."""
        shape = list(self.rows.shape)
        shape[self.dim] = -(-shape[self.dim] // _size(self.mesh, "copies"))
        return torch.Size(shape)

    def flat_part(self) -> Tensor:
        """The part as the others receive it."""
        return pad(self.part, self.dim, self.padded_shape()[self.dim]).reshape(-1)

    def take_rows(self, parts: Tensor) -> None:
        """Put together what :meth:`flat_part` gave on each copy, (copies, elements)."""
        whole = parts.unflatten(1, self.padded_shape()).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        self.rows.detach().copy_(whole.narrow(self.dim, 0, self.rows.size(self.dim)))
        self.version = self.part._version

    def flat_grads(self) -> Tensor:
        """The rows' gradient by the copy that each part belongs to, (copies, elements)."""
        number, length = _size(self.mesh, "copies"), self.padded_shape()[self.dim]
        grad = torch.zeros_like(self.rows) if self.rows.grad is None else self.rows.grad
        parts = pad(grad, self.dim, number * length).unflatten(self.dim, (number, length))
        return parts.movedim(self.dim, 0).reshape(number, -1)

    def take_grad(self, flat: Tensor) -> None:
        """Add this rank's part of a gradient."""
        self.rows.grad = None
        own = flat.view(self.padded_shape()).narrow(self.dim, 0, self.part.size(self.dim))
        grad, parameter = self.parameter.grad, self.parameter
        if grad is not None:
            assert isinstance(grad, DTensor)
            grad._local_tensor.add_(own)
            return
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(
            own.clone(memory_format=torch.contiguous_format),
            self.mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class SpreadParameters:
    """The spread parameters of ``model``, which are divided among their copies if ``divide``.

    Dividing exchanges the modules' parameters for others.
    """

    def __init__(self, model: nn.Module, ledger: Ledger, divide: bool) -> None:
        self._ledger = ledger
        self._divided: dict[int, _Divided] = {}
        if divide:
            self._divide(model)
        self.parameters = [p for p in model.parameters() if is_spread(p) and p.requires_grad]
        self._done: dict[int, tuple[Tensor, Tensor]] = {}  # gradient object, what it was after the reduction

    def _divide(self, model: nn.Module) -> None:
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not is_spread(parameter):
                    continue
                if id(parameter) not in known:
                    divided = _Divided.of(parameter)
                    known[id(parameter)] = parameter if divided is None else divided.parameter
                    if divided is not None:
                        self._divided[id(divided.parameter)] = divided
                module._parameters[key] = known[id(parameter)]

    # Forward

    def rows_of(self, parameter: Tensor) -> Tensor | None:
        """All rows that this rank has of a divided parameter, as :meth:`refresh` left them; else None."""
        divided = self._divided.get(id(parameter))
        if divided is None:
            return None
        if divided.rows.requires_grad != parameter.requires_grad:
            divided.rows.requires_grad_(parameter.requires_grad)
        return divided.rows

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather what has changed since the last time; collective over the copies."""
        for some in _bundles([one for one in self._divided.values() if one.is_stale]):
            group = some[0].mesh.get_group("copies")
            sent = torch.cat([one.flat_part() for one in some])
            found = sent.new_empty(dist.get_world_size(group), sent.numel())
            PlainAllGather("experts", self._ledger)(found.view(-1), sent, group)
            for one, parts in zip(
                some, found.split([o.padded_shape().numel() for o in some], 1), strict=True
            ):
                one.take_rows(parts)

    # Gradients

    @torch.no_grad()
    def reduce(self, divisor: float) -> None:
        """Add up what has come since the last call over the copies and divide it; collective.

        However often it is called, a gradient is averaged once.  A parameter that has a gradient on some rank
        of its mesh has one on all of them afterwards, and one that has none anywhere stays without, as in a
        plain run.
        """
        self.changed()  # an update comes, and not all of them count what they write
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            assert isinstance(parameter, DTensor)
            by_mesh.setdefault(parameter.device_mesh, []).append(index)
        for mesh, indices in by_mesh.items():
            wanted = self._wanted(mesh, indices)
            whole = [index for index in wanted if id(self.parameters[index]) not in self._divided]
            self._add_up(mesh, whole, divisor)
            chosen = (self._divided.get(id(self.parameters[index])) for index in wanted)
            divided = [one for one in chosen if one is not None]
            for some in _bundles(divided):
                self._scatter(some, divisor)
            for one in divided:
                if not one.rows.numel():  # another rank's expert: its gradient is there, and empty
                    one.take_grad(one.part.new_zeros(0))

    def drop(self) -> None:
        """Forget gradients that are not reduced yet."""
        for one in self._divided.values():
            one.rows.grad = None

    def changed(self) -> None:
        """Somebody may have written parameters in a way that tensors do not count."""
        for one in self._divided.values():
            one.version = -1

    def _wanted(self, mesh: DeviceMesh, indices: list[int]) -> list[int]:
        divided = [self._divided.get(id(self.parameters[index])) for index in indices]
        grads = [
            self.parameters[index].grad if one is None else one.rows.grad
            for index, one in zip(indices, divided, strict=True)
        ]
        flags = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device=mesh.device_type)
        for axis in _AXES:
            if _size(mesh, axis) > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return [index for index, flag in zip(indices, flags.tolist(), strict=True) if flag]

    def _scatter(self, some: list[_Divided], divisor: float) -> None:
        group = some[0].mesh.get_group("copies")
        rows = torch.cat([one.flat_grads() for one in some], 1)
        mean = torch.empty_like(rows[0])
        with self._ledger.timed(
            "reduce_scatter", "experts", "wire", full_bytes=rows.nbytes, world_size=len(rows)
        ) as call:
            Swap(group).sum(rows, mean, 1.0 / divisor, call, rows.dtype)
        lengths = [one.padded_shape().numel() for one in some]
        for one, own in zip(some, mean.split(lengths), strict=True):
            one.take_grad(own)

    def _add_up(self, mesh: DeviceMesh, indices: list[int], divisor: float) -> None:
        news, olds, locals_ = [], [], []
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            before, after = self._done.pop(index, (None, None))
            known = after if before is grad else None
            local = grad._local_tensor
            locals_.append(local)
            olds.append(known)
            news.append(local.clone() if known is None else local - known)
        if _size(mesh, "copies") > 1:
            self._sum(news, mesh.get_group("copies"))
        for index, local, known, new in zip(indices, locals_, olds, news, strict=True):
            new.div_(divisor)
            local.copy_(new if known is None else known + new)
            grad = self.parameters[index].grad
            assert grad is not None
            self._done[index] = (grad, local.clone())

    def _sum(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        """Sum each over ``group``; small ones travel together."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.nbytes > _SMALL:
                self._all_reduce(tensor, group)
            elif tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            self._all_reduce(flat, group)
            for tensor, total in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        world_size = dist.get_world_size(group)
        with self._ledger.timed(
            "all_reduce", "experts", "wire", full_bytes=tensor.nbytes, world_size=world_size
        ):
            dist.all_reduce(tensor, group=group)


def _bundles(divided: Sequence[_Divided]) -> Iterator[list[_Divided]]:
    """Those that travel together, in the same order on every rank."""
    by_kind: dict[tuple[object, ...], list[_Divided]] = {}
    for one in divided:
        if one.rows.numel():
            by_kind.setdefault(one.kind, []).append(one)
    for alike in by_kind.values():
        bundle, size = [], 0
        for one in alike:
            bundle.append(one)
            size += one.rows.nbytes
            if size >= _TOGETHER:
                yield bundle
                bundle, size = [], 0
        if bundle:
            yield bundle


def _size(mesh: DeviceMesh, axis: str) -> int:
    assert mesh.mesh_dim_names is not None
    return mesh.size(mesh.mesh_dim_names.index(axis))


def pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    """``tensor`` with zeros behind it along ``dim``, up to ``length``."""
    if tensor.size(dim) == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length - tensor.size(dim)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def reduce_scalars(parameters: list[nn.Parameter], divisor: float, group: dist.ProcessGroup) -> None:
    """Add up the gradients of whole 0-dim parameters over ``group`` and divide them; collective."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = [torch.zeros(()) if p.grad is None else p.grad.float() for p in trained]
    flat = torch.stack([grad.reshape(()) for grad in present])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    for parameter, value in zip(trained, (flat / divisor).unbind(), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(value)
