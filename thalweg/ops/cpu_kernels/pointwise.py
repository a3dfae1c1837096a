"""Kernels on rows: normalise, activate, and make rows ready for a product with packed weights.

Every kernel that feeds a product ends with the same step, :func:`emit_quantize_row`: fp32 rows stay as they are,
become bf16, or become int8 (int16 where bytes are multiplied as words) with a scale for each row and the sums that
the formats of ``gemm.py`` ask for.  Rows are dealt out to the threads; widths are multiples of 16.
"""

import math
from typing import Any

from llvmlite import ir

from thalweg.ops.cpu_kernels.kernel_builder import F32, I8, I16, I32, I64, VOID, KernelBuilder, vec
from thalweg.ops.cpu_kernels.packing import GROUP_SIZE

# Where a prepared row goes: fp32 values ``y``, the operand, its scale and sums.  Strides in bytes.
OUTPUT_ARGS = ("y", "y_stride", "ready", "ready_stride", "scale", "sums", "sums_stride", "total")

# ``eps`` is the address of an fp32.
NORM_ARGS = ("x", "x_stride", "weight", "bias", "eps", "rows", "width", *OUTPUT_ARGS)
# Gated kernels read ``width`` gates and, right after them, ``width`` values from each row of x.
ACTIVATION_ARGS = ("x", "x_stride", "rows", "width", *OUTPUT_ARGS)


# ``index``: int64 numbers of the rows to copy; ``bytes`` of each: 8, or a multiple of 64.
GATHER_ROWS_ARGS = ("x", "x_stride", "y", "y_stride", "rows", "index", "bytes")
# ``value``: fp32 and ``place``: int32, one for each row.
ARGMAX_ARGS = ("x", "x_stride", "rows", "width", "value", "place")


def emit_quantize_row(module: Any, kind: str) -> Any:
    """Return the function that makes one fp32 row ready: kind ``fp32``, ``bf16``, ``int8``, ``int16``."""
    name = f"prepare_{kind}"
    if name in module.globals:
        return module.globals[name]
    code = KernelBuilder(module, name, ir.FunctionType(VOID, [I64] * 6))
    code.function.linkage = "internal"
    y, width, operand, scale, sums, total = code.function.args
    if kind == "fp32":
        with code.if_then(code.builder.icmp_signed("!=", y, operand)), code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            code.store(code.load(vec(16), code.add(y, at)), code.add(operand, at))
    elif kind == "bf16":
        with code.range(0, width, 16) as i:
            value = code.load(vec(16), code.add(y, code.mul(i, 4)))
            code.store(code.to_bf16(value), code.add(operand, code.mul(i, 2)))
    else:
        _quantize(code, kind, y, width, operand, scale, sums, total)
    code.ret()
    return code.function


def _quantize(
    code: KernelBuilder, kind: str, y: Any, width: Any, operand: Any, scale: Any, sums: Any, total: Any
) -> None:
    row_max = code.abs_max(y, width)
    code.store(code.builder.fdiv(row_max, code.f32_const(127.0)), scale)
    inverse = code.splat(code.builder.fdiv(code.f32_const(127.0), row_max), 16)
    zero = code.i32_const(0, 16)
    row_sum = code.stack_var(zero)
    group = code.stack_var(zero)
    with code.range(0, width, 16) as i:
        quantized = code.load_rounded(code.add(y, code.mul(i, 4)), inverse)
        if kind == "int16":  # of four the even ones, then the odd ones: as ``vpmaddwd`` meets a weight's bytes
            order = code.const_vector([4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(16)])
            words = code.builder.trunc(quantized, vec(16, I16))
            code.store(code.builder.shuffle_vector(words, words, order), code.add(operand, code.mul(i, 2)))
        else:
            code.store(code.builder.trunc(quantized, vec(16, I8)), code.add(operand, i))
        row_sum.value = code.builder.add(row_sum.value, quantized)
        # A group is two steps; its sum is written at both, and right at the second.
        starts_group = code.builder.icmp_signed("==", code.rem(i, GROUP_SIZE), code.int_const(0))
        group.value = code.builder.add(code.builder.select(starts_group, zero, group.value), quantized)
        group_sum = code.builder.sitofp(code.reduce(group.value, code.builder.add), F32)
        code.store(group_sum, code.add(sums, code.mul(code.div(i, GROUP_SIZE), 4)))
    code.store(code.reduce(row_sum.value, code.builder.add), total)


def _call_quantize_row(code: KernelBuilder, kind: str, out: dict[str, Any], row: Any, y: Any) -> None:
    code.builder.call(emit_quantize_row(code.module, kind), [
        y, out["width"],
        code.add(out["ready"], code.mul(row, out["ready_stride"])),
        code.add(out["scale"], code.mul(row, 4)),
        code.add(out["sums"], code.mul(row, out["sums_stride"])),
        code.add(out["total"], code.mul(row, 4)),
    ])  # fmt: skip


