"""Adam, AdamW and Lion whose moments are kept in bf16 or 8 bits (see ``moment_codec.py``).

A step goes through the parameters in chunks that fit the cache:

    read the chunk's moments into fp32 -> the optimiser's own fp32 kernel -> round and store

so that the moments are never wide in memory, and 16-bit weights and gradients are widened for a chunk alone.
Chunks are whole rows where there are blocks, which do not cross rows; a result does not depend on chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.optim import foreach
from thalweg.optim.algorithms.fused_adam import AbstractAdam, fused_adam_step
from thalweg.optim.algorithms.lion import check_hyperparameters, evaluate_closure
from thalweg.optim.algorithms.moment_codec import (
    ADAM_MOMENTS,
    SCALE_SUFFIX,
    MomentSpec,
    check_state_dtype,
    convert_moments,
    dequantize_moment,
    get_stored_dtype,
    hash_noise,
    quantize_moment,
    row_length,
    stochastic_round_into,
    zeros_moment,
)
from thalweg.optim.dtensor_local import ExactStateDtypeMixin, local_grad, to_local
from thalweg.utils.dtypes import HALF_DTYPES

CHUNK_ELEMENTS = 1 << 18


@dataclass
class _DecodedChunk:
    """Flat fp32 tensors of one chunk, and what must be stored when they have changed."""

    param: Tensor
    grad: Tensor
    moments: list[Tensor]
    store: Callable[[], None]


class _LowBitOptimizer(ExactStateDtypeMixin, torch.optim.Optimizer):
    """What the three have in common.  State: each moment, in int8 ``<moment>_scale`` too, and ``step``."""

    moments: tuple[MomentSpec, ...] = ADAM_MOMENTS

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss if one is given."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(group, param)
        return loss

    def _step_param(self, group: dict[str, Any], param: Tensor) -> None:
        state = self.state[param]
        for moment in self.moments:
            if moment.key not in state:
                state |= zeros_moment(param, moment, group["state_dtype"])
        convert_moments(param, state, group["state_dtype"], self.moments)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        count = int(state["step"])
        for chunk in _iter_chunks(param, state, self.moments, group["state_dtype"], count):
            self._update(group, chunk, count)
            chunk.store()

    def _update(self, group: dict[str, Any], chunk: _DecodedChunk, count: int) -> None:
        raise NotImplementedError


class LowBitAdam(_LowBitOptimizer, AbstractAdam):
    """Adam (decoupled decay: AdamW) with ``exp_avg`` and ``exp_avg_sq`` in ``state_dtype``.

    Computes what torch's fused Adam computes, on fp32 read from the stored moments; ``state_dtype="fp32"``
    gives its bits.
    """

    def __init__(self, params: Any, *options: Any, state_dtype: str = "int8", **hyper: Any) -> None:
        check_state_dtype("Adam", state_dtype)
        super().__init__(params, *options, **hyper)
        self.defaults["state_dtype"] = state_dtype
        for group in self.param_groups:
            group.setdefault("state_dtype", state_dtype)

    def _update(self, group: dict[str, Any], chunk: _DecodedChunk, count: int) -> None:
        exp_avg, exp_avg_sq = chunk.moments
        fused_adam_step(group, chunk.param, chunk.grad, exp_avg, exp_avg_sq, float(count - 1))


class LowBitLion(_LowBitOptimizer):
    """Lion (see ``lion.py``) with ``exp_avg`` in ``state_dtype``."""

    moments = ADAM_MOMENTS[:1]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        state_dtype: str = "int8",
    ) -> None:
        check_hyperparameters("Lion", lr, betas, weight_decay)
        check_state_dtype("Lion", state_dtype)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "state_dtype": state_dtype})

    def _update(self, group: dict[str, Any], chunk: _DecodedChunk, count: int) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        update = foreach.lerp(chunk.moments, [chunk.grad], 1 - beta1)
        foreach.sign_(update)
        if group["weight_decay"]:
            chunk.param.mul_(1 - lr * group["weight_decay"])
        chunk.param.add_(update[0], alpha=-lr)
        foreach.lerp_(chunk.moments, [chunk.grad], 1 - beta2)


def _iter_chunks(
    param: Tensor, state: dict[str, Any], moments: tuple[MomentSpec, ...], dtype_name: str, count: int
) -> Iterator[_DecodedChunk]:
    """The chunks of this rank's piece, in order; each must be finished before the next is taken."""
    piece, grad = to_local(param), local_grad(param)
    if piece.numel() == 0:
        return
    stored_dtype = get_stored_dtype(param, dtype_name)
    contiguous = piece.contiguous()
    flat, flat_grad = contiguous.view(-1), grad.reshape(-1)
    row = row_length(param) if stored_dtype == "int8" else 1
    size = max(row, CHUNK_ELEMENTS // row * row)
    stored = [to_local(state[m.key]) for m in moments]
    stored = [t.view(-1) if t.is_contiguous() else t.contiguous().view(-1) for t in stored]
    scales = [to_local(state[m.key + SCALE_SUFFIX]) if stored_dtype == "int8" else None for m in moments]
    for start in range(0, flat.numel(), size):
        elements = slice(start, start + size)
        rows = slice(start // row, (start + size) // row)
        yield _decode_chunk(
            flat[elements],
            flat_grad[elements],
            [t[elements] for t in stored],
            [None if s is None else s[rows] for s in scales],
            moments,
            count,
        )
    if contiguous is not piece:
        piece.copy_(contiguous)
    for moment, t in zip(moments, stored, strict=True):
        if t.data_ptr() != to_local(state[moment.key]).data_ptr():
            to_local(state[moment.key]).copy_(t.view(piece.shape))


def _decode_chunk(
    param: Tensor,
    grad: Tensor,
    stored: list[Tensor],
    scales: list[Tensor | None],
    moments: tuple[MomentSpec, ...],
    count: int,
) -> _DecodedChunk:
    work = param.float() if param.dtype in HALF_DTYPES else param
    wide_grad = grad.to(work.dtype)
    bf16 = stored[0].dtype == torch.bfloat16
    noise = hash_noise(wide_grad, work, count) if bf16 else None
    wide: list[Tensor] = []
    for stored_moment, scale, moment in zip(stored, scales, moments, strict=True):
        if scale is not None:
            out = torch.empty(stored_moment.shape, dtype=torch.float32, device=stored_moment.device)
            rows = scale.shape[0]
            dequantize_moment(stored_moment.view(rows, -1), scale, moment.signed, out.view(rows, -1))
            wide.append(out)
        else:
            wide.append(stored_moment.float() if bf16 else stored_moment)

    def store() -> None:
        bits = noise
        for stored_moment, scale, moment, updated in zip(stored, scales, moments, wide, strict=True):
            if scale is not None:
                rows = scale.shape[0]
                quantize_moment(updated.view(rows, -1), stored_moment.view(rows, -1), scale, moment.signed)
            elif bits is not None:
                stochastic_round_into(updated, stored_moment, bits)
                bits = bits.bitwise_left_shift(16)  # the lower half serves the second moment
        if work is not param:
            param.copy_(work)

    return _DecodedChunk(work, wide_grad, wide, store)
