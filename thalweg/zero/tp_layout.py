"""How tensor-parallel ranks shard a model's parameters, as far as ZeRO has to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard


@dataclass(frozen=True)
class DTensorLayout:
    """What a sharded parameter is announced as: its logical shape, on a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size


@dataclass(frozen=True)
class TensorParallelLayout:
    """``mesh`` has the axes ("tp", "dp"); ``tp_placements`` gives by parameter its logical shape and its
    placement on "tp".  One that is not named there is whole on every tensor rank.
    """

    mesh: DeviceMesh
    tp_placements: Mapping[str, tuple[torch.Size, Placement]] = field(default_factory=dict)

    def get_layout(self, name: str, shape: torch.Size, replicated: bool) -> DTensorLayout:
        """The layout of the parameter whose piece has ``shape``; ``replicated`` over "dp" or sharded by rows."""
        global_shape, placement = self.tp_placements.get(name, (shape, Replicate()))
        return DTensorLayout(self.mesh, (placement, Replicate() if replicated else Shard(0)), global_shape)
