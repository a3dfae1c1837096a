"""How many products a second the processor's vector units do: the other bound of a decoding step.

A loop of nothing but the instructions that the packed kernels live on (``vfmadd``, ``vdpbf16ps``, ``vpdpbusd`` or what
stands for it), twelve sums in registers, on all of torch's threads; the best of some turns.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path

import torch
from llvmlite import ir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from thalweg.ops.cpu_kernels.isa import Isa, select_isa
from thalweg.ops.cpu_kernels.kernel_builder import BF16, I8, I16, I32, JitModule, KernelBuilder, KernelModule, vec
from thalweg.ops.cpu_kernels.packing import WEIGHT_FORMATS
from thalweg.ops.cpu_kernels.program import Program

_NUM_ACCUMULATORS, _NUM_ITERATIONS = 12, 200_000


@cache
def _compile_kernel(weight_format: str, isa: Isa) -> tuple[JitModule, int]:
    """Return the code and how many products a step of each sum is."""
    module, lanes = KernelModule(isa), isa.lanes
    code = KernelBuilder(module, "multiply")
    kind = "int4" if weight_format == "int4" else isa.operand_kind(weight_format)
    products = {"fp32": lanes, "bf16": 2 * lanes, "int16": 2 * lanes}.get(kind, 4 * lanes)
    operand = {"fp32": vec(lanes), "bf16": vec(2 * lanes, BF16), "int16": vec(2 * lanes, I16)}.get(
        kind, vec(4 * lanes, I8)
    )
    total = {"int8": vec(lanes, I32), "int16": vec(lanes, I32), "int4": code.nibble_acc_type}.get(kind, vec(lanes))
    source, out = code.load_arg(0), code.load_arg(1)
    a, b = (code.load(operand, code.add(source, 64 * i)) for i in range(2))
    sums = [code.stack_var(ir.Constant(total, None)) for _ in range(_NUM_ACCUMULATORS)]
    multiply = {"fp32": lambda acc, x, y: code.fma(x, y, acc), "bf16": code.dot_pairs, "int4": code.dot_nibbles,
                "int16": code.dot_words}  # fmt: skip
    with code.range(0, _NUM_ITERATIONS):
        for accumulator in sums:
            # Bytes meet the sum itself: a product of the same two would be taken out of the loop.
            x = code.builder.bitcast(accumulator.value, operand) if kind.startswith("int") else b
            if kind == "int8":
                accumulator.value = code.dot_bytes(accumulator.value, code.byte_weights(a), x)
            else:
                accumulator.value = multiply[kind](accumulator.value, a, x)
    for number, accumulator in enumerate(sums):  # what is never stored need not be computed
        code.store(accumulator.value, code.add(out, code.mul(code.thread_id, 64 * _NUM_ACCUMULATORS), 64 * number))
    code.ret()
    return JitModule(str(module), isa), products


@cache
def multiply_adds_per_second(weight_format: str, repeats: int = 5) -> float | None:
    """Return products a second of all threads with weights of a format; None where there are no kernels."""
    isa = select_isa()
    if isa is None:
        return None
    library, products = _compile_kernel(weight_format, isa)
    threads = torch.get_num_threads()
    source, out = torch.zeros(64), torch.zeros(threads * _NUM_ACCUMULATORS * 16)
    tape = Program([(library.get_address("multiply"), [source.data_ptr(), out.data_ptr()])], [source, out])
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        tape.run()
        best = min(best, time.perf_counter() - start)
    return threads * _NUM_ITERATIONS * _NUM_ACCUMULATORS * products / best


if __name__ == "__main__":
    for name in WEIGHT_FORMATS:
        print(name, multiply_adds_per_second(name))
