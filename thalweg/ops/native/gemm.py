"""Matrix products with packed weights: one row streams at memory speed, many rows at the multiplier's.

A weight lies in panels (``panels.py``); a panel meets up to 12 rows at a time, whose sums stay in registers.
Arguments of a product: see :data:`ARGUMENTS`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from thalweg.ops.native.ir import BF16, F16, F32, I8, I32, I64, VOID, Code, vec
from thalweg.ops.native.panels import FORMATS, GROUP, Format

ARGUMENTS = (
    "a", "weight", "out", "rows", "k", "panels", "a_stride", "out_stride", "bias", "residual", "a_scale",
    "column_scale", "sums", "sums_stride",
)  # fmt: skip
"""Addresses, counts and strides in bytes; ``rows`` is the address of an int64, ``residual`` may be 0.

``sums``: for int8 the int32 sum of each row, for int4 the fp32 sums of each row's groups of 32.
"""
_CHUNK = 448 * 1024  # bytes of rows that meet all panels before the next ones do: they stay in the cache


def product(module: Any, name: str) -> str:
    """Add the kernel of a format to a module and return its name."""
    form = FORMATS[name]
    tiles = {rows: _tile(module, form, rows) for rows in range(1, form.rows + 1)}
    code = Code(module, f"gemm_{name}")
    a = {label: code.arg(index) for index, label in enumerate(ARGUMENTS)}
    rows = code.load(I64, a["rows"], 8)
    per_panel = code.mul(a["k"], {"fp32": 128, "bf16": 64, "int8": 32, "int4": 10}[name])
    first, last = code.share(a["panels"])
    # As few passes as the registers allow, of about equal height.
    chunk = code.max(code.mul(code.div(code.i(_CHUNK // form.rows), a["a_stride"]), form.rows), form.rows * 4)
    with code.range(0, rows, chunk) as top:
        height = code.min(chunk, code.sub(rows, top))
        passes = code.div(code.add(height, form.rows - 1), form.rows)
        with code.range(first, last) as panel:
            weight = code.add(a["weight"], code.mul(panel, per_panel))
            column = code.mul(panel, 4 * form.columns)
            with code.range(0, passes) as number:
                start = code.div(code.mul(height, number), passes)
                stop = code.div(code.mul(height, code.add(number, 1)), passes)
                row = code.add(top, start)
                offset = code.add(code.mul(row, a["out_stride"]), column)
                has = code.b.icmp_signed("!=", a["residual"], code.i(0))
                values = [
                    code.add(a["a"], code.mul(row, a["a_stride"])), weight, code.add(a["out"], offset),
                    code.b.select(has, code.add(a["residual"], offset), code.i(0)),
                    code.add(a["bias"], column), code.add(a["a_scale"], code.mul(row, 4)),
                    code.add(a["column_scale"], column),
                    code.add(a["sums"], code.mul(row, a["sums_stride"])),
                    a["k"], a["a_stride"], a["out_stride"], a["sums_stride"],
                ]  # fmt: skip
                done = code.function.append_basic_block("done")
                bad = code.function.append_basic_block("none")
                switch = code.b.switch(code.sub(stop, start), bad)
                for count, tile in tiles.items():
                    block = code.function.append_basic_block(f"rows{count}")
                    switch.add_case(code.i(count), block)
                    code.b.position_at_end(block)
                    code.b.call(tile, values)
                    code.b.branch(done)
                code.b.position_at_end(bad)
                code.b.branch(done)
                code.b.position_at_end(done)
    code.ret()
    return f"gemm_{name}"


def _tile(module: Any, form: Format, rows: int) -> Any:
    """Build ``rows`` rows times one panel."""
    code = Code(module, f"tile_{form.name}_{rows}", ir.FunctionType(VOID, [I64] * 12))
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    a, w, out, residual, bias, a_scale, column_scale, sums, k, a_stride, out_stride, sums_stride = (
        code.function.args
    )
    vectors = form.columns // 16
    cells = [(r, c) for r in range(rows) for c in range(vectors)]
    a_rows = [code.add(a, code.mul(a_stride, r)) for r in range(rows)]
    sum_rows = [code.add(sums, code.mul(sums_stride, r)) for r in range(rows)]
    body = _int4_sums if form.name == "int4" else _plain_sums
    totals = body(code, form, rows, a_rows, w, k, sum_rows)
    for r, c in cells:
        value = totals[r, c]
        base = code.load(vec(16), code.add(bias, 64 * c))
        if form.name in ("int8", "int4"):
            scale = code.splat(code.load(F32, code.add(a_scale, 4 * r)), 16)
            if form.name == "int8":
                value = code.b.sitofp(value, vec(16))
                scale = code.b.fmul(scale, code.load(vec(16), code.add(column_scale, 64 * c)))
            value = code.fma(value, scale, base)
        else:
            value = code.b.fadd(value, base)
        at = code.add(code.mul(out_stride, r), 64 * c)
        result = code.var(value)
        with code.when(code.b.icmp_signed("!=", residual, code.i(0))):
            result.value = code.b.fadd(value, code.load(vec(16), code.add(residual, at)))
        code.store(result.value, code.add(out, at))
    code.ret()
    return code.function


def _plain_sums(
    code: Code, form: Format, rows: int, a_rows: list[Any], w: Any, k: Any, sums: list[Any]
) -> dict[tuple[int, int], Any]:
    """One pass over k for fp32, bf16 and int8."""
    vectors = form.columns // 16
    # fp32 and bf16 add up in one order whatever the number of rows, so that a row's result does not depend
    # on its neighbours; integers may be added in any order.
    integer = form.name == "int8"
    lanes = max(1, min(4, 8 // (rows * vectors))) if integer else 1
    unroll = 4
    zero = code.splat(code.i(0, I32), 16) if integer else code.f(0.0, 16)
    acc = {}
    for r in range(rows):
        start = zero
        if integer:  # weights are stored with 128 added
            total = code.load(I32, sums[r])
            start = code.splat(code.b.mul(total, code.i(-128, I32)), 16)
        for c in range(vectors):
            for lane in range(lanes):
                acc[r, c, lane] = code.var(start if lane == 0 else zero)
    span = form.k_step * unroll
    with code.range(0, k, span) as at:
        a_at = code.mul(at, {"fp32": 4, "bf16": 2, "int8": 1}[form.name])
        w_at = code.add(w, code.mul(at, 128 // form.k_step))
        for u in range(unroll):
            weights = [_load_weight(code, form, code.add(w_at, 128 * u + 64 * c)) for c in range(vectors)]
            for r in range(rows):
                x = _load_row(code, form, code.add(a_rows[r], a_at, 4 * u))
                for c in range(vectors):
                    cell = acc[r, c, u % lanes]
                    cell.value = _multiply(code, form, cell.value, weights[c], x)
    join = code.b.add if integer else code.b.fadd
    totals = {}
    for r in range(rows):
        for c in range(vectors):
            value = acc[r, c, 0].value
            for lane in range(1, lanes):
                value = join(value, acc[r, c, lane].value)
            totals[r, c] = value
    return totals


def _load_weight(code: Code, form: Format, address: Any) -> Any:
    return code.load({"fp32": vec(16), "bf16": vec(32, BF16), "int8": vec(64, I8)}[form.name], address, 64)


def _load_row(code: Code, form: Format, address: Any) -> Any:
    if form.name == "fp32":
        return code.splat(code.load(F32, address), 16)
    four = code.splat(code.load(I32, address), 16)
    return code.b.bitcast(four, vec(32, BF16) if form.name == "bf16" else vec(64, I8))


def _multiply(code: Code, form: Format, acc: Any, weight: Any, x: Any) -> Any:
    if form.name == "fp32":
        return code.fma(weight, x, acc)
    name = "avx512bf16.dpbf16ps" if form.name == "bf16" else "avx512.vpdpbusd"
    return code.call(f"llvm.x86.{name}.512", acc.type, [acc, weight, x])


def _int4_sums(
    code: Code, form: Format, rows: int, a_rows: list[Any], w: Any, k: Any, sums: list[Any]
) -> dict[tuple[int, int], Any]:
    """One pass over k, group by group: integer sums in a group, scaled and added in fp32."""
    zero = code.splat(code.i(0, I32), 16)
    acc = [code.var(code.f(0.0, 16)) for _ in range(rows)]
    low_bits = code.splat(code.i(0x0F0F0F0F, I32), 16)
    four = code.splat(code.i(4, I32), 16)
    with code.range(0, k, GROUP) as at:
        group = code.add(w, code.mul(at, 10))
        code.call("llvm.prefetch.p0", VOID, [
            code.b.inttoptr(code.add(group, 2560), ir.PointerType()),
            code.i(0, I32), code.i(3, I32), code.i(1, I32),
        ])  # fmt: skip
        scale, offset = (
            code.b.fpext(code.load(vec(16, F16), code.add(group, 32 * i)), vec(16)) for i in range(2)
        )
        inner = [[zero, zero] for _ in range(rows)]
        for eight in range(GROUP // 8):
            both = code.load(vec(16, I32), code.add(group, 64 + 64 * eight), 64)
            halves = [code.b.and_(both, low_bits), code.b.and_(code.b.lshr(both, four), low_bits)]
            for half, nibbles in enumerate(halves):
                for r in range(rows):
                    x = code.load(I32, code.add(a_rows[r], at, 8 * eight + 4 * half))
                    quad = code.b.bitcast(code.splat(x, 16), vec(64, I8))
                    lane = half if rows <= 4 else 0
                    inner[r][lane] = code.call(
                        "llvm.x86.avx512.vpdpbusd.512",
                        zero.type,
                        [inner[r][lane], code.b.bitcast(nibbles, vec(64, I8)), quad],
                    )
        for r in range(rows):
            total = code.b.add(*inner[r]) if rows <= 4 else inner[r][0]
            value = code.fma(scale, code.b.sitofp(total, vec(16)), acc[r].value)
            part = code.load(F32, code.add(sums[r], code.div(at, GROUP // 4)))
            acc[r].value = code.fma(offset, code.splat(part, 16), value)
    return {(r, 0): acc[r].value for r in range(rows)}
