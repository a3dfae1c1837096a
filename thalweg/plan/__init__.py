"""The plan: bytes, traffic and seconds of a run, before anything is allocated.

This package is callable: ``thalweg.plan(model, config, ...)`` is :func:`thalweg.plan.api.plan`.

    inputs       a config, a class or a model   ->  the model on meta, the shapes of its batch
    spec         a config, machines             ->  what the trace must know of the run
    trace        the model on fake tensors      ->  events of one step
    memory       events                         ->  bytes of a rank
    comm_volume  FSDP2 units                    ->  bytes over each link
    step_time    both, and the cluster's speeds ->  seconds, and what limits them
    planner      one config                     ->  a Plan: a table, JSON, a page (html)
    search       many configs                   ->  the cheapest that fits
"""

import importlib
import sys
import types
from typing import Any

_PUBLIC = {"Cluster": "thalweg.plan.spec.cluster", "Plan": "thalweg.plan.result", "plan": "thalweg.plan.api"}

__all__ = ["Cluster", "Plan", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thalweg.plan' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__("plan")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
