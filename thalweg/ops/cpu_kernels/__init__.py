"""Kernels for inference on CPUs, made at load by LLVM (the optional package ``llvmlite``; no compiler).

``unsupported_reason`` tells whether they can be used; the rest of this module may be called only where they can.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("llvmlite") is not None:
    from thalweg.ops.cpu_kernels.assembler import ActivationBuffer, Instruction, KernelSet, allocate_rows, build_program
    from thalweg.ops.cpu_kernels.isa import ISAS, SELECT_ISA, Isa, select_isa, supported_isas
    from thalweg.ops.cpu_kernels.kv_layout import BLOCK_SIZE, BLOCKS_PER_STRIPE, KV_DTYPE_BYTES, AttentionShape
    from thalweg.ops.cpu_kernels.packing import (
        WEIGHT_FORMATS,
        PackingBuffer,
        iter_packed_blocks,
        packed_nbytes,
        round_up,
    )
    from thalweg.ops.cpu_kernels.program import MAX_THREADS, Program, ThreadTuner, openmp_available
    from thalweg.ops.cpu_kernels.shm_reduce import CACHE_LINE_BYTES

    _HAVE_LLVMLITE = True
else:
    BLOCK_SIZE, BLOCKS_PER_STRIPE, ISAS, KV_DTYPE_BYTES, WEIGHT_FORMATS, _HAVE_LLVMLITE = 16, 16, {}, {}, {}, False
    CACHE_LINE_BYTES, supported_isas = 128, list

__all__ = [
    "BLOCKS_PER_STRIPE", "BLOCK_SIZE", "CACHE_LINE_BYTES", "ISAS", "KV_DTYPE_BYTES", "MAX_THREADS", "WEIGHT_FORMATS",
    "ActivationBuffer", "AttentionShape", "Instruction", "Isa", "KernelSet", "PackingBuffer", "Program", "ThreadTuner",
    "allocate_rows", "build_program", "host_isa", "iter_packed_blocks", "packed_nbytes", "round_up", "supported_isas",
    "unsupported_reason",
]  # fmt: skip


def unsupported_reason() -> str:
    """Return what keeps the CPU kernels from this machine, or an empty text."""
    if not _HAVE_LLVMLITE:
        return "llvmlite is not installed (pip install llvmlite)"
    if select_isa() is None:
        return f"this processor has none of {os.environ.get(SELECT_ISA) or ', '.join(ISAS)}"
    return "" if openmp_available() else "torch was not built with the OpenMP runtime of GCC"


def host_isa() -> Isa | None:
    """Return the instruction set of the kernels here, or None where :func:`unsupported_reason` tells why."""
    return None if unsupported_reason() else select_isa()
