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

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from thalweg.ops.native.ir import BF16, F32, I1, I8, I16, I32, I64, VOID, Code, Var, vec

BLOCK = 16
STRIPE = 16  # blocks of a head that lie side by side
CACHES = {"fp32": 4, "bf16": 2, "int8": 1}
_SCALES = 4 * BLOCK  # bytes, in an 8-bit cache


@dataclass(frozen=True)
class Heads:
    """Shape and flavour of one layer's attention."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    cache: str = "fp32"
    """What keys and values are kept as: a name of :data:`CACHES`."""
    paired: bool = False
    """Whether a bf16 cache lies in pairs, for processors that multiply them (``vdpbf16ps``)."""
    rotary: int = 0
    """Leading dims of a head that are rotated; 0 for none."""
    interleaved: bool = False
    """Pairs are (2i, 2i+1) instead of (i, i + rotary/2)."""
    qk_norm: bool = False
    window: int = 0
    """Positions that a token sees, itself included; 0 for all."""
    softcap: float = 0.0
    alibi: bool = False
    reach: int = 0
    """Positions that a table of relative biases covers to either side; 0 for no such table."""

    @property
    def quantised(self) -> bool:
        """Whether the cache is an 8-bit one."""
        return self.cache == "int8"

    @property
    def size(self) -> int:
        """Bytes of an element of the cache."""
        return CACHES[self.cache]

    @property
    def element(self) -> Any:
        """The cache's element type, where it is a float."""
        return BF16 if self.cache == "bf16" else F32

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys, or the values, of one head of one block."""
        return BLOCK * self.dim * self.size + (_SCALES if self.quantised else 0)

    def name(self, what: str) -> str:
        """Return a name that tells this shape from others."""
        fields = (
            self.heads, self.kv_heads, self.dim, self.scale, self.cache, self.paired, self.rotary,
            self.interleaved, self.qk_norm, self.window, self.softcap, self.alibi, self.reach,
        )  # fmt: skip
        return f"{what}_" + "_".join(str(field).replace(".", "p").replace("-", "m") for field in fields)


class Plain:
    """fp32, or bf16 that is widened before it is used."""

    def __init__(self, code: Code, h: Heads) -> None:
        self.code, self.h = code, h

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of fp32 as the key of a slot; ``start`` is the head's place in the block."""
        code, h = self.code, self.h
        base = code.add(start, code.mul(slot, h.size))
        with code.range(0, h.dim) as d:
            value = code.load(F32, code.add(row, code.mul(d, 4)))
            if h.cache == "bf16":
                value = code.b.fptrunc(value, BF16)
            code.store(value, code.add(base, code.mul(d, BLOCK * h.size)), h.size)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of fp32 as the value of a slot."""
        code, h = self.code, self.h
        base = code.add(start, code.mul(slot, h.dim * h.size))
        with code.range(0, h.dim, 16) as d:
            value = code.load(vec(16), code.add(row, code.mul(d, 4)))
            if h.cache == "bf16":
                value = code.b.fptrunc(value, vec(16, BF16))
            code.store(value, code.add(base, code.mul(d, h.size)))

    def scores(self, query: Any) -> Callable[[Any], Any]:
        """Return what gives a query's products with the 16 keys of a block."""
        code, h = self.code, self.h

        def of(block: Any) -> Any:
            acc = [code.var(code.f(0.0, 16)) for _ in range(4)]
            with code.range(0, h.dim, 8) as d:
                for u in range(8):
                    q = code.splat(code.load(F32, code.add(query, code.mul(d, 4), 4 * u)), 16)
                    at = code.add(block, code.mul(d, BLOCK * h.size), BLOCK * h.size * u)
                    acc[u % 4].value = code.fma(q, self._widen(at), acc[u % 4].value)
            return _sum(code.b.fadd, acc)

        return of

    def weights(self, weight: Any, block: Any, at: Any) -> Any:
        """Keep a block's 16 weights at an address for :meth:`add`; return them as they will be used."""
        self.code.store(weight, at)
        return weight

    def add(self, acc: Sequence[Var], at: Any, block: Any, inside: Any) -> None:
        """Add the first ``inside`` values of a block, weighted, to sums of 16 dims each."""
        code, h = self.code, self.h
        with code.range(0, inside) as j:
            p = code.splat(code.load(F32, code.add(at, code.mul(j, 4))), 16)
            for c, cell in enumerate(acc):
                v = self._widen(code.add(block, code.mul(j, h.dim * h.size), 16 * h.size * c))
                cell.value = code.fma(p, v, cell.value)

    def _widen(self, address: Any) -> Any:
        value = self.code.load(vec(16, self.h.element), address)
        return self.code.b.fpext(value, vec(16)) if self.h.cache == "bf16" else value


