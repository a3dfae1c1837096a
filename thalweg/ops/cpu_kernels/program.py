"""Run a list of kernels on all of torch's threads with one call from Python.

A program is an int64 tensor with a row of 20 words for each instruction: the kernel's address, then its
arguments.  All threads walk through it together and meet at a barrier after each instruction.  The threads
are those of the OpenMP runtime that torch has loaded, so that nothing competes with torch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir

from thalweg.ops.cpu_kernels.kernel_builder import I32, I64, KERNEL, PTR, VOID, JitModule, KernelBuilder

WORDS_PER_INSTRUCTION = 20
# Threads that run a program at most: kernels with scratch memory of their own have a row for each thread.
MAX_THREADS = 256
_SPINS = 4000  # a few microseconds; then the core is offered to whoever else needs it


def _openmp_symbols() -> dict[str, int]:
    """Return the addresses of the runtime's entry points, or nothing where torch brings another one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        library = ctypes.CDLL(str(path))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        if all(hasattr(library, name) for name in names):
            return {n: ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in names}
    return {}


def _emit_interpreter(module: Any) -> None:
    """``walk(state)``: one thread's way through the program; state = program, instructions, barrier."""
    code = KernelBuilder(module, "walk", ir.FunctionType(VOID, [PTR]))
    b = code.builder
    state = b.ptrtoint(code.function.args[0], I64)
    program, count, barrier = (code.load(I64, code.add(state, 8 * i), 8) for i in range(3))
    thread = b.sext(code.call("omp_get_thread_num", I32, []), I64)
    threads = b.sext(code.call("omp_get_num_threads", I32, []), I64)
    arrived = b.inttoptr(barrier, I64.as_pointer())
    phase = b.inttoptr(code.add(barrier, 128), I64.as_pointer())
    with code.range(0, count) as index:
        row = code.add(program, code.mul(index, 8 * WORDS_PER_INSTRUCTION))
        kernel = b.inttoptr(code.load(I64, row, 8), KERNEL.as_pointer())
        before = b.load_atomic(phase, "acquire", 8, typ=I64)
        b.call(kernel, [b.inttoptr(code.add(row, 8), PTR), thread, threads])
        with code.if_then(b.icmp_signed(">", threads, code.int_const(1))):
            arrival = b.atomic_rmw("add", arrived, code.int_const(1), "acq_rel")
            last = b.icmp_signed("==", code.add(arrival, 1), threads)
            with b.if_else(last) as (then, otherwise):
                with then:
                    b.store_atomic(code.int_const(0), arrived, "monotonic", 8)
                    b.store_atomic(code.add(before, 1), phase, "release", 8)
                with otherwise:
                    _emit_spin_wait(code, phase, before)
    code.ret()


def _emit_spin_wait(code: KernelBuilder, phase: Any, before: Any) -> None:
    b = code.builder
    spin = code.function.append_basic_block("spin")
    yield_core = code.function.append_basic_block("rest")
    respin = code.function.append_basic_block("again")
    done = code.function.append_basic_block("released")
    start = b.block
    b.branch(spin)
    b.position_at_end(spin)
    num_spins = b.phi(I64)
    num_spins.add_incoming(code.int_const(0), start)
    now = b.load_atomic(phase, "acquire", 8, typ=I64)
    code.call("llvm.x86.sse2.pause", VOID, [])
    b.cbranch(b.icmp_signed("==", now, before), respin, done)
    b.position_at_end(respin)
    more = code.add(num_spins, 1)
    b.cbranch(b.icmp_signed("<", more, code.int_const(_SPINS)), spin, yield_core)
    num_spins.add_incoming(more, respin)
    b.position_at_end(yield_core)
    code.call("sched_yield", I32, [])
    num_spins.add_incoming(code.int_const(0), yield_core)
    b.branch(spin)
    b.position_at_end(done)


def _emit_launch(module: Any) -> None:
    """``launch(state, threads)``: run ``walk(state)`` on all threads."""
    code = KernelBuilder(module, "launch", ir.FunctionType(VOID, [PTR, I32]))
    state, threads = code.function.args
    walk = module.globals["walk"]
    code.call("GOMP_parallel", VOID, [code.builder.bitcast(walk, PTR), state, threads, ir.Constant(I32, 0)])
    code.ret()


@cache
def _load_runtime() -> tuple[Any, JitModule]:
    symbols = _openmp_symbols()
    module = ir.Module("program")
    _emit_interpreter(module)
    _emit_launch(module)
    libc = ctypes.CDLL(None)
    symbols["sched_yield"] = ctypes.cast(libc.sched_yield, ctypes.c_void_p).value or 0
    library = JitModule(module, symbols)
    launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(library.get_address("launch"))
    return launch, library


def openmp_available() -> bool:
    """Whether torch's OpenMP runtime can be joined here."""
    return bool(_openmp_symbols())


class Program:
    """Instructions that are written once and run many times; keeps what they point to alive."""

    def __init__(
        self, instructions: Sequence[tuple[int, Sequence[int]]], keep_alive: Sequence[Any] = (), num_threads: int = 0
    ) -> None:
        rows = torch.zeros(len(instructions), WORDS_PER_INSTRUCTION, dtype=torch.int64)
        for row, (kernel, args) in zip(rows, instructions, strict=True):
            assert len(args) < WORDS_PER_INSTRUCTION
            row[: 1 + len(args)] = torch.tensor([kernel, *args], dtype=torch.int64)
        self._keep_alive: tuple[Any, ...] = (rows, *keep_alive)
        # The barrier's two words, on cache lines of their own.
        self._barrier = torch.zeros(64, dtype=torch.int64)
        base = -(-self._barrier.data_ptr() // 128) * 128
        self._state = torch.tensor([rows.data_ptr(), len(rows), base], dtype=torch.int64)
        self._address = self._state.data_ptr()
        # Two threads that come first together compile it twice: each program keeps the machine code that it runs.
        self._launch, self._library = _load_runtime()
        self._num_threads = num_threads

    def run(self) -> None:
        """Run all instructions; returns when they are done.  The interpreter lock is free meanwhile."""
        self._launch(self._address, min(self._num_threads or torch.get_num_threads(), MAX_THREADS))
