"""How keys and values lie in the cache, and the arithmetic on them: a class for each layout.

For one head of one block of 16 positions:

=========  ====================================  ======================================  ==================
layout     keys                                  values                                  queries and weights
=========  ====================================  ======================================  ==================
Plain      (dim, 16)                             (16, dim)                               fp32
Paired     (dim / 2, 16, 2) in bf16              (8, dim, 2) in bf16                     bf16
Quantised  (dim / 4, 16, 4) int8 with 128        (16, dim) int8, then 16 scales          int8; fp32
           added, then 16 scales
=========  ====================================  ======================================  ==================

So a vector holds one number, two or four of each of a block's 16 keys, and one instruction multiplies them
with the query's.  A scale belongs to a position.  Slots beyond a token's position hold what an earlier owner
left; their weight is 0, and nothing is multiplied by them that could be infinite.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from llvmlite import ir

from thalweg.ops.cpu_kernels.kernel_builder import BF16, F32, I1, I8, I16, I32, VOID, KernelBuilder, StackVar, vec

BLOCK_SIZE = 16
BLOCKS_PER_STRIPE = 16  # blocks of a head that lie side by side
KV_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES = 4 * BLOCK_SIZE  # bytes, in an 8-bit cache


@dataclass(frozen=True)
class AttentionShape:
    """Shape and flavour of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # What keys and values are kept as: a name of :data:`KV_DTYPE_BYTES`.
    kv_dtype: str = "fp32"
    # Whether a bf16 cache lies in pairs, for processors that multiply them (``vdpbf16ps``).
    bf16_pairs: bool = False
    # Leading dims of a head that are rotated; 0 for none.
    rotary_dim: int = 0
    # Pairs are (2i, 2i+1) instead of (i, i + rotary/2).
    rotary_interleaved: bool = False
    qk_norm: bool = False
    # Positions that a token sees, itself included; 0 for all.
    sliding_window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    # Positions that a table of relative biases covers to either side; 0 for no such table.
    bias_span: int = 0

    @property
    def is_int8(self) -> bool:
        """Whether the cache is an 8-bit one."""
        return self.kv_dtype == "int8"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the cache."""
        return KV_DTYPE_BYTES[self.kv_dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys, or the values, of one head of one block."""
        return BLOCK_SIZE * self.head_dim * self.element_bytes + (_SCALE_BYTES if self.is_int8 else 0)

    def kernel_name(self, prefix: str) -> str:
        """Return a name that tells this shape from others."""
        return f"{prefix}_" + "_".join(str(field).replace(".", "p").replace("-", "m") for field in astuple(self))


