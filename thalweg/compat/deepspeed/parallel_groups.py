"""``deepspeed.utils.groups``: the process groups of the newest engine, the whole job's before there is one."""

from functools import partial
from typing import Any

import torch.distributed as dist

from thalweg.compat.deepspeed.live_engines import live_engines
from thalweg.utils.env import read_rank_info


def get_local_rank() -> int:
    """This rank's number on its host."""
    return read_rank_info().local_rank


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The job's numbers of a group's ranks."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _find_group(axis: str) -> Any:
    """The newest engine's ranks along an axis of its meshes; None where it has no such axis."""
    engine = next(iter(live_engines()), None)
    if engine is None:
        return dist.group.WORLD if axis in ("dp", "fsdp") else None
    mesh = getattr(engine.meshes, axis)
    return None if mesh is None else mesh.get_group()


def _find_size(axis: str) -> int:
    group = _find_group(axis)
    return 1 if group is None else dist.get_world_size(group)


def _find_rank(axis: str) -> int:
    group = _find_group(axis)
    return 0 if group is None else dist.get_rank(group)


get_data_parallel_group = _get_data_parallel_group = partial(_find_group, "dp")
get_data_parallel_world_size = _get_data_parallel_world_size = partial(_find_size, "dp")
get_data_parallel_rank = _get_data_parallel_rank = partial(_find_rank, "dp")
get_model_parallel_group = _get_model_parallel_group = partial(_find_group, "tp")
get_model_parallel_world_size = _get_model_parallel_world_size = partial(_find_size, "tp")
_get_sequence_parallel_group = partial(_find_group, "sequence")
_get_sequence_parallel_world_size = partial(_find_size, "sequence")
_get_sequence_parallel_rank = partial(_find_rank, "sequence")
_get_sequence_data_parallel_group = partial(_find_group, "fsdp")
