"""The instruction sets that kernels are made for: how wide a register is, how many there are, what multiplies bytes.

The generator asks these descriptions and nothing else, so one source gives code for all of them.  Where a kernel's
own unit is 16 numbers (a block of the KV cache, a step over a row) it says so, and LLVM cuts that into registers;
where the registers decide the shape of the work, as in ``gemm.py``, it takes ``lanes`` and ``tile``.

==========  ====================  =========  ==============================================  ==================
name        processors            registers  dot products of int8                            of bf16
==========  ====================  =========  ==============================================  ==================
avx512bf16  Zen 4, Cooper Lake    32 x 512   ``vpdpbusd``                                    ``vdpbf16ps``
avx512      Ice Lake              32 x 512   ``vpdpbusd``                                    widened to fp32
avxvnni     Alder Lake            16 x 256   ``vpdpbusd``                                    widened to fp32
avx2        Haswell, Zen          16 x 256   ``vpmaddwd``; of nibbles ``vpmaddubsw``         widened to fp32
neon        Graviton 2, Apple M1  32 x 128   ``sdot``                                        widened to fp32
==========  ====================  =========  ==============================================  ==================
"""

import contextlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import llvmlite.binding as llvm

SELECT_ISA = "THALWEG_CPU_ISA"  # makes a processor run the code of a smaller one; for tests and comparisons


@dataclass(frozen=True)
class Isa:
    """An instruction set as the generator sees it."""

    name: str
    machine: str  # as ``platform.machine`` says
    features: frozenset[str]  # that a processor must have, by LLVM's names
    lanes: int  # fp32 numbers in a register
    tile: tuple[int, int]  # rows, and registers of columns, whose sums stay in registers
    byte_dot: Literal["vpdpbusd", "vpmaddwd", "sdot"]
    bf16_dot: bool = False

    def operand_kind(self, weight_format: str) -> str:
        """Return what rows become before they meet weights of a format: ``fp32``, ``bf16``, ``int8`` or ``int16``."""
        if weight_format == "bf16" and not self.bf16_dot:
            return "fp32"
        if weight_format == "int8" and self.byte_dot == "vpmaddwd":
            return "int16"
        return {"int4": "int8"}.get(weight_format, weight_format)

    def target_machine(self) -> llvm.TargetMachine:
        """Return LLVM's target: this processor without what the set does not have, or any other of the set's."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        if self.machine != _host_machine():
            target = llvm.Target.from_triple(self.triple)
            return target.create_target_machine(features=",".join(f"+{x}" for x in sorted(self.features)), opt=3)
        features = llvm.get_host_cpu_features()
        for name in features:
            if self.lanes < 16 and name.startswith(("avx512", "avx10", "amx", "avxvnni")):
                features[name] = False
        features.update(dict.fromkeys(self.features, True))  # code that is not for this processor can be looked at
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3)

    @property
    def triple(self) -> str:
        """LLVM's name of the system."""
        return llvm.get_default_triple() if self.machine == _host_machine() else f"{self.machine}-unknown-linux-gnu"


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"})
ISAS = {
    isa.name: isa
    for isa in (  # the first that a processor has is the best
        Isa("avx512bf16", "x86_64", _AVX512 | {"avx512bf16"}, 16, (12, 2), "vpdpbusd", bf16_dot=True),
        Isa("avx512", "x86_64", _AVX512, 16, (12, 2), "vpdpbusd"),
        Isa("avxvnni", "x86_64", _AVX2 | {"avxvnni"}, 8, (6, 2), "vpdpbusd"),
        Isa("avx2", "x86_64", _AVX2, 8, (6, 2), "vpmaddwd"),
        Isa("neon", "aarch64", frozenset({"neon", "dotprod"}), 4, (6, 4), "sdot"),
    )
}


def _host_machine() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@cache
def host_cpu_features() -> frozenset[str]:
    """Return the processor's features by LLVM's names (``avx512vnni``, ...)."""
    found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    with contextlib.suppress(OSError):  # what LLVM does not ask an Arm processor for
        found |= {"dotprod"} if " asimddp" in Path("/proc/cpuinfo").read_text() else set()
    return frozenset(found)


def supported_isas() -> list[Isa]:
    """Return the instruction sets of this processor, the best first."""
    return [isa for isa in ISAS.values() if isa.machine == _host_machine() and isa.features <= host_cpu_features()]


def select_isa() -> Isa | None:
    """Return the instruction set that kernels are made for here: the best, or the one of $THALWEG_CPU_ISA."""
    name = os.environ.get(SELECT_ISA)
    return next((isa for isa in supported_isas() if name in (None, isa.name)), None)
