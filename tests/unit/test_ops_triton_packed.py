"""Triton's product for packed weights, by Triton's interpreter; `tests/gpu/test_packed_cuda.py` compiles it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from thalweg.ops.linear import packed


def _mend_interpreter() -> None:
    """Two things of the interpreter (3.6), none of the compiler: a bound of a loop with a newer numpy, and bf16.

    It has bf16 as 16 bits of an integer, which its products and its casts from int8 take for a number.
    """
    tl, interpreter = (pytest.importorskip(name) for name in ("triton.language", "triton.runtime.interpreter"))
    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def cast_from(self: Any, value: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and value.dtype.scalar.is_int():
            bits = value.data.astype(np.float32).view(np.uint32) >> 16  # exact for 8 bits
            return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)
        return cast(self, value, dtype)

    def widen(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = patch_tensor
    builder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)
    builder.cast_impl = builder.create_si_to_fp = cast_from


def _errors(form: str, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> tuple[float, float]:
    """By how much the kernel is off fp64, and by how much with other inputs."""
    from thalweg.ops.linear import triton_packed

    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_triton_product", lambda codes, table, *_: (seen.extend((codes, table)), (None, ()))[1])
        patch.setattr(packed, "_take_fused", lambda *_: None)  # torch's own product is not asked for
        packed._DEVICE_PACKERS[form](torch.randn(shape) * 0.05, None, dtype)
    codes, table = seen
    if form == "int8":
        whole = codes.double() * table.double()[:, None]
    else:
        numbers = torch.cat([codes >> 4, codes << 4 >> 4], 1).double().view(shape[0], -1, 32)
        whole = (numbers * table[0].double()[..., None] + table[1].double()[..., None]).flatten(1)
    x = torch.randn(rows, shape[1]).to(dtype)
    expected = x.double() @ whole.t()
    found = [triton_packed.linear(one, codes, table) for one in (x, x.roll(1, 1))]
    if not rows:
        assert found[0].shape == expected.shape
        found = [triton_packed.unpack(codes, table, shape[1]), -whole.to(dtype)]
        expected = whole
    assert found[0].dtype == dtype and found[0].shape == expected.shape
    return tuple(((one.double() - expected).norm() / expected.norm()).item() for one in found)  # type: ignore[return-value]


# Odd sizes; one more than a block of outputs, of bytes; inputs shared among programs, some of which have none.
CASES = [
    ("int8", (33, 37), 1, torch.bfloat16),
    ("int8", (33, 37), 5, torch.float16),
    ("int8", (37, 1100), 2, torch.float32),
    ("int8", (33, 300), 33, torch.bfloat16),
    ("int4", (37, 2112), 1, torch.float16),
    ("int4", (70, 192), 2, torch.float32),
    ("int4", (33, 320), 16, torch.bfloat16),
    ("int4", (35, 64), 33, torch.float16),
    ("int8", (33, 1037), 130, torch.float16),  # many rows: numbers for the device's product
    ("int8", (37, 70), 6, torch.float32),
    ("int4", (35, 2112), 70, torch.float16),
    ("int4", (33, 64), 0, torch.float16),
]


def main() -> None:
    """All cases, in a process whose Triton interprets."""
    _mend_interpreter()
    torch.manual_seed(0)
    for form, shape, rows, dtype in CASES:
        error, control = _errors(form, shape, rows, dtype)
        # The interpreter cuts what it rounds to bf16.
        tolerance = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}[dtype]
        assert error < tolerance < control / 10, (form, shape, rows, dtype, error, control)
    print(len(CASES), "cases")


def test_the_kernel_by_the_interpreter():
    """A process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA and ROCm")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", __name__], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{len(CASES)} cases" in done.stdout, done.stderr[-2000:]


if __name__ == "__main__":
    main()
