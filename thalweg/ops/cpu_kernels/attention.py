"""Rotate, store and attend: the part of a decoder that sees the paged KV cache.

The cache of a layer is a pool of blocks of 16 positions, in stripes of 16 blocks: within a stripe head by
head, so that blocks that follow each other are one stream, and stripes of all layers side by side, so that
memory is first touched as blocks are first used (were the whole pool head by head, one block more would touch
a page in each head of each layer: half a gigabyte of huge pages in one step).  How a block lies is
``kv_layout.py``'s.  A token knows its position, the row of its sequence's block
table, and nothing else: a step may mix decoding tokens and pieces of prompts freely, and each token attends
to the positions up to its own.

Softmax is the plain two-pass one, in fp32, over a scratch row for each thread.
"""

from typing import Any

from llvmlite import ir

from thalweg.ops.cpu_kernels.kernel_builder import F32, I64, VOID, KernelBuilder, vec
from thalweg.ops.cpu_kernels.kv_layout import BLOCK_SIZE, BLOCKS_PER_STRIPE, AttentionShape, make_kv_layout
from thalweg.ops.cpu_kernels.pointwise import exp, normalize_row

# ``tables``: address of int32 block tables, ``table_offsets``: of each token's table as an offset in bytes;
# ``stripe``: bytes from a stripe of blocks to the next.
ROPE_ARGS = (
    "qkv", "qkv_stride", "rows", "positions", "tables", "keys", "values", "cos", "sin", "q_norm", "k_norm",
    "eps", "table_of", "stripe",
)  # fmt: skip
# ``positions``: where each token is, ``last_visible``: the last position it sees.  ``slopes``: ALiBi's, or a table
# of relative biases, (heads, 2 * reach + 16) floats with that of key j before query i at reach + j - i.
ATTENTION_ARGS = (
    "qkv", "qkv_stride", "rows", "positions", "tables", "keys", "values", "out", "scratch", "scratch_stride",
    "slopes", "table_of", "stripe", "lasts",
)  # fmt: skip


def _block_offset(code: KernelBuilder, shape: AttentionShape, block: Any, stripe: Any) -> Any:
    """Where a block of a head lies behind the head's first one."""
    of_stripe = code.mul(code.div(block, BLOCKS_PER_STRIPE), stripe)
    return code.add(of_stripe, code.mul(code.rem(block, BLOCKS_PER_STRIPE), shape.head_bytes))


def emit_rope_and_store_kv(module: Any, shape: AttentionShape) -> str:
    """Add the kernel that normalises and rotates queries and keys, and stores keys and values."""
    code = KernelBuilder(module, shape.kernel_name("rotate"))
    a = code.load_args(ROPE_ARGS)
    rows = code.load(I64, a["rows"], 8)
    per_token = shape.num_heads + 2 * shape.num_kv_heads
    eps = code.load(F32, a["eps"])
    kv = make_kv_layout(code, shape)
    with code.thread_items(code.mul(rows, per_token)) as item:
        token, head = code.div(item, per_token), code.rem(item, per_token)
        row = code.add(a["qkv"], code.mul(token, a["qkv_stride"]), code.mul(head, 4 * shape.head_dim))
        position = code.load(I64, code.add(a["positions"], code.mul(token, 8)))
        with code.if_then(code.builder.icmp_signed("<", head, code.int_const(shape.num_heads + shape.num_kv_heads))):
            is_query = code.builder.icmp_signed("<", head, code.int_const(shape.num_heads))
            if shape.qk_norm:
                weight = code.builder.select(is_query, a["q_norm"], a["k_norm"])
                normalize_row(code, "rms", row, row, weight, weight, eps, code.int_const(shape.head_dim))
            if shape.rotary_dim:
                _apply_rope(code, shape, row, position, a)
        stored = code.builder.icmp_signed(">=", head, code.int_const(shape.num_heads))
        with code.if_then(stored):
            table = code.add(a["tables"], code.load(I64, code.add(a["table_of"], code.mul(token, 8))))
            number = code.load(ir.IntType(32), code.add(table, code.mul(code.div(position, BLOCK_SIZE), 4)))
            block = _block_offset(code, shape, code.builder.sext(number, I64), a["stripe"])
            slot = code.rem(position, BLOCK_SIZE)
            is_key = code.builder.icmp_signed("<", head, code.int_const(shape.num_heads + shape.num_kv_heads))
            with code.builder.if_else(is_key) as (then, otherwise):
                with then:
                    start = code.mul(code.sub(head, shape.num_heads), BLOCKS_PER_STRIPE * shape.head_bytes)
                    kv.store_key(row, code.add(a["keys"], block, start), slot)
                with otherwise:
                    start = code.mul(
                        code.sub(head, shape.num_heads + shape.num_kv_heads), BLOCKS_PER_STRIPE * shape.head_bytes
                    )
                    kv.store_value(row, code.add(a["values"], block, start), slot)
    return code.ret()


