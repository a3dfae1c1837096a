"""Matrix products with packed weights: one row streams at memory speed, many rows at the multiplier's.

A weight lies in panels (``packing.py``); a panel meets as many rows at a time as have their sums in
registers: 12 with AVX-512, 6 with AVX2 or NEON, 4 where operands take more of them.
Arguments of a product: see :data:`GEMM_ARGS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from thalweg.ops.cpu_kernels.isa import Isa
from thalweg.ops.cpu_kernels.kernel_builder import (
    BF16,
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    VOID,
    KernelBuilder,
    KernelModule,
    vec,
)  # fmt: skip
from thalweg.ops.cpu_kernels.packing import GROUP_SIZE, WEIGHT_FORMATS, WeightFormat

# Addresses, counts and strides in bytes; ``rows`` is the address of an int64, ``residual`` may be 0.
# ``sums``: for int8 the int32 sum of each row, for int4 the fp32 sums of each row's groups of 32.
GEMM_ARGS = (
    "a", "weight", "out", "rows", "k", "panels", "a_stride", "out_stride", "bias", "residual", "a_scale",
    "column_scale", "sums", "sums_stride",
)  # fmt: skip
_CACHE_LINE = 64  # bytes
_PREFETCH_BYTES = 5120
_CHUNK_BYTES = 448 * 1024  # bytes of rows that meet all panels before the next ones do: they stay in the cache


def emit_gemm(module: KernelModule, weight_format: str) -> str:
    """Add the kernel of a format to a module and return its name."""
    fmt = WEIGHT_FORMATS[weight_format]
    max_rows = _tile_shape(module.isa, fmt)[0]
    tiles = {rows: _emit_tile(module, fmt, rows) for rows in range(1, max_rows + 1)}
    code = KernelBuilder(module, f"gemm_{weight_format}")
    a = code.load_args(GEMM_ARGS)
    rows = code.load(I64, a["rows"], 8)
    per_panel = code.mul(a["k"], fmt.k_bytes)
    first, last = code.thread_range(a["panels"])
    # As few passes as the registers allow, of about equal height.
    chunk = code.max(
        code.mul(code.div(code.int_const(_CHUNK_BYTES // max_rows), a["a_stride"]), max_rows), max_rows * 4
    )
    with code.range(0, rows, chunk) as chunk_start:
        height = code.min(chunk, code.sub(rows, chunk_start))
        passes = code.div(code.add(height, max_rows - 1), max_rows)
        with code.range(first, last) as panel:
            weight = code.add(a["weight"], code.mul(panel, per_panel))
            column = code.mul(panel, 4 * fmt.panel_columns)
            # A tile that needs several sweeps over a panel brings the next one into the cache, in each pass its part:
            # else memory is idle in all sweeps but the first.  One sweep is best left to the processor's own prefetch.
            prefetch_step = code.div(code.int_const(_CACHE_LINE), passes)
            with code.range(0, passes) as number:
                start = code.div(code.mul(height, number), passes)
                stop = code.div(code.mul(height, code.add(number, 1)), passes)
                row = code.add(chunk_start, start)
                offset = code.add(code.mul(row, a["out_stride"]), column)
                has_residual = code.builder.icmp_signed("!=", a["residual"], code.int_const(0))
                values = [
                    code.add(a["a"], code.mul(row, a["a_stride"])), weight, code.add(a["out"], offset),
                    code.builder.select(has_residual, code.add(a["residual"], offset), code.int_const(0)),
                    code.add(a["bias"], column), code.add(a["a_scale"], code.mul(row, 4)),
                    code.add(a["column_scale"], column),
                    code.add(a["sums"], code.mul(row, a["sums_stride"])),
                    a["k"], a["a_stride"], a["out_stride"], a["sums_stride"],
                    code.add(weight, per_panel, code.div(code.mul(per_panel, number), passes)), prefetch_step,
                ]  # fmt: skip
                done = code.function.append_basic_block("done")
                bad = code.function.append_basic_block("none")
                switch = code.builder.switch(code.sub(stop, start), bad)
                for count, tile in tiles.items():
                    block = code.function.append_basic_block(f"rows{count}")
                    switch.add_case(code.int_const(count), block)
                    code.builder.position_at_end(block)
                    code.builder.call(tile, values)
                    code.builder.branch(done)
                code.builder.position_at_end(bad)
                code.builder.branch(done)
                code.builder.position_at_end(done)
    return code.ret()


class Operands(NamedTuple):
    """What a tile multiplies: the addresses of its rows, of their sums and of a panel of ``k`` steps."""

    rows: list[Any]
    sums: list[Any]
    panel: Any
    k: Any
    prefetch: Prefetch


class Prefetch:
    """Where a pass has come to in the next panel, and its bytes from one prefetch to the next."""

    def __init__(self, code: KernelBuilder, start: Any, step: Any) -> None:
        self._code, self._at, self._step = code, code.stack_var(start), step

    def lines(self, count: int) -> None:
        """Go on by as many cache lines as a pass alone would read meanwhile."""
        for _ in range(count):
            self._code.prefetch(self._at.value)
            self._at.value = self._code.add(self._at.value, self._step)


def _tile_shape(isa: Isa, fmt: WeightFormat) -> tuple[int, int]:
    """Return the most rows, and registers of columns beside them, that a format's sums in registers allow."""
    if fmt.name == "int4":  # a panel is one pass; the fp32 sums, touched once a group, may be elsewhere
        return {16: 10, 8: 4, 4: 4}[isa.lanes], fmt.panel_columns // isa.lanes
    # ``vpmaddwd`` has its products in registers of their own.
    return (4, 2) if fmt.name == "int8" and isa.byte_dot == "vpmaddwd" else isa.tile


