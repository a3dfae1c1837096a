"""The random number generators of one process, as a tree that a checkpoint can keep."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """Python's, numpy's (if loaded), torch's CPU and the current CUDA device's generator states."""
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        tree["numpy"] = {
            "name": str(name),
            "keys": keys.copy(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tree["cuda"] = torch.cuda.get_rng_state()
    return tree


def restore_rng(tree: dict[str, Any]) -> None:
    """Set the generators that ``tree`` has; those it lacks are left as they are."""
    if "python" in tree:
        saved = tree["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "torch" in tree:
        torch.set_rng_state(tree["torch"].cpu())
    if "numpy" in tree:
        import numpy

        saved = tree["numpy"]
        state = (saved["name"], saved["keys"], saved["position"], saved["has_gauss"], saved["cached"])
        numpy.random.set_state(state)
    if "cuda" in tree and torch.cuda.is_available():
        torch.cuda.set_rng_state(tree["cuda"].cpu())
