"""The start of the process group."""

from typing import Any

import torch.distributed as dist

from thalweg import parallel_dims


def check_process_group(dist_init_required: bool | None) -> None:
    """``dist_init_required=False`` says that the program has made a process group.

    Raises:
        ValueError: it has not.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise ValueError(
            "dist_init_required=False, and there is no process group: call torch.distributed.init_process_group() "
            "first, or leave the argument out"
        )


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """``thalweg.init_distributed`` without its answer."""
    check_process_group(kwargs.get("dist_init_required"))
    parallel_dims.init_distributed(dist_backend, *args, **kwargs)
