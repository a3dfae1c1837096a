"""Older spellings, moved to today's before anything is checked.

Each move is remembered, so that a later complaint names the path that the user wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thalweg.config.problems import Problem, show

ZERO = "zero_optimization"
_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
SPELLINGS = {
    "bfloat16": "bf16",
    "ddp_bf16": "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}.gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    **{f"{ZERO}.{name}": f"{ZERO}.stage3_{name}" for name in _STAGE3},
    "allgather_size": f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.aio": "aio",  # where the documentation of Hugging Face has it
    "aio.intra_op_parallelism": "aio.thread_count",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
    "activation_checkpointing.partitioned_activations": "activation_checkpointing.partition_activations",
    "quantize_training.quantize-algo": "quantize_training.quantize_algo",
    "elasticity.prefer_large_batch": "elasticity.prefer_larger_batch",
}
_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


@dataclass
class Renames:
    """Pairs of a path as given and the path as it is called today."""

    pairs: list[tuple[str, str]] = field(default_factory=list)

    def given(self, path: str) -> str:
        """The path as the user wrote it."""
        return self._swap(path, [(today, given) for given, today in self.pairs])

    def today(self, path: str) -> str:
        """The path as the schema has it."""
        return self._swap(path, self.pairs)

    def notes(self) -> tuple[str, ...]:
        """One line for each older spelling that was read."""
        return tuple(f"{given} is read as {today}" for given, today in self.pairs)

    @staticmethod
    def _swap(path: str, pairs: list[tuple[str, str]]) -> str:
        for old, new in pairs:
            if path == old or path.startswith((f"{old}.", f"{old}[")):
                return new + path[len(old) :]
        return path


def modernise(tree: dict[str, Any]) -> tuple[dict[str, Any], Renames, list[Problem]]:
    """Move every older spelling in ``tree`` (changed in place) and say what could not be moved."""
    renames = Renames()
    problems: list[Problem] = []
    _expand_boolean(tree, renames)
    for old, new in SPELLINGS.items():
        _move(tree, old, new, renames, problems)
    _expand_offload(tree, renames, problems)
    return tree, renames, problems


def _expand_boolean(tree: dict[str, Any], renames: Renames) -> None:
    """``"zero_optimization": true`` was stage 1."""
    if isinstance(tree.get(ZERO), bool):
        tree[ZERO] = {"stage": 1 if tree[ZERO] else 0}
        renames.pairs.append((ZERO, f"{ZERO}.stage"))


def _holder(tree: dict[str, Any], path: str, make: bool = False) -> tuple[dict[str, Any] | None, str]:
    *blocks, name = path.split(".")
    at: Any = tree
    for block in blocks:
        if make and isinstance(at, dict):
            at = at.setdefault(block, {})
        else:
            at = at.get(block) if isinstance(at, dict) else None
    return (at if isinstance(at, dict) else None), name


def _move(tree: dict[str, Any], old: str, new: str, renames: Renames, problems: list[Problem]) -> None:
    holder, name = _holder(tree, old)
    if holder is None or name not in holder:
        return
    value = holder.pop(name)
    target, key = _holder(tree, new, make=True)
    if target is None:
        problems.append(Problem(old, value, f"to be written as {new}"))
    elif key in target:
        problems.append(Problem(old, value, f"only one of {old} and {new}, which mean the same"))
    else:
        target[key] = value
        renames.pairs.append((old, new))


def _expand_offload(tree: dict[str, Any], renames: Renames, problems: list[Problem]) -> None:
    zero = tree.get(ZERO)
    if not isinstance(zero, dict):
        return
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for old, block in _OFFLOAD.items():
        value = zero.pop(old, None)
        path = f"{ZERO}.{old}"
        if value is None or value is False or value == "auto":
            continue
        if value is not True:
            problems.append(Problem(path, value, "true or false"))
        elif block in zero:
            problems.append(Problem(path, value, f"only one of {path} and {ZERO}.{block}"))
        else:
            zero[block] = {"device": "cpu"}
            renames.pairs.append((path, f"{ZERO}.{block}.device"))
    if pinned is None or pinned == "auto":
        return
    path = f"{ZERO}.cpu_offload_use_pin_memory"
    if not isinstance(pinned, bool):
        problems.append(Problem(path, pinned, "true or false"))
        return
    for block in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(block), dict):
            zero[block].setdefault("pin_memory", pinned)
    renames.pairs.append((path, f"pin_memory = {show(pinned)} of the offload blocks"))