class Paired(Plain):
    """bf16 in pairs: of dims in keys, of positions in values."""

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store pairs of dims."""
        code, h = self.code, self.h
        base = code.add(start, code.mul(slot, 4))
        with code.range(0, h.dim, 16) as d:
            pairs = code.b.bitcast(self._narrow(code.add(row, code.mul(d, 4))), vec(8, I32))
            for i in range(8):
                at = code.add(base, code.mul(d, 2 * BLOCK), 4 * BLOCK * i)
                code.store(code.b.extract_element(pairs, code.i(i, I32)), at, 4)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store every other number: the neighbours belong to another position, maybe to another thread."""
        code, h = self.code, self.h
        base = code.add(start, code.mul(code.div(slot, 2), 4 * h.dim))
        odd = code.b.icmp_signed("==", code.rem(slot, 2), code.i(1))
        lanes = ir.VectorType(I1, 32)
        masks = [ir.Constant(lanes, [int(i % 2 == which) for i in range(32)]) for which in (0, 1)]
        mask = code.b.select(odd, masks[1], masks[0])
        twice = ir.Constant(ir.VectorType(I32, 32), [i // 2 for i in range(32)])
        with code.range(0, h.dim, 16) as d:
            small: Any = code.b.bitcast(self._narrow(code.add(row, code.mul(d, 4))), vec(16, I16))
            wide = code.b.shuffle_vector(small, ir.Constant(small.type, ir.Undefined), twice)
            at = code.b.inttoptr(code.add(base, code.mul(d, 4)), ir.PointerType())
            code.call("llvm.masked.store.v32i16.p0", VOID, [wide, at, code.i(2, I32), mask])

    def scores(self, query: Any) -> Callable[[Any], Any]:
        """Two dims at a time."""
        code, h = self.code, self.h
        space = _space(code, h.dim * 2)
        with code.range(0, h.dim, 16) as d:
            code.store(self._narrow(code.add(query, code.mul(d, 4))), code.add(space, code.mul(d, 2)))

        def of(block: Any) -> Any:
            acc = [code.var(code.f(0.0, 16)) for _ in range(4)]
            with code.range(0, h.dim, 16) as d:
                for u in range(8):
                    q = self._both(code.add(space, code.mul(d, 2), 4 * u))
                    at = code.add(block, code.mul(d, 2 * BLOCK), 4 * BLOCK * u)
                    self._dot(acc[u % 4], q, code.load(vec(32, BF16), at))
            return _sum(code.b.fadd, acc)

        return of

    def weights(self, weight: Any, block: Any, at: Any) -> Any:
        """Round the weights, so that they add up to what they are used as."""
        small = self.code.b.fptrunc(weight, vec(16, BF16))
        self.code.store(small, at)
        return self.code.b.fpext(small, vec(16))

    def add(self, acc: Sequence[Var], at: Any, block: Any, inside: Any) -> None:
        """Two positions at a time; of the last pair, maybe one."""
        code, h = self.code, self.h
        row = 4 * h.dim
        with code.range(0, code.div(inside, 2)) as pair:
            p = self._both(code.add(at, code.mul(pair, 4)))
            for c, cell in enumerate(acc):
                place = code.add(block, code.mul(pair, row), 64 * c)
                self._dot(cell, p, code.load(vec(32, BF16), place))
        with code.when(code.b.icmp_signed("==", code.rem(inside, 2), code.i(1))):
            pair = code.div(inside, 2)
            p = self._both(code.add(at, code.mul(pair, 4)))
            first = code.splat(code.i(0xFFFF, I32), 16)
            for c, cell in enumerate(acc):
                two = code.load(vec(16, I32), code.add(block, code.mul(pair, row), 64 * c))
                self._dot(cell, p, code.b.bitcast(code.b.and_(two, first), vec(32, BF16)))

    def _narrow(self, address: Any) -> Any:
        return self.code.b.fptrunc(self.code.load(vec(16), address), vec(16, BF16))

    def _both(self, address: Any) -> Any:
        """Two bf16 numbers, 16 times."""
        return self.code.b.bitcast(self.code.splat(self.code.load(I32, address), 16), vec(32, BF16))

    def _dot(self, cell: Var, a: Any, b: Any) -> None:
        cell.value = self.code.call("llvm.x86.avx512bf16.dpbf16ps.512", vec(16), [cell.value, a, b])


class Quantised(Plain):
    """int8 with a scale for each position."""

    def store_key(self, row: Any, start: Any, slot: Any) -> None:
        """Store dims in fours, 128 added."""
        code, h = self.code, self.h
        inverse = self._store_scale(row, start, slot)
        with code.range(0, h.dim, 16) as d:
            whole = _rounded(code, code.add(row, code.mul(d, 4)), inverse)
            biased = code.b.add(whole, code.splat(code.i(128, I32), 16))
            fours = code.b.bitcast(code.b.trunc(biased, vec(16, I8)), vec(4, I32))
            for i in range(4):
                at = code.add(start, code.mul(d, BLOCK), 4 * BLOCK * i, code.mul(slot, 4))
                code.store(code.b.extract_element(fours, code.i(i, I32)), at)

    def store_value(self, row: Any, start: Any, slot: Any) -> None:
        """Store a row of bytes."""
        code, h = self.code, self.h
        inverse = self._store_scale(row, start, slot)
        base = code.add(start, code.mul(slot, h.dim))
        with code.range(0, h.dim, 16) as d:
            whole = _rounded(code, code.add(row, code.mul(d, 4)), inverse)
            code.store(code.b.trunc(whole, vec(16, I8)), code.add(base, d))

    def _store_scale(self, row: Any, start: Any, slot: Any) -> Any:
        """Write the scale of a position behind its head's bytes; returns its inverse, 16 times."""
        code = self.code
        top = _largest(code, row, self.h.dim)
        at = code.add(start, BLOCK * self.h.dim, code.mul(slot, 4))
        code.store(code.b.fdiv(top, code.f(127.0)), at, 4)
        return code.splat(code.b.fdiv(code.f(127.0), top), 16)

    def scores(self, query: Any) -> Callable[[Any], Any]:
        """Four dims at a time, with a query that is quantised once."""
        code, h = self.code, self.h
        space = _space(code, h.dim)
        top = _largest(code, query, h.dim)
        inverse = code.splat(code.b.fdiv(code.f(127.0), top), 16)
        zero = code.splat(code.i(0, I32), 16)
        total = code.var(zero)
        with code.range(0, h.dim, 16) as d:
            whole = _rounded(code, code.add(query, code.mul(d, 4)), inverse)
            total.value = code.b.add(total.value, whole)
            code.store(code.b.trunc(whole, vec(16, I8)), code.add(space, d))
        bias = code.splat(code.b.mul(code.fold(total.value, code.b.add), code.i(-128, I32)), 16)
        query_scale = code.splat(code.b.fdiv(top, code.f(127.0)), 16)

        def of(block: Any) -> Any:
            acc = [code.var(bias if lane == 0 else zero) for lane in range(4)]
            with code.range(0, h.dim, 16) as d:
                for lane in range(4):
                    four = code.splat(code.load(I32, code.add(space, d, 4 * lane)), 16)
                    key = code.load(vec(64, I8), code.add(block, code.mul(d, BLOCK), 4 * BLOCK * lane))
                    acc[lane].value = code.call(
                        "llvm.x86.avx512.vpdpbusd.512",
                        zero.type,
                        [acc[lane].value, key, code.b.bitcast(four, vec(64, I8))],
                    )
            scale = code.b.fmul(code.load(vec(16), code.add(block, BLOCK * h.dim)), query_scale)
            return code.b.fmul(code.b.sitofp(_sum(code.b.add, acc), vec(16)), scale)

        return of

    def weights(self, weight: Any, block: Any, at: Any) -> Any:
        """Take the values' scales in."""
        scales = self.code.load(vec(16), self.code.add(block, BLOCK * self.h.dim))
        self.code.store(self.code.b.fmul(weight, scales), at)
        return weight

    def _widen(self, address: Any) -> Any:
        whole = self.code.b.sext(self.code.load(vec(16, I8), address), vec(16, I32))
        return self.code.b.sitofp(whole, vec(16))


def layout(code: Code, h: Heads) -> Plain:
    """Return the layout of a cache, for the code of one function."""
    kind = Quantised if h.cache == "int8" else Paired if h.cache == "bf16" and h.paired else Plain
    return kind(code, h)


def _sum(join: Callable[[Any, Any], Any], acc: Sequence[Var]) -> Any:
    return join(join(acc[0].value, acc[1].value), join(acc[2].value, acc[3].value))


def _space(code: Code, nbytes: int) -> Any:
    """Return the address of some bytes on the stack."""
    with code.b.goto_entry_block():
        return code.b.ptrtoint(code.b.alloca(ir.ArrayType(I64, -(-nbytes // 8))), I64)


def _largest(code: Code, row: Any, dim: int) -> Any:
    """Return the largest size of a row's numbers, above 0."""
    top = code.var(code.f(0.0, 16))
    with code.range(0, dim, 16) as d:
        size = code.unary("fabs", code.load(vec(16), code.add(row, code.mul(d, 4))))
        top.value = code.fmax(size, top.value)
    return code.fmax(code.largest(top.value), code.f(1e-30))


def _rounded(code: Code, address: Any, inverse: Any) -> Any:
    """Return 16 floats, scaled and rounded to int32."""
    magic = code.f(12582912.0, 16)  # 1.5 * 2**23: adding it rounds, and leaves the integer in the low bits
    value = code.fma(code.load(vec(16), address), inverse, magic)
    return code.b.sub(code.b.bitcast(value, vec(16, I32)), code.splat(code.i(0x4B400000, I32), 16))