class PlainKV:
    """fp32, or bf16 that is widened before it is used."""

    def __init__(self, code: KernelBuilder, shape: AttentionShape) -> None:
        self.code, self.shape = code, shape

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of fp32 as the key of a slot; ``start`` is the head's place in the block."""
        code, shape = self.code, self.shape
        base = code.add(start, code.mul(slot, shape.element_bytes))
        with code.range(0, shape.head_dim) as d:
            value = code.load(F32, code.add(row, code.mul(d, 4)))
            if shape.kv_dtype == "bf16":
                value = code.to_bf16(value)
            code.store(value, code.add(base, code.mul(d, BLOCK_SIZE * shape.element_bytes)), shape.element_bytes)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of fp32 as the value of a slot."""
        code, shape = self.code, self.shape
        base = code.add(start, code.mul(slot, shape.head_dim * shape.element_bytes))
        with code.range(0, shape.head_dim, 16) as d:
            value = code.load(vec(16), code.add(row, code.mul(d, 4)))
            if shape.kv_dtype == "bf16":
                value = code.to_bf16(value)
            code.store(value, code.add(base, code.mul(d, shape.element_bytes)))

    def key_scores(self, query: Any) -> Callable[[Any], Any]:
        """Return what gives a query's products with the 16 keys of a block."""
        code, shape = self.code, self.shape

        def score_block(block: Any) -> Any:
            acc = [code.stack_var(code.f32_const(0.0, 16)) for _ in range(4)]
            with code.range(0, shape.head_dim, 8) as d:
                for u in range(8):
                    q = code.splat(code.load(F32, code.add(query, code.mul(d, 4), 4 * u)), 16)
                    at = code.add(
                        block, code.mul(d, BLOCK_SIZE * shape.element_bytes), BLOCK_SIZE * shape.element_bytes * u
                    )
                    acc[u % 4].value = code.fma(q, self._load_fp32(at), acc[u % 4].value)
            return _combine_four(code.builder.fadd, acc)

        return score_block

    def store_probs(self, probs: Any, block: Any, at: Any) -> Any:
        """Keep a block's 16 weights at an address for :meth:`add`; return them as they will be used."""
        self.code.store(probs, at)
        return probs

    def accumulate(self, acc: Sequence[StackVar], at: Any, block: Any, num_valid: Any) -> None:
        """Add the first ``num_valid`` values of a block, weighted, to sums of 16 dims each."""
        code, shape = self.code, self.shape
        per_pass = max(1, code.isa.tile[0] * code.isa.tile[1] * code.isa.lanes // 16)  # sums that stay in registers
        for first in range(0, len(acc), per_pass):
            with code.range(0, num_valid) as j:
                p = code.splat(code.load(F32, code.add(at, code.mul(j, 4))), 16)
                value = code.add(block, code.mul(j, shape.head_dim * shape.element_bytes))
                for c, cell in enumerate(acc[first : first + per_pass], first):
                    v = self._load_fp32(code.add(value, 16 * shape.element_bytes * c))
                    cell.value = code.fma(p, v, cell.value)

    def _load_fp32(self, address: Any) -> Any:
        if self.shape.kv_dtype == "bf16":
            return self.code.builder.fpext(self.code.load(vec(16, BF16), address), vec(16))
        return self.code.load(vec(16), address)


class Bf16PairKV(PlainKV):
    """bf16 in pairs: of dims in keys, of positions in values."""

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store pairs of dims."""
        code, shape = self.code, self.shape
        base = code.add(start, code.mul(slot, 4))
        with code.range(0, shape.head_dim, 16) as d:
            pairs = code.builder.bitcast(self._load_bf16(code.add(row, code.mul(d, 4))), vec(8, I32))
            for i in range(8):
                at = code.add(base, code.mul(d, 2 * BLOCK_SIZE), 4 * BLOCK_SIZE * i)
                code.store(code.builder.extract_element(pairs, code.int_const(i, I32)), at, 4)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store every other number: the neighbours belong to another position, maybe to another thread."""
        code, shape = self.code, self.shape
        base = code.add(start, code.mul(code.div(slot, 2), 4 * shape.head_dim))
        odd = code.builder.icmp_signed("==", code.rem(slot, 2), code.int_const(1))
        lanes = ir.VectorType(I1, 32)
        masks = [ir.Constant(lanes, [int(i % 2 == which) for i in range(32)]) for which in (0, 1)]
        mask = code.builder.select(odd, masks[1], masks[0])
        twice = ir.Constant(ir.VectorType(I32, 32), [i // 2 for i in range(32)])
        with code.range(0, shape.head_dim, 16) as d:
            small: Any = code.builder.bitcast(self._load_bf16(code.add(row, code.mul(d, 4))), vec(16, I16))
            wide = code.builder.shuffle_vector(small, ir.Constant(small.type, ir.Undefined), twice)
            at = code.builder.inttoptr(code.add(base, code.mul(d, 4)), ir.PointerType())
            code.call("llvm.masked.store.v32i16.p0", VOID, [wide, at, code.int_const(2, I32), mask])

    def key_scores(self, query: Any) -> Callable[[Any], Any]:
        """Two dims at a time."""
        code, shape = self.code, self.shape
        query_buffer = code.stack_bytes(shape.head_dim * 2)
        with code.range(0, shape.head_dim, 16) as d:
            code.store(self._load_bf16(code.add(query, code.mul(d, 4))), code.add(query_buffer, code.mul(d, 2)))

        def score_block(block: Any) -> Any:
            acc = [code.stack_var(code.f32_const(0.0, 16)) for _ in range(4)]
            with code.range(0, shape.head_dim, 16) as d:
                for u in range(8):
                    q = self._broadcast_pair(code.add(query_buffer, code.mul(d, 2), 4 * u))
                    at = code.add(block, code.mul(d, 2 * BLOCK_SIZE), 4 * BLOCK_SIZE * u)
                    self._dot(acc[u % 4], q, code.load(vec(32, BF16), at))
            return _combine_four(code.builder.fadd, acc)

        return score_block

    def store_probs(self, probs: Any, block: Any, at: Any) -> Any:
        """Round the weights, so that they add up to what they are used as."""
        small = self.code.to_bf16(probs)
        self.code.store(small, at)
        return self.code.builder.fpext(small, vec(16))

    def accumulate(self, acc: Sequence[StackVar], at: Any, block: Any, num_valid: Any) -> None:
        """Two positions at a time; of the last pair, maybe one."""
        code, shape = self.code, self.shape
        row = 4 * shape.head_dim
        with code.range(0, code.div(num_valid, 2)) as pair:
            p = self._broadcast_pair(code.add(at, code.mul(pair, 4)))
            for c, cell in enumerate(acc):
                address = code.add(block, code.mul(pair, row), 64 * c)
                self._dot(cell, p, code.load(vec(32, BF16), address))
        with code.if_then(code.builder.icmp_signed("==", code.rem(num_valid, 2), code.int_const(1))):
            pair = code.div(num_valid, 2)
            p = self._broadcast_pair(code.add(at, code.mul(pair, 4)))
            first = code.i32_const(0xFFFF, 16)
            for c, cell in enumerate(acc):
                two = code.load(vec(16, I32), code.add(block, code.mul(pair, row), 64 * c))
                self._dot(cell, p, code.builder.bitcast(code.builder.and_(two, first), vec(32, BF16)))

    def _load_bf16(self, address: Any) -> Any:
        return self.code.to_bf16(self.code.load(vec(16), address))

    def _broadcast_pair(self, address: Any) -> Any:
        """Two bf16 numbers, 16 times."""
        return self.code.builder.bitcast(self.code.splat(self.code.load(I32, address), 16), vec(32, BF16))

    def _dot(self, cell: StackVar, a: Any, b: Any) -> None:
        cell.value = self.code.dot_pairs(cell.value, a, b)


class Int8KV(PlainKV):
    """int8 with a scale for each position."""

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store dims in fours, 128 added."""
        code, shape = self.code, self.shape
        inverse = self._store_scale(row, start, slot)
        with code.range(0, shape.head_dim, 16) as d:
            quantized = code.load_rounded(code.add(row, code.mul(d, 4)), inverse)
            biased = code.builder.add(quantized, code.i32_const(128, 16))
            fours = code.builder.bitcast(code.builder.trunc(biased, vec(16, I8)), vec(4, I32))
            for i in range(4):
                at = code.add(start, code.mul(d, BLOCK_SIZE), 4 * BLOCK_SIZE * i, code.mul(slot, 4))
                code.store(code.builder.extract_element(fours, code.int_const(i, I32)), at)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of bytes."""
        code, shape = self.code, self.shape
        inverse = self._store_scale(row, start, slot)
        base = code.add(start, code.mul(slot, shape.head_dim))
        with code.range(0, shape.head_dim, 16) as d:
            quantized = code.load_rounded(code.add(row, code.mul(d, 4)), inverse)
            code.store(code.builder.trunc(quantized, vec(16, I8)), code.add(base, d))

    def _store_scale(self, row: Any, start: Any, slot: Any) -> Any:
        """Write the scale of a position behind its head's bytes; returns its inverse, 16 times."""
        code = self.code
        row_max = code.abs_max(row, self.shape.head_dim)
        at = code.add(start, BLOCK_SIZE * self.shape.head_dim, code.mul(slot, 4))
        code.store(code.builder.fdiv(row_max, code.f32_const(127.0)), at, 4)
        return code.splat(code.builder.fdiv(code.f32_const(127.0), row_max), 16)

    def key_scores(self, query: Any) -> Callable[[Any], Any]:
        """Four dims at a time, with a query that is quantised once."""
        code, shape = self.code, self.shape
        query_buffer = code.stack_bytes(shape.head_dim)
        row_max = code.abs_max(query, shape.head_dim)
        inverse = code.splat(code.builder.fdiv(code.f32_const(127.0), row_max), 16)
        zero = code.i32_const(0, 16)
        total = code.stack_var(zero)
        with code.range(0, shape.head_dim, 16) as d:
            quantized = code.load_rounded(code.add(query, code.mul(d, 4)), inverse)
            total.value = code.builder.add(total.value, quantized)
            code.store(code.builder.trunc(quantized, vec(16, I8)), code.add(query_buffer, d))
        bias = code.builder.mul(code.reduce(total.value, code.builder.add), code.int_const(-code.byte_bias, I32))
        bias = code.splat(bias, 16)
        query_scale = code.splat(code.builder.fdiv(row_max, code.f32_const(127.0)), 16)

        def score_block(block: Any) -> Any:
            acc = [code.stack_var(bias if lane == 0 else zero) for lane in range(4)]
            with code.range(0, shape.head_dim, 16) as d:
                for lane in range(4):
                    four = code.splat(code.load(I32, code.add(query_buffer, d, 4 * lane)), 16)
                    key = code.load(vec(64, I8), code.add(block, code.mul(d, BLOCK_SIZE), 4 * BLOCK_SIZE * lane))
                    x = code.builder.bitcast(four, vec(64, I8))
                    acc[lane].value = code.dot_bytes(acc[lane].value, code.byte_weights(key), x)
            scale = code.builder.fmul(code.load(vec(16), code.add(block, BLOCK_SIZE * shape.head_dim)), query_scale)
            return code.builder.fmul(code.builder.sitofp(_combine_four(code.builder.add, acc), vec(16)), scale)

        return score_block

    def store_probs(self, probs: Any, block: Any, at: Any) -> Any:
        """Take the values' scales in."""
        scales = self.code.load(vec(16), self.code.add(block, BLOCK_SIZE * self.shape.head_dim))
        self.code.store(self.code.builder.fmul(probs, scales), at)
        return probs

    def _load_fp32(self, address: Any) -> Any:
        integers = self.code.builder.sext(self.code.load(vec(16, I8), address), vec(16, I32))
        return self.code.builder.sitofp(integers, vec(16))


def make_kv_layout(code: KernelBuilder, shape: AttentionShape) -> PlainKV:
    """Return the layout of a cache, for the code of one function."""
    in_pairs = shape.kv_dtype == "bf16" and shape.bf16_pairs
    return (Int8KV if shape.is_int8 else Bf16PairKV if in_pairs else PlainKV)(code, shape)


def _combine_four(combine: Callable[[Any, Any], Any], acc: Sequence[StackVar]) -> Any:
    return combine(combine(acc[0].value, acc[1].value), combine(acc[2].value, acc[3].value))
