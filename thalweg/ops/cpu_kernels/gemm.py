"""Matrix products with packed weights: one row streams at memory speed, many rows at the multiplier's.

A weight lies in panels (``packing.py``); a panel meets up to 12 rows at a time, whose sums stay in registers.
Arguments of a product: see :data:`GEMM_ARGS`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from thalweg.ops.cpu_kernels.kernel_builder import BF16, F16, F32, I8, I32, I64, VOID, KernelBuilder, vec
from thalweg.ops.cpu_kernels.packing import GROUP_SIZE, WEIGHT_FORMATS, WeightFormat

# Addresses, counts and strides in bytes; ``rows`` is the address of an int64, ``residual`` may be 0.
# ``sums``: for int8 the int32 sum of each row, for int4 the fp32 sums of each row's groups of 32.
GEMM_ARGS = (
    "a", "weight", "out", "rows", "k", "panels", "a_stride", "out_stride", "bias", "residual", "a_scale",
    "column_scale", "sums", "sums_stride",
)  # fmt: skip
_CHUNK_BYTES = 448 * 1024  # bytes of rows that meet all panels before the next ones do: they stay in the cache


def emit_gemm(module: Any, weight_format: str) -> str:
    """Add the kernel of a format to a module and return its name."""
    fmt = WEIGHT_FORMATS[weight_format]
    tiles = {rows: _emit_tile(module, fmt, rows) for rows in range(1, fmt.max_rows + 1)}
    code = KernelBuilder(module, f"gemm_{weight_format}")
    a = code.load_args(GEMM_ARGS)
    rows = code.load(I64, a["rows"], 8)
    per_panel = code.mul(a["k"], {"fp32": 128, "bf16": 64, "int8": 32, "int4": 10}[weight_format])
    first, last = code.thread_range(a["panels"])
    # As few passes as the registers allow, of about equal height.
    chunk = code.max(
        code.mul(code.div(code.int_const(_CHUNK_BYTES // fmt.max_rows), a["a_stride"]), fmt.max_rows), fmt.max_rows * 4
    )
    with code.range(0, rows, chunk) as chunk_start:
        height = code.min(chunk, code.sub(rows, chunk_start))
        passes = code.div(code.add(height, fmt.max_rows - 1), fmt.max_rows)
        with code.range(first, last) as panel:
            weight = code.add(a["weight"], code.mul(panel, per_panel))
            column = code.mul(panel, 4 * fmt.panel_columns)
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
    code.ret()
    return f"gemm_{weight_format}"


def _emit_tile(module: Any, fmt: WeightFormat, rows: int) -> Any:
    """Build ``rows`` rows times one panel."""
    code = KernelBuilder(module, f"tile_{fmt.name}_{rows}", ir.FunctionType(VOID, [I64] * 12))
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    a, w, out, residual, bias, a_scale, column_scale, sums, k, a_stride, out_stride, sums_stride = code.function.args
    vectors = fmt.panel_columns // 16
    cells = [(r, c) for r in range(rows) for c in range(vectors)]
    a_rows = [code.add(a, code.mul(a_stride, r)) for r in range(rows)]
    sum_rows = [code.add(sums, code.mul(sums_stride, r)) for r in range(rows)]
    body = _emit_int4_sums if fmt.name == "int4" else _emit_dot_sums
    totals = body(code, fmt, rows, a_rows, w, k, sum_rows)
    for r, c in cells:
        value = totals[r, c]
        base = code.load(vec(16), code.add(bias, 64 * c))
        if fmt.name in ("int8", "int4"):
            scale = code.splat(code.load(F32, code.add(a_scale, 4 * r)), 16)
            if fmt.name == "int8":
                value = code.builder.sitofp(value, vec(16))
                scale = code.builder.fmul(scale, code.load(vec(16), code.add(column_scale, 64 * c)))
            value = code.fma(value, scale, base)
        else:
            value = code.builder.fadd(value, base)
        at = code.add(code.mul(out_stride, r), 64 * c)
        result = code.stack_var(value)
        with code.if_then(code.builder.icmp_signed("!=", residual, code.int_const(0))):
            result.value = code.builder.fadd(value, code.load(vec(16), code.add(residual, at)))
        code.store(result.value, code.add(out, at))
    code.ret()
    return code.function


def _emit_dot_sums(
    code: KernelBuilder, fmt: WeightFormat, rows: int, a_rows: list[Any], w: Any, k: Any, sums: list[Any]
) -> dict[tuple[int, int], Any]:
    """One pass over k for fp32, bf16 and int8."""
    vectors = fmt.panel_columns // 16
    # fp32 and bf16 add up in one order whatever the number of rows, so that a row's result does not depend
    # on its neighbours; integers may be added in any order.
    integer = fmt.name == "int8"
    lanes = max(1, min(4, 8 // (rows * vectors))) if integer else 1
    unroll = 4
    zero = code.splat(code.int_const(0, I32), 16) if integer else code.f32_const(0.0, 16)
    acc = {}
    for r in range(rows):
        start = zero
        if integer:  # weights are stored with 128 added
            total = code.load(I32, sums[r])
            start = code.splat(code.builder.mul(total, code.int_const(-128, I32)), 16)
        for c in range(vectors):
            for lane in range(lanes):
                acc[r, c, lane] = code.stack_var(start if lane == 0 else zero)
    span = fmt.k_step * unroll
    with code.range(0, k, span) as at:
        a_at = code.mul(at, {"fp32": 4, "bf16": 2, "int8": 1}[fmt.name])
        w_at = code.add(w, code.mul(at, 128 // fmt.k_step))
        for u in range(unroll):
            weights = [_emit_load_weight(code, fmt, code.add(w_at, 128 * u + 64 * c)) for c in range(vectors)]
            for r in range(rows):
                x = _emit_load_row(code, fmt, code.add(a_rows[r], a_at, 4 * u))
                for c in range(vectors):
                    cell = acc[r, c, u % lanes]
                    cell.value = _emit_multiply_add(code, fmt, cell.value, weights[c], x)
    combine = code.builder.add if integer else code.builder.fadd
    totals = {}
    for r in range(rows):
        for c in range(vectors):
            value = acc[r, c, 0].value
            for lane in range(1, lanes):
                value = combine(value, acc[r, c, lane].value)
            totals[r, c] = value
    return totals


def _emit_load_weight(code: KernelBuilder, fmt: WeightFormat, address: Any) -> Any:
    return code.load({"fp32": vec(16), "bf16": vec(32, BF16), "int8": vec(64, I8)}[fmt.name], address, 64)


def _emit_load_row(code: KernelBuilder, fmt: WeightFormat, address: Any) -> Any:
    if fmt.name == "fp32":
        return code.splat(code.load(F32, address), 16)
    packed = code.splat(code.load(I32, address), 16)
    return code.builder.bitcast(packed, vec(32, BF16) if fmt.name == "bf16" else vec(64, I8))


def _emit_multiply_add(code: KernelBuilder, fmt: WeightFormat, acc: Any, weight: Any, x: Any) -> Any:
    if fmt.name == "fp32":
        return code.fma(weight, x, acc)
    return code.dot_pairs(acc, weight, x) if fmt.name == "bf16" else code.dot_bytes(acc, weight, x)


def _emit_int4_sums(
    code: KernelBuilder, fmt: WeightFormat, rows: int, a_rows: list[Any], w: Any, k: Any, sums: list[Any]
) -> dict[tuple[int, int], Any]:
    """One pass over k, group by group: integer sums in a group, scaled and added in fp32."""
    zero = code.splat(code.int_const(0, I32), 16)
    acc = [code.stack_var(code.f32_const(0.0, 16)) for _ in range(rows)]
    low_bits = code.splat(code.int_const(0x0F0F0F0F, I32), 16)
    four = code.splat(code.int_const(4, I32), 16)
    with code.range(0, k, GROUP_SIZE) as at:
        group = code.add(w, code.mul(at, 10))
        code.call("llvm.prefetch.p0", VOID, [
            code.builder.inttoptr(code.add(group, 2560), ir.PointerType()),
            code.int_const(0, I32), code.int_const(3, I32), code.int_const(1, I32),
        ])  # fmt: skip
        scale, offset = (
            code.builder.fpext(code.load(vec(16, F16), code.add(group, 32 * i)), vec(16)) for i in range(2)
        )
        inner = [[zero, zero] for _ in range(rows)]
        for eight in range(GROUP_SIZE // 8):
            both = code.load(vec(16, I32), code.add(group, 64 + 64 * eight), 64)
            halves = [code.builder.and_(both, low_bits), code.builder.and_(code.builder.lshr(both, four), low_bits)]
            for half, nibbles in enumerate(halves):
                for r in range(rows):
                    x = code.load(I32, code.add(a_rows[r], at, 8 * eight + 4 * half))
                    quad = code.builder.bitcast(code.splat(x, 16), vec(64, I8))
                    lane = half if rows <= 4 else 0
                    inner[r][lane] = code.dot_bytes(inner[r][lane], code.builder.bitcast(nibbles, vec(64, I8)), quad)
        for r in range(rows):
            total = code.builder.add(*inner[r]) if rows <= 4 else inner[r][0]
            value = code.fma(scale, code.builder.sitofp(total, vec(16)), acc[r].value)
            group_sum = code.load(F32, code.add(sums[r], code.div(at, GROUP_SIZE // 4)))
            acc[r].value = code.fma(offset, code.splat(group_sum, 16), value)
    return {(r, 0): acc[r].value for r in range(rows)}