def emit_norm(module: Any, style: str, kind: str) -> str:
    """Add a normalisation (``rms`` or ``layer``; ``none`` passes rows on) for operands of a kind."""
    code = KernelBuilder(module, f"norm_{style}_{kind}")
    a = code.load_args(NORM_ARGS)
    rows, width = code.load(I64, a["rows"], 8), a["width"]
    eps = code.load(F32, a["eps"])
    with code.thread_items(rows) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        normalize_row(code, style, x, y, a["weight"], a["bias"], eps, width)
        _call_quantize_row(code, kind, a, row, y)
    return code.ret()


def normalize_row(
    code: KernelBuilder, style: str, x: Any, y: Any, weight: Any, bias: Any, eps: Any, width: Any
) -> None:
    """Normalise one row of fp32 from x to y (addresses; they may be equal)."""
    count = code.builder.sitofp(width, F32)
    mean = code.f32_const(0.0)
    if style == "layer":
        total = code.stack_var(code.f32_const(0.0, 16))
        with code.range(0, width, 16) as i:
            total.value = code.builder.fadd(total.value, code.load(vec(16), code.add(x, code.mul(i, 4))))
        mean = code.builder.fdiv(code.reduce_add(total.value), count)
    centre = code.splat(mean, 16)
    scale = code.f32_const(1.0, 16)
    if style != "none":
        squares = code.stack_var(code.f32_const(0.0, 16))
        with code.range(0, width, 16) as i:
            d = code.builder.fsub(code.load(vec(16), code.add(x, code.mul(i, 4))), centre)
            squares.value = code.fma(d, d, squares.value)
        variance = code.builder.fadd(code.builder.fdiv(code.reduce_add(squares.value), count), eps)
        scale = code.splat(code.builder.fdiv(code.f32_const(1.0), code.call_intrinsic("sqrt", variance)), 16)
    with code.range(0, width, 16) as i:
        at = code.mul(i, 4)
        value = code.load(vec(16), code.add(x, at))
        if style != "none":
            value = code.builder.fmul(code.builder.fsub(value, centre), scale)
            gain = code.load(vec(16), code.add(weight, at))
            value = code.builder.fmul(value, gain)
            if style == "layer":
                value = code.builder.fadd(value, code.load(vec(16), code.add(bias, at)))
        code.store(value, code.add(y, at))


def emit_activation(module: Any, function: str, gated: bool, kind: str) -> str:
    """Add an activation (``silu``, ``gelu``, ``gelu_tanh``, ``relu``), times a second half where gated."""
    code = KernelBuilder(module, f"act_{function}{'_gated' if gated else ''}_{kind}")
    a = code.load_args(ACTIVATION_ARGS)
    rows, width = code.load(I64, a["rows"], 8), a["width"]
    # One row cannot be shared out where its scale is needed; without one, threads take parts of the width.
    with code.thread_items(rows) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        with code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            value = apply_activation(code, function, code.load(vec(16), code.add(x, at)))
            if gated:
                value = code.builder.fmul(value, code.load(vec(16), code.add(x, at, code.mul(width, 4))))
            code.store(value, code.add(y, at))
        _call_quantize_row(code, kind, a, row, y)
    return code.ret()


def emit_add(module: Any) -> str:
    """Add the kernel that adds rows to rows: ``x``, ``addend``, ``rows``, ``width``, ``input_stride``."""
    code = KernelBuilder(module, "add")
    x, addend, width, stride = (code.load_arg(i) for i in (0, 1, 3, 4))
    with code.thread_items(code.load(I64, code.load_arg(2), 8)) as row:
        to = code.add(x, code.mul(row, code.mul(width, 4)))
        of = code.add(addend, code.mul(row, stride))
        with code.range(0, width, 16) as i:
            at = code.mul(i, 4)
            value = code.builder.fadd(code.load(vec(16), code.add(to, at)), code.load(vec(16), code.add(of, at)))
            code.store(value, code.add(to, at))
    return code.ret()


def emit_gather_rows(module: Any) -> str:
    """Add the kernel that copies rows by their numbers; arguments: :data:`GATHER_ROWS_ARGS`."""
    code = KernelBuilder(module, "pick")
    a = code.load_args(GATHER_ROWS_ARGS)
    with code.thread_items(code.load(I64, a["rows"], 8)) as row:
        source = code.load(I64, code.add(a["index"], code.mul(row, 8)), 8)
        x = code.add(a["x"], code.mul(source, a["x_stride"]))
        y = code.add(a["y"], code.mul(row, a["y_stride"]))
        num_vector_bytes = code.mul(code.div(a["bytes"], 64), 64)
        with code.range(0, num_vector_bytes, 64) as i:
            code.store(code.load(vec(16), code.add(x, i)), code.add(y, i))
        with code.range(num_vector_bytes, a["bytes"], 8) as i:
            code.store(code.load(I64, code.add(x, i)), code.add(y, i))
    return code.ret()