def _apply_rope(code: KernelBuilder, shape: AttentionShape, row: Any, position: Any, a: dict[str, Any]) -> None:
    pairs = shape.rotary_dim // 2
    table = code.mul(position, 4 * pairs)
    width = 16 if pairs % 16 == 0 and not shape.rotary_interleaved else 1
    with code.range(0, pairs, width) as i:
        cos = code.load(vec(width), code.add(a["cos"], table, code.mul(i, 4)))
        sin = code.load(vec(width), code.add(a["sin"], table, code.mul(i, 4)))
        at = code.add(row, code.mul(i, 8 if shape.rotary_interleaved else 4))
        other = code.add(at, 4 if shape.rotary_interleaved else 4 * pairs)
        x, y = code.load(vec(width), at), code.load(vec(width), other)
        code.store(code.builder.fsub(code.builder.fmul(x, cos), code.builder.fmul(y, sin)), at)
        code.store(code.builder.fadd(code.builder.fmul(y, cos), code.builder.fmul(x, sin)), other)


def emit_paged_attention(module: Any, shape: AttentionShape) -> str:
    """Add the kernel that lets every token's query heads attend; ``out`` has rows of heads * dim floats."""
    code = KernelBuilder(module, shape.kernel_name("attend"))
    a = code.load_args(ATTENTION_ARGS)
    head_fn = _emit_attention_head(module, shape)
    rows = code.load(I64, a["rows"], 8)
    scratch = code.add(a["scratch"], code.mul(code.thread_id, a["scratch_stride"]))
    with code.thread_items(code.mul(rows, shape.num_heads)) as item:
        head, token = code.div(item, rows), code.rem(item, rows)  # a head's keys stay in the cache
        query = code.add(a["qkv"], code.mul(token, a["qkv_stride"]), code.mul(head, 4 * shape.head_dim))
        position = code.load(I64, code.add(a["positions"], code.mul(token, 8)))
        table = code.add(a["tables"], code.load(I64, code.add(a["table_of"], code.mul(token, 8))))
        out = code.add(a["out"], code.mul(code.add(code.mul(token, shape.num_heads), head), 4 * shape.head_dim))
        last_visible = code.load(I64, code.add(a["lasts"], code.mul(token, 8)))
        slope = code.load(F32, code.add(a["slopes"], code.mul(head, 4))) if shape.alibi else code.f32_const(0.0)
        bias = code.int_const(0)
        if shape.bias_span:
            bias = code.add(a["slopes"], code.mul(head, 4 * (2 * shape.bias_span + BLOCK_SIZE)))
        kv = code.mul(code.div(head, shape.num_heads // shape.num_kv_heads), BLOCKS_PER_STRIPE * shape.head_bytes)
        keys, values = code.add(a["keys"], kv), code.add(a["values"], kv)
        call_args = [query, position, last_visible, table, keys, values, a["stripe"], out, scratch, bias]
        code.builder.call(head_fn, [*call_args, slope])
    return code.ret()


def _emit_attention_head(module: Any, shape: AttentionShape) -> Any:
    code = KernelBuilder(module, shape.kernel_name("head"), ir.FunctionType(VOID, [I64] * 10 + [F32]))
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    query, position, last, table, keys, values, stripe, out, scratch, bias, slope = code.function.args
    start = code.int_const(0)
    if shape.sliding_window:
        start = code.max(code.sub(code.add(position, 1), shape.sliding_window), 0)
    block0, blocks = code.div(start, BLOCK_SIZE), code.add(code.div(last, BLOCK_SIZE), 1)
    if shape.bias_span:
        bias = code.add(bias, code.mul(code.sub(shape.bias_span, position), 4))
    lane = code.builder.sitofp(code.const_vector(range(16)), vec(16))
    low = code.f32_const(-3.0e38, 16)
    max_scores = code.stack_var(low)

    def block_address(pool: Any, number: Any) -> Any:
        index = code.load(ir.IntType(32), code.add(table, code.mul(number, 4)))
        return code.add(pool, _block_offset(code, shape, code.builder.sext(index, I64), stripe))

    kv = make_kv_layout(code, shape)
    scores = kv.key_scores(query)
    with code.range(block0, blocks) as number:
        score = code.builder.fmul(scores(block_address(keys, number)), code.f32_const(shape.scale, 16))
        if shape.softcap:
            score = _softcap(code, score, shape.softcap)
        base = code.mul(number, BLOCK_SIZE)
        key_positions = code.builder.fadd(lane, code.splat(code.builder.sitofp(base, F32), 16))
        query_position = code.splat(code.builder.sitofp(position, F32), 16)
        if shape.alibi:
            score = code.fma(code.splat(slope, 16), code.builder.fsub(key_positions, query_position), score)
        if shape.bias_span:
            score = code.builder.fadd(score, code.load(vec(16), code.add(bias, code.mul(base, 4))))
        last_visible = code.splat(code.builder.sitofp(last, F32), 16)
        score = code.builder.select(code.builder.fcmp_ordered("<=", key_positions, last_visible), score, low)
        if shape.sliding_window:
            first = code.splat(code.builder.sitofp(start, F32), 16)
            score = code.builder.select(code.builder.fcmp_ordered(">=", key_positions, first), score, low)
        max_scores.value = code.fmax(score, max_scores.value)
        code.store(score, code.add(scratch, code.mul(base, 4)))
    peak = code.splat(code.reduce_max(max_scores.value), 16)
    total = code.stack_var(code.f32_const(0.0, 16))
    parts = shape.head_dim // 16
    acc = [code.stack_var(code.f32_const(0.0, 16)) for _ in range(parts)]
    with code.range(block0, blocks) as number:
        at = code.add(scratch, code.mul(number, 4 * BLOCK_SIZE))
        weight = exp(code, code.builder.fsub(code.load(vec(16), at), peak))
        block = block_address(values, number)
        total.value = code.builder.fadd(total.value, kv.store_probs(weight, block, at))
        num_valid = code.min(code.sub(code.add(last, 1), code.mul(number, BLOCK_SIZE)), BLOCK_SIZE)
        kv.accumulate(acc, at, block, num_valid)
    inverse = code.splat(code.builder.fdiv(code.f32_const(1.0), code.reduce_add(total.value)), 16)
    for c in range(parts):
        code.store(code.builder.fmul(acc[c].value, inverse), code.add(out, 64 * c))
    code.ret()
    return code.function


def _softcap(code: KernelBuilder, score: Any, cap: float) -> Any:
    # cap * tanh(s / cap) = cap - 2 cap / (1 + exp(2 s / cap))
    e = exp(code, code.builder.fmul(score, code.f32_const(2.0 / cap, 16)))
    drop = code.builder.fdiv(code.f32_const(2.0 * cap, 16), code.builder.fadd(e, code.f32_const(1.0, 16)))
    return code.builder.fsub(code.f32_const(cap, 16), drop)
