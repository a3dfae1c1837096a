"""Kernels between fp32 numbers and codes of few bits: signs with a scale (1-bit optimisers), NF4 (QLoRA's weights).

Each reads its numbers from memory once and writes them once; what is needed twice, a block of 4 KB, is in the first
cache the second time.  They give the bits that torch's operators give in the code's plain form
(``comm/collectives/onebit.py``, ``adapt/quantized_weight.py``).  Blocks are dealt out to the threads.
"""

from collections.abc import Sequence
from typing import Any

from thalweg.ops.cpu_kernels.kernel_builder import F32, I1, I8, I16, I32, I64, KernelBuilder, vec

SIGN_BLOCK = 1024  # numbers that share a scale
_VECTORS = 8  # of 16 numbers, added up before they meet the sums of others

# ``table``: ``items`` rows of these words, all addresses but the last: blocks of fp32 errors, the contiguous numbers to
# add to them, how many numbers each block has (fp32; only its last may have fewer than 1,024), and the code's parts.
COMPRESS_SIGNS_ARGS = ("table", "items")
COMPRESS_SIGNS_ITEM = ("errors", "numbers", "counts", "scales", "signs", "blocks")
# Payload i lies ``stride`` bytes behind the one before; ``out`` becomes the mean of all ``payloads``.
DECOMPRESS_SIGNS_ARGS = ("scales", "signs", "stride", "payloads", "out", "blocks")
# ``scales``: bf16, one for each of ``blocks`` blocks of ``block`` numbers (a multiple of 16); ``values``: the sixteen.
DEQUANTIZE_NF4_ARGS = ("codes", "scales", "values", "out", "blocks", "block")