def emit_argmax(module: Any) -> str:
    """Add the kernel that finds each row's largest number and its first place; arguments: :data:`ARGMAX_ARGS`.

    A row that holds a NaN has NaN as its largest.
    """
    code = KernelBuilder(module, "best")
    a = code.load_args(ARGMAX_ARGS)
    lane_ids = code.const_vector(range(16))
    sixteen = code.i32_const(16, 16)
    with code.thread_items(code.load(I64, a["rows"], 8)) as row:
        x = code.add(a["x"], code.mul(row, a["x_stride"]))
        lane_max = code.stack_var(code.f32_const(-math.inf, 16))
        lane_index = code.stack_var(code.i32_const(0, 16))
        current_index, lane_nan = code.stack_var(lane_ids), code.stack_var(code.f32_const(0.0, 16))
        with code.range(0, code.mul(code.div(a["width"], 16), 16), 16) as i:
            value = code.load(vec(16), code.add(x, code.mul(i, 4)))
            larger = code.builder.fcmp_ordered(">", value, lane_max.value)
            lane_max.value = code.builder.select(larger, value, lane_max.value)
            lane_index.value = code.builder.select(larger, current_index.value, lane_index.value)
            lane_nan.value = code.builder.select(
                code.builder.fcmp_unordered("uno", value, value), value, lane_nan.value
            )
            current_index.value = code.builder.add(current_index.value, sixteen)
        # The lanes' best ones, and what is left of the row, one by one.
        best_value, best_index = (code.stack_var(code.f32_const(-math.inf)), code.stack_var(code.int_const(0, I32)))
        nan = code.stack_var(code.reduce_add(lane_nan.value))

        def update_best(value: Any, at: Any) -> None:
            equal = code.builder.fcmp_ordered("==", value, best_value.value)
            equal = code.builder.and_(equal, code.builder.icmp_signed("<", at, best_index.value))
            better = code.builder.or_(code.builder.fcmp_ordered(">", value, best_value.value), equal)
            best_value.value = code.builder.select(better, value, best_value.value)
            best_index.value = code.builder.select(better, at, best_index.value)

        for i in range(16):
            value = code.builder.extract_element(lane_max.value, code.int_const(i, I32))
            update_best(value, code.builder.extract_element(lane_index.value, code.int_const(i, I32)))
        with code.range(code.mul(code.div(a["width"], 16), 16), a["width"]) as i:
            value = code.load(F32, code.add(x, code.mul(i, 4)))
            nan.value = code.builder.select(code.builder.fcmp_unordered("uno", value, value), value, nan.value)
            update_best(value, code.builder.trunc(i, I32))
        code.store(code.builder.fadd(best_value.value, nan.value), code.add(a["value"], code.mul(row, 4)))
        code.store(best_index.value, code.add(a["place"], code.mul(row, 4)))
    return code.ret()


def apply_activation(code: KernelBuilder, name: str, x: Any) -> Any:
    """Return the activation of a vector."""
    one, half = code.f32_const(1.0, 16), code.f32_const(0.5, 16)
    if name == "relu":
        return code.fmax(x, code.f32_const(0.0, 16))
    if name == "silu":
        return code.builder.fdiv(x, code.builder.fadd(one, exp(code, code.builder.fneg(x))))
    if name == "gelu_tanh":
        cubic = code.fma(code.builder.fmul(x, x), code.f32_const(0.044715, 16), one)
        u = code.builder.fmul(code.builder.fmul(x, cubic), code.f32_const(2 * 0.7978845608028654, 16))
        # 1 + tanh(u/2) = 2 / (1 + exp(-u))
        return code.builder.fdiv(x, code.builder.fadd(one, exp(code, code.builder.fneg(u))))
    assert name == "gelu", name
    # x/2 * (1 + erf(x / sqrt 2)) = x/2 * erfc(-x / sqrt 2), erfc by its Chebyshev fit (relative error 1.2e-7)
    z = code.builder.fmul(x, code.f32_const(-0.7071067811865476, 16))
    size = code.call_intrinsic("fabs", z)
    t = code.builder.fdiv(one, code.fma(half, size, one))
    poly = code.f32_const(0.17087277, 16)
    for factor in (
        -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
        -1.26551223,
    ):  # fmt: skip
        poly = code.fma(poly, t, code.f32_const(factor, 16))
    tail = code.builder.fmul(t, exp(code, code.builder.fsub(poly, code.builder.fmul(size, size))))
    negative = code.builder.fcmp_ordered("<", z, code.f32_const(0.0, 16))
    erfc = code.builder.select(negative, code.builder.fsub(code.f32_const(2.0, 16), tail), tail)
    return code.builder.fmul(code.builder.fmul(half, x), erfc)


def exp(code: KernelBuilder, x: Any) -> Any:
    """Return e**x of an fp32 vector, to about one unit in the last place; 0 far below, infinite far above."""
    width = x.type.count
    assert width == 16
    x = code.fmin(code.fmax(x, code.f32_const(-103.0, width)), code.f32_const(88.72, width))
    n = code.call_intrinsic("rint", code.builder.fmul(x, code.f32_const(1.4426950408889634, width)))
    r = code.fma(n, code.f32_const(-0.693359375, width), x)
    r = code.fma(n, code.f32_const(2.12194440e-4, width), r)
    p = code.f32_const(1.9875691500e-4, width)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = code.fma(p, r, code.f32_const(factor, width))
    value = code.fma(code.builder.fmul(r, r), p, code.builder.fadd(r, code.f32_const(1.0, width)))
    return code.exp2_scale(value, n)
