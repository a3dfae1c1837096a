"""From a model and a config to this rank's part of a pipeline.

    open     what is to be cut: a PipelineModule's layers, or the anatomy of any other model
    cut      the model becomes this rank's stages; weights that stages share agree on their values
    drive    once it is sharded: the driver of whole windows

In between the model is split over tensor ranks and the like, as without a pipeline.  A rank's
*place* is its position in the pipeline; stages are numbered along the model, and the schedule
says which places have which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.comm import CommsLog
from thalweg.config import Config
from thalweg.deferred_init.context import has_meta_tensors
from thalweg.parallel.pipeline.module import DUMMY_PARAM_NAME, PipelineModule, PipelineModuleStages, add_dummy_param
from thalweg.parallel.pipeline.partition import partition_balanced
from thalweg.parallel.pipeline.pipeline_runner import ForwardHooks, GradientReduction, LocalStages, PipelineRunner
from thalweg.parallel.pipeline.profile_blocks import BlockCost, profile_blocks, stage_costs
from thalweg.parallel.pipeline.schedules.auto_schedule import choose_schedule, rank_schedules
from thalweg.parallel.pipeline.schedules.builders import ScheduleName, assign_stages, build_schedule
from thalweg.parallel.pipeline.schedules.schedule import PipelineSchedule
from thalweg.parallel.pipeline.split_model import BlockLayout, SplitModelStages, find_blocks, partition_blocks
from thalweg.parallel.pipeline.tied_weights import ParamNaming, TiedWeights, find_alias_groups, find_tied_weights
from thalweg.parallel.sequence.pipeline_layers import LayerSequenceParallel
from thalweg.parallel.sequence.sequence_parallel import SequenceGroups, SequenceParallelAttention
from thalweg.parallel.tensor.tensor_parallel import broadcast_model
from thalweg.parallel_dims import ParallelMeshes

_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class PipelineRank:
    """Where this rank is: ``rank`` of ``size`` in ``group``, which is None for a pipeline of one."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def from_meshes(cls, meshes: ParallelMeshes) -> PipelineRank:
        """This rank's, of the job's axes."""
        if meshes.pp is None:
            return cls(0, 1, None)
        return cls(meshes.pp.get_local_rank(), meshes.pp.size(), meshes.pp.get_group())


def get_num_virtual_stages(config: Config) -> int:
    """Stages on each rank where the schedule is interleaved."""
    return config.pipeline.virtual_stages if config.pipeline.virtual_stages > 1 else 2


