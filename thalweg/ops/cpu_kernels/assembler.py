"""Names for what a tape is laid from: kernels by what they do, buffers of rows, calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thalweg.ops.cpu_kernels import attention, codes, gemm, lora, packing, pointwise, shm_reduce
from thalweg.ops.cpu_kernels.isa import Isa, select_isa
from thalweg.ops.cpu_kernels.kernel_builder import JitModule, KernelModule
from thalweg.ops.cpu_kernels.program import Program


class ActivationBuffer:
    """A buffer of rows that are ready for packed weights: ``width`` columns, padded, of a kind.

    ``y`` (rows, width) takes the fp32 values; for the kind ``fp32`` it is the operand itself where its rows
    need no padding.
    """

    def __init__(self, rows: int, width: int, kind: str, y: Tensor) -> None:
        self.width, self.kind, self.y = width, kind, y
        columns = packing.round_up(width)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int16": torch.int16, "int8": torch.int8}[kind]
        use_in_place = kind == "fp32" and y.stride(0) >= columns
        self.operand = y if use_in_place else allocate_rows(rows, columns, dtype)
        self.operand_stride = self.operand.stride(0) * self.operand.element_size()
        self.scale = torch.zeros(rows)
        self.group_sums = torch.zeros(rows, columns // packing.GROUP_SIZE)
        self.row_sums = torch.zeros(rows, dtype=torch.int32)

    def output_args(self) -> list[Any]:
        """Return the arguments that :data:`pointwise.OUTPUT_ARGS` names."""
        sums = self.group_sums.stride(0) * 4
        y = self.y.stride(0) * 4
        return [self.y, y, self.operand, self.operand_stride, self.scale, self.group_sums, sums, self.row_sums]

    def sum_args(self, weight_format: str) -> list[Any]:
        """Return the sums that a product with weights of a form asks for, and their stride."""
        return [self.group_sums, self.group_sums.stride(0) * 4] if weight_format == "int4" else [self.row_sums, 4]


def allocate_rows(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros (rows, columns) whose rows do not all start in the same set of the first cache."""
    per_line = 64 // dtype.itemsize
    stride = packing.round_up(columns)
    if stride * dtype.itemsize % 1024 == 0:
        stride += per_line
    return torch.zeros(rows, stride, dtype=dtype)[:, :columns]


@dataclass(frozen=True)
class Instruction:
    """A kernel by name and its arguments: tensors stand for their addresses."""

    kernel: str
    arguments: Sequence[Any]


def _kernel(emit: Callable[..., str]) -> Callable[..., str]:
    """Return the method that names the kernel ``emit`` makes of its arguments, after making it once."""

    def get_or_emit(self: KernelSet, *args: Any) -> str:
        name, llvm_ir = _emit_kernel(emit, self.isa, args)
        self._llvm_ir[name] = llvm_ir
        return name

    return get_or_emit


class KernelSet:
    """The kernels that a tape needs, each made once, for an instruction set: by default the one selected here."""

    def __init__(self, isa: Isa | None = None) -> None:
        selected = isa or select_isa()
        assert selected is not None, "unsupported_reason() tells"
        self.isa = selected
        self._llvm_ir: dict[str, str] = {}

    # Normalise rows (``rms``, ``layer``, ``none``) and make them ready as a kind.
    norm = _kernel(pointwise.emit_norm)
    # Apply an activation, gated or not, and make rows ready as a kind.
    activate = _kernel(pointwise.emit_activation)
    # Add rows to rows.
    add = _kernel(pointwise.emit_add)
    # Copy chosen rows.
    gather_rows = _kernel(pointwise.emit_gather_rows)
    # Find each row's largest number.
    argmax = _kernel(pointwise.emit_argmax)
    # Multiply rows with a packed weight of a format.
    gemm = _kernel(gemm.emit_gemm)
    # Rotate queries and keys, store keys and values, of a shape.
    rope_and_store_kv = _kernel(attention.emit_rope_and_store_kv)
    # Attend to the paged cache, of a shape.
    paged_attention = _kernel(attention.emit_paged_attention)
    # Wait for the other ranks.
    barrier = _kernel(shm_reduce.emit_barrier)
    # Add up the ranks' rows.
    reduce_sum = _kernel(shm_reduce.emit_reduce_sum)
    # Multiply rows with their adapters' first matrices.
    lora_shrink = _kernel(lora.emit_lora_shrink)
    # Add the product with their adapters' second matrices.
    lora_expand = _kernel(lora.emit_lora_expand)
    # Add numbers to errors and encode them as signs and scales.
    compress_signs = _kernel(codes.emit_compress_signs)
    # Average numbers of signs and scales.
    decompress_signs = _kernel(codes.emit_decompress_signs)
    # Write a weight's numbers, from codes of four bits.
    dequantize_nf4 = _kernel(codes.emit_dequantize_nf4)

    def compile(self) -> dict[str, JitModule]:
        """Turn everything into machine code, by kernel; what another engine has needed is at hand."""
        return {name: _compile_module(llvm_ir, self.isa) for name, llvm_ir in self._llvm_ir.items()}

    def llvm_ir(self, name: str) -> str:
        """Return a kernel as LLVM reads it."""
        return self._llvm_ir[name]


@lru_cache(256)
def _emit_kernel(emit: Callable[..., str], isa: Isa, args: tuple[Any, ...]) -> tuple[str, str]:
    """A kernel's name and its code for LLVM, whose making costs as much as reading it: engines come and go."""
    module = KernelModule(isa)
    return emit(module, *args), str(module)


@lru_cache(128)
def _compile_module(llvm_ir: str, isa: Isa) -> JitModule:
    return JitModule(llvm_ir, isa)


def build_program(
    instructions: Sequence[Instruction], kernels: dict[str, JitModule], keep_alive: Sequence[Any], num_threads: int = 0
) -> Program:
    """Make a program of calls; ``keep_alive`` lives as long as it, ``num_threads`` is 0 for as many as torch has."""
    rows = []
    for call in instructions:
        values = [x.data_ptr() if isinstance(x, Tensor) else int(x) for x in call.arguments]
        rows.append((kernels[call.kernel].get_address(call.kernel), values))
    return Program(rows, [kernels, *keep_alive, *instructions], num_threads)
