"""Kernels for inference on CPUs, made at load by LLVM (the optional package ``llvmlite``; no compiler).

``missing`` tells whether they can be used; the rest of this module may be called only where they can.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or importlib.util.find_spec("llvmlite") is not None:
    from thalweg.ops.native.kept import BLOCK, CACHES, STRIPE, Heads
    from thalweg.ops.native.layout import Call, Kernels, Rows, lay, row_buffer
    from thalweg.ops.native.panels import FORMATS, pack, pack_blocks, packed_sizes, padded
    from thalweg.ops.native.tape import Tape, runnable

    _FOUND = True
else:
    BLOCK, STRIPE, CACHES, FORMATS, _FOUND = 16, 16, {}, {}, False

__all__ = [
    "BLOCK", "CACHES", "FORMATS", "STRIPE", "Call", "Heads", "Kernels", "Rows", "Tape", "lay", "missing",
    "pack", "pack_blocks", "packed_sizes", "padded", "row_buffer",
]  # fmt: skip


@cache
def missing(form: str) -> str:
    """Return what keeps weights of this form from the native kernels here, or an empty text."""
    if not _FOUND:
        return "llvmlite is not installed (pip install llvmlite)"
    from thalweg.ops.native.ir import host_features

    wanted: Any = {"avx512f", "avx512bw", "avx512vl", FORMATS[form].feature}
    lacking = wanted - host_features()
    if lacking:
        return f"this processor lacks {', '.join(sorted(lacking))}"
    return "" if runnable() else "torch was not built with the OpenMP runtime of GCC"