def _emit_tile(module: KernelModule, fmt: WeightFormat, rows: int) -> Any:
    """Build ``rows`` rows times one panel."""
    code = KernelBuilder(module, f"tile_{fmt.name}_{rows}", ir.FunctionType(VOID, [I64] * 14))
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    a, w, out, residual, bias, a_scale, column_scale, sums, k, a_stride, out_stride, sums_stride, *ahead = (
        code.function.args
    )
    lanes = module.isa.lanes
    a_rows = [code.add(a, code.mul(a_stride, r)) for r in range(rows)]
    sum_rows = [code.add(sums, code.mul(sums_stride, r)) for r in range(rows)]
    operands = Operands(a_rows, sum_rows, w, k, Prefetch(code, *ahead))
    body = _emit_int4_sums if fmt.name == "int4" else _emit_dot_sums
    max_rows, vectors = _tile_shape(module.isa, fmt)
    max_sums, num_vectors = max_rows * vectors, fmt.panel_columns // lanes
    while 2 * vectors <= num_vectors and 2 * vectors * rows <= max_sums:
        vectors *= 2  # few rows: wider passes over the panel
    for first in range(0, num_vectors, vectors):
        columns = range(first, first + vectors)
        totals = body(code, fmt, columns, operands)
        for (r, c), value in totals.items():
            at = 4 * lanes * c
            base = code.load(vec(lanes), code.add(bias, at))
            if fmt.name in ("int8", "int4"):
                scale = code.splat(code.load(F32, code.add(a_scale, 4 * r)), lanes)
                if fmt.name == "int8":
                    value = code.builder.sitofp(value, vec(lanes))
                    scale = code.builder.fmul(scale, code.load(vec(lanes), code.add(column_scale, at)))
                value = code.fma(value, scale, base)
            else:
                value = code.builder.fadd(value, base)
            offset = code.add(code.mul(out_stride, r), at)
            result = code.stack_var(value)
            with code.if_then(code.builder.icmp_signed("!=", residual, code.int_const(0))):
                result.value = code.builder.fadd(value, code.load(vec(lanes), code.add(residual, offset)))
            code.store(result.value, code.add(out, offset))
    code.ret()
    return code.function