class PipelineParallel:
    """This rank's part of one model's pipeline; ``model`` is what the rank holds of it.

    ``batch``: keyword arguments of a micro-batch, for a model that is no PipelineModule.
    ``memory_limit``: what a rank may hold, where a cut by measured costs is to heed it.

    Raises:
        ValueError: the model cannot be cut so.
    """

    def __init__(
        self,
        model: nn.Module,
        meshes: ParallelMeshes,
        config: Config,
        batch: Mapping[str, Any] | None,
        memory_limit: int | None = None,
    ) -> None:
        self._config, self._meshes, self._memory_limit = config, meshes, memory_limit
        self.pp = PipelineRank.from_meshes(meshes)
        self._stages: LocalStages | None = None
        self._block_layout: BlockLayout | None = None
        self._block_costs: list[BlockCost] | None = None
        self._tied_names: list[list[str]] = []
        self._tied_weights: TiedWeights | None = None
        self.param_naming = ParamNaming(group=self.pp.group)
        self.model = model
        if isinstance(model, PipelineModule):
            max_stages = len(model.specs)
        else:
            assert batch is not None
            self._block_layout = find_blocks(model, batch)
            self._tied_names = find_alias_groups(model)
            max_stages = self._block_layout.num_blocks
            if "auto" in (config.pipeline.schedule, config.pipeline.partition):
                self._block_costs = self._profile_blocks(model, self._block_layout, batch)
        self.schedule_name: ScheduleName = self._choose_schedule(max_stages)
        self._stage_to_rank = assign_stages(self.schedule_name, self.pp.size, get_num_virtual_stages(config))
        self.num_stages = len(self._stage_to_rank)
        self._local_stages = [s for s, place in enumerate(self._stage_to_rank) if place == self.pp.rank]
        if isinstance(model, PipelineModule):
            self._build_local_layers(model)

    def _profile_blocks(
        self, model: nn.Module, layout: BlockLayout, batch: Mapping[str, Any]
    ) -> list[BlockCost] | None:
        """What each block costs on the job's first rank; None where there are no values to run on."""
        table = torch.zeros(layout.num_blocks, 4, dtype=torch.float64)
        root = dist.get_global_rank(self._meshes.world_group, 0)
        if dist.get_rank() == root and not any(p.is_meta for p in model.parameters()):
            block_costs = profile_blocks(model, layout.list_name, batch)
            rows = [[c.forward, c.backward, c.saved_bytes, c.parameter_bytes] for c in block_costs]
            table = torch.tensor(rows, dtype=torch.float64)
        dist.broadcast(table, src=root, group=self._meshes.world_group)
        if not table.any():
            return None
        return [BlockCost(f, b, int(saved), int(held)) for f, b, saved, held in table.tolist()]

    def _choose_schedule(self, max_stages: int) -> ScheduleName:
        section, block_costs, num_ranks = self._config.pipeline, self._block_costs, self.pp.size
        name = section.schedule
        if name != "auto":
            return name
        get_costs = None
        if block_costs is not None:
            seconds = [part.seconds for part in block_costs]
            get_costs = lambda stages: stage_costs(block_costs, partition_balanced(seconds, stages, min_layers=1))
        steps = int(self._config.gradient_accumulation_steps)
        ranked = rank_schedules(num_ranks, steps, max_stages, get_costs, get_num_virtual_stages(self._config))
        best = choose_schedule(ranked)
        cost_source = "measured" if block_costs is not None else "equal"
        self._config.add_note(
            "pipeline.schedule", f"{best.name}: a bubble of {best.timeline.bubble:.1%} by {cost_source} costs"
        )
        return best.name

    def _build_schedule(self, num_micro_batches: int) -> PipelineSchedule:
        """The schedule of ``num_micro_batches`` micro-batches; a window may end too early for DualPipeV, but ZBV has
        the same placement."""
        name: ScheduleName = self.schedule_name
        num_ranks = self.pp.size
        if name == "dualpipev" and num_micro_batches < 2 * num_ranks:
            name = "zbv"
        return build_schedule(
            name, num_ranks, num_micro_batches, num_virtual_stages=get_num_virtual_stages(self._config)
        )

    def _get_stage_ranges(self, model: nn.Module, layout: BlockLayout) -> list[range]:
        block_costs = self._block_costs if self._config.pipeline.partition == "auto" else None
        if block_costs is None:
            return partition_blocks(model, layout, self.num_stages)
        fits = None if self._memory_limit is None else partial(self._fits_memory, block_costs, self._memory_limit)
        return partition_blocks(model, layout, self.num_stages, [part.seconds for part in block_costs], fits)

    def _fits_memory(self, block_costs: list[BlockCost], memory_limit: int, stage: int, start: int, stop: int) -> bool:
        """Whether a rank has room for these blocks: weight, gradient, two moments; activations in flight."""
        sharded = self._config.zero_optimization.stage >= 1
        num_copies = 2 + 2 / (self._meshes.fsdp.size() if sharded else 1)
        state_bytes = num_copies * sum(part.parameter_bytes for part in block_costs[start:stop])
        in_flight = max(1, self.num_stages - stage)
        return state_bytes + in_flight * sum(part.saved_bytes for part in block_costs[start:stop]) <= memory_limit

    def _build_local_layers(self, pipeline_module: PipelineModule) -> None:
        method = self._config.pipeline.partition
        stage_ranges = pipeline_module.partition_layers(self.num_stages, None if method == "best" else method)
        checkpoint_interval = (
            self._config.pipeline.activation_checkpoint_interval or pipeline_module.activation_checkpoint_interval
        )
        stages = self._stages = PipelineModuleStages(
            pipeline_module, stage_ranges, self._local_stages, checkpoint_interval
        )
        self.model = stages.module
        rank_of_layer = {i: self._stage_to_rank[stage] for stage, cut in enumerate(stage_ranges) for i in cut}
        self._tied_names, rank_by_name = [], {}
        for key in pipeline_module.tied_layers().values():
            for attr in key[0][1]:
                names = [f"layers.{index}.{attr}" for index, _ in key]
                self._tied_names.append(names)
                rank_by_name.update(zip(names, (rank_of_layer[index] for index, _ in key), strict=True))
        self._bind_tied_weights(rank_by_name)

    def split_model(self) -> None:
        """Cut a model that is no list of layers in place; collective over the job."""
        if self._block_layout is None:
            return
        model, layout = self.model, self._block_layout
        if self._meshes.tp is None and not has_meta_tensors(model):  # else the tensor ranks have done so
            broadcast_model(model, self._meshes.world_group)
        stage_ranges = self._get_stage_ranges(model, layout)
        self._stages = SplitModelStages(model, layout, stage_ranges, self._local_stages)
        add_dummy_param(model)
        last = len(stage_ranges) - 1
        rank_by_module = {
            f"{layout.list_name}.{i}": self._stage_to_rank[s] for s, cut in enumerate(stage_ranges) for i in cut
        }
        rank_by_module |= dict.fromkeys(layout.entry_modules, self._stage_to_rank[0])
        rank_by_module |= dict.fromkeys(layout.exit_modules, self._stage_to_rank[last])
        tied_names = [name for names in self._tied_names for name in names]
        rank_by_name = {
            name: place for name in tied_names if (place := _rank_of_module(name, rank_by_module)) is not None
        }
        self._bind_tied_weights(rank_by_name)

    def apply_sequence_parallel(
        self, groups: SequenceGroups, on_token_count: Callable[[Tensor], None] | None = None
    ) -> SequenceParallelAttention | None:
        """Let a list of layers work on parts of sequences; None for a model with a forward of its own."""
        if not isinstance(self._stages, PipelineModuleStages):
            return None
        self._stages.sequence_parallel = LayerSequenceParallel.install(
            self._stages.module.layers.values(), groups, on_token_count
        )
        return self._stages.sequence_parallel.attention

    def _bind_tied_weights(self, rank_by_name: dict[str, int]) -> None:
        tied_weights = find_tied_weights(self._tied_names, rank_by_name)
        local_names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        canonical = {
            name: tie.names[0]
            for tie in tied_weights
            if self.pp.rank in tie.pp_ranks
            for name in tie.names
            if name in local_names and tie.names[0] not in local_names
        }
        self.param_naming = ParamNaming(canonical, frozenset({DUMMY_PARAM_NAME}), self.pp.group)
        if self.pp.group is None:
            return
        self._tied_weights = TiedWeights(tied_weights, self.pp.rank, self.pp.group)
        self._tied_weights.sync_values(self.model)

    def local_param_name(self, name: str) -> str | None:
        """The name by which this rank knows a parameter of the whole model; None if it lies elsewhere."""
        local_names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        if name in local_names:
            return name
        aliases = next((names for names in self._tied_names if name in names), [])
        return next((other for other in aliases if other in local_names), None)

    def seed_per_stage(self) -> None:
        """Give each place random numbers of its own, so that dropout differs from stage to stage."""
        seed = int(torch.randint(1 << 62, ()))
        if self.pp.rank:
            torch.manual_seed((seed + _SEED_STRIDE * self.pp.rank) % (1 << 63))

    def tied_weights(self) -> TiedWeights | None:
        """What an optimizer must know of the other stages; after sharding."""
        if self._tied_weights is not None:
            self._tied_weights.bind(self.model)
        return self._tied_weights

    def make_runner(
        self, reduction: GradientReduction, device: torch.device, hooks: ForwardHooks, ledger: CommsLog
    ) -> PipelineRunner:
        """What runs whole windows; after sharding.  ``ledger`` counts what stages send each other."""
        assert self._stages is not None
        pp_rank, group, reverse_group = self.pp.rank, self.pp.group, self._meshes.pp_reverse_group
        if self._tied_weights is not None:
            self._tied_weights.ledger = ledger
        return PipelineRunner(
            self._stages, self._build_schedule, pp_rank, group, device, reduction, hooks, ledger, reverse_group
        )


def _rank_of_module(name: str, rank_by_module: Mapping[str, int]) -> int | None:
    """The place of the module that a parameter belongs to, or of one around it."""
    while name:
        if name in rank_by_module:
            return rank_by_module[name]
        name = name.rpartition(".")[0]
    return None
