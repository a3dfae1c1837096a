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
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

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

    def __init__(self, module: Any, name: str, signature: Any = KERNEL) -> None:
        self.module = module
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

    @contextmanager
    def if_then(self, condition: Any) -> Iterator[None]:
        """Run the body where the condition (one bit) holds."""
        with self.builder.if_then(condition):
            yield

    def thread_range(self, count: Any) -> tuple[Any, Any]:
        """Return the first and the last index but one of this thread's part of ``count`` items."""
        first = self.div(self.mul(count, self.thread_id), self.num_threads)
        return first, self.div(self.mul(count, self.add(self.thread_id, 1)), self.num_threads)

    def call(self, name: str, typ: Any, values: Sequence[Any]) -> Any:
        """Call a function or intrinsic by name."""
        signature = ir.FunctionType(typ, [value.type for value in values])
        known = self.module.globals.get(name)
        return self.builder.call(known or ir.Function(self.module, signature, name=name), values)

    def dot_bytes(self, acc: Any, a: Any, b: Any) -> Any:
        """Add to 16 int32 the products of four bytes each, of a without a sign, of b with one."""
        return self.call("llvm.x86.avx512.vpdpbusd.512", acc.type, [acc, a, b])

    def dot_pairs(self, acc: Any, a: Any, b: Any) -> Any:
        """Add to 16 fp32 the products of two bf16 each."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", acc.type, [acc, a, b])

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

    def reduce(self, a: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Join a vector's elements, pairwise."""
        while isinstance(a.type, ir.VectorType) and a.type.count > 1:
            half = a.type.count // 2
            parts = []
            for start in (0, half):
                mask = ir.Constant(ir.VectorType(I32, half), list(range(start, start + half)))
                parts.append(self.builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined), mask))
            a = combine(*parts)
        if isinstance(a.type, ir.VectorType):
            return self.builder.extract_element(a, ir.Constant(I32, 0))
        return a

    def const_vector(self, values: Sequence[int], typ: Any = I32) -> Any:
        """Return a constant vector of integers."""
        return ir.Constant(ir.VectorType(typ, len(values)), list(values))

    def ret(self) -> None:
        """End the function."""
        self.builder.ret_void()


class JitModule:
    """Compiled functions: addresses by name, alive as long as this object is."""

    def __init__(self, module: Any, symbols: dict[str, int] | None = None) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        features = llvm.get_host_cpu_features().flatten()
        machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)
        parsed = llvm.parse_assembly(str(module))
        parsed.triple = llvm.get_default_triple()
        parsed.verify()
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_unrolling = False  # what is to be unrolled is written out
        tuning.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(parsed, passes)
        for name, address in (symbols or {}).items():
            llvm.add_symbol(name, address)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def get_address(self, name: str) -> int:
        """Return where a function lies."""
        return self._engine.get_function_address(name)


def host_cpu_features() -> frozenset[str]:
    """Return the processor's features by LLVM's names (``avx512vnni``, ...)."""
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