def _emit_dot_sums(
    code: KernelBuilder, fmt: WeightFormat, columns: range, operands: Operands
) -> dict[tuple[int, int], Any]:
    """One pass over k for fp32, bf16 and int8, of some registers of a panel's columns."""
    # fp32 and bf16 add up in one order whatever the number of rows, so that a row's result does not depend
    # on its neighbours; integers may be added in any order.
    integer, kind, width = fmt.name == "int8", code.isa.operand_kind(fmt.name), code.isa.lanes
    num_rows = len(operands.rows)
    chains = max(1, min(4, 8 // (num_rows * len(columns)))) if integer else 1
    unroll = 4
    zero = code.i32_const(0, width) if integer else code.f32_const(0.0, width)
    acc = {}
    for r in range(num_rows):
        start = zero
        if integer and code.byte_bias:
            total = code.load(I32, operands.sums[r])
            start = code.splat(code.builder.mul(total, code.int_const(-code.byte_bias, I32)), width)
        for c in columns:
            for chain in range(chains):
                acc[r, c, chain] = code.stack_var(start if chain == 0 else zero)
    span = fmt.k_step * unroll
    # bf16 weights that meet fp32 rows, and int8 ones that meet int16 rows, are taken apart in two steps.
    parts = 1 if fmt.name == kind else 2
    with code.range(0, operands.k, span) as at:
        a_at = code.mul(at, {"fp32": 4, "bf16": 2, "int16": 2, "int8": 1}[kind])
        w_at = code.add(operands.panel, code.mul(at, 128 // fmt.k_step))
        if len(columns) * width < fmt.panel_columns:
            operands.prefetch.lines(unroll * 4 * width * len(columns) // _CACHE_LINE)
        for u in range(unroll):
            for part in range(parts):
                weights = [_emit_load_weight(code, fmt, code.add(w_at, 128 * u + 4 * width * c), part) for c in columns]
                for r in range(num_rows):
                    x = _emit_load_row(code, kind, code.add(operands.rows[r], a_at, 4 * (u * parts + part)))
                    for c, weight in zip(columns, weights, strict=True):
                        cell = acc[r, c, u % chains]
                        cell.value = _emit_multiply_add(code, kind, cell.value, weight, x)
    combine = code.builder.add if integer else code.builder.fadd
    totals = {}
    for r in range(num_rows):
        for c in columns:
            value = acc[r, c, 0].value
            for chain in range(1, chains):
                value = combine(value, acc[r, c, chain].value)
            totals[r, c] = value
    return totals


def _emit_load_weight(code: KernelBuilder, fmt: WeightFormat, address: Any, part: int) -> Any:
    lanes = code.isa.lanes
    if fmt.name == "int8":
        if code.isa.operand_kind("int8") == "int16":
            words = code.load(vec(2 * lanes, I16), address, 4 * lanes)
            return code.odd_bytes(words) if part else code.even_bytes(words)
        return code.byte_weights(code.load(vec(4 * lanes, I8), address, 4 * lanes))
    if fmt.name == "bf16" and not code.isa.bf16_dot:
        pair = code.load(vec(lanes, I32), address, 4 * lanes)
        high, sixteen = code.i32_const(-65536, lanes), code.i32_const(16, lanes)
        value = code.builder.and_(pair, high) if part else code.builder.shl(pair, sixteen)
        return code.builder.bitcast(value, vec(lanes))
    return code.load(vec(lanes) if fmt.name == "fp32" else vec(2 * lanes, BF16), address, 4 * lanes)


def _emit_load_row(code: KernelBuilder, kind: str, address: Any) -> Any:
    lanes = code.isa.lanes
    if kind == "fp32":
        return code.splat(code.load(F32, address), lanes)
    packed = code.splat(code.load(I32, address), lanes)
    types = {"bf16": vec(2 * lanes, BF16), "int16": vec(2 * lanes, I16), "int8": vec(4 * lanes, I8)}
    return code.builder.bitcast(packed, types[kind])


def _emit_multiply_add(code: KernelBuilder, kind: str, acc: Any, weight: Any, x: Any) -> Any:
    if kind == "fp32":
        return code.fma(weight, x, acc)
    return {"bf16": code.dot_pairs, "int16": code.dot_words, "int8": code.dot_bytes}[kind](acc, weight, x)


def _emit_int4_sums(
    code: KernelBuilder, fmt: WeightFormat, columns: range, operands: Operands
) -> dict[tuple[int, int], Any]:
    """One pass over k, group by group: integer sums in a group, scaled and added in fp32."""
    lanes, rows = code.isa.lanes, range(len(operands.rows))
    cells = [(r, c) for r in rows for c in columns]
    zero = ir.Constant(code.nibble_acc_type, None)
    # Few sums wait for each other: each is then two, of even and odd steps.
    chains = 2 if len(cells) <= 4 and code.isa.byte_dot != "vpmaddubsw" else 1
    acc = {cell: code.stack_var(code.f32_const(0.0, lanes)) for cell in cells}
    low_bits = code.i32_const(0x0F0F0F0F, lanes)
    four = code.i32_const(4, lanes)
    with code.range(0, operands.k, GROUP_SIZE) as at:
        group = code.add(operands.panel, code.mul(at, fmt.k_bytes))
        # The processor's own prefetch does not keep up, nor does one line of a group's five: with all of them 8 rows
        # meet weights from memory 1.7 times as fast.
        for line in range(GROUP_SIZE * fmt.k_bytes // _CACHE_LINE):
            code.prefetch(code.add(group, _PREFETCH_BYTES + _CACHE_LINE * line))
        inner = {(cell, chain): zero for cell in cells for chain in range(chains)}
        for eight in range(GROUP_SIZE // 8):
            for c in columns:
                both = code.load(vec(lanes, I32), code.add(group, 64 + 64 * eight + 4 * lanes * c), 4 * lanes)
                halves = code.builder.and_(both, low_bits), code.builder.and_(code.builder.lshr(both, four), low_bits)
                for half, nibbles in enumerate(halves):
                    for r in rows:
                        x = code.load(I32, code.add(operands.rows[r], at, 8 * eight + 4 * half))
                        quad: Any = code.builder.bitcast(code.splat(x, lanes), vec(4 * lanes, I8))
                        cell = (r, c), half % chains
                        inner[cell] = code.dot_nibbles(inner[cell], code.builder.bitcast(nibbles, quad.type), quad)
        for c in columns:
            scale, offset = (
                code.builder.fpext(code.load(vec(lanes, F16), code.add(group, 32 * i + 2 * lanes * c)), vec(lanes))
                for i in range(2)
            )
            for r in rows:
                total = code.nibble_sums(inner[(r, c), 0])
                if chains == 2:
                    total = code.builder.add(total, code.nibble_sums(inner[(r, c), 1]))
                value = code.fma(scale, code.builder.sitofp(total, vec(lanes)), acc[r, c].value)
                group_sum = code.load(F32, code.add(operands.sums[r], code.div(at, GROUP_SIZE // 4)))
                acc[r, c].value = code.fma(offset, code.splat(group_sum, lanes), value)
    return {cell: acc[cell].value for cell in cells}
