"""``deepspeed.pipe.PipelineModule``: layers that are cut as the module is made."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from thalweg.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from thalweg.parallel.pipeline.module import LayerLike, LocalLayers, PipelineModule


class DeepSpeedPipelineModule(PipelineModule):
    """A PipelineModule that holds this rank's layers alone, built, where ``num_stages`` says how many ranks share it.

    Programs count its parameters and make an optimizer of them before ``initialize()``.  Thalweg's own is cut there,
    as the config says.  ``dynamic_shape``: shapes may always change.
    """

    activation_checkpoint_func = staticmethod(non_reentrant_checkpoint)

    def __init__(self, layers: Sequence[LayerLike], num_stages: int | None = None, *args: Any, **options: Any) -> None:
        options.pop("dynamic_shape", None)
        super().__init__(layers, num_stages, *args, **options)
        self._local_layers: dict[int, Any] | None = None
        if num_stages is None or not dist.is_initialized():
            return
        ranks_of_a_stage, rest = divmod(dist.get_world_size(), num_stages)
        if rest:
            raise ValueError(f"num_stages = {num_stages} does not divide the {dist.get_world_size()} ranks of the job")
        stage = dist.get_rank() // ranks_of_a_stage
        self._local_layers = super().build_layers(self.partition_layers(num_stages)[stage])
        modules = {str(i): layer for i, layer in self._local_layers.items() if isinstance(layer, nn.Module)}
        self.layers = nn.ModuleDict(modules)

    def _precompute_checkpointable_values(self) -> None:
        """Nothing: :attr:`is_checkpointable_results` is always that of the interval."""

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Of this rank's layers, whether each block of ``activation_checkpoint_interval`` is recomputed."""
        layers, indices = LocalLayers(self.specs, self._local_layers or {}), list(self._local_layers or ())
        layers.checkpointable_layers = self.checkpointable_layers
        step = self.activation_checkpoint_interval
        return [layers.is_checkpointable(indices[i : i + step]) for i in range(0, len(indices), step)] if step else []

    def build_layers(self, indices: Sequence[int]) -> dict[int, Any]:
        """The layers that are there.

        Raises:
            ValueError: the config wants others on this rank, which an optimizer made before would not have.
        """
        if self._local_layers is None:
            return super().build_layers(indices)
        if list(indices) != list(self._local_layers):
            raise ValueError(
                f"pipeline.schedule or pipeline.partition of the config puts the layers {list(indices)} on this rank, "
                f"which was given {list(self._local_layers)} when the PipelineModule was made: leave those keys out"
            )
        return self._local_layers
