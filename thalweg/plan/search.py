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
from thalweg.config.problems import ConfigError
from thalweg.plan.changes import changed, nvme_folder
from thalweg.plan.sizes import show_bytes, show_seconds
from thalweg.utils.log import get_logger

if TYPE_CHECKING:
    from thalweg.plan.core import Plan, Question

_log = get_logger(__name__)


def suggest(
    question: Question, config: Config, seconds: float = 6.0
) -> tuple[dict[str, Any] | None, list[str]]:
    """Changes that make the run fit, and what was found on the way; None if nothing tried fits in time."""
    deadline = time.thread_time() + seconds
    reasons: list[str] = []
    for level in _levels(config, question.cluster.device == "cpu"):
        fitting: list[tuple[float, dict[str, Any]]] = []
        for changes in level:
            answer = _try(question, config, changes)
            if answer is None:
                continue
            fits = answer.fits is not False
            reasons.append(
                f"{_words(changes)}: {show_bytes(answer.per_rank.total)}, {show_seconds(answer.seconds)}"
                f"{'' if fits else ', does not fit'}"
            )
            if fits:
                fitting.append((answer.seconds, changes))
            if time.thread_time() > deadline:
                break
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1], reasons
        if time.thread_time() > deadline:
            reasons.append("the search ran out of time")
            break
    return None, reasons


def _try(question: Question, config: Config, changes: dict[str, Any]) -> Plan | None:
    try:
        return question.answer(changed(config, changes, question.cluster.world_size))
    except ConfigError:
        return None
    except ValueError as error:  # a head that cannot be tiled, say
        _log.debug("%s cannot be planned: %s", changes, error)
        return None


def _levels(config: Config, on_cpu: bool) -> Iterator[list[dict[str, Any]]]:
    """Groups of candidates, the cheapest group first."""
    stage = config.zero_optimization.stage
    many = int(config.data_parallel_size) > 1
    stages = [s for s in range(stage, 4) if many] or [stage]
    policies = ["none", "selective", "full"]
    policies = policies[policies.index(config.activation_checkpointing.policy) :]
    yield [_stage(s) for s in stages if s != stage]
    yield [_stage(s) | _remat(p) for p in policies[1:] for s in dict.fromkeys((stages[-1], stage))]
    micro = int(config.train_micro_batch_size_per_gpu)
    steps = int(config.gradient_accumulation_steps)
    least: dict[str, Any] = {}
    for size in (micro // 2**power for power in range(1, micro.bit_length())):
        if micro % size == 0:
            least = {
                "train_micro_batch_size_per_gpu": size,
                "gradient_accumulation_steps": steps * micro // size,
            }
            yield [least | _stage(stages[-1]) | _remat(p) for p in dict.fromkeys((policies[0], policies[-1]))]
    least |= _remat(policies[-1])
    if not config.tiling.loss:
        tiled = _remat(policies[-1]) | {"tiling.loss": True}
        least |= tiled
        yield [one | _stage(stages[-1]) for one in ([tiled] if least == tiled else [tiled, least])]
    yield from _tiers(config, on_cpu, _remat(policies[-1]), least)


def _tiers(
    config: Config, on_cpu: bool, remat: dict[str, Any], least: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """The optimizer's state elsewhere, then the parameters too; ``least``: all that makes activations few."""
    zero, folder = config.zero_optimization, nvme_folder(config)
    states, params = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
    for device in ([] if on_cpu else ["cpu"]) + (["nvme"] if folder else []):
        place = {"nvme_path": folder} if device == "nvme" else {}
        moved = {f"{states}.{key}": value for key, value in {"device": device, **place}.items()}
        if zero.offload_optimizer.device == "none":
            both = _stage(max(1, zero.stage)) | moved
            yield [both, both | remat]
            yield [both | least]
        also = {f"{params}.{key}": value for key, value in {"device": device, **place}.items()}
        also |= {f"{params}.max_in_cpu": 0} if device == "nvme" else {}
        if zero.offload_param.device == "none":
            yield [_stage(3) | moved | also, _stage(3) | moved | also | remat]
            yield [_stage(3) | moved | also | least]


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization.stage": stage}


def _remat(policy: str) -> dict[str, Any]:
    return {"activation_checkpointing.policy": policy}


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items()) or "as it is"
