"""The table behind the parity matrix: what can be combined, which combinations are run, which are refused.

A combination is a line such as ``"s3 dp2 tp2 remat bf16"``: one stage, degrees with their number (the product
of those with ``ranks`` is the world size), switches without.  A new axis is one line of ``FEATURES`` and the
lines of ``COMBINATIONS`` that use it; ``docs/MATRIX.md`` (tests/repo/matrix_page.py) is made from here, and a
pair of features that no line covers must be in ``UNSUPPORTED_PAIRS`` or ``UNCOVERED_PAIRS``.  The gate runs
``covering_combinations``, in which each pair and each named triple still occurs; the nightly run all.  Nothing here
imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations as pairs_of
from math import prod
from typing import Any

ConfigDict = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """``config`` makes the options of a degree (1 for a switch); ``ranks``: it multiplies the world."""

    title: str
    config: Callable[[int], ConfigDict] = lambda degree: {}
    multiplies_world: bool = False


def _zero(**options: Any) -> Callable[[int], ConfigDict]:
    return lambda degree: {"zero_optimization": options}


FEATURES: Mapping[str, Feature] = {
    **{f"s{stage}": Feature(f"ZeRO {stage}", _zero(stage=stage)) for stage in range(4)},
    "dp": Feature("data ranks", multiplies_world=True),
    "tp": Feature("tensor", lambda degree: {"tensor_parallel": {"autotp_size": degree}}, multiplies_world=True),
    "sp": Feature("sequence (Ulysses)", lambda degree: {"sequence_parallel_size": degree}, multiplies_world=True),
    "cp": Feature("context (ring)", lambda degree: {"context_parallel_size": degree}, multiplies_world=True),
    "pp": Feature("pipeline", lambda degree: {"pipeline": {"stages": degree}}, multiplies_world=True),
    "ep": Feature("expert"),  # inside the data ranks; the model asks for it
    "host": Feature("optimiser on host", _zero(offload_optimizer={"device": "cpu"})),
    "nvme": Feature("optimiser on NVMe", _zero(offload_optimizer={"device": "nvme", "nvme_path": "{folder}"})),
    "paged": Feature(
        "parameters on NVMe",
        _zero(offload_param={"device": "nvme", "nvme_path": "{folder}", "max_in_cpu": 0, "buffer_count": 2}),
    ),
    "remat": Feature("recomputation", lambda degree: {"activation_checkpointing": {"policy": "full"}}),
    "compile": Feature("compile", lambda degree: {"compile": {"enabled": True, "backend": "aot_eager"}}),
    "bf16": Feature("bf16", lambda degree: {"bf16": {"enabled": True}}),
    "fp16": Feature("fp16", lambda degree: {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "lora": Feature("LoRA"),
}
STAGES = ("s0", "s1", "s2", "s3")
PAIRED_FEATURES = tuple(key for key in FEATURES if key != "dp")
EXCLUSIVE_GROUPS = (
    frozenset(STAGES),
    frozenset({"bf16", "fp16"}),
    frozenset({"host", "nvme"}),
)  # one of each at a time

COMBINATIONS = """
s0 dp2 remat
s1 dp2 host
s2 dp2 nvme remat
s3 dp2 paged nvme remat
s3 dp2 paged host
s1 dp2 bf16 host
s2 dp2 fp16 remat host
s3 dp2 bf16 paged nvme
s3 dp2 fp16 paged nvme
s3 dp2 bf16 remat
s0 dp2 bf16
s0 dp2 fp16
s1 dp2 fp16 nvme
s2 dp2 bf16 nvme
s0 dp2 ep2
s3 dp2 ep2 remat
s1 tp2
s0 tp2 remat
s3 tp2 fp16
s1 tp2 bf16
s0 sp2
s3 sp2 remat
s1 sp2 bf16
s2 sp2 fp16
s0 dp2 compile
s1 dp2 compile bf16 host
s2 dp2 compile remat nvme
s3 dp2 compile fp16
s0 pp2
s3 pp2 remat
s1 pp2 bf16
s2 pp2 fp16
s0 pp2 compile
s0 dp2 tp2
s1 dp2 tp2
s2 dp2 tp2
s3 dp2 tp2
s0 dp2 sp2
s1 dp2 sp2
s2 dp2 sp2
s3 dp2 sp2
s0 tp2 sp2
s0 cp2
s3 cp2 remat
s1 cp2 bf16
s2 cp2 fp16
s3 dp2 cp2
s1 dp2 cp2 host
s2 tp2 cp2
s3 sp2 cp2
s3 dp2 pp2
s2 tp2 pp2
s0 sp2 pp2
s1 sp2 pp2 remat
s3 sp2 pp2
s2 cp2 pp2
s3 cp2 pp2
s0 dp2 pp2 ep2
s3 dp2 pp2 ep2 remat
s3 dp2 pp2 bf16 remat
s1 dp2 pp2 host
s2 dp2 pp2 nvme
s3 dp2 pp2 paged
s0 dp2 tp2 ep2
s3 dp2 tp2 ep2 remat
s0 cp4
s3 dp2 cp2 ep2
s2 dp2 cp2 nvme
s3 dp2 cp2 paged
s1 tp2 sp2 remat
s2 tp2 sp2 bf16
s3 tp2 sp2
s1 dp2 tp2 host
s2 dp2 tp2 nvme remat
s3 dp2 tp2 paged nvme
s2 dp2 sp2 host
s3 dp2 sp2 paged nvme remat
s1 dp4 ep2 host
s2 dp4 ep4 nvme
s3 dp2 sp2 ep2
s3 dp4 ep2 bf16
s0 dp4 ep4 fp16
s1 dp2 sp2 ep4 remat
s3 dp4 ep2 paged
s3 dp2 paged compile
s3 tp4
s1 tp4 remat
s0 sp4
s2 sp4 host
s3 dp4 remat bf16 host
s1 dp2 tp2 sp2
s3 dp2 tp2 sp2 remat
s2 dp4 tp2 bf16
s0 dp2 tp4
s3 dp4 sp2 ep2
s1 dp2 tp2 cp2
s3 tp2 sp2 cp2
s2 dp2 cp4 bf16
s3 dp2 tp2 pp2
s3 dp2 sp2 pp2
s2 sp2 cp2 pp2
s1 tp2 sp2 pp2
s3 dp2 tp2 pp2 ep2
s0 dp2 lora ep2
s3 dp2 lora paged nvme fp16 remat
s2 dp2 lora compile host bf16
s3 tp2 pp2 lora
s1 sp2 cp2 lora
s3 dp2 lora
s1 dp2 lora fp16 nvme
s2 tp2 lora bf16 remat
s3 dp2 tp2 lora
s3 dp2 sp2 lora remat
s2 dp2 pp2 lora bf16
s3 dp2 cp2 lora
s3 dp2 lora ep2
"""

# Triples that people use, beside the pairs: (features, a name for it).
TRIPLES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("s3", "bf16", "remat"), "the usual fine-tuning job"),
    (("s3", "paged", "nvme"), "ZeRO-Infinity"),
    (("s2", "host", "fp16"), "ZeRO-Offload"),
    (("s1", "tp", "bf16"), "Megatron with a sharded optimiser"),
    (("s3", "tp", "sp"), "long sequences, wide layers"),
    (("s3", "sp", "remat"), "Ulysses, long sequences"),
    (("s3", "cp", "remat"), "a ring, long sequences"),
    (("s3", "sp", "cp"), "Ulysses and a ring together"),
    (("s3", "pp", "dp"), "a pipeline of sharded stages"),
    (("s2", "tp", "pp"), "Megatron's three axes"),
    (("s3", "sp", "pp"), "long sequences through a pipeline"),
    (("s3", "ep", "bf16"), "a mixture of experts"),
    (("s3", "pp", "ep"), "a mixture of experts in sharded stages"),
    (("s3", "ep", "sp"), "a mixture of experts on long sequences"),
    (("s3", "lora", "remat"), "LoRA on a sharded base"),
    (("s3", "lora", "tp"), "LoRA on a base that is cut and sharded"),
)


@dataclass(frozen=True)
class UnsupportedPair:
    """A pair that does not go together: a combination that has it, and words of the error that says so."""

    combination: str
    message: str


UNSUPPORTED_PAIRS: Mapping[tuple[str, str], UnsupportedPair] = {
    ("s0", "host"): UnsupportedPair("s0 dp2 host", "zero_optimization.stage to be 1, 2 or 3"),
    ("s0", "nvme"): UnsupportedPair("s0 dp2 nvme", "zero_optimization.stage to be 1, 2 or 3"),
    ("s0", "paged"): UnsupportedPair("s0 dp2 paged", "the only stage that shards parameters"),
    ("s1", "paged"): UnsupportedPair("s1 dp2 paged", "the only stage that shards parameters"),
    ("s2", "paged"): UnsupportedPair("s2 dp2 paged", "the only stage that shards parameters"),
    ("sp", "compile"): UnsupportedPair("s0 sp2 compile", "exchanges of a sequence are not compiled yet"),
    ("cp", "compile"): UnsupportedPair("s0 cp2 compile", "exchanges of a sequence are not compiled yet"),
    ("ep", "compile"): UnsupportedPair("s0 dp2 ep2 compile", "grouped product torch does not trace"),
    ("tp", "compile"): UnsupportedPair("s0 tp2 compile", "split layers are not compiled yet"),
}

# Pairs that nothing shows and nothing refuses: what is known about them.
UNCOVERED_PAIRS: Mapping[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Combination:
    """One line of the table, read."""

    name: str
    degrees: Mapping[str, int]

    @classmethod
    def parse(cls, line: str) -> Combination:
        """``"s3 dp2 tp2 remat"``; an unknown word is an error."""
        degrees: dict[str, int] = {}
        for word in line.split():
            if word in FEATURES and not FEATURES[word].multiplies_world:
                degrees[word] = 1
                continue
            match = re.fullmatch(r"([a-z]+)(\d+)", word)
            assert match and match[1] in FEATURES, f"{line}: {word} is not in FEATURES"
            degrees[match[1]] = int(match[2])
        assert sum(key in degrees for key in STAGES) == 1, f"{line}: one stage"
        return cls(line, degrees)

    @property
    def id(self) -> str:
        """As in a test's name."""
        return self.name.replace(" ", "-")

    @property
    def world_size(self) -> int:
        """Ranks it needs."""
        return prod(degree for key, degree in self.degrees.items() if FEATURES[key].multiplies_world)

    def degree(self, key: str) -> int:
        """Ranks along an axis, 1 where it is not named."""
        return self.degrees.get(key, 1)

    def config(self, folder: str) -> ConfigDict:
        """The options that switch its features on; ``folder`` is for files of the tiers."""
        merged: ConfigDict = {}
        for key, degree in self.degrees.items():
            _merge(merged, FEATURES[key].config(degree), folder)
        return merged


