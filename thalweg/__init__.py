"""Thalweg: train, fine-tune and serve models bigger than the machine.

Every public name is resolved on first use, so ``import thalweg`` costs nothing,
prints nothing and creates no device context.
"""

import importlib
from typing import Any

from thalweg.utils.timing import PausedCollector

__version__ = "0.1.0.dev0"

_PUBLIC = {
    "initialize": "thalweg.engine",
    "Engine": "thalweg.engine",
    "init_distributed": "thalweg.parallel_dims",
    "init_inference": "thalweg.infer.init_inference",
    "load_config": "thalweg.config",
    "plan": "thalweg.plan",
    "zero": "thalweg.zero",
    "moe": "thalweg.moe",
    "pipe": "thalweg.pipe",
    "pipeline": "thalweg.serve.mii.pipeline",
    "serve": "thalweg.serve",
    "client": "thalweg.serve.mii.deployment",
    "add_config_arguments": "thalweg.config.arguments",
    "checkpointing": "thalweg.activation_checkpointing.checkpointing",
    "comm": "thalweg.comm",
    "get_accelerator": "thalweg.accelerator",
    "tp_model_init": "thalweg.parallel.tensor.tensor_parallel",
    "FlopsProfiler": "thalweg.observe.flops_profiler",
    "OnDevice": "thalweg.deferred_init.context",
    "compression": "thalweg.compression",
    "RepeatingLoader": "thalweg.data.repeating_loader",
    **{
        f"estimate_zero{stage}_model_states_mem_needs{form}": "thalweg.plan.estimates"
        for stage in (2, 3)
        for form in ("", "_all_live", "_all_cold")
    },
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thalweg' has no attribute {name!r}")
    with PausedCollector():  # collections would be a fifth of this import
        module = importlib.import_module(_PUBLIC[name])
    is_public_itself = module.__name__ == f"thalweg.{name}" or name == "checkpointing"
    return module if is_public_itself else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
