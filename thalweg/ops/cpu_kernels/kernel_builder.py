"""A small language for CPU kernels, turned to machine code by llvmlite (the LLVM library as a wheel).

A kernel is a Python function that receives a :class:`KernelBuilder` and calls its methods; each call appends an
instruction.  Addresses are plain 64-bit integers, vectors are LLVM vectors, mutable variables are stack slots
that LLVM turns into registers, loops are context managers::

    with code.range(0, n, 16) as i:
        code.store(code.fma(a, code.load(code.vec(16), x + 4 * i), c), y + 4 * i)

Every kernel has one signature, ``void kernel(int64 *args, int64 thread, int64 threads)``, so that one loop
can run a list of them (``program.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from thalweg.ops.cpu_kernels.isa import Isa

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID, PTR = ir.VoidType(), ir.PointerType()
KERNEL = ir.FunctionType(VOID, [PTR, I64, I64])


class BFloat16Type(ir.types.Type):  # llvmlite has no name for it
    """The type ``bfloat``."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


BF16 = BFloat16Type()


def vec(width: int, element: Any = F32) -> Any:
    """Return a vector type, or the element's own for a width of 1."""
    return element if width == 1 else ir.VectorType(element, width)


class KernelModule(ir.Module):
    """A module whose kernels are for one instruction set."""

    def __init__(self, isa: Isa) -> None:
        super().__init__("kernels")
        self.isa = isa


class StackVar:
    """A mutable variable."""

    def __init__(self, code: KernelBuilder, value: Any) -> None:
        self._builder = code.builder
        with code.builder.goto_entry_block():
            self._alloca = code.builder.alloca(value.type)
        self._type = value.type
        code.builder.store(value, self._alloca)

    @property
    def value(self) -> Any:
        """The value now."""
        return self._builder.load(self._alloca, typ=self._type)

    @value.setter
    def value(self, new: Any) -> None:
        self._builder.store(new, self._alloca)


