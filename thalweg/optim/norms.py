"""The norm of all gradients, once and the same everywhere.

    pieces     the local gradient tensors of this rank
    buckets    pieces with the same shard groups (see ``dtensor_local.py``): one partial sum of squares each, in fp64
    total      the buckets completed over their groups and added up: the same bits on every rank

The engine decides by this norm whether a step is skipped, so two things must hold. A gradient that is not
finite anywhere makes the norm non-finite everywhere (a sum of squares keeps inf and NaN). And a finite
gradient never does: squares of fp32 values above 1.8e19 overflow fp32, so a sum that comes out as inf is done
again in fp64 before anyone believes it.

Accuracy: torch's fp32 norm on a CPU adds up in fp32 along the whole tensor and is off by 6e-5 for 3 M
elements and by 2.6e-3 for 38 M. Taken over rows of 4,096 and added up in fp64 it takes the same time and is
off by 1e-9, so that a clipped run does not depend on how its gradients are cut. What fills no two rows is taken in
fp64: of a few elements fp32 is off by 3e-8. An accelerator's kernel for lists of tensors adds up in fp64 as it reads:
nothing is widened in memory, nothing overflows, and the host need not look.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.device import widest_float
from thalweg.optim import dtensor_local, foreach
from thalweg.utils.dtypes import HALF_DTYPES

ROW_LENGTH = 4096
# (norms of full rows, what is left over): what a sum of squares needs to know of a tensor.
RowNorms: TypeAlias = tuple[list[Tensor], list[Tensor]]
NumberT = TypeVar("NumberT", float, Tensor)
# Elements of a 16-bit tensor that are widened at a time.
_UPCAST_ELEMENTS = 1 << 20
# Below this, squares of fp32 values are denormal and the sum is no longer accurate.
_MIN_ACCURATE_SUM = 1e-30


@dataclass(frozen=True)
class PartialNorm:
    """What a piece that is no longer at hand adds to a 2-norm: the sum of squares takes it in its place and
    comes to the same bits.  ``exact_norm``: its fp64 norm, where fp32 norms of rows cannot be trusted."""

    row_norms: RowNorms
    exact_norm: Tensor | None

    @property
    def device(self) -> torch.device:
        """Where the norms are."""
        return (*self.row_norms[0], *self.row_norms[1])[0].device

    @property
    def is_finite(self) -> bool:
        """Whether every element of the piece was finite."""
        return self.exact_norm is None or bool(self.exact_norm.isfinite())

    def norm(self) -> Tensor:
        """The piece's norm, 0-dim fp64."""
        return _fast_square_sum([self], compute_row_norms).sqrt() if self.exact_norm is None else self.exact_norm


NormInput: TypeAlias = Tensor | PartialNorm
PartialNorms: TypeAlias = Mapping[Tensor, PartialNorm] | None  # by parameter, of gradients that have left


def compute_partial_norm(piece: Tensor) -> PartialNorm:
    """Take the norms of ``piece`` before it goes."""
    full, rest = compute_row_norms(piece)
    partial_norm = PartialNorm((full, [tensor.clone() for tensor in rest]), None)
    total = _fast_square_sum([partial_norm], compute_row_norms)
    if total.isfinite() and total >= _MIN_ACCURATE_SUM:
        return partial_norm
    return PartialNorm(partial_norm.row_norms, _exact_norm(piece))


