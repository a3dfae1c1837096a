"""How many products a second the processor's vector units do: the other bound of a decoding step.

A loop of nothing but the instruction that the packed kernels live on (``vfmadd``, ``vdpbf16ps``,
``vpdpbusd``), twelve sums in registers, on all of torch's threads; the best of some turns.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path

import torch
from llvmlite import ir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from thalweg.ops.cpu_kernels.kernel_builder import (
    BF16,
    I8,
    I32,
    JitModule,
    KernelBuilder,
    host_cpu_features,
    vec,
)
from thalweg.ops.cpu_kernels.packing import WEIGHT_FORMATS
from thalweg.ops.cpu_kernels.program import Program

_NUM_ACCUMULATORS, _NUM_ITERATIONS = 12, 200_000
_INSTRUCTIONS = {  # by what an instruction multiplies: products, operands, sums
    "fp32": (16, vec(16), vec(16)),
    "bf16": (32, vec(32, BF16), vec(16)),
    "int8": (64, vec(64, I8), vec(16, I32)),
}


@cache
def _compile_kernel(dtype: str) -> tuple[JitModule, int]:
    module = ir.Module("multiply")
    code = KernelBuilder(module, f"multiply_{dtype}")
    products, operand_type, accumulator_type = _INSTRUCTIONS[dtype]
    source, out = code.load_arg(0), code.load_arg(1)
    a, b = (code.load(operand_type, code.add(source, 64 * i)) for i in range(2))
    sums = [code.stack_var(code.load(accumulator_type, source)) for _ in range(_NUM_ACCUMULATORS)]
    with code.range(0, _NUM_ITERATIONS):
        for accumulator in sums:
            if dtype == "fp32":
                accumulator.value = code.fma(a, b, accumulator.value)
            else:
                name = "avx512bf16.dpbf16ps" if dtype == "bf16" else "avx512.vpdpbusd"
                accumulator.value = code.call(f"llvm.x86.{name}.512", accumulator_type, [accumulator.value, a, b])
    for number, accumulator in enumerate(sums):  # what is never stored need not be computed
        code.store(accumulator.value, code.add(out, code.mul(code.thread_id, 64 * _NUM_ACCUMULATORS), 64 * number))
    code.ret()
    return JitModule(module), products


@cache
def multiply_adds_per_second(dtype: str, repeats: int = 5) -> float | None:
    """Return products a second of all threads; None where the processor lacks the instruction.

    int4 is multiplied by int8's instruction.
    """
    dtype = {"int4": "int8"}.get(dtype, dtype)
    if WEIGHT_FORMATS[dtype].cpu_feature not in host_cpu_features():
        return None
    library, products = _compile_kernel(dtype)
    threads = torch.get_num_threads()
    source, out = torch.zeros(64), torch.zeros(threads * _NUM_ACCUMULATORS * 16)
    tape = Program([(library.get_address(f"multiply_{dtype}"), [source.data_ptr(), out.data_ptr()])], [source, out])
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        tape.run()
        best = min(best, time.perf_counter() - start)
    return threads * _NUM_ITERATIONS * _NUM_ACCUMULATORS * products / best


if __name__ == "__main__":
    for name in WEIGHT_FORMATS:
        print(name, multiply_adds_per_second(name))
