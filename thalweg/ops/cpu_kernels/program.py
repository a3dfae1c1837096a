"""Run a list of kernels on all of torch's threads with one call from Python.

A program is an int64 tensor with a row of 20 words for each instruction: the kernel's address, then its
arguments.  All threads walk through it together and meet at a barrier after each instruction.  The threads
are those of the OpenMP runtime that torch has loaded, so that nothing competes with torch's own.

Barriers make all threads as slow as the slowest: where another process holds one of two cores, the thread there comes
to each of hundreds of barriers a time slice late.  :class:`ThreadTuner` finds out by trying.
"""

import ctypes
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir

from thalweg.ops.cpu_kernels.isa import supported_isas
from thalweg.ops.cpu_kernels.kernel_builder import I32, I64, KERNEL, PTR, VOID, JitModule, KernelBuilder, KernelModule

WORDS_PER_INSTRUCTION = 20
# Threads that run a program at most: kernels with scratch memory of their own have a row for each thread.
MAX_THREADS = 256
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 32.0  # seconds between trials of another number of threads
_SPINS = 4000  # a few microseconds; then the core is offered to whoever else needs it


@cache
def _openmp_symbols() -> dict[str, int]:
    """Return the addresses of the runtime's entry points, or nothing where torch brings another one."""
    package = Path(torch.__file__).parent
    for path in sorted(
        [*(package / "lib").glob("lib*omp*.so*"), *package.with_name("torch.libs").glob("lib*omp*.so*")]
    ):
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
                    is_over = lambda: b.icmp_signed("!=", b.load_atomic(phase, "acquire", 8, typ=I64), before)
                    code.spin_until(is_over, _SPINS, _SPINS)
    code.ret()


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
    isa = supported_isas()[0]
    module = KernelModule(isa)
    _emit_interpreter(module)
    _emit_launch(module)
    libc = ctypes.CDLL(None)
    symbols["sched_yield"] = ctypes.cast(libc.sched_yield, ctypes.c_void_p).value or 0
    library = JitModule(str(module), isa, symbols)
    launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(library.get_address("launch"))
    return launch, library


def openmp_available() -> bool:
    """Whether torch's OpenMP runtime can be joined here."""
    return bool(_openmp_symbols())


class Program:
    """Instructions that are written once and run many times; keeps what they point to alive.

    ``num_threads`` may change between runs; 0 is as many as torch has.
    """

    def __init__(
        self, instructions: Sequence[tuple[int, Sequence[int]]], keep_alive: Sequence[Any] = (), num_threads: int = 0
    ) -> None:
        rows = torch.zeros(len(instructions), WORDS_PER_INSTRUCTION, dtype=torch.int64, device="cpu")
        for row, (kernel, args) in zip(rows, instructions, strict=True):
            assert len(args) < WORDS_PER_INSTRUCTION
            row[: 1 + len(args)] = torch.tensor([kernel, *args], dtype=torch.int64, device="cpu")
        self._keep_alive: tuple[Any, ...] = (rows, *keep_alive)
        # The barrier's two words, on cache lines of their own.
        self._barrier = torch.zeros(64, dtype=torch.int64, device="cpu")
        base = -(-self._barrier.data_ptr() // 128) * 128
        self._state = torch.tensor([rows.data_ptr(), len(rows), base], dtype=torch.int64, device="cpu")
        self._address = self._state.data_ptr()
        # Two threads that come first together compile it twice: each program keeps the machine code that it runs.
        self._launch, self._library = _load_runtime()
        self.num_threads = num_threads

    def run(self) -> None:
        """Run all instructions; returns when they are done.  The interpreter lock is free meanwhile."""
        self._launch(self._address, min(self.num_threads or torch.get_num_threads(), MAX_THREADS))


class ThreadTuner:
    """How many threads a step is computed on: torch's number, or fewer while that is faster.

    Two numbers are compared on pairs of neighbouring steps that do the same work.  Fewer are tried when a step takes
    twice as long as the like of it did before; fewer and more every half second at first, and half as often after each
    trial that changed nothing.  Results must not depend on the number.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_threads = self._most = torch.get_num_threads()
        self._clock = clock
        self._pause, self._trial_end = _FIRST_PAUSE, clock()
        self._untried: list[int] = []
        self._other = 0  # what is being tried, 0 while nothing is
        self._pairs: list[tuple[float, float]] = []  # seconds of like steps on num_threads and on the other
        self._last: tuple[Hashable, float] = (None, 0.0)  # of the last step on num_threads: its work and its seconds

    def run(self, work: Hashable, compute: Callable[[int], None]) -> None:
        """Compute a step on some number of threads; steps of equal ``work`` are alike, None is like no other."""
        if (most := torch.get_num_threads()) != self._most:
            self.num_threads, self._most, self._other, self._untried = most, most, 0, []
        is_like = work is not None and work == self._last[0]
        begin = self._clock()
        if self._other and is_like:
            compute(self._other)
            self._pairs.append((self._last[1], self._clock() - begin))
            self._last = (None, 0.0)
            self._decide()
            return
        compute(self.num_threads)
        seconds, since = self._clock() - begin, self._clock() - self._trial_end
        if not self._other and is_like and seconds > 2 * self._last[1] and since > _FIRST_PAUSE:
            self._begin_trial(self._numbers(fewer_only=True))
        elif not self._other and since > self._pause:
            self._untried = self._untried or self._numbers()
            self._begin_trial(self._untried)
        self._last = (work, seconds)

    def _numbers(self, fewer_only: bool = False) -> list[int]:
        count = self.num_threads
        halves = [count >> bits for bits in range(1, count.bit_length())]
        numbers = dict.fromkeys((count - 1, *halves, count + 1, min(2 * count, self._most)))
        return [n for n in numbers if 0 < n <= (count - 1 if fewer_only else self._most) and n != count]

    def _begin_trial(self, numbers: list[int]) -> None:
        if numbers:
            self._other, self._pairs = numbers.pop(0), []

    def _decide(self) -> None:
        """End the trial after four pairs, or as soon as one number is much slower."""
        ours, others = (sum(seconds) for seconds in zip(*self._pairs, strict=True))
        ratio = max(ours, others) / min(ours, others)
        if len(self._pairs) < (1 if ratio > 4 else 2 if ratio > 2 else 4):
            return
        if others < 0.9 * ours:
            self.num_threads, self._pause, self._untried = self._other, _FIRST_PAUSE, []
        else:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._other, self._trial_end = 0, self._clock()
