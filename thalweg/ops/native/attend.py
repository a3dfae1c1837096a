"""Rotate, store and attend: the part of a decoder that sees the paged KV cache.

The cache of a layer is a pool of blocks of 16 positions, in stripes of 16 blocks: within a stripe head by
head, so that blocks that follow each other are one stream, and stripes of all layers side by side, so that
memory is first touched as blocks are first used (were the whole pool head by head, one block more would touch
a page in each head of each layer: half a gigabyte of huge pages in one step).  How a block lies is
``kept.py``'s.  A token knows its position, the row of its sequence's block
table, and nothing else: a step may mix decoding tokens and pieces of prompts freely, and each token attends
to the positions up to its own.

Softmax is the plain two-pass one, in fp32, over a scratch row for each thread.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from thalweg.ops.native.ir import F32, I64, VOID, Code, vec
from thalweg.ops.native.kept import BLOCK, STRIPE, Heads, layout
from thalweg.ops.native.pointwise import exp, normalise

ROTATE = (
    "qkv", "qkv_stride", "rows", "positions", "tables", "keys", "values", "cos", "sin", "q_norm", "k_norm",
    "eps", "table_of", "stripe",
)  # fmt: skip
"""``tables``: address of int32 block tables, ``table_of``: of each token's table as an offset in bytes;
``stripe``: bytes from a stripe of blocks to the next."""
ATTEND = (
    "qkv", "qkv_stride", "rows", "positions", "tables", "keys", "values", "out", "scratch", "scratch_stride",
    "slopes", "table_of", "stripe", "lasts",
)  # fmt: skip
"""``positions``: where each token is, ``lasts``: the last position it sees.  ``slopes``: ALiBi's, or a table
of relative biases, (heads, 2 * reach + 16) floats with that of key j before query i at reach + j - i."""


def _arguments(code: Code, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: code.arg(index) for index, name in enumerate(names)}


def _offset(code: Code, h: Heads, number: Any, stripe: Any) -> Any:
    """Where a block of a head lies behind the head's first one."""
    return code.add(
        code.mul(code.div(number, STRIPE), stripe), code.mul(code.rem(number, STRIPE), h.head_bytes)
    )


def rotate(module: Any, h: Heads) -> str:
    """Add the kernel that normalises and rotates queries and keys, and stores keys and values."""
    name = h.name("rotate")
    code = Code(module, name)
    a = _arguments(code, ROTATE)
    rows = code.load(I64, a["rows"], 8)
    per_token = h.heads + 2 * h.kv_heads
    first, last = code.share(code.mul(rows, per_token))
    eps = code.load(F32, a["eps"])
    kept = layout(code, h)
    with code.range(first, last) as item:
        token, head = code.div(item, per_token), code.rem(item, per_token)
        row = code.add(a["qkv"], code.mul(token, a["qkv_stride"]), code.mul(head, 4 * h.dim))
        position = code.load(I64, code.add(a["positions"], code.mul(token, 8)))
        with code.when(code.b.icmp_signed("<", head, code.i(h.heads + h.kv_heads))):
            is_query = code.b.icmp_signed("<", head, code.i(h.heads))
            if h.qk_norm:
                weight = code.b.select(is_query, a["q_norm"], a["k_norm"])
                normalise(code, "rms", row, row, weight, weight, eps, code.i(h.dim))
            if h.rotary:
                _turn(code, h, row, position, a)
        stored = code.b.icmp_signed(">=", head, code.i(h.heads))
        with code.when(stored):
            table = code.add(a["tables"], code.load(I64, code.add(a["table_of"], code.mul(token, 8))))
            number = code.load(ir.IntType(32), code.add(table, code.mul(code.div(position, BLOCK), 4)))
            block = _offset(code, h, code.b.sext(number, I64), a["stripe"])
            slot = code.rem(position, BLOCK)
            is_key = code.b.icmp_signed("<", head, code.i(h.heads + h.kv_heads))
            with code.b.if_else(is_key) as (then, otherwise):
                with then:
                    start = code.mul(code.sub(head, h.heads), STRIPE * h.head_bytes)
                    kept.store_key(row, code.add(a["keys"], block, start), slot)
                with otherwise:
                    start = code.mul(code.sub(head, h.heads + h.kv_heads), STRIPE * h.head_bytes)
                    kept.store_value(row, code.add(a["values"], block, start), slot)
    code.ret()
    return name


def _turn(code: Code, h: Heads, row: Any, position: Any, a: dict[str, Any]) -> None:
    pairs = h.rotary // 2
    table = code.mul(position, 4 * pairs)
    width = 16 if pairs % 16 == 0 and not h.interleaved else 1
    with code.range(0, pairs, width) as i:
        cos = code.load(vec(width), code.add(a["cos"], table, code.mul(i, 4)))
        sin = code.load(vec(width), code.add(a["sin"], table, code.mul(i, 4)))
        at = code.add(row, code.mul(i, 8 if h.interleaved else 4))
        other = code.add(at, 4 if h.interleaved else 4 * pairs)
        x, y = code.load(vec(width), at), code.load(vec(width), other)
        code.store(code.b.fsub(code.b.fmul(x, cos), code.b.fmul(y, sin)), at)
        code.store(code.b.fadd(code.b.fmul(y, cos), code.b.fmul(x, sin)), other)


