"""Norms of tensors as sums of powers in fp64, fast and without overflow (see ``clip.py`` for why)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from thalweg.optim import foreach
from thalweg.utils.dtypes import HALF_DTYPES

ROW_LENGTH = 4096
# (norms of full rows, what is left over): what a sum of squares needs to know of a tensor.
RowNorms: TypeAlias = tuple[list[Tensor], list[Tensor]]
# Elements of a 16-bit tensor that are widened at a time.
_UPCAST_ELEMENTS = 1 << 20
# Below this, squares of fp32 values are denormal and the sum is no longer accurate.
_MIN_ACCURATE_SUM = 1e-30


@dataclass(frozen=True)
class PartialNorm:
    """What a piece that is no longer at hand adds to a 2-norm: :func:`power_sum` takes it in its place and
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

    def numel(self) -> int:
        """Never 0, as it stands for a piece that counts."""
        return 1


NormInput: TypeAlias = Tensor | PartialNorm


def compute_partial_norm(piece: Tensor) -> PartialNorm:
    """Take the norms of ``piece`` before it goes."""
    full, rest = compute_row_norms(piece)
    partial_norm = PartialNorm((full, [tensor.clone() for tensor in rest]), None)
    total = _fast_square_sum([partial_norm], compute_row_norms)
    if total.isfinite() and total >= _MIN_ACCURATE_SUM:
        return partial_norm
    return PartialNorm(partial_norm.row_norms, torch.linalg.vector_norm(piece, dtype=_accumulation_dtype(piece)))


def power_sum(
    pieces: Sequence[NormInput],
    norm_type: float,
    device: torch.device,
    row_norms_fn: Callable[[Tensor], RowNorms] | None = None,
) -> Tensor:
    """Return the sum of ``|x| ** norm_type`` (for ``inf``: the maximum of ``|x|``) over all pieces, 0-dim
    fp64.

    A NaN gives NaN, for ``inf`` it gives inf. Empty pieces count as nothing. ``row_norms_fn`` replaces
    :func:`compute_row_norms` for norms that are known already; it must give the same.
    """
    by_device: dict[torch.device, list[NormInput]] = {}
    for piece in pieces:
        if piece.numel():
            by_device.setdefault(piece.device, []).append(piece)
    if not by_device:
        return torch.zeros((), dtype=torch.float64, device=device)
    partial_sums = torch.stack(
        [
            _power_sum_on_device(group, norm_type, row_norms_fn or compute_row_norms).to(device)
            for group in by_device.values()
        ]
    )
    return partial_sums.max() if math.isinf(norm_type) else partial_sums.sum()


def square_sums(pieces: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each piece, fp64 of shape [len(pieces)]; all on one device."""
    sums = []
    for piece in pieces:
        full, rest = compute_row_norms(piece)
        norms = [*full, *(torch.linalg.vector_norm(r).reshape(1) for r in rest if r.numel())]
        sums.append(torch.cat(norms).double().square().sum() if norms else piece.new_zeros((), dtype=torch.float64))
    return torch.stack(sums)


def _power_sum_on_device(
    pieces: Sequence[NormInput], norm_type: float, row_norms_fn: Callable[[Tensor], RowNorms]
) -> Tensor:
    if math.isinf(norm_type):
        peak = torch.stack(foreach.norm(pieces, math.inf)).max().double()
        return peak.nan_to_num(nan=math.inf, posinf=math.inf)
    if norm_type == 2.0:
        total = _fast_square_sum(pieces, row_norms_fn)
        if total.isfinite() and total >= _MIN_ACCURATE_SUM:
            return total
    norms = [
        torch.linalg.vector_norm(piece, norm_type, dtype=_accumulation_dtype(piece))
        if isinstance(piece, Tensor)
        else piece.norm()
        for piece in pieces
    ]
    return torch.stack(norms).pow(norm_type).sum()


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _fast_square_sum(pieces: Sequence[NormInput], row_norms_fn: Callable[[Tensor], RowNorms]) -> Tensor:
    """Sum of squares by fp32 norms of short rows, added up in fp64."""
    small, norms = [], []
    for piece in pieces:
        full, rest = row_norms_fn(piece) if isinstance(piece, Tensor) else piece.row_norms
        norms += full
        small += rest
    if small:
        norms.append(torch.stack(foreach.norm(small)))
    return torch.cat(norms).double().square().sum()


def compute_row_norms(piece: Tensor) -> RowNorms:
    """Return (norms of full rows of ``ROW_LENGTH`` elements, what is left over); on a GPU nothing is cut."""
    if piece.device.type != "cpu" or not piece.is_contiguous() or piece.numel() < 2 * ROW_LENGTH:
        return [], [piece.float() if piece.dtype in HALF_DTYPES else piece]
    flat = piece.view(-1)
    full_size = flat.numel() // ROW_LENGTH * ROW_LENGTH
    rest = (
        [flat[full_size:].float() if piece.dtype in HALF_DTYPES else flat[full_size:]]
        if full_size < flat.numel()
        else []
    )
    return full_row_norms(flat[:full_size]), rest


def full_row_norms(flat: Tensor) -> list[Tensor]:
    """Return the norms of the rows of a 1-D CPU tensor whose size is a multiple of ``ROW_LENGTH``; 16-bit numbers
    are widened a part at a time."""
    if flat.dtype not in HALF_DTYPES:
        return [torch.linalg.vector_norm(flat.view(-1, ROW_LENGTH), dim=1)]
    return [
        torch.linalg.vector_norm(elements.float().view(-1, ROW_LENGTH), dim=1)
        for elements in flat.split(_UPCAST_ELEMENTS)
    ]
