"""What the options ask weights and activations to be, and the check that a description is right."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from thalweg.device import resolve_device
from thalweg.infer.config import EngineConfig
from thalweg.infer.models.spec import UnsupportedModelError
from thalweg.ops import cpu_kernels

NUM_PROBE_TOKENS = 13  # tokens of the check at load
_TOLERANCE = {torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def get_weight_format(options: EngineConfig) -> str:
    """Return what weights become: fp32, bf16, fp16, int8 or int4."""
    if options.quantization:
        return options.quantization
    if options.dtype != "auto":
        return options.dtype
    if resolve_device(options.device).type != "cpu":
        return "bf16"
    isa = cpu_kernels.host_isa()
    return "bf16" if isa is not None and isa.bf16_dot else "fp32"


def get_kv_cache_dtype(options: EngineConfig) -> str:
    """Return what keys and values are stored as: fp32, bf16, fp16, int8 or fp8."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    weight_format = get_weight_format(options)
    return weight_format if weight_format in ("fp32", "fp16") else "bf16"


def get_compute_dtype(options: EngineConfig) -> torch.dtype:
    """Return what torch operators compute in."""
    if options.quantization and resolve_device(options.device).type == "cpu":
        return torch.float32
    computed = options.dtype if options.quantization else get_weight_format(options)
    return {"fp32": torch.float32, "fp16": torch.float16}.get(computed, torch.bfloat16)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Have a live model in eval mode for a block, and each of its modules as it was after it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_logits_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, *, is_moe: bool = False) -> None:
    """Raise UnsupportedModelError unless a description gives the logits that the model in ``dtype`` gave.

    ``is_moe``: its tokens go to some of many experts.
    """
    # Of each token's numbers the mean error: the largest of a deep model's many in bf16 says little.
    rows = (actual - expected).square().mean(1).sqrt()
    # In few bits a token or two may go to other experts, where routers are undecided: the middle one counts.
    worst = rows.median() if is_moe and dtype != torch.float32 else rows.max()
    error = (worst / expected.std().clamp(min=1e-6)).item()
    if not error < _TOLERANCE.get(dtype, 5e-2):
        raise UnsupportedModelError(f"our description's logits are off by {error:.2g} standard deviations")
