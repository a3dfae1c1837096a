"""The start of the process group."""

from __future__ import annotations

from typing import Any

from thalweg import parallel_dims


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """``thalweg.init_distributed`` without its answer."""
    parallel_dims.init_distributed(dist_backend, *args, **kwargs)
