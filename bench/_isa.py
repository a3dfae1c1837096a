"""A smaller processor than this one, for all contestants alike: what `--isa` of a benchmark asks of each library.

Imports nothing but the standard library: the environment of the peers runs it too.
"""

from __future__ import annotations

import os
import sys

_ASKED = "THALWEG_BENCH_ISA"
# MKL has the matrix products of torch and of ctranslate2, oneDNN those in 16 bits; each reads its variable once.
_VARIABLES = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "THALWEG_CPU_ISA": "avx2",
        "CT2_FORCE_CPU_ISA": "AVX2",
    },
}
ISAS = tuple(_VARIABLES)
# Compiled for the processor: these are built anew (`g++` through `_cxx_avx2.sh`, llama.cpp by its own switches).
LLAMA_CPP_SWITCHES = {
    None: "-DGGML_NATIVE=ON",
    "avx2": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
}
WITHOUT_SWITCH = ("onnxruntime", "vllm")


def asked_isa() -> str | None:
    """Return the instruction set that this process and its children were asked to stay within, or None for all."""
    return os.environ.get(_ASKED)


def isa_variables(isa: str | None) -> dict[str, str]:
    """Return the environment in which libraries stay within an instruction set."""
    return {} if isa is None else {**_VARIABLES[isa], _ASKED: isa}


def start_within(isa: str | None) -> None:
    """Start this program anew within an instruction set, unless it is; libraries read their variables at import."""
    if isa is not None and asked_isa() != isa:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **isa_variables(isa)})


def with_isa(name: str, separator: str = "_") -> str:
    """Return the name of a result, a folder or a run with the instruction set that was asked for."""
    return separator.join(filter(None, (name, asked_isa())))
