"""``deepspeed.comm``: torch's collectives under its names, and the log of the engines'."""

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thalweg.compat.deepspeed.live_engines import live_engines
from thalweg.compat.deepspeed.logs import logger
from thalweg.device import pick_device


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log what the engines communicated."""
    for engine in live_engines():
        logger.info("communication\n%s", engine.log_communication())
    return {} if return_dict else None


def configure(*args: Any, **options: Any) -> None:
    """Nothing to do: every collective of the engines is counted, see ``comms_logger`` in the config."""


def has_all_gather_into_tensor() -> bool:
    """Whether torch has it."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


allgather_fn, inference_all_reduce = dist.all_gather_into_tensor, dist.all_reduce


def reduce_scatter_fn(
    output: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce one tensor to its parts."""
    return dist.reduce_scatter_tensor(output, tensor, op=op, group=group, async_op=async_op)


def get_world_group() -> Any:
    """All ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The job's number of a group's rank."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """A mesh of the job's devices."""
    return init_device_mesh(pick_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def __getattr__(name: str) -> Any:
    value = getattr(dist, name)
    if isinstance(value, type) or not callable(value):
        return value
    # Without what DeepSpeed's log calls it.
    return functools.wraps(value)(lambda *args, prof=0, log_name=0, debug=0, **options: value(*args, **options))
