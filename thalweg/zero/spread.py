"""Parameters that stay out of ZeRO's units: scalars, and what is spread over ranks before sharding.

FSDP2 cannot shard a scalar, and experts must not be gathered, so that no rank waits for another's
tokens.  A spread parameter (a stack of experts) is a DTensor on a mesh with the axes "ep", rows along
it, and "copies": the data ranks that have the same rows.  Modules compute with another tensor, this
rank's rows of it:

    phase           parameter (what users, optimisers and checkpoints see)     rows (what modules use)
    first forward                                                              gathered, if divided
    backward                                                                   collect gradients
    end of window   .grad: the mean over all data ranks                        without gradients
    update          new values                                                 stale, if divided

Where ZeRO divides states (stages 1 to 3) a parameter is *divided*: each copy keeps and updates a part of
the rows alone, its gradient ends in a reduce-scatter over the copies, and the rows are memory of their
own.  One that is frozen, or has no dim to divide, is whole on every copy: parameter and rows are the
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

from thalweg.comm import Ledger
from thalweg.comm.plain import PlainAllGather, Swap

_TOGETHER = 32 << 20  # bytes of rows that travel together
_SMALL = 1 << 18  # bytes of a gradient that is added up with others
_AXES = ("ep", "copies")


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter of a model that is not sharded yet lies on ranks of its own."""
    return isinstance(parameter, DTensor)


