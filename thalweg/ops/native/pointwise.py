"""Kernels on rows: normalise, activate, and make rows ready for a product with packed weights.

Every kernel that feeds a product ends with the same step, :func:`prepare`: fp32 rows stay as they are, become
bf16, or become int8 with a scale for each row and the sums that the formats of ``gemm.py`` ask for.  Rows are
dealt out to the threads; widths are multiples of 16.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from thalweg.ops.native.ir import BF16, F32, I8, I32, I64, VOID, Code, vec
from thalweg.ops.native.panels import GROUP

OUTPUTS = ("y", "y_stride", "ready", "ready_stride", "scale", "sums", "sums_stride", "total")
"""Where a prepared row goes: fp32 values ``y``, the operand, its scale and sums.  Strides in bytes."""

NORM = ("x", "x_stride", "weight", "bias", "eps", "rows", "width", *OUTPUTS)
"""``eps`` is the address of an fp32."""
ACTIVATE = ("x", "x_stride", "rows", "width", *OUTPUTS)
"""Gated kernels read ``width`` gates and, right after them, ``width`` values from each row of x."""


PICK = ("x", "x_stride", "y", "y_stride", "rows", "index", "bytes")
"""``index``: int64 numbers of the rows to copy; ``bytes`` of each: 8, or a multiple of 64."""
BEST = ("x", "x_stride", "rows", "width", "value", "place")
"""``value``: fp32 and ``place``: int32, one for each row."""


def prepare(module: Any, kind: str) -> Any:
    """Return the function that makes one fp32 row ready: kind ``fp32``, ``bf16``, ``int8``."""
    name = f"prepare_{kind}"
    if name in module.globals:
        return module.globals[name]
    code = Code(module, name, ir.FunctionType(VOID, [I64] * 6))
    code.function.linkage = "internal"
    y, width, ready, scale, sums, total = code.function.args
    if kind == "fp32":
        with code.when(code.b.icmp_signed("!=", y, ready)), code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            code.store(code.load(vec(16), code.add(y, at)), code.add(ready, at))
    elif kind == "bf16":
        with code.range(0, width, 16) as i:
            value = code.load(vec(16), code.add(y, code.mul(i, 4)))
            code.store(code.b.fptrunc(value, vec(16, BF16)), code.add(ready, code.mul(i, 2)))
    elif kind == "int8":
        _quantise(code, y, width, ready, scale, sums, total)
    code.ret()
    return code.function


def _quantise(code: Code, y: Any, width: Any, ready: Any, scale: Any, sums: Any, total: Any) -> None:
    largest = code.var(code.f(0.0, 16))
    with code.range(0, width, 16) as i:
        value = code.unary("fabs", code.load(vec(16), code.add(y, code.mul(i, 4))))
        largest.value = code.fmax(value, largest.value)
    top = code.fmax(code.largest(largest.value), code.f(1e-30))
    code.store(code.b.fdiv(top, code.f(127.0)), scale)
    inverse = code.splat(code.b.fdiv(code.f(127.0), top), 16)
    magic = code.f(12582912.0, 16)  # 1.5 * 2**23: adding it rounds, and leaves the integer in the low bits
    zero = code.splat(code.i(0, I32), 16)
    everything = code.var(zero)
    group = code.var(zero)
    with code.range(0, width, 16) as i:
        value = code.fma(code.load(vec(16), code.add(y, code.mul(i, 4))), inverse, magic)
        whole = code.b.sub(code.b.bitcast(value, vec(16, I32)), code.splat(code.i(0x4B400000, I32), 16))
        code.store(code.b.trunc(whole, vec(16, I8)), code.add(ready, i))
        everything.value = code.b.add(everything.value, whole)
        # A group is two steps; its sum is written at both, and right at the second.
        fresh = code.b.icmp_signed("==", code.rem(i, GROUP), code.i(0))
        group.value = code.b.add(code.b.select(fresh, zero, group.value), whole)
        part = code.b.sitofp(code.fold(group.value, code.b.add), F32)
        code.store(part, code.add(sums, code.mul(code.div(i, GROUP), 4)))
    code.store(code.fold(everything.value, code.b.add), total)


def _finish(code: Code, module: Any, kind: str, out: dict[str, Any], row: Any, y: Any, width: Any) -> None:
    code.b.call(prepare(module, kind), [
        y, width,
        code.add(out["ready"], code.mul(row, out["ready_stride"])),
        code.add(out["scale"], code.mul(row, 4)),
        code.add(out["sums"], code.mul(row, out["sums_stride"])),
        code.add(out["total"], code.mul(row, 4)),
    ])  # fmt: skip


def _arguments(code: Code, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: code.arg(index) for index, name in enumerate(names)}


def norm(module: Any, style: str, kind: str) -> str:
    """Add a normalisation (``rms`` or ``layer``; ``none`` passes rows on) for operands of a kind."""
    name = f"norm_{style}_{kind}"
    code = Code(module, name)
    a = _arguments(code, NORM)
    rows, width = code.load(I64, a["rows"], 8), a["width"]
    eps = code.load(F32, a["eps"])
    first, last = code.share(rows)
    with code.range(first, last) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        normalise(code, style, x, y, a["weight"], a["bias"], eps, width)
        _finish(code, module, kind, a, row, y, width)
    code.ret()
    return name


def normalise(code: Code, style: str, x: Any, y: Any, weight: Any, bias: Any, eps: Any, width: Any) -> None:
    """Normalise one row of fp32 from x to y (addresses; they may be equal)."""
    count = code.b.sitofp(width, F32)
    mean = code.f(0.0)
    if style == "layer":
        total = code.var(code.f(0.0, 16))
        with code.range(0, width, 16) as i:
            total.value = code.b.fadd(total.value, code.load(vec(16), code.add(x, code.mul(i, 4))))
        mean = code.b.fdiv(code.total(total.value), count)
    centre = code.splat(mean, 16)
    scale = code.f(1.0, 16)
    if style != "none":
        square = code.var(code.f(0.0, 16))
        with code.range(0, width, 16) as i:
            d = code.b.fsub(code.load(vec(16), code.add(x, code.mul(i, 4))), centre)
            square.value = code.fma(d, d, square.value)
        variance = code.b.fadd(code.b.fdiv(code.total(square.value), count), eps)
        scale = code.splat(code.b.fdiv(code.f(1.0), code.unary("sqrt", variance)), 16)
    with code.range(0, width, 16) as i:
        at = code.mul(i, 4)
        value = code.load(vec(16), code.add(x, at))
        if style != "none":
            value = code.b.fmul(code.b.fsub(value, centre), scale)
            gain = code.load(vec(16), code.add(weight, at))
            value = code.b.fmul(value, gain)
            if style == "layer":
                value = code.b.fadd(value, code.load(vec(16), code.add(bias, at)))
        code.store(value, code.add(y, at))


def activate(module: Any, function: str, gated: bool, kind: str) -> str:
    """Add an activation (``silu``, ``gelu``, ``gelu_tanh``, ``relu``), times a second half where gated."""
    name = f"act_{function}{'_gated' if gated else ''}_{kind}"
    code = Code(module, name)
    a = _arguments(code, ACTIVATE)
    rows, width = code.load(I64, a["rows"], 8), a["width"]
    # One row cannot be shared out where its scale is needed; without one, threads take parts of the width.
    first, last = code.share(rows)
    with code.range(first, last) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        with code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            value = activation(code, function, code.load(vec(16), code.add(x, at)))
            if gated:
                value = code.b.fmul(value, code.load(vec(16), code.add(x, at, code.mul(width, 4))))
            code.store(value, code.add(y, at))
        _finish(code, module, kind, a, row, y, width)
    code.ret()
    return name


def add(module: Any) -> str:
    """Add the kernel that adds rows to rows: ``x``, ``part``, ``rows``, ``width``, ``part_stride``."""
    code = Code(module, "add")
    x, part, width, stride = (code.arg(i) for i in (0, 1, 3, 4))
    first, last = code.share(code.load(I64, code.arg(2), 8))
    with code.range(first, last) as row:
        to = code.add(x, code.mul(row, code.mul(width, 4)))
        of = code.add(part, code.mul(row, stride))
        with code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            value = code.b.fadd(code.load(vec(16), code.add(to, at)), code.load(vec(16), code.add(of, at)))
            code.store(value, code.add(to, at))
    code.ret()
    return "add"


def pick(module: Any) -> str:
    """Add the kernel that copies rows by their numbers; arguments: :data:`PICK`."""
    code = Code(module, "pick")
    a = _arguments(code, PICK)
    first, last = code.share(code.load(I64, a["rows"], 8))
    with code.range(first, last) as row:
        source = code.load(I64, code.add(a["index"], code.mul(row, 8)), 8)
        x = code.add(a["x"], code.mul(source, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        whole = code.mul(code.div(a["bytes"], 64), 64)
        with code.range(0, whole, 64) as i:
            code.store(code.load(vec(16), code.add(x, i)), code.add(y, i))
        with code.range(whole, a["bytes"], 8) as i:
            code.store(code.load(I64, code.add(x, i)), code.add(y, i))
    code.ret()
    return "pick"


def best(module: Any) -> str:
    """Add the kernel that finds each row's largest number and its first place; arguments: :data:`BEST`.

    A row that holds a NaN has NaN as its largest.
    """
    code = Code(module, "best")
    a = _arguments(code, BEST)
    first, last = code.share(code.load(I64, a["rows"], 8))
    lane = code.lanes(range(16))
    sixteen = code.splat(code.i(16, I32), 16)
    with code.range(first, last) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        top, where = code.var(code.f(-math.inf, 16)), code.var(code.splat(code.i(0, I32), 16))
        here, odd = code.var(lane), code.var(code.f(0.0, 16))
        with code.range(0, code.mul(code.div(a["width"], 16), 16), 16) as i:
            value = code.load(vec(16), code.add(x, code.mul(i, 4)))
            larger = code.b.fcmp_ordered(">", value, top.value)
            top.value = code.b.select(larger, value, top.value)
            where.value = code.b.select(larger, here.value, where.value)
            odd.value = code.b.select(code.b.fcmp_unordered("uno", value, value), value, odd.value)
            here.value = code.b.add(here.value, sixteen)
        # The lanes' best ones, and what is left of the row, one by one.
        one, place = code.var(code.f(-math.inf)), code.var(code.i(0, I32))
        nan = code.var(code.total(odd.value))

        def take(value: Any, at: Any) -> None:
            equal = code.b.and_(
                code.b.fcmp_ordered("==", value, one.value), code.b.icmp_signed("<", at, place.value)
            )
            better = code.b.or_(code.b.fcmp_ordered(">", value, one.value), equal)
            one.value = code.b.select(better, value, one.value)
            place.value = code.b.select(better, at, place.value)

        for i in range(16):
            number = code.i(i, I32)
            take(code.b.extract_element(top.value, number), code.b.extract_element(where.value, number))
        with code.range(code.mul(code.div(a["width"], 16), 16), a["width"]) as i:
            value = code.load(F32, code.add(x, code.mul(i, 4)))
            nan.value = code.b.select(code.b.fcmp_unordered("uno", value, value), value, nan.value)
            take(value, code.b.trunc(i, I32))
        code.store(code.b.fadd(one.value, nan.value), code.add(a["value"], code.mul(row, 4)))
        code.store(place.value, code.add(a["place"], code.mul(row, 4)))
    code.ret()
    return "best"


def activation(code: Code, name: str, x: Any) -> Any:
    """Return the activation of a vector."""
    one, half = code.f(1.0, 16), code.f(0.5, 16)
    if name == "relu":
        return code.fmax(x, code.f(0.0, 16))
    if name == "silu":
        return code.b.fdiv(x, code.b.fadd(one, exp(code, code.b.fneg(x))))
    if name == "gelu_tanh":
        cubic = code.fma(code.b.fmul(x, x), code.f(0.044715, 16), one)
        u = code.b.fmul(code.b.fmul(x, cubic), code.f(2 * 0.7978845608028654, 16))
        # 1 + tanh(u/2) = 2 / (1 + exp(-u))
        return code.b.fdiv(x, code.b.fadd(one, exp(code, code.b.fneg(u))))
    assert name == "gelu", name
    # x/2 * (1 + erf(x / sqrt 2)) = x/2 * erfc(-x / sqrt 2), erfc by its Chebyshev fit (relative error 1.2e-7)
    z = code.b.fmul(x, code.f(-0.7071067811865476, 16))
    size = code.unary("fabs", z)
    t = code.b.fdiv(one, code.fma(half, size, one))
    poly = code.f(0.17087277, 16)
    for factor in (
        -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
        -1.26551223,
    ):  # fmt: skip
        poly = code.fma(poly, t, code.f(factor, 16))
    tail = code.b.fmul(t, exp(code, code.b.fsub(poly, code.b.fmul(size, size))))
    negative = code.b.fcmp_ordered("<", z, code.f(0.0, 16))
    erfc = code.b.select(negative, code.b.fsub(code.f(2.0, 16), tail), tail)
    return code.b.fmul(code.b.fmul(half, x), erfc)


def exp(code: Code, x: Any) -> Any:
    """Return e**x of an fp32 vector, to about one unit in the last place; 0 far below, infinite far above."""
    width = x.type.count
    assert width == 16
    x = code.fmin(code.fmax(x, code.f(-103.0, width)), code.f(88.72, width))
    n = code.unary("rint", code.b.fmul(x, code.f(1.4426950408889634, width)))
    r = code.fma(n, code.f(-0.693359375, width), x)
    r = code.fma(n, code.f(2.12194440e-4, width), r)
    p = code.f(1.9875691500e-4, width)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = code.fma(p, r, code.f(factor, width))
    value = code.fma(code.b.fmul(r, r), p, code.b.fadd(r, code.f(1.0, width)))
    # p * 2**n, rounded once where the result has no whole exponent left
    every = ir.Constant(ir.IntType(16), -1)
    return code.call(
        "llvm.x86.avx512.mask.scalef.ps.512", value.type, [value, n, value, every, code.i(4, I32)]
    )
