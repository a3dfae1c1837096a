"""``deepspeed.utils.groups``: the process groups of the newest engine, the whole job's before there is one."""

from __future__ import annotations

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


def _find_group(axis: str, without_engine: Any = None) -> Any:
    """The newest engine's ranks along an axis of its meshes; None where it has no such axis."""
    engine = next(iter(live_engines()), None)
    if engine is None:
        return without_engine
    mesh = getattr(engine.meshes, axis)
    return None if mesh is None else mesh.get_group()


def _get_data_parallel_group() -> Any:
    return _find_group("dp", dist.group.WORLD)


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    return dist.get_rank(_get_data_parallel_group())


def _get_sequence_parallel_group() -> Any:
    return _find_group("sequence")


def _get_sequence_parallel_world_size() -> int:
    group = _get_sequence_parallel_group()
    return 1 if group is None else dist.get_world_size(group)


def _get_sequence_parallel_rank() -> int:
    group = _get_sequence_parallel_group()
    return 0 if group is None else dist.get_rank(group)


def _get_sequence_data_parallel_group() -> Any:
    return _find_group("fsdp", dist.group.WORLD)


def _get_model_parallel_group() -> Any:
    return _find_group("tp")


def _get_model_parallel_world_size() -> int:
    group = _get_model_parallel_group()
    return 1 if group is None else dist.get_world_size(group)


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size
