"""Runs kernels of another processor in QEMU: a program without a libc, linked from what LLVM makes of them.

Its memory is one piece at a fixed address: read from standard input, changed by the kernels, written to standard
output.  Tensors are copied into it and back, so a call is written as for a kernel of this processor.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thalweg.ops import cpu_kernels
from thalweg.ops.cpu_kernels.kernel_builder import optimize

ASSEMBLER, LINKER, EMULATOR = "aarch64-linux-gnu-as", "aarch64-linux-gnu-ld", "qemu-aarch64"
MISSING = [name for name in (ASSEMBLER, LINKER, EMULATOR) if shutil.which(name) is None]
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
    objects = [folder / f"{number}.o" for number in range(len(modules) + 1)]
    for text, path in zip(modules, objects, strict=False):
        parsed, machine = optimize(text, kernels.isa)
        path.write_bytes(machine.emit_object(parsed))
    subprocess.run([ASSEMBLER, "-o", objects[-1]], input=_main_source(calls, len(image)), text=True, check=True)
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


def _main_source(calls: Sequence[cpu_kernels.Instruction], size: int) -> str:
    """Return the program's entry in assembly: map the memory, read it, call the kernels, write it."""

    def call(name: str, *words: int) -> list[str]:
        return [*(f"ldr x{number}, ={word}" for number, word in enumerate(words)), name]

    def system_call(number: int, *words: int) -> list[str]:
        return [*call(f"ldr x8, ={number}", *words), "svc #0"]

    lines = system_call(_MMAP, _BASE, size, 3, 0x32, -1, 0)  # read and write; private, fixed, of no file
    lines += system_call(_READ, 0, _BASE, size)
    for number, kernel in enumerate(calls):
        lines += call(f"bl {kernel.kernel}", _BASE + 8 * _WORDS * number, 0, 1)
    lines += [*system_call(_WRITE, 1, _BASE, size), *system_call(_EXIT, 0)]
    return "\n".join([".globl _start", "_start:", *lines, ""])