def emit_compress_signs(module: Any) -> str:
    """Add the kernel that adds numbers to errors, encodes the sums, and leaves the new errors."""
    code = KernelBuilder(module, "compress_signs")
    b, (table, items) = code.builder, (code.load_arg(i) for i in range(len(COMPRESS_SIGNS_ARGS)))
    sums = code.stack_bytes(4 * SIGN_BLOCK // _VECTORS)
    short_block = code.stack_bytes(4 * SIGN_BLOCK)  # a copy of the last numbers, with zeros behind them
    zero = code.f32_const(0.0)
    with code.range(0, items) as index:
        words = code.add(table, code.mul(index, 8 * len(COMPRESS_SIGNS_ITEM)))
        item = {name: code.load(I64, code.add(words, 8 * i), 8) for i, name in enumerate(COMPRESS_SIGNS_ITEM)}
        with code.thread_items(item["blocks"]) as block:
            errors = code.add(item["errors"], code.mul(block, 4 * SIGN_BLOCK))
            numbers = code.stack_var(code.add(item["numbers"], code.mul(block, 4 * SIGN_BLOCK)))
            signs = code.add(item["signs"], code.mul(block, SIGN_BLOCK // 8))
            count = code.load(F32, code.add(item["counts"], code.mul(block, 4)))
            end = b.fptosi(count, I64)
            is_short = b.icmp_signed("<", end, code.int_const(SIGN_BLOCK))
            with code.if_then(is_short):
                with code.range(0, end) as i:
                    code.store(
                        code.load(F32, code.add(numbers.value, code.mul(i, 4))), code.add(short_block, code.mul(i, 4))
                    )
                with code.range(end, SIGN_BLOCK) as i:
                    code.store(zero, code.add(short_block, code.mul(i, 4)))
                numbers.value = short_block
            with code.range(0, SIGN_BLOCK, 16 * _VECTORS) as start:
                magnitudes = []
                for i in range(_VECTORS):
                    at = code.mul(code.add(start, 16 * i), 4)
                    value = b.fadd(
                        code.load(vec(16), code.add(errors, at)), code.load(vec(16), code.add(numbers.value, at))
                    )
                    code.store(value, code.add(errors, at))
                    negative = b.icmp_signed("<", b.bitcast(value, vec(16, I32)), code.i32_const(0, 16))
                    code.store(b.bitcast(negative, I16), code.add(signs, code.div(at, 32)))
                    magnitudes.append(code.call_intrinsic("fabs", value))
                code.store(_add_pairwise(code, magnitudes), code.add(sums, code.div(start, _VECTORS // 4)))
            rows = [code.load(vec(16), code.add(sums, 64 * i)) for i in range(SIGN_BLOCK // 16 // _VECTORS)]
            scale = b.fdiv(code.reduce_add(_add_pairwise(code, rows)), count)
            code.store(scale, code.add(item["scales"], code.mul(block, 4)))
            with code.range(0, 4 * SIGN_BLOCK, 64) as at:
                value = code.load(vec(16), code.add(errors, at))
                coded = code.call("llvm.copysign.v16f32", vec(16), [code.splat(scale, 16), value])
                code.store(b.fsub(value, coded), code.add(errors, at))
            with code.if_then(is_short), code.range(end, SIGN_BLOCK) as i:
                code.store(zero, code.add(errors, code.mul(i, 4)))
    return code.ret()


def _add_pairwise(code: KernelBuilder, vectors: Sequence[Any]) -> Any:
    """Add neighbours, then their sums' neighbours: the order that the code's plain form has, too."""
    while len(vectors) > 1:
        vectors = [code.builder.fadd(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def emit_decompress_signs(module: Any) -> str:
    """Add the kernel that writes the mean of encoded rows; arguments: :data:`DECOMPRESS_SIGNS_ARGS`."""
    code = KernelBuilder(module, "decompress_signs")
    b, a = code.builder, code.load_args(DECOMPRESS_SIGNS_ARGS)
    divisor = code.splat(b.sitofp(a["payloads"], F32), 16)
    with code.thread_items(a["blocks"]) as block:
        scales, out = code.add(a["scales"], code.mul(block, 4)), code.add(a["out"], code.mul(block, 4 * SIGN_BLOCK))
        signs = code.add(a["signs"], code.mul(block, SIGN_BLOCK // 8))
        with code.range(0, SIGN_BLOCK // 8, 2 * _VECTORS) as at:
            totals = [code.stack_var(value) for value in _load_signed(code, scales, code.add(signs, at))]
            with code.range(1, a["payloads"]) as number:
                skip = code.mul(number, a["stride"])
                values = _load_signed(code, code.add(scales, skip), code.add(signs, at, skip))
                for total, value in zip(totals, values, strict=True):
                    total.value = b.fadd(total.value, value)
            with code.if_then(b.icmp_signed(">", a["payloads"], code.int_const(1))):
                for total in totals:
                    total.value = b.fdiv(total.value, divisor)
            for i, total in enumerate(totals):
                code.store(total.value, code.add(out, code.mul(at, 32), 64 * i))
    return code.ret()


def _load_signed(code: KernelBuilder, scale: Any, signs: Any) -> list[Any]:
    """The next numbers of a block: its scale with their signs."""
    value = code.load(F32, scale)
    plus, minus = code.splat(value, 16), code.splat(code.builder.fneg(value), 16)
    bits = (code.builder.bitcast(code.load(I16, code.add(signs, 2 * i)), vec(16, I1)) for i in range(_VECTORS))
    return [code.builder.select(negative, minus, plus) for negative in bits]


def emit_dequantize_nf4(module: Any, dtype: str) -> str:
    """Add the kernel that writes a weight's numbers as ``fp32`` or ``bf16``; arguments: :data:`DEQUANTIZE_NF4_ARGS`."""
    code = KernelBuilder(module, f"dequantize_nf4_{dtype}")
    b, a = code.builder, code.load_args(DEQUANTIZE_NF4_ARGS)
    values = code.load(vec(16), a["values"])
    # A byte has the earlier number in its upper half.
    twice = code.const_vector([i // 2 for i in range(16)])
    shifts = code.const_vector([4, 0] * 8)
    size = 2 if dtype == "bf16" else 4
    with code.thread_items(a["blocks"]) as block:
        bits = b.shl(b.zext(code.load(I16, code.add(a["scales"], code.mul(block, 2))), I32), code.int_const(16, I32))
        scale = code.splat(b.bitcast(bits, F32), 16)
        start = code.mul(block, a["block"])
        with code.range(start, code.add(start, a["block"]), 16) as at:
            pairs = code.load(vec(8, I8), code.add(a["codes"], code.div(at, 2)))
            both = b.zext(b.shuffle_vector(pairs, pairs, twice), vec(16, I32))
            number = b.fmul(
                code.look_up(values, a["values"], b.and_(b.lshr(both, shifts), code.i32_const(15, 16))), scale
            )
            code.store(code.to_bf16(number) if dtype == "bf16" else number, code.add(a["out"], code.mul(at, size)))
    return code.ret()