@dataclass(eq=False)
class _Spread:
    """A parameter and this rank's ``rows`` of it."""

    parameter: nn.Parameter
    rows: Tensor
    mesh: DeviceMesh

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Spread:
        """One that is whole on each copy."""
        assert isinstance(parameter, DTensor)
        rows = parameter._local_tensor.detach().requires_grad_(parameter.requires_grad)
        return cls(parameter, rows, parameter.device_mesh)

    @property
    def number(self) -> int:
        """Copies there are."""
        return _size(self.mesh, "copies")

    def take_grad(self, own: Tensor) -> None:
        """Add ``own``, of the parameter's local shape, to its gradient."""
        grad, parameter = self.parameter.grad, self.parameter
        if grad is not None:
            assert isinstance(grad, DTensor)
            grad._local_tensor.add_(own)
            return
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(
            own.contiguous(),
            self.mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@dataclass(eq=False)
class _Divided(_Spread):
    """One of which each copy keeps a part along ``dim``."""

    part: Tensor  # the parameter's local tensor
    dim: int
    version: int = -1  # of the part that the rows were gathered from

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Divided | _Spread:
        """Divide ``parameter``, whole on each copy until now, along its longest dim, if one is left."""
        assert isinstance(parameter, DTensor)
        mesh, rows = parameter.device_mesh, parameter._local_tensor.detach()
        number = _size(mesh, "copies")
        *before, last = parameter.placements
        cut = {placement.dim for placement in before if isinstance(placement, Shard)}
        dims = [d for d in range(rows.ndim) if d not in cut and rows.size(d) >= number]
        if number == 1 or not parameter.requires_grad or not last.is_replicate() or not dims:
            return _Spread.of(parameter)
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
        return cls(divided, rows.requires_grad_(), mesh, divided._local_tensor, dim)

    @property
    def is_stale(self) -> bool:
        """Whether the rows may be older than the parts."""
        return self.version != self.part._version

    def padded_shape(self) -> torch.Size:
        """That of the longest part."""
        shape = list(self.rows.shape)
        shape[self.dim] = -(-shape[self.dim] // self.number)
        return torch.Size(shape)

    def flat_part(self) -> Tensor:
        """The part as the others receive it."""
        return _padded(self.part, self.dim, self.padded_shape()[self.dim]).reshape(-1)

    def take_rows(self, parts: Tensor) -> None:
        """Put together what :meth:`flat_part` gave on each copy, (copies, elements)."""
        whole = parts.unflatten(1, self.padded_shape()).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        self.rows.detach().copy_(whole.narrow(self.dim, 0, self.rows.size(self.dim)))
        self.version = self.part._version

    def flat_grads(self) -> Tensor:
        """The rows' gradient by the copy that each part belongs to, (copies, elements); taken away."""
        length = self.padded_shape()[self.dim]
        grad, self.rows.grad = self.rows.grad, None
        grad = torch.zeros_like(self.rows) if grad is None else grad
        parts = _padded(grad, self.dim, self.number * length).unflatten(self.dim, (self.number, length))
        return parts.movedim(self.dim, 0).reshape(self.number, -1)

    def take_mean(self, flat: Tensor) -> None:
        """Add this rank's part of a gradient."""
        own = flat.view(self.padded_shape()).narrow(self.dim, 0, self.part.size(self.dim))
        self.take_grad(own.clone(memory_format=torch.contiguous_format))


class SpreadParameters:
    """The spread parameters of ``model``, which are divided among their copies if ``divide``.

    Dividing exchanges the modules' parameters for others.
    """

    def __init__(self, model: nn.Module, ledger: Ledger, divide: bool) -> None:
        self._ledger = ledger
        kind = _Divided if divide else _Spread
        found: dict[int, _Spread] = {}  # by the parameter as it was
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and is_spread(parameter):
                    one = found.get(id(parameter)) or kind.of(parameter)
                    found[id(parameter)] = one
                    module._parameters[key] = one.parameter
        self._all = list(found.values())
        self._by_id = {id(one.parameter): one for one in self._all}
        self._divided = [one for one in self._all if isinstance(one, _Divided)]

    # Forward

    def rows_of(self, parameter: Tensor) -> Tensor | None:
        """This rank's rows of a parameter, as :meth:`refresh` left them; None if it is no spread one."""
        one = self._by_id.get(id(parameter))
        if one is None:
            return None
        if one.rows.requires_grad != parameter.requires_grad:
            one.rows.requires_grad_(parameter.requires_grad)
        return one.rows

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather what has changed since the last time; collective over the copies."""
        for some in _bundles([one for one in self._divided if one.is_stale]):
            group = some[0].mesh.get_group("copies")
            sent = torch.cat([one.flat_part() for one in some])
            found = sent.new_empty(some[0].number, sent.numel())
            PlainAllGather("experts", self._ledger)(found.view(-1), sent, group)
            lengths = [one.padded_shape().numel() for one in some]
            for one, parts in zip(some, found.split(lengths, 1), strict=True):
                one.take_rows(parts)

    def changed(self) -> None:
        """Somebody may write parameters in a way that tensors do not count."""
        for one in self._divided:
            one.version = -1

    # Gradients

    def drop(self) -> None:
        """Forget gradients that are not reduced yet."""
        for one in self._all:
            one.rows.grad = None

    @torch.no_grad()
    def reduce(self, divisor: float) -> None:
        """Add up what has come since the last call over the copies and divide it; collective.

        A parameter that has a gradient on some rank of its mesh has one on all of them afterwards, and one
        that has none anywhere stays without, as in a plain run.
        """
        self.changed()  # an update comes, and not all of them count what they write
        by_mesh: dict[DeviceMesh, list[_Spread]] = {}
        for one in self._all:
            by_mesh.setdefault(one.mesh, []).append(one)
        for mesh, those in by_mesh.items():
            wanted = _wanted(mesh, those)
            self._add_up(mesh, [one for one in wanted if not isinstance(one, _Divided)], divisor)
            divided = [one for one in wanted if isinstance(one, _Divided)]
            for some in _bundles(divided):
                self._scatter(some, divisor)
            for one in divided:
                if not one.rows.numel():  # another rank's expert: its gradient is there, and empty
                    one.rows.grad = None
                    one.take_grad(torch.zeros_like(one.part))

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
            one.take_mean(own)

    def _add_up(self, mesh: DeviceMesh, those: list[_Spread], divisor: float) -> None:
        grads = [torch.zeros_like(one.rows) if one.rows.grad is None else one.rows.grad for one in those]
        if _size(mesh, "copies") > 1:
            self._sum(grads, mesh.get_group("copies"))
        for one, grad in zip(those, grads, strict=True):
            one.rows.grad = None
            one.take_grad(grad.div_(divisor))

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
        size = dist.get_world_size(group)
        with self._ledger.timed("all_reduce", "experts", "wire", full_bytes=tensor.nbytes, world_size=size):
            dist.all_reduce(tensor, group=group)


def _wanted(mesh: DeviceMesh, those: list[_Spread]) -> list[_Spread]:
    """Those that have a gradient on some rank of the mesh."""
    flags = torch.tensor([one.rows.grad is not None for one in those], device=mesh.device_type).byte()
    for axis in _AXES:
        if _size(mesh, axis) > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [one for one, flag in zip(those, flags.tolist(), strict=True) if flag]


def _bundles(divided: Sequence[_Divided]) -> Iterator[list[_Divided]]:
    """Those that travel together, in the same order on every rank."""
    by_kind: dict[tuple[DeviceMesh, torch.dtype], list[_Divided]] = {}
    for one in divided:
        if one.rows.numel():
            by_kind.setdefault((one.mesh, one.part.dtype), []).append(one)
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


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
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
