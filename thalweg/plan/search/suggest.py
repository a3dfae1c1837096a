"""The cheapest configuration that fits: candidates in the order of what they cost.

Each candidate is a set of changes to the config.  What costs nothing in the result comes
first: a higher stage, then recomputation, then a smaller micro-batch with more
accumulation (the same update), then both and a loss without full logits, then the tiers: the host where the
ranks compute on GPUs, a disk where the config names a folder.  Candidates of one group are planned, the ones
that fit are compared by their seconds, and the search ends with the first group that has any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thalweg.config import Config
from thalweg.config.errors import ConfigError
from thalweg.plan.spec.config_changes import find_nvme_path, resolve_with_changes
from thalweg.utils.formatting import format_bytes, format_seconds
from thalweg.utils.log import get_logger

if TYPE_CHECKING:
    from thalweg.plan.api import Plan, Planner

_log = get_logger(__name__)


def suggest(planner: Planner, config: Config, cpu_budget_s: float = 6.0) -> tuple[dict[str, Any] | None, list[str]]:
    """Changes that make the run fit, and what was found on the way; None if nothing tried fits in time."""
    deadline = time.thread_time() + cpu_budget_s
    reasons: list[str] = []
    for level in _candidate_groups(config, planner.cluster.device == "cpu"):
        fitting: list[tuple[float, dict[str, Any]]] = []
        for changes in level:
            plan = _try_plan(planner, config, changes)
            if plan is None:
                continue
            fits = plan.fits is not False
            reasons.append(
                f"{_describe_changes(changes)}: {format_bytes(plan.per_rank.total)}, "
                f"{format_seconds(plan.step_seconds)}{'' if fits else ', does not fit'}"
            )
            if fits:
                fitting.append((plan.step_seconds, changes))
            if time.thread_time() > deadline:
                break
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1], reasons
        if time.thread_time() > deadline:
            reasons.append("the search ran out of time")
            break
    return None, reasons


def _try_plan(planner: Planner, config: Config, changes: dict[str, Any]) -> Plan | None:
    try:
        return planner.predict(resolve_with_changes(config, changes, planner.cluster.world_size))
    except ConfigError:
        return None
    except ValueError as error:  # a head that cannot be tiled, say
        _log.debug("%s cannot be planned: %s", changes, error)
        return None


def _candidate_groups(config: Config, on_cpu: bool) -> Iterator[list[dict[str, Any]]]:
    """Groups of candidates, the cheapest group first."""
    stage = config.zero_optimization.stage
    has_data_parallel = int(config.data_parallel_size) > 1
    stages = [s for s in range(stage, 4) if has_data_parallel] or [stage]
    policies = ["none", "selective", "full"]
    policies = policies[policies.index(config.activation_checkpointing.policy) :]
    yield [_stage_change(s) for s in stages if s != stage]
    yield [
        _stage_change(s) | _checkpointing_change(p) for p in policies[1:] for s in dict.fromkeys((stages[-1], stage))
    ]
    micro_batch = int(config.train_micro_batch_size_per_gpu)
    steps = int(config.gradient_accumulation_steps)
    smallest: dict[str, Any] = {}
    for size in (micro_batch // 2**power for power in range(1, micro_batch.bit_length())):
        if micro_batch % size == 0:
            smallest = {
                "train_micro_batch_size_per_gpu": size,
                "gradient_accumulation_steps": steps * micro_batch // size,
            }
            yield [
                smallest | _stage_change(stages[-1]) | _checkpointing_change(p)
                for p in dict.fromkeys((policies[0], policies[-1]))
            ]
    smallest |= _checkpointing_change(policies[-1])
    if not config.tiling.loss:
        tiled = _checkpointing_change(policies[-1]) | {"tiling.loss": True}
        smallest |= tiled
        yield [one | _stage_change(stages[-1]) for one in ([tiled] if smallest == tiled else [tiled, smallest])]
    yield from _offload_groups(config, on_cpu, _checkpointing_change(policies[-1]), smallest)


def _offload_groups(
    config: Config, on_cpu: bool, checkpointing: dict[str, Any], smallest: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """The optimizer's state elsewhere, then the parameters too; ``least``: all that makes activations few."""
    zero, folder = config.zero_optimization, find_nvme_path(config)
    optimizer_key, param_key = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
    for device in ([] if on_cpu else ["cpu"]) + (["nvme"] if folder else []):
        nvme_path = {"nvme_path": folder} if device == "nvme" else {}
        offload_optimizer = {f"{optimizer_key}.{key}": value for key, value in {"device": device, **nvme_path}.items()}
        if zero.offload_optimizer.device == "none":
            both = _stage_change(max(1, zero.stage)) | offload_optimizer
            yield [both, both | checkpointing]
            yield [both | smallest]
        offload_param = {f"{param_key}.{key}": value for key, value in {"device": device, **nvme_path}.items()}
        offload_param |= {f"{param_key}.max_in_cpu": 0} if device == "nvme" else {}
        if zero.offload_param.device == "none":
            yield [
                _stage_change(3) | offload_optimizer | offload_param,
                _stage_change(3) | offload_optimizer | offload_param | checkpointing,
            ]
            yield [_stage_change(3) | offload_optimizer | offload_param | smallest]


def _stage_change(stage: int) -> dict[str, Any]:
    return {"zero_optimization.stage": stage}


def _checkpointing_change(policy: str) -> dict[str, Any]:
    return {"activation_checkpointing.policy": policy}


def _describe_changes(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items()) or "as it is"
