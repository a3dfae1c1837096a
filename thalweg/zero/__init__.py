"""ZeRO: one implementation on FSDP2, a stage being a policy (:mod:`.policy`).

Read :mod:`.shard` first: it is the recipe.  :mod:`.units` chooses what is wrapped,
:mod:`.homes` says where shards and gathered parameters live, :mod:`.init` builds models
without memory, :mod:`.gather` gives full parameters back to the user for a while.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {"Init": "thalweg.zero.init", "GatheredParameters": "thalweg.zero.gather"}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thalweg.zero' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
