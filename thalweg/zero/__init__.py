"""ZeRO: one implementation on FSDP2, a stage being a policy (:mod:`.policy`).

Read :mod:`.shard` first: it is the recipe.  :mod:`.units` chooses what is wrapped,
:mod:`.storage.base` says where shards and gathered parameters live, :mod:`thalweg.deferred_init.context` builds models
without memory, :mod:`.gathered_parameters` gives full parameters back to the user for a while.
"""

import importlib
from typing import Any

_PUBLIC = {
    "Init": "thalweg.deferred_init.context",
    "GatheredParameters": "thalweg.zero.gathered_parameters",
    "register_external_parameter": "thalweg.zero.leaf_modules",
    "set_z3_leaf_modules": "thalweg.zero.leaf_modules",
    "unset_z3_leaf_modules": "thalweg.zero.leaf_modules",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thalweg.zero' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
