"""``thalweg.plan``: from a model, a config and the machines to a :class:`Plan`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from thalweg.config import load, resolve
from thalweg.plan.planner import build_planner
from thalweg.plan.result import Plan
from thalweg.plan.search.search import fill_auto
from thalweg.plan.search.search import suggest as suggest_changes
from thalweg.plan.spec.cluster import Cluster
from thalweg.plan.spec.run_spec import with_optimizer
from thalweg.zero.options import get_model_size


def plan(
    model: Any,
    config: Any = None,
    *,
    cluster: Cluster | None = None,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
    suggest: bool = True,
    deferred_init: bool | None = None,
) -> Plan:
    """What a run will need, before anything is allocated.

    ``model``: a module (live or on meta), a class with ``model_kwargs``, a Hugging Face config
    (object, dict, path).  ``config``: a path, dict or JSON text of DeepSpeed's keys.
    ``cluster``, or its parts: sizes are bytes or texts such as ``"80GiB"``; ``device`` is
    ``"cpu"`` or the name of a GPU (``"h100"``).  ``batch``: one micro-batch of tensors on any
    device, else it is made of ``sequence_length`` tokens.  ``suggest``: look for the cheapest
    configuration that fits where this one does not.  ``process_bytes``: what a CPU rank holds
    before the model is there (by default, what this process does).  ``deferred_init``: whether the program builds the
    model under :class:`thalweg.zero.Init` (by default, where parameters rest on a disk).  A config without an optimizer
    is planned with AdamW.

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: nothing that describes a model; inputs that cannot be guessed.
    """
    machines = {"num_nodes": num_nodes, "devices_per_node": devices_per_node, "device": device}
    memory = {"device_memory": device_memory, "host_memory": host_memory}
    planner = build_planner(model, cluster, batch, sequence_length, model_kwargs, process_bytes, **machines, **memory)
    world_size, facts = planner.cluster.world_size, get_model_size(planner.meta_model.model)
    loaded = load(config)
    assumes_optimizer = loaded.optimizer is None
    loaded = with_optimizer(loaded, torch.optim.AdamW) if assumes_optimizer else loaded
    resolved = resolve(fill_auto(loaded, planner), world_size=world_size, model=facts)
    micro_batch = int(resolved.train_micro_batch_size_per_gpu)
    planner = replace(planner, micro_batch=micro_batch, deferred_init=deferred_init)
    result = planner.predict(resolved)
    if suggest and result.fits is False:
        result.suggestion, result.reasons = suggest_changes(planner, resolved, known=result)
    if assumes_optimizer:
        result.assumptions.append("AdamW, as the config names no optimizer")
    return result