class KernelBuilder:
    """The body of one function under construction."""

    def __init__(self, module: KernelModule, name: str, signature: Any = KERNEL) -> None:
        self.module, self.isa = module, module.isa
        self.function = ir.Function(module, signature, name=name)
        self.function.attributes.add("nounwind")
        entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self.builder = ir.IRBuilder(entry)
        self.builder.branch(body)
        self.builder.position_at_end(body)
        if signature is KERNEL:
            self.args, self.thread_id, self.num_threads = self.function.args

    # numbers and types

    @staticmethod
    def int_const(value: int, typ: Any = I64) -> Any:
        """Return an integer constant."""
        return ir.Constant(typ, value)

    def f32_const(self, value: float, width: int = 1) -> Any:
        """Return an fp32 constant, or a vector of it."""
        return self.splat(ir.Constant(F32, float(np.float32(value))), width)

    def i32_const(self, value: int, width: int) -> Any:
        """Return a vector of the same int32."""
        return self.splat(self.int_const(value, I32), width)

    def splat(self, value: Any, width: int) -> Any:
        """Return a vector with the same scalar everywhere."""
        if width == 1:
            return value
        typ = ir.VectorType(value.type, width)
        lane0 = self.builder.insert_element(ir.Constant(typ, ir.Undefined), value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, width), [0] * width)
        return self.builder.shuffle_vector(lane0, ir.Constant(typ, ir.Undefined), zeros)

    def _to_int(self, value: Any) -> Any:
        return self.int_const(value) if isinstance(value, int) else value

    def add(self, *terms: Any) -> Any:
        """Add 64-bit integers; Python numbers among them are constants."""
        total = self._to_int(terms[0])
        for term in terms[1:]:
            total = self.builder.add(total, self._to_int(term))
        return total

    def sub(self, a: Any, b: Any) -> Any:
        """Subtract 64-bit integers."""
        return self.builder.sub(self._to_int(a), self._to_int(b))

    def mul(self, a: Any, b: Any) -> Any:
        """Multiply 64-bit integers."""
        return self.builder.mul(self._to_int(a), self._to_int(b))

    def div(self, a: Any, b: Any) -> Any:
        """Divide non-negative 64-bit integers."""
        return self.builder.udiv(self._to_int(a), self._to_int(b))

    def rem(self, a: Any, b: Any) -> Any:
        """Return the remainder of non-negative 64-bit integers."""
        return self.builder.urem(self._to_int(a), self._to_int(b))

    def min(self, a: Any, b: Any) -> Any:
        """Return the smaller 64-bit integer."""
        a, b = self._to_int(a), self._to_int(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def max(self, a: Any, b: Any) -> Any:
        """Return the larger 64-bit integer."""
        a, b = self._to_int(a), self._to_int(b)
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    # memory

    def load(self, typ: Any, address: Any, align: int = 1) -> Any:
        """Load a value from an integer address."""
        return self.builder.load(self.builder.inttoptr(address, PTR), typ=typ, align=align)

    def store(self, value: Any, address: Any, align: int = 1) -> None:
        """Store a value at an integer address."""
        self.builder.store(value, self.builder.inttoptr(address, PTR), align=align)

    def load_arg(self, index: int) -> Any:
        """Return the kernel's argument of that number, an integer."""
        return self.load(I64, self.add(self.builder.ptrtoint(self.args, I64), 8 * index), 8)

    def load_args(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the kernel's first arguments by name."""
        return {name: self.load_arg(index) for index, name in enumerate(names)}

    def stack_var(self, value: Any) -> StackVar:
        """Return a mutable variable."""
        return StackVar(self, value)

    def prefetch(self, address: Any) -> None:
        """Bring a cache line into the second cache."""
        kind = (self.int_const(x, I32) for x in (0, 2, 1))  # for reading, into the second cache, data
        self.call("llvm.prefetch.p0", VOID, [self.builder.inttoptr(address, PTR), *kind])

    def stack_bytes(self, nbytes: int) -> Any:
        """Return the address of some bytes on the stack, on a cache line's boundary."""
        with self.builder.goto_entry_block():
            memory: Any = self.builder.alloca(ir.ArrayType(I64, -(-nbytes // 8)))
            memory.align = 64
            return self.builder.ptrtoint(memory, I64)

    # control

    @contextmanager
    def range(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """Loop over 64-bit integers."""
        start, stop, step = self._to_int(start), self._to_int(stop), self._to_int(step)
        before = self.builder.block
        head = self.function.append_basic_block("head")
        body = self.function.append_basic_block("loop")
        done = self.function.append_basic_block("done")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(I64)
        index.add_incoming(start, before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, stop), body, done)
        self.builder.position_at_end(body)
        yield index
        index.add_incoming(self.builder.add(index, step), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(done)

    def if_then(self, condition: Any) -> AbstractContextManager[Any]:
        """Run the body where the condition (one bit) holds."""
        return self.builder.if_then(condition)

    def thread_items(self, count: Any) -> AbstractContextManager[Any]:
        """Loop over this thread's part of ``count`` items."""
        return self.range(*self.thread_range(count))

    def thread_range(self, count: Any) -> tuple[Any, Any]:
        """Return the first and the last index but one of this thread's part of ``count`` items."""
        first = self.div(self.mul(count, self.thread_id), self.num_threads)
        return first, self.div(self.mul(count, self.add(self.thread_id, 1)), self.num_threads)

    def call(self, name: str, typ: Any, values: Sequence[Any]) -> Any:
        """Call a function or intrinsic by name."""
        signature = ir.FunctionType(typ, [value.type for value in values])
        known = self.module.globals.get(name)
        return self.builder.call(known or ir.Function(self.module, signature, name=name), values)

    def spin_hint(self) -> None:
        """Tell the core that the thread is waiting."""
        if self.isa.machine == "x86_64":
            self.call("llvm.x86.sse2.pause", VOID, [])
        else:
            self.call("llvm.aarch64.hint", VOID, [self.int_const(1, I32)])  # yield

    def spin_until(self, is_over: Callable[[], Any], num_spins: int, num_respins: int) -> None:
        """Wait until the condition (one bit, read anew each time) holds: spin ``num_spins`` times, then offer the core
        to whoever else needs it, and again after every ``num_respins``."""
        spins = self.stack_var(self.int_const(0))
        poll, idle, over = (self.function.append_basic_block(name) for name in ("poll", "idle", "over"))
        self.builder.branch(poll)
        self.builder.position_at_end(poll)
        self.builder.cbranch(is_over(), over, idle)
        self.builder.position_at_end(idle)
        self.spin_hint()
        spins.value = self.add(spins.value, 1)
        with self.if_then(self.builder.icmp_signed(">", spins.value, self.int_const(num_spins))):
            self.call("sched_yield", I32, [])
            spins.value = self.int_const(num_spins - num_respins)
        self.builder.branch(poll)
        self.builder.position_at_end(over)

    # products of small numbers: vectors of one register or several

    def byte_weights(self, raw: Any) -> tuple[Any, ...]:
        """Return bytes that were stored with 128 added as :meth:`dot_bytes` takes them."""
        if self.isa.byte_dot == "vpmaddwd":
            words = self.builder.bitcast(raw, vec(raw.type.count // 2, I16))
            return self.even_bytes(words), self.odd_bytes(words)
        if self.isa.byte_dot == "sdot":
            return (self.builder.xor(raw, self.splat(self.int_const(-128, I8), raw.type.count)),)
        return (raw,)

    @property
    def byte_bias(self) -> int:
        """What :meth:`dot_bytes` leaves added to each weight: its sums are too large by that times the sum of x."""
        return 0 if self.isa.byte_dot == "sdot" else 128

    def dot_bytes(self, acc: Any, weights: Sequence[Any], x: Any) -> Any:
        """Add to int32 the products of four bytes each, of :meth:`byte_weights` and of int8 within +-127."""
        return self._by_register(self._dot_bytes, acc, *weights, x)

    def _dot_bytes(self, acc: Any, *operands: Any) -> Any:
        if self.isa.byte_dot == "vpmaddwd":
            even, odd, x = operands
            words: Any = self.builder.bitcast(x, even.type)
            eight = self.splat(self.int_const(8, I16), words.type.count)
            acc = self.dot_words(acc, even, self.builder.ashr(self.builder.shl(words, eight), eight))
            return self.dot_words(acc, odd, self.builder.ashr(words, eight))
        if self.isa.byte_dot == "sdot":
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, [acc, *operands])
        return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * self.isa.lanes}", acc.type, [acc, *operands])

    def even_bytes(self, words: Any) -> Any:
        """Return the low byte of each int16, without a sign."""
        return self.builder.and_(words, self.splat(self.int_const(255, I16), words.type.count))

    def odd_bytes(self, words: Any) -> Any:
        """Return the high byte of each int16, without a sign."""
        return self.builder.lshr(words, self.splat(self.int_const(8, I16), words.type.count))

    def dot_words(self, acc: Any, a: Any, b: Any) -> Any:
        """Add to int32 the products of two int16 each."""
        return self._add_in_order(acc, self.call("llvm.x86.avx2.pmadd.wd", acc.type, [a, b]))

    def dot_nibbles(self, acc: Any, nibbles: Any, x: Any) -> Any:
        """Add the products of bytes from 0 to 15 and of int8 within +-127; ``acc``: see :meth:`nibble_sums`."""
        if self.isa.byte_dot == "vpmaddwd":
            return self.builder.add(acc, self.call("llvm.x86.avx2.pmadd.ub.sw", acc.type, [nibbles, x]))
        return self._dot_bytes(acc, nibbles, x)

    def _add_in_order(self, acc: Any, term: Any) -> Any:
        """Add integers; LLVM may not add terms to each other first, of which it keeps more than there are registers."""
        same = ir.FunctionType(acc.type, [acc.type])
        return self.builder.asm(same, "", "=x,0", [self.builder.add(acc, term)], side_effect=False)

    @property
    def nibble_acc_type(self) -> Any:
        """The type of :meth:`dot_nibbles`'s sums in one register."""
        lanes = self.isa.lanes
        return vec(2 * lanes, I16) if self.isa.byte_dot == "vpmaddwd" else vec(lanes, I32)

    def nibble_sums(self, acc: Any) -> Any:
        """Return the int32 sums of up to 32 products each that :meth:`dot_nibbles` has added up.

        ``vpmaddubsw`` adds pairs of products in int16, where 8 * 2 * 15 * 127 = 30,480 fit.
        """
        if self.isa.byte_dot != "vpmaddwd":
            return acc
        ones = self.splat(self.int_const(1, I16), acc.type.count)
        return self.call("llvm.x86.avx2.pmadd.wd", vec(8, I32), [acc, ones])

    def _by_register(self, compute: Callable[..., Any], *vectors: Any) -> Any:
        """Apply to vectors of several registers what takes vectors of one; the first one has 32-bit elements."""
        count = vectors[0].type.count // self.isa.lanes
        parts = [compute(*(self._part(v, i, count) for v in vectors)) for i in range(count)]
        while len(parts) > 1:
            parts = [self._concat(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _part(self, vector: Any, index: int, count: int) -> Any:
        if count == 1:
            return vector
        size = vector.type.count // count
        return self._shuffle(vector, vector, range(index * size, (index + 1) * size))

    def _concat(self, a: Any, b: Any) -> Any:
        return self._shuffle(a, b, range(2 * a.type.count))

    def _shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(a, b, self.const_vector(lanes))

    def dot_pairs(self, acc: Any, a: Any, b: Any) -> Any:
        """Add to 16 fp32 the products of two bf16 each."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", acc.type, [acc, a, b])

    def to_bf16(self, a: Any) -> Any:
        """Round an fp32 scalar or vector to bf16, halves to even."""
        width = getattr(a.type, "count", 1)
        if self.isa.bf16_dot:
            return self.builder.fptrunc(a, vec(width, BF16))
        # LLVM would call a function for each number.
        number = lambda value: self.i32_const(value, width)
        bits = self.builder.bitcast(a, vec(width, I32))
        odd = self.builder.and_(self.builder.lshr(bits, number(16)), number(1))
        rounded = self.builder.add(self.builder.add(bits, number(0x7FFF)), odd)
        is_nan = self.builder.fcmp_unordered("uno", a, a)
        rounded = self.builder.select(is_nan, self.builder.or_(bits, number(0x400000)), rounded)
        high = self.builder.trunc(self.builder.lshr(rounded, number(16)), vec(width, I16))
        return self.builder.bitcast(high, vec(width, BF16))

    def exp2_scale(self, a: Any, n: Any) -> Any:
        """Return a * 2**n for whole fp32 n from -149 to 128, rounded once where the result is subnormal."""
        width = a.type.count
        if self.isa.lanes == width == 16:
            every = ir.Constant(I16, -1)
            return self.call("llvm.x86.avx512.mask.scalef.ps.512", a.type, [a, n, a, every, self.int_const(4, I32)])
        # 2**n in two factors, which both have a whole exponent
        exponent = self.builder.fptosi(n, vec(width, I32))
        half = self.builder.ashr(exponent, self.i32_const(1, width))
        for part in (half, self.builder.sub(exponent, half)):
            biased = self.builder.add(part, self.i32_const(127, width))
            bits = self.builder.shl(biased, self.i32_const(23, width))
            a = self.builder.fmul(a, self.builder.bitcast(bits, a.type))
        return a

    def look_up(self, table: Any, address: Any, index: Any) -> Any:
        """Return ``table[index]`` for 16 int32 from 0 to 15; ``table``: 16 fp32, which also lie at ``address``."""
        if self.isa.lanes == 16:
            return self.call("llvm.x86.avx512.permvar.sf.512", table.type, [table, index])
        if self.isa.lanes == 8:
            halves = [self._part(table, i, 2) for i in range(2)]
            found = []
            for part in (self._part(index, i, 2) for i in range(2)):
                low, high = (self.call("llvm.x86.avx2.permps", half.type, [half, part]) for half in halves)
                found.append(self.builder.select(self.builder.icmp_signed(">", part, self.i32_const(7, 8)), high, low))
            return self._concat(*found)
        result = table
        for lane in (self.int_const(i, I32) for i in range(16)):
            place = self.builder.zext(self.builder.extract_element(index, lane), I64)
            value = self.load(F32, self.add(address, self.mul(place, 4)))
            result = self.builder.insert_element(result, value, lane)
        return result

    # floating point, scalar or vector

    def _suffix(self, typ: Any) -> str:
        return f"v{typ.count}f32" if isinstance(typ, ir.VectorType) else "f32"

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self.call(f"llvm.fma.{self._suffix(a.type)}", a.type, [a, b, c])

    def call_intrinsic(self, name: str, a: Any) -> Any:
        """Apply an LLVM intrinsic such as ``fabs``, ``sqrt``, ``nearbyint``."""
        return self.call(f"llvm.{name}.{self._suffix(a.type)}", a.type, [a])

    def fmax(self, a: Any, b: Any) -> Any:
        """Return the larger of two floats."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fmin(self, a: Any, b: Any) -> Any:
        """Return the smaller of two floats."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def reduce_add(self, a: Any) -> Any:
        """Add up a vector's elements, pairwise."""
        return self.reduce(a, self.builder.fadd)

    def reduce_max(self, a: Any) -> Any:
        """Return a vector's largest element."""
        return self.reduce(a, self.fmax)

    def abs_max(self, address: Any, width: Any) -> Any:
        """Return the largest size of ``width`` fp32 numbers, above 0."""
        lane_max = self.stack_var(self.f32_const(0.0, 16))
        with self.range(0, width, 16) as i:
            size = self.call_intrinsic("fabs", self.load(vec(16), self.add(address, self.mul(i, 4))))
            lane_max.value = self.fmax(size, lane_max.value)
        return self.fmax(self.reduce_max(lane_max.value), self.f32_const(1e-30))

    def load_rounded(self, address: Any, factor: Any) -> Any:
        """Load 16 floats, multiplied with a factor and rounded to int32."""
        magic = self.f32_const(12582912.0, 16)  # 1.5 * 2**23: adding it rounds, and leaves the integer in the low bits
        value = self.fma(self.load(vec(16), address), factor, magic)
        return self.builder.sub(self.builder.bitcast(value, vec(16, I32)), self.i32_const(0x4B400000, 16))

    def reduce(self, a: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Join a vector's elements, pairwise."""
        while isinstance(a.type, ir.VectorType) and a.type.count > 1:
            a = combine(self._part(a, 0, 2), self._part(a, 1, 2))
        if isinstance(a.type, ir.VectorType):
            return self.builder.extract_element(a, ir.Constant(I32, 0))
        return a

    def const_vector(self, values: Sequence[int], typ: Any = I32) -> Any:
        """Return a constant vector of integers."""
        return ir.Constant(ir.VectorType(typ, len(values)), list(values))

    def ret(self) -> str:
        """End the function; returns its name."""
        self.builder.ret_void()
        return self.function.name


def optimize(llvm_ir: str, isa: Isa) -> tuple[Any, Any]:
    """Return the optimised module of a text, and the machine that turns it into code for an instruction set."""
    machine = isa.target_machine()
    parsed = llvm.parse_assembly(llvm_ir)
    parsed.triple = isa.triple
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False  # what is to be unrolled is written out
    tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine


class JitModule:
    """Compiled functions: addresses by name, alive as long as this object is."""

    def __init__(self, llvm_ir: str, isa: Isa, symbols: dict[str, int] | None = None) -> None:
        parsed, machine = optimize(llvm_ir, isa)
        for name, address in (symbols or {}).items():
            llvm.add_symbol(name, address)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def get_address(self, name: str) -> int:
        """Return where a function lies."""
        return self._engine.get_function_address(name)