def attend(module: Any, h: Heads) -> str:
    """Add the kernel that lets every token's query heads attend; ``out`` has rows of heads * dim floats."""
    name = h.name("attend")
    code = Code(module, name)
    a = _arguments(code, ATTEND)
    one = _one_head(module, h)
    rows = code.load(I64, a["rows"], 8)
    first, last = code.share(code.mul(rows, h.heads))
    scratch = code.add(a["scratch"], code.mul(code.thread, a["scratch_stride"]))
    with code.range(first, last) as item:
        head, token = code.div(item, rows), code.rem(item, rows)  # a head's keys stay in the cache
        query = code.add(a["qkv"], code.mul(token, a["qkv_stride"]), code.mul(head, 4 * h.dim))
        position = code.load(I64, code.add(a["positions"], code.mul(token, 8)))
        table = code.add(a["tables"], code.load(I64, code.add(a["table_of"], code.mul(token, 8))))
        out = code.add(a["out"], code.mul(code.add(code.mul(token, h.heads), head), 4 * h.dim))
        last_seen = code.load(I64, code.add(a["lasts"], code.mul(token, 8)))
        slope = code.load(F32, code.add(a["slopes"], code.mul(head, 4))) if h.alibi else code.f(0.0)
        bias = code.add(a["slopes"], code.mul(head, 4 * (2 * h.reach + BLOCK))) if h.reach else code.i(0)
        kv = code.mul(code.div(head, h.heads // h.kv_heads), STRIPE * h.head_bytes)
        keys, values = code.add(a["keys"], kv), code.add(a["values"], kv)
        places = [query, position, last_seen, table, keys, values, a["stripe"], out, scratch, bias]
        code.b.call(one, [*places, slope])
    code.ret()
    return name


def _one_head(module: Any, h: Heads) -> Any:
    code = Code(module, h.name("head"), ir.FunctionType(VOID, [I64] * 10 + [F32]))
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    query, position, last, table, keys, values, stripe, out, scratch, bias, slope = code.function.args
    start = code.max(code.sub(code.add(position, 1), h.window), 0) if h.window else code.i(0)
    block0, blocks = code.div(start, BLOCK), code.add(code.div(last, BLOCK), 1)
    if h.reach:
        bias = code.add(bias, code.mul(code.sub(h.reach, position), 4))
    lane = code.b.sitofp(code.lanes(range(16)), vec(16))
    low = code.f(-3.0e38, 16)
    top = code.var(low)

    def block_of(pool: Any, number: Any) -> Any:
        index = code.load(ir.IntType(32), code.add(table, code.mul(number, 4)))
        return code.add(pool, _offset(code, h, code.b.sext(index, I64), stripe))

    kept = layout(code, h)
    scores = kept.scores(query)
    with code.range(block0, blocks) as number:
        score = code.b.fmul(scores(block_of(keys, number)), code.f(h.scale, 16))
        if h.softcap:
            score = _capped(code, score, h.softcap)
        base = code.mul(number, BLOCK)
        where = code.b.fadd(lane, code.splat(code.b.sitofp(base, F32), 16))
        here = code.splat(code.b.sitofp(position, F32), 16)
        if h.alibi:
            score = code.fma(code.splat(slope, 16), code.b.fsub(where, here), score)
        if h.reach:
            score = code.b.fadd(score, code.load(vec(16), code.add(bias, code.mul(base, 4))))
        seen = code.splat(code.b.sitofp(last, F32), 16)
        score = code.b.select(code.b.fcmp_ordered("<=", where, seen), score, low)
        if h.window:
            first = code.splat(code.b.sitofp(start, F32), 16)
            score = code.b.select(code.b.fcmp_ordered(">=", where, first), score, low)
        top.value = code.fmax(score, top.value)
        code.store(score, code.add(scratch, code.mul(base, 4)))
    peak = code.splat(code.largest(top.value), 16)
    total = code.var(code.f(0.0, 16))
    parts = h.dim // 16
    acc = [code.var(code.f(0.0, 16)) for _ in range(parts)]
    with code.range(block0, blocks) as number:
        at = code.add(scratch, code.mul(number, 4 * BLOCK))
        weight = exp(code, code.b.fsub(code.load(vec(16), at), peak))
        block = block_of(values, number)
        total.value = code.b.fadd(total.value, kept.weights(weight, block, at))
        inside = code.min(code.sub(code.add(last, 1), code.mul(number, BLOCK)), BLOCK)
        kept.add(acc, at, block, inside)
    inverse = code.splat(code.b.fdiv(code.f(1.0), code.total(total.value)), 16)
    for c in range(parts):
        code.store(code.b.fmul(acc[c].value, inverse), code.add(out, 64 * c))
    code.ret()
    return code.function


def _capped(code: Code, score: Any, cap: float) -> Any:
    # cap * tanh(s / cap) = cap - 2 cap / (1 + exp(2 s / cap))
    e = exp(code, code.b.fmul(score, code.f(2.0 / cap, 16)))
    drop = code.b.fdiv(code.f(2.0 * cap, 16), code.b.fadd(e, code.f(1.0, 16)))
    return code.b.fsub(code.f(cap, 16), drop)
