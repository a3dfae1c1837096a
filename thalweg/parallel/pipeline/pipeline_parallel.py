"""From a model and a config to this rank's part of a pipeline.

    open     what is to be cut: a PipelineModule's layers, or the anatomy of any other model
    cut      the model becomes this rank's stages; weights that stages share agree on their values
    drive    once it is sharded: the driver of whole windows

In between the model is split over tensor ranks and the like, as without a pipeline.  A rank's
*place* is its position in the pipeline; stages are numbered along the model, and the schedule
says which places have which.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.comm import CommsLog
from thalweg.config import Config
from thalweg.parallel.pipeline.module import DUMMY_PARAM_NAME, PipelineModule, PipelineModuleStages, add_dummy_param
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.partition import partition_balanced
from thalweg.parallel.pipeline.pipeline_runner import ForwardHooks, LocalStages, PipelineRunner
from thalweg.parallel.pipeline.profile_blocks import BlockCost, profile_blocks, stage_costs
from thalweg.parallel.pipeline.schedules.auto_schedule import choose_schedule, rank_schedules
from thalweg.parallel.pipeline.schedules.builders import ScheduleName, assign_stages, build_schedule
from thalweg.parallel.pipeline.schedules.schedule import PipelineSchedule
from thalweg.parallel.pipeline.split_model import BlockLayout, SplitModelStages, find_blocks, partition_blocks
from thalweg.parallel.pipeline.tied_weights import ParamNaming, TiedWeights, find_alias_groups, find_tied_weights
from thalweg.parallel.sequence.pipeline_layers import LayerSequenceParallel
from thalweg.parallel.sequence.sequence_parallel import SequenceGroups, SequenceParallelAttention
from thalweg.parallel.tensor.tensor_parallel import broadcast_model
from thalweg.parallel_dims import ParallelMeshes, control_group
from thalweg.zero.shard import ShardedModel

_SEED_STRIDE = 0x9E3779B97F4A7C15


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
        pp = meshes.pp
        self.pp_rank, self.pp_size, self.pp_group = (
            (0, 1, None) if pp is None else (pp.get_local_rank(), pp.size(), pp.get_group())
        )
        virtual_stages = config.pipeline.virtual_stages
        self._num_virtual_stages = virtual_stages if virtual_stages > 1 else 2  # where the schedule is interleaved
        self._stages: LocalStages | None = None
        self._block_layout: BlockLayout | None = None
        self._block_costs: list[BlockCost] | None = None
        self._tied_names: list[list[str]] = []
        self._tied_weights: TiedWeights | None = None
        self.param_naming = ParamNaming(group=self.pp_group)
        self.model = model
        if isinstance(model, PipelineModule):
            max_stages = len(model.specs)
        else:
            assert batch is not None
            self._block_layout = find_blocks(model, batch)
            self._tied_names = find_alias_groups(model)
            max_stages = self._block_layout.num_blocks
            if "auto" in (config.pipeline.schedule, config.pipeline.partition):
                # Measured on the job's first rank; None where there are no values to run on.
                table = torch.zeros(max_stages, 4, dtype=torch.float64)
                if dist.get_rank(meshes.world_group) == 0 and not any(p.is_meta for p in model.parameters()):
                    costs = profile_blocks(model, self._block_layout.list_name, batch)
                    table = torch.tensor([astuple(cost) for cost in costs], dtype=table.dtype)
                dist.broadcast(table, group_src=0, group=control_group(meshes.world_group))
                self._block_costs = [BlockCost(*row) for row in table.tolist()] if table.any() else None
        self.schedule_name: ScheduleName = self._choose_schedule(max_stages)
        self._stage_to_rank = assign_stages(self.schedule_name, self.pp_size, self._num_virtual_stages)
        self.num_stages = len(self._stage_to_rank)
        self._local_stages = [s for s, place in enumerate(self._stage_to_rank) if place == self.pp_rank]
        if isinstance(model, PipelineModule):
            self._build_local_layers(model)

    def _choose_schedule(self, max_stages: int) -> ScheduleName:
        section, block_costs, num_ranks = self._config.pipeline, self._block_costs, self.pp_size
        name = section.schedule
        if name != "auto":
            return name
        get_costs = None
        if block_costs is not None:
            seconds = [part.seconds for part in block_costs]
            get_costs = lambda stages: stage_costs(block_costs, partition_balanced(seconds, stages, min_layers=1))
        steps = int(self._config.gradient_accumulation_steps)
        ranked = rank_schedules(num_ranks, steps, max_stages, get_costs, self._num_virtual_stages)
        best = choose_schedule(ranked)
        cost_source = "measured" if block_costs is not None else "equal"
        bubble = f"a bubble of {best.timeline.bubble:.1%} by {cost_source} costs"
        self._config.add_note("pipeline.schedule", f"{best.name}: {bubble}")
        return best.name

    def _build_schedule(self, num_micro_batches: int) -> PipelineSchedule:
        """The schedule of ``num_micro_batches`` micro-batches; a window may end too early for DualPipeV, but ZBV has
        the same placement."""
        is_too_short = self.schedule_name == "dualpipev" and num_micro_batches < 2 * self.pp_size
        name = "zbv" if is_too_short else self.schedule_name
        return build_schedule(name, self.pp_size, num_micro_batches, num_virtual_stages=self._num_virtual_stages)

    def _get_stage_ranges(self, model: nn.Module, layout: BlockLayout) -> list[range]:
        block_costs, memory_limit = self._block_costs, self._memory_limit
        if block_costs is None or self._config.pipeline.partition != "auto":
            return partition_blocks(model, layout, self.num_stages)
        # Weight, gradient and two moments; the latter in shards.
        num_copies = 2 + 2 / (self._meshes.fsdp.size() if self._config.zero_optimization.stage >= 1 else 1)

        def fits(stage: int, start: int, stop: int) -> bool:
            """Whether a rank has room for these blocks and the activations that are in flight."""
            blocks, in_flight = block_costs[start:stop], max(1, self.num_stages - stage)
            num_bytes = sum(num_copies * block.parameter_bytes + in_flight * block.saved_bytes for block in blocks)
            return memory_limit is None or num_bytes <= memory_limit

        return partition_blocks(model, layout, self.num_stages, [part.seconds for part in block_costs], fits)

    def _build_local_layers(self, pipeline_module: PipelineModule) -> None:
        method = self._config.pipeline.partition
        stage_ranges = pipeline_module.partition_layers(self.num_stages, None if method == "best" else method)
        interval = self._config.pipeline.activation_checkpoint_interval
        interval = interval or pipeline_module.activation_checkpoint_interval
        self._stages = PipelineModuleStages(pipeline_module, stage_ranges, self._local_stages, interval)
        self.model = self._stages.module
        rank_of_layer = {i: self._stage_to_rank[stage] for stage, cut in enumerate(stage_ranges) for i in cut}
        rank_by_name: dict[str, int] = {}
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
        if self._meshes.tp is None:  # else the tensor ranks have done so
            broadcast_model(model, self._meshes.world_group)
        stage_ranges = self._get_stage_ranges(model, layout)
        self._stages = SplitModelStages(model, layout, stage_ranges, self._local_stages)
        add_dummy_param(model)
        rank_by_module = {
            f"{layout.list_name}.{i}": self._stage_to_rank[s] for s, cut in enumerate(stage_ranges) for i in cut
        }
        rank_by_module |= dict.fromkeys(layout.entry_modules, self._stage_to_rank[0])
        rank_by_module |= dict.fromkeys(layout.exit_modules, self._stage_to_rank[-1])
        rank_by_name = {}
        for name in (name for names in self._tied_names for name in names):
            module_name = name
            while module_name and module_name not in rank_by_module:  # the module of a weight, or one around it
                module_name = module_name.rpartition(".")[0]
            if module_name:
                rank_by_name[name] = rank_by_module[module_name]
        self._bind_tied_weights(rank_by_name)

    def apply_sequence_parallel(
        self, groups: SequenceGroups, on_token_count: Callable[[Tensor], None] | None = None
    ) -> SequenceParallelAttention | None:
        """Let a list of layers work on parts of sequences; None for a model with a forward of its own."""
        if not isinstance(self._stages, PipelineModuleStages):
            return None
        layers = list(self._stages.module.layers.values())
        self._stages.sequence_parallel = LayerSequenceParallel(layers, groups, on_token_count)
        return self._stages.sequence_parallel.attention

    def _bind_tied_weights(self, rank_by_name: dict[str, int]) -> None:
        tied_weights = find_tied_weights(self._tied_names, rank_by_name)
        local_names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        own_ties = [tie for tie in tied_weights if self.pp_rank in tie.pp_ranks and tie.names[0] not in local_names]
        canonical = {name: tie.names[0] for tie in own_ties for name in tie.names if name in local_names}
        self.param_naming = ParamNaming(canonical, frozenset({DUMMY_PARAM_NAME}), self.pp_group)
        if self._meshes.pp is None:
            return
        self._tied_weights = TiedWeights(tied_weights, self.pp_rank, self._meshes.pp)
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
        if self.pp_rank:
            torch.manual_seed((seed + _SEED_STRIDE * self.pp_rank) % (1 << 63))

    def tied_weights(self) -> TiedWeights | None:
        """What an optimizer must know of the other stages; after sharding."""
        if self._tied_weights is not None:
            self._tied_weights.bind(self.model)
        return self._tied_weights

    def make_runner(
        self, reduction: ShardedModel, device: torch.device, hooks: ForwardHooks, ledger: CommsLog
    ) -> PipelineRunner:
        """What runs whole windows; after sharding.  ``ledger`` counts what stages send each other."""
        assert self._stages is not None
        if self._tied_weights is not None:
            self._tied_weights.ledger = ledger
        channel = P2PChannel(self.pp_group, device, ledger, self._meshes.pp_reverse_group)
        return PipelineRunner(self._stages, self._build_schedule, self.pp_rank, channel, reduction, hooks)