def square_sums(pieces: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each piece, in the widest dtype of their device: shape [len(pieces)].

    On the host if one is there: of offloaded states a parameter of 0 dims stays on the device.
    """
    if all(piece.device.type != "cpu" for piece in pieces):
        return _wide_norms(pieces).square()
    return torch.stack([_fast_square_sum([piece.cpu()], compute_row_norms) for piece in pieces])


def _accurate_square_sum(pieces: Sequence[NormInput], row_norms_fn: Callable[[Tensor], RowNorms]) -> Tensor:
    """The sum of squares of pieces on one device, 0-dim fp64; a NaN gives NaN."""
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if len(tensors) == len(pieces) and tensors[0].device.type != "cpu":
        return square_sums(tensors).sum()
    total = _fast_square_sum(pieces, row_norms_fn)
    if total.isfinite() and total >= _MIN_ACCURATE_SUM:
        return total
    norms = [_exact_norm(piece) if isinstance(piece, Tensor) else piece.norm() for piece in pieces]
    return torch.stack(norms).pow(2.0).sum()


def _exact_norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64)


def _fast_square_sum(pieces: Sequence[NormInput], row_norms_fn: Callable[[Tensor], RowNorms]) -> Tensor:
    """Sum of squares by fp32 norms of short rows, added up in fp64."""
    small, norms = [], []
    for piece in pieces:
        full, rest = row_norms_fn(piece) if isinstance(piece, Tensor) else piece.row_norms
        norms += full
        small += rest
    # An empty piece adds nothing, but in the order of the sum.
    small = [rest for rest in small if rest.numel()] or small[: not norms]
    if small:
        norms.append(_wide_norms(small))
    return torch.cat(norms).double().square().sum()


def _wide_norms(pieces: Sequence[Tensor]) -> Tensor:
    """The norm of each piece, added up in the device's widest dtype: shape [len(pieces)]; all on one device."""
    real = [torch.view_as_real(piece.resolve_conj()) if piece.is_complex() else piece for piece in pieces]
    return torch.stack(foreach.norm(real, 2, widest_float(real[0].device)))


def compute_row_norms(piece: Tensor) -> RowNorms:
    """Return (norms of full rows of ``ROW_LENGTH`` elements, what is left over); on the CPU."""
    flat = piece.reshape(-1)  # the order of a sum hangs on the shape
    if piece.numel() < 2 * ROW_LENGTH:
        return [], [dtensor_local.upcast_half(flat)]
    full_size = flat.numel() // ROW_LENGTH * ROW_LENGTH
    rest = flat[full_size:]
    return full_row_norms(flat[:full_size]), [dtensor_local.upcast_half(rest)] if rest.numel() else []


def full_row_norms(flat: Tensor) -> list[Tensor]:
    """Return the norms of the rows of a 1-D CPU tensor whose size is a multiple of ``ROW_LENGTH``; 16-bit numbers
    are widened a part at a time."""
    if flat.dtype not in HALF_DTYPES:
        return [torch.linalg.vector_norm(flat.view(-1, ROW_LENGTH), dim=1)]
    return [
        torch.linalg.vector_norm(elements.float().view(-1, ROW_LENGTH), dim=1)
        for elements in flat.split(_UPCAST_ELEMENTS)
    ]


@torch.no_grad()
def global_grad_norm(
    params: Iterable[Tensor],
    *,
    replicate_group: dist.ProcessGroup | None = None,
    row_norms_fn: Callable[[Tensor], RowNorms] | None = None,
    partial_norms: PartialNorms = None,
) -> Tensor:
    """Return the 2-norm over all gradients of ``params`` as a 0-dim fp64 tensor, bit-equal on all ranks.

    A device without fp64 gives fp32, where a norm above 1e19 is inf.

    ``params`` may mix ``DTensor`` s of any mesh and placement with plain, replicated tensors; those without
    a gradient count as zero. All ranks must pass the same parameters in the same order, also where some of
    their gradients are None. There is one all-reduce for each group that any parameter is sharded over.

    ``replicate_group``: the ranks that hold the plain parameters as copies; if given, a
    non-finite value in any one copy is noticed by all, and rank 0's copy decides the value.
    ``row_norms_fn(piece)`` replaces :func:`compute_row_norms` where parts of a norm are
    known already; it must give the same.
    ``partial_norms``: parameters whose gradients have left, with what they add to the norm.

    The result is inf or NaN exactly if some gradient is (fp64 gradients: also if the norm exceeds 1e154).
    """
    params, partial_norms = list(params), partial_norms or {}
    buckets: dict[tuple[dtensor_local.ShardGroups, bool], dict[torch.device, list[NormInput]]] = {}
    for param, shard_groups in zip(params, dtensor_local.get_shard_groups(params), strict=True):
        is_replicated = replicate_group is not None and not isinstance(param, DTensor)
        by_device = buckets.setdefault((shard_groups, is_replicated), {})
        piece = partial_norms.get(param)
        if piece is None and param.grad is not None and (grad := dtensor_local.local_grad(param)).numel():
            piece = grad
        if piece is not None:
            by_device.setdefault(piece.device, []).append(piece)
    device = dtensor_local.to_local(params[0]).device if params else torch.device("cpu")
    rows = torch.zeros(max(1, len(buckets)), dtype=widest_float(device), device=device)
    reduce_groups = []
    for row, ((shard_groups, is_replicated), by_device) in zip(rows, buckets.items(), strict=False):
        for pieces in by_device.values():
            row.add_(_accurate_square_sum(pieces, row_norms_fn or compute_row_norms).to(device))
        if is_replicated and replicate_group is not None:
            shard_groups = (replicate_group,)
            if dist.get_rank(replicate_group) > 0:  # one copy counts, the others only if they are not finite
                row.copy_(torch.where(row.isfinite(), torch.zeros_like(row), row))
        reduce_groups.append(shard_groups)
    dtensor_local.all_reduce_tensors_(rows.unbind()[: len(reduce_groups)], reduce_groups)
    return rows.sum() ** 0.5


def clip_factor(norm: NumberT, max_norm: float) -> NumberT:
    """``max_norm / (norm + 1e-6)`` if that is below 1, else 1: the scale of gradients of that norm, a float or a 0-dim
    tensor."""
    factor: Any = max_norm / (norm + 1e-6)
    at_most_1: Any = factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)
    return at_most_1
