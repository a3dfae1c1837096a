"""Means of gradients over sites in few numbers; what these leave out is added to the next gradient (error feedback).

One step for a gradient ``g_i`` of site ``i``, with ``e_i`` the error that it keeps, zero at first::

    m_i = g_i + e_i;    result = mean over sites of C[m_i];    e_i = m_i - C[m_i]

    PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2; m_i a matrix of n x m, rank r)
        P = mean of (m_i Q), orthogonalised;  Q_i = m_i^T P;  C[m_i] = P Q_i^T;  Q = mean of Q_i, from which the next
        step begins
        two all-reduces, of n r and of m r numbers for each matrix; what is no matrix goes along as it is
    top-k (Stich et al. 2018, arXiv 1809.07599, algorithm 1)
        C[m_i] has the k numbers of each tensor that are largest by magnitude, and zeros
        one all-gather, of k numbers and their k places for each tensor

Invariant: what was given and has not come out is what the errors hold: over any number of calls,
sum of mean(g_i) = sum of results + mean(e_i).  PowerSGD's error is what site ``i`` itself has left out,
``m_i - P Q_i^T``: no longer than ``m_i``, as ``P`` is orthonormal.  Against the mean ``Q`` the invariant would hold as
well, but errors would also keep by what sites differ, which never leaves them.

``P`` is orthogonalised by Householder reflections: columns that are zero, or equal up to rounding, as those of a
gradient of few samples are, still become orthonormal, where the paper's Gram-Schmidt makes two of one direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thalweg.comm.collectives.wire import SiteExchange


@dataclass(frozen=True)
class PowerSGDAllReduce:
    """Matrices as products of ``rank`` columns and rows; see the head of this file."""

    exchange: SiteExchange
    rank: int

    def compresses(self, num_rows: int, num_columns: int) -> bool:
        """Whether a matrix is sent in fewer numbers than it has."""
        return self.rank * (num_rows + num_columns) < num_rows * num_columns

    @torch.no_grad()
    def __call__(self, grads: Sequence[Tensor], states: Sequence[dict[str, Tensor]], plain: Sequence[Tensor]) -> None:
        """Replace ``grads`` and ``plain`` (fp32, contiguous) by their means over sites, the latter exactly; collective.

        ``states``, one for each of ``grads``, are kept from step to step: ``error``, shaped as the gradient, whose
        first dim is the matrix's rows, and ``q`` (columns, rank).
        """
        matrices = [grad.view(len(grad), prod(grad.shape[1:])) for grad in grads]
        for matrix, state in zip(matrices, states, strict=True):
            matrix.add_(_get_error(state, matrix))
            if "q" not in state or state["q"].shape != (matrix.shape[1], self.rank):
                generator = torch.Generator().manual_seed(0)  # the same at all sites
                state["q"] = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)
        ps = [matrix @ state["q"] for matrix, state in zip(matrices, states, strict=True)]
        self.exchange.mean_([*ps, *plain], "gradients", "powersgd")
        ps = [torch.linalg.qr(p).Q for p in ps]
        # Fewer rows than the rank (an uneven shard's) have as many directions; the others are zero.
        ps = [torch.nn.functional.pad(p, (0, self.rank - p.shape[1])) for p in ps]
        qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        for matrix, state, p, q in zip(matrices, states, ps, qs, strict=True):
            torch.addmm(matrix, p, q.T, alpha=-1, out=_get_error(state, matrix))
        self.exchange.mean_(qs, "gradients", "powersgd")
        for matrix, state, p, q in zip(matrices, states, ps, qs, strict=True):
            state["q"] = q
            torch.mm(p, q.T, out=matrix)


@dataclass(frozen=True)
class TopKAllReduce:
    """Of each tensor the share ``ratio`` of its numbers, at least one; see the head of this file."""

    exchange: SiteExchange
    ratio: float

    def compresses(self, num_rows: int, num_columns: int) -> bool:
        """Whether a tensor is sent in part: every one is."""
        return True

    @torch.no_grad()
    def __call__(self, grads: Sequence[Tensor], states: Sequence[dict[str, Tensor]], plain: Sequence[Tensor]) -> None:
        """As :class:`PowerSGDAllReduce`, without ``q``."""
        self.exchange.mean_(plain, "gradients")
        flats = [grad.view(-1) for grad in grads]
        places, values = [], []
        for flat, state in zip(flats, states, strict=True):
            error = _get_error(state, flat)
            error.add_(flat)
            count = min(flat.numel(), max(1, round(self.ratio * flat.numel())))
            # In one order, as ranks of a site that have the same numbers send a part of one message each.
            places.append(error.abs().topk(count, sorted=False).indices.sort().values)
            values.append(error[places[-1]])
            error[places[-1]] = 0.0
            flat.zero_()
        # One message: the bits of the numbers, then their places, which count within a tensor and so fit 32 bits.
        message = torch.cat([torch.cat(values).view(torch.int32), torch.cat(places).int()])
        counts = [len(place) for place in places]
        for row in self.exchange.gather(message, "gradients", "topk"):
            sent, at = row.view(2, -1).unbind()
            for flat, numbers, place in zip(
                flats, sent.view(torch.float32).split(counts), at.split(counts), strict=True
            ):
                flat.index_add_(0, place.long(), numbers, alpha=1 / self.exchange.num_sites)


def _get_error(state: dict[str, Tensor], like: Tensor) -> Tensor:
    """The error of ``state``, zero at first, in the shape of ``like``."""
    if "error" not in state:
        state["error"] = torch.zeros_like(like)
    return state["error"].view_as(like)