def _merge(into: ConfigDict, block: Mapping[str, Any], folder: str) -> None:
    for key, value in block.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value, folder)
        else:
            into[key] = value.replace("{folder}", folder) if isinstance(value, str) else value


def combinations(world_size: int | None = None) -> list[Combination]:
    """All lines, or those of a world size."""
    parsed = [Combination.parse(line) for line in COMBINATIONS.strip().splitlines()]
    return [one for one in parsed if world_size in (None, one.world_size)]


def mutually_exclusive(first: str, second: str) -> bool:
    """Whether a pair is two answers to one question."""
    return any({first, second} <= choice for choice in EXCLUSIVE_GROUPS)


def combinations_with(*keys: str) -> list[Combination]:
    """The combinations that show all of these features together."""
    return [one for one in combinations() if _shows(one, keys)]


def _shows(combination: Combination, keys: tuple[str, ...]) -> bool:
    """LoRA trains a small part of a model: with it a combination shows nothing of the others among themselves."""
    return all(key in combination.degrees for key in keys) and ("lora" in keys or "lora" not in combination.degrees)


def tuples_shown(combination: Combination) -> set[tuple[str, ...]]:
    """The pairs of features and the named triples that a combination shows."""
    tuples = [*pairs_of(PAIRED_FEATURES, 2), *(triple for triple, _ in TRIPLES)]
    return {keys for keys in tuples if _shows(combination, keys)}


@cache
def covering_combinations() -> tuple[Combination, ...]:
    """Lines of the table that show all that all lines show, in the table's order, most of them of few ranks.

    Taken greedily: next comes the line with the most that is not shown yet for each of its ranks; then a line whose
    pairs and triples the others show too is left out.
    """
    lines, chosen = combinations(), []
    missing = set().union(*map(tuples_shown, lines))
    while missing:
        best = max(lines, key=lambda line: len(tuples_shown(line) & missing) / line.world_size)
        chosen.append(best)
        missing -= tuples_shown(best)
    for line in reversed(tuple(chosen)):
        others = set().union(*(tuples_shown(other) for other in chosen if other is not line))
        if tuples_shown(line) <= others:
            chosen.remove(line)
    return tuple(line for line in lines if line in chosen)
