"""Kernels for inference on CPUs, made at load by LLVM (the optional package ``llvmlite``; no compiler).

``unsupported_reason`` tells whether they can be used; the rest of this module may be called only where they can.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or importlib.util.find_spec("llvmlite") is not None:
    from thalweg.ops.cpu_kernels.assembler import ActivationBuffer, Instruction, KernelSet, allocate_rows, build_program
    from thalweg.ops.cpu_kernels.kv_layout import BLOCK_SIZE, BLOCKS_PER_STRIPE, KV_DTYPE_BYTES, AttentionShape
    from thalweg.ops.cpu_kernels.packing import WEIGHT_FORMATS, iter_packed_blocks, packed_nbytes, round_up
    from thalweg.ops.cpu_kernels.program import MAX_THREADS, Program, ThreadTuner, openmp_available

    _HAVE_LLVMLITE = True
else:
    BLOCK_SIZE, BLOCKS_PER_STRIPE, KV_DTYPE_BYTES, WEIGHT_FORMATS, _HAVE_LLVMLITE = 16, 16, {}, {}, False

__all__ = [
    "BLOCKS_PER_STRIPE", "BLOCK_SIZE", "KV_DTYPE_BYTES", "MAX_THREADS", "WEIGHT_FORMATS", "ActivationBuffer",
    "AttentionShape", "Instruction", "KernelSet", "Program", "ThreadTuner", "allocate_rows", "build_program",
    "iter_packed_blocks", "packed_nbytes", "round_up", "unsupported_reason",
]  # fmt: skip


@cache
def unsupported_reason(weight_format: str) -> str:
    """Return what keeps weights of this format from the CPU kernels here, or an empty text."""
    if not _HAVE_LLVMLITE:
        return "llvmlite is not installed (pip install llvmlite)"
    from thalweg.ops.cpu_kernels.kernel_builder import host_cpu_features

    required: Any = {"avx512f", "avx512bw", "avx512vl", WEIGHT_FORMATS[weight_format].cpu_feature}
    missing_features = required - host_cpu_features()
    if missing_features:
        return f"this processor lacks {', '.join(sorted(missing_features))}"
    return "" if openmp_available() else "torch was not built with the OpenMP runtime of GCC"
