"""Adam, AdamW and Lion whose moments are kept in bf16 or 8 bits (see ``moment_codec.py``).

A step goes through the parameters in chunks that fit the cache (on an accelerator: that bound the memory):

    read the chunk's moments into fp32 -> the optimiser's own fp32 kernel -> round and store

so that the moments are never wide in memory, and 16-bit weights and gradients are widened for a chunk alone.
Chunks are whole rows where there are blocks, which do not cross rows; a result does not depend on chunks.
"""

from typing import Any

import torch
from torch import Tensor

from thalweg.optim.algorithms import moment_codec
from thalweg.optim.algorithms.fused_adam import AbstractAdam, fused_adam_step
from thalweg.optim.algorithms.lion import Lion, lion_step
from thalweg.optim.dtensor_local import StepMixin, local_grad, to_local, upcast_half

CHUNK_ELEMENTS = 1 << 18
# Some thirty launches a chunk, and some eight fp32 tensors of its size: 0.5 GiB.
ACCELERATOR_CHUNK_ELEMENTS = 1 << 24


class _LowBitOptimizer(StepMixin, torch.optim.Optimizer):
    """What the three have in common.  State: each moment, in int8 ``<moment>_scale`` too, and ``step``."""

    keeps_saved_dtype = True
    moments = moment_codec.ADAM_MOMENTS

    def __init__(self, params: Any, *options: Any, state_dtype: str = "int8", **hyper: Any) -> None:
        moment_codec.check_state_dtype(type(self).__name__.removeprefix("LowBit"), state_dtype)
        super().__init__(params, *options, **hyper)
        self.defaults["state_dtype"] = state_dtype
        for group in self.param_groups:
            group.setdefault("state_dtype", state_dtype)

    def _update_params(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(group, param)

    def _step_param(self, group: dict[str, Any], param: Tensor) -> None:
        state, dtype_name = self.state[param], group["state_dtype"]
        for moment in self.moments:
            if moment not in state:
                state |= moment_codec.zeros_moment(param, moment, dtype_name)
        moment_codec.convert_moments(param, state, dtype_name, self.moments)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        piece, count = to_local(param), int(state["step"])
        in_blocks = moment_codec.get_stored_dtype(param, dtype_name) == "int8"
        if piece.numel() == 0:
            return
        moments = [to_local(state[moment]) for moment in self.moments]
        scales = [to_local(state[moment + moment_codec.SCALE_SUFFIX]) if in_blocks else None for moment in self.moments]
        grad = local_grad(param).reshape(-1)
        contiguous = [tensor.contiguous() for tensor in (piece, *moments)]
        flat, *stored = (tensor.view(-1) for tensor in contiguous)
        row = moment_codec.row_length(param) if in_blocks else 1
        most = CHUNK_ELEMENTS if flat.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
        size = max(row, most // row * row)
        for start in range(0, flat.numel(), size):
            chunk, rows = slice(start, start + size), slice(start // row, (start + size) // row)
            codes_of = [tensor[chunk] for tensor in stored]
            scales_of = [None if scale is None else scale[rows] for scale in scales]
            # Widen, update and store.
            work = upcast_half(flat[chunk])
            chunk_grad = grad[chunk].to(work.dtype)
            in_bf16 = codes_of[0].dtype == torch.bfloat16
            noise = moment_codec.hash_noise(chunk_grad, work, count) if in_bf16 else None  # of the weights as they were
            wide: list[Tensor] = []
            for moment, codes, scale in zip(self.moments, codes_of, scales_of, strict=True):
                if scale is None:
                    wide.append(codes.float() if in_bf16 else codes)
                else:
                    wide.append(torch.empty(codes.shape, dtype=torch.float32, device=codes.device))
                    moment_codec.dequantize_moment(codes, scale, moment_codec.is_signed(moment), wide[-1])
            self._update(group, work, chunk_grad, wide, count)
            for moment, codes, scale, updated in zip(self.moments, codes_of, scales_of, wide, strict=True):
                if scale is not None:
                    moment_codec.quantize_moment(updated, codes, scale, moment_codec.is_signed(moment))
                elif noise is not None:
                    moment_codec.stochastic_round_into(updated, codes, noise)
                    noise = noise.bitwise_left_shift(16)  # the lower half serves the second moment
            if work.dtype != flat.dtype:
                flat[chunk].copy_(work)
        for tensor, copy in zip((piece, *moments), contiguous, strict=True):
            if tensor is not copy:
                tensor.copy_(copy)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, moments: list[Tensor], count: int) -> None:
        raise NotImplementedError


class LowBitAdam(_LowBitOptimizer, AbstractAdam):
    """Adam (decoupled decay: AdamW) with ``exp_avg`` and ``exp_avg_sq`` in ``state_dtype``.

    Computes what torch's fused Adam computes, on fp32 read from the stored moments; ``state_dtype="fp32"``
    gives its bits.
    """

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, moments: list[Tensor], count: int) -> None:
        exp_avg, exp_avg_sq = moments
        fused_adam_step(group, param, grad, exp_avg, exp_avg_sq, float(count - 1))


class LowBitLion(_LowBitOptimizer, Lion):
    """Lion (see ``lion.py``) with ``exp_avg`` in ``state_dtype``."""

    moments = moment_codec.ADAM_MOMENTS[:1]

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, moments: list[Tensor], count: int) -> None:
        lion_step(group, [param], [grad], moments)
