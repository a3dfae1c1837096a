"""Runs kernels of another processor in QEMU: a program without a libc, linked from what LLVM makes of them.

Its memory is one piece at a fixed address: read from standard input, changed by the kernels, written to standard
output.  Tensors are copied into it and back, so a call is written as for a kernel of this processor.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from thalweg.ops import cpu_kernels
from thalweg.ops.cpu_kernels.kernel_builder import I64, PTR, VOID, KernelBuilder, KernelModule, optimize

LINKER, EMULATOR = "aarch64-linux-gnu-ld", "qemu-aarch64"
MISSING = [name for name in (LINKER, EMULATOR) if shutil.which(name) is None]
_BASE, _WORDS = 1 << 37, 32  # where memory is; words of a call's arguments
_MMAP, _READ, _WRITE, _EXIT = 222, 63, 64, 93


def emulate(kernels: cpu_kernels.KernelSet, calls: Sequence[cpu_kernels.Instruction], folder: Path) -> None:
    """Run calls one after the other, on one thread."""
    image, tensors = bytearray(8 * _WORDS * len(calls)), {}
    for number, call in enumerate(calls):
        for index, argument in enumerate(call.arguments):
            word = argument
            if isinstance(argument, Tensor):
                storage = argument.untyped_storage()
                if storage.data_ptr() not in tensors:
                    image += bytes(-len(image) % 64)
                    tensors[storage.data_ptr()] = storage, len(image)
                    image += bytes(storage)
                word = _BASE + tensors[storage.data_ptr()][1] + argument.data_ptr() - storage.data_ptr()
            at = 8 * (number * _WORDS + index)
            image[at : at + 8] = int(word).to_bytes(8, "little", signed=True)
    image += bytes(4096)
    modules = [kernels.llvm_ir(name) for name in {call.kernel for call in calls}]
    objects = []
    for number, text in enumerate([*modules, _emit_main(kernels.isa, calls, len(image))]):
        parsed, machine = optimize(text, kernels.isa)
        objects.append(folder / f"{number}.o")
        objects[-1].write_bytes(machine.emit_object(parsed))
    subprocess.run([LINKER, "-o", folder / "program", *objects], check=True)
    (folder / "in").write_bytes(image)
    with open(folder / "in", "rb") as source, open(folder / "out", "wb") as target:
        command = [EMULATOR, "-cpu", "max", folder / "program"]
        subprocess.run(command, stdin=source, stdout=target, check=True, timeout=60)
    result = (folder / "out").read_bytes()
    assert len(result) == len(image)
    for storage, at in tensors.values():
        size = storage.nbytes()
        view = torch.tensor([], dtype=torch.uint8).set_(storage)
        view.copy_(torch.frombuffer(bytearray(result[at : at + size]), dtype=torch.uint8))


def _emit_main(isa: cpu_kernels.Isa, calls: Sequence[cpu_kernels.Instruction], size: int) -> str:
    code = KernelBuilder(KernelModule(isa), "_start", ir.FunctionType(VOID, []))

    def system_call(*words: Any) -> Any:
        values = [code.int_const(w) if isinstance(w, int) else w for w in (*words, *[0] * (7 - len(words)))]
        constraints = "={x0},{x8},{x0},{x1},{x2},{x3},{x4},{x5},~{memory}"
        return code.builder.asm(ir.FunctionType(I64, [I64] * 7), "svc #0", constraints, values, side_effect=True)

    system_call(_MMAP, _BASE, size, 3, 0x32, -1, 0)  # read and write; private, fixed, of no file
    system_call(_READ, 0, _BASE, size)
    for number, call in enumerate(calls):
        args = code.builder.inttoptr(code.int_const(_BASE + 8 * _WORDS * number), PTR)
        code.call(call.kernel, VOID, [args, code.int_const(0), code.int_const(1)])
    system_call(_WRITE, 1, _BASE, size)
    system_call(_EXIT, 0)
    code.ret()
    return str(code.module)
