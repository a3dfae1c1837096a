"""What the plan must know of a run besides the model; made from a resolved config."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from thalweg.activation_checkpointing import ActivationCheckpointPolicy
from thalweg.config import Config
from thalweg.config.schema.base import get_by_path, replace_by_path
from thalweg.config.schema.optimizer import COMPRESSED_OPTIMIZERS, canonical_name
from thalweg.config.schema.parallel import TPPartition
from thalweg.config.schema.training import GradientCompressionConfig, Optimizer, OuterOptimizerConfig, Tiling
from thalweg.optim.build import build_optimizer, get_optimizer_params
from thalweg.optim.offload.nvme_step import is_elementwise
from thalweg.optim.offload.policy import may_step_in_backward
from thalweg.zero.shard import ShardOptions
from thalweg.zero.storage.base import ParamSpec, StorageKind
from thalweg.zero.storage.nvme import MOST_IN_MEMORY, prefers_low_memory, shards_on_host

INTRA_NODE, INTER_NODE = "inside a node", "between nodes"
MAX_IN_CPU_KEY = "zero_optimization.offload_param.max_in_cpu"
# Of the memory of a rank, for parameters that stay in it though they might rest on a disk; each takes its master, its
# copy in the compute dtype and holes between them.
_RESIDENT_SHARE, _RESIDENT_BYTES = 1 / 8, 8
_DERIVED_KEYS = ("train_batch_size", "data_parallel_size")


@dataclass(frozen=True)
class RankTopology:
    """``num_nodes`` hosts with ``ranks_per_node`` ranks each, on ``device`` ``"cpu"`` or ``"accelerator"``."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.ranks_per_node

    def group_leaders(self, group_size: int) -> Self:
        """One rank of each group of ``group_size`` neighbours."""
        if self.ranks_per_node % group_size == 0:
            return replace(self, ranks_per_node=self.ranks_per_node // group_size)
        if group_size % self.ranks_per_node == 0:
            return replace(self, num_nodes=self.world_size // group_size, ranks_per_node=1)
        return replace(self, num_nodes=1, ranks_per_node=max(1, self.world_size // group_size))


@dataclass(frozen=True, kw_only=True)
class RunSpec(ShardOptions):
    """Everything that decides the bytes of a rank, but the model and its batch: how it is sharded, and the rest.

    ``topology``: the ranks that states are sharded over; ``tp_size``: how many share each one's layers; ``sp_size``:
    how many of them share a sequence.
    """

    topology: RankTopology
    activation_checkpointing: ActivationCheckpointPolicy = field(default_factory=ActivationCheckpointPolicy)
    accumulation_steps: int = 1
    micro_batch_size: int = 1
    optimizer: str | None = "AdamW"
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    autocast_dtype: Any = None
    linear_kernels: str = "auto"
    may_step_in_backward: bool = False
    activation_offload: str = "none"
    low_memory: bool = False
    elementwise_optimizer: bool = True
    tp_size: int = 1
    tp_partition: TPPartition | None = None
    sp_size: int = 1
    tiling: Tiling = field(default_factory=Tiling)
    tp_link: str = INTRA_NODE
    outer_optimizer: OuterOptimizerConfig | None = None
    gradient_compression: GradientCompressionConfig | None = None  # between hosts, where there are several

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on processors."""
        return self.topology.device == "cpu"

    @property
    def replicates_states(self) -> bool:
        """Whether every rank holds all states."""
        return not self.policy.shards_optimizer_states or self.num_shards == 1

    @property
    def num_site_ranks(self) -> int:
        """Ranks that train as one job: all of them, or those of a site."""
        if self.site_size is None:
            return self.topology.world_size
        return self.topology.ranks_per_node if isinstance(self.site_size, str) else self.site_size

    @property
    def num_shards(self) -> int:
        """Into how many pieces states are cut: one a rank, or one a rank of a group (MiCS, a site)."""
        world, group = self.num_site_ranks, self.zero.mics_shard_size
        if not self.policy.shards_optimizer_states:
            return 1
        return world if group <= 0 or group == world else group

    @property
    def shard_topology(self) -> RankTopology:
        """The ranks among which states are sharded (replicated: averaged), by host."""
        topology = self.topology
        size = self.num_site_ranks if self.replicates_states else self.num_shards
        local = min(size, topology.ranks_per_node)
        return RankTopology(max(1, size // local), local, topology.device)

    @property
    def states_on_host(self) -> bool:
        """Whether a GPU's shards lie in host memory and are copied to it as they are gathered."""
        return shards_on_host(self.zero, self.on_cpu)

    @property
    def storage_kind(self) -> StorageKind:
        """Where unsharded parameters live (see ``zero/storage/base.py``)."""
        if self.states_on_host:
            return "wire"
        if self.replicates_states:
            return "private"
        if not self.on_cpu:
            return "wire"
        keeps_unsharded = not self.policy.reshards_after_use or self.zero.zero_hpz_partition_size > 1
        return "shared" if self.shard_topology.num_nodes == 1 or (self.is_hierarchical and keeps_unsharded) else "wire"

    @property
    def sent_share_of_grads(self) -> float:
        """How many of the bytes of reduced gradients cross from a GPU to the host: see ``FSDPGroupHandle``."""
        dtypes, sent = self.precision, self.precision.reduce_dtype
        sums_grads = self.accumulation_steps > 1 and not self.policy.reduces_each_backward
        if self.topology.world_size == 1 and dtypes.compute_dtype == torch.bfloat16 and not sums_grads:
            sent = dtypes.compute_dtype
        return min(1.0, sent.itemsize / dtypes.master_dtype.itemsize)

    @property
    def is_hierarchical(self) -> bool:
        """Whether shared memory on each host works together with the network between hosts."""
        return self.on_cpu and self.shard_topology.num_nodes > 1 and self.shard_topology.ranks_per_node > 1

    @property
    def uses_shared_memory(self) -> bool:
        """Whether gradients are added up in memory that the ranks of a host share."""
        topology = self.shard_topology
        return self.on_cpu and topology.ranks_per_node > 1 and (topology.num_nodes == 1 or self.is_hierarchical)

    @property
    def reduces_in_place(self) -> bool:
        """Whether a reduction's input is its output: see ``comm/collectives/reducer.py: ReplicatedReducer``."""
        same_dtype = self.precision.reduce_dtype == self.precision.master_dtype
        return self.replicates_states and not self.uses_shared_memory and same_dtype

    @property
    def optimizer_on_disk(self) -> bool:
        """Whether the optimizer's state rests in the swap file, and gradients until the update."""
        return self.zero.offload_optimizer.device == "nvme"

    @property
    def grads_leave_early(self) -> bool:
        """Whether gradients go before the step, so that they never are there all at once."""
        return self.updates_in_backward or self.optimizer_on_disk

    def master_on_disk(self, param_spec: ParamSpec) -> bool:
        """Whether the master of a parameter that stays in memory lies on a disk (see ``zero/storage/nvme.py``)."""
        only_state_on_disk = self.optimizer_on_disk and self.zero.offload_param.device != "nvme"
        may_rest = param_spec.requires_grad and param_spec.has_copy and only_state_on_disk
        return may_rest and not self.is_hierarchical and self.storage_kind != "wire"

    @property
    def updates_in_backward(self) -> bool:
        """Whether a unit is updated within the backward pass, its gradients gone at once."""
        where = self.zero.offload_optimizer.device
        possible = where == "cpu" or (where == "nvme" and self.zero.offload_param.device == "nvme")
        return possible and self.may_step_in_backward and self.elementwise_optimizer


def run_spec_from_config(config: Config, topology: RankTopology, options: ShardOptions) -> RunSpec:
    """The run that a resolved config describes; ``options`` are the ``ShardOptions`` it gives for the model.

    ``topology``: all ranks of the job.
    """
    tp_size, per_node = get_tp_size(config), topology.ranks_per_node
    topology = topology.group_leaders(tp_size)
    section, optimizer = config.activation_checkpointing, config.optimizer
    autocast = config.torch_autocast.dtype if config.torch_autocast.enabled else None
    return RunSpec(
        **vars(options),
        topology=topology,
        activation_checkpointing=ActivationCheckpointPolicy(policy=section.policy, every=section.every),
        accumulation_steps=int(config.gradient_accumulation_steps),
        micro_batch_size=int(config.train_micro_batch_size_per_gpu),
        optimizer=None if optimizer is None else optimizer.type,
        optimizer_params=get_optimizer_params(config),
        autocast_dtype=autocast,
        linear_kernels=config.cpu_kernels,
        may_step_in_backward=may_step_in_backward(config, on_cpu=topology.device == "cpu"),
        activation_offload=_activation_offload_device(config),
        low_memory=prefers_low_memory(config),
        elementwise_optimizer=_is_elementwise(config),
        tp_size=tp_size,
        tp_partition=config.tensor_parallel.partition_config,
        sp_size=int(config.sequence_parallel_size or 1),
        tp_link=INTRA_NODE if tp_size * int(config.sequence_parallel_size or 1) <= per_node else INTER_NODE,
        tiling=config.tiling,
        outer_optimizer=config.outer_optimizer,
        gradient_compression=config.gradient_compression if topology.num_nodes > 1 else None,
    )


def get_tp_size(config: Config) -> int:
    """How many ranks share each layer."""
    section = config.tensor_parallel
    return max(1, section.autotp_size, section.tp.tp_size)


def _activation_offload_device(config: Config) -> str:
    """Where inputs of checkpointed units wait."""
    section = config.activation_checkpointing
    if section.policy == "none":
        return "none"
    return "cpu" if section.cpu_checkpointing and not config.compile.enabled else section.offload


def with_optimizer(config: Config, optimizer: Any) -> Config:
    """``config`` with the optimizer that a program has built itself, where it is one of torch's.

    What is known of any other class is too little to plan with: the config is left as it is.
    """
    kind = optimizer if isinstance(optimizer, type) else getattr(optimizer, "func", type(optimizer))
    name = canonical_name("optimizer", getattr(kind, "__name__", ""))
    if optimizer is None or name is None or getattr(torch.optim, name, None) is not kind:
        return config
    groups = getattr(optimizer, "param_groups", None) or [getattr(optimizer, "keywords", {})]
    state_options = ("momentum", "amsgrad", "centered")  # what makes more state
    params = {key: groups[0][key] for key in state_options if groups[0].get(key)}
    return replace_by_path(config, {"optimizer": Optimizer(type=name, params=params)})


def _is_elementwise(config: Config) -> bool:
    if config.optimizer is None:
        return True
    probe = nn.Parameter(torch.zeros(2, 2))
    try:
        return is_elementwise(build_optimizer(config.optimizer.type, [probe], get_optimizer_params(config)))
    except ValueError:  # an optimizer that wants to see the model
        return False


# What makes a run smaller (or its traffic another) and is not counted: (option, whether it is on).
_UNMODELLED: dict[str, Any] = {
    "optimizer.type": lambda name: name in COMPRESSED_OPTIMIZERS,
    "context_parallel_size": lambda size: size > 1,
    "pipeline.stages": lambda stages: isinstance(stages, int) and stages > 1,
    "expert_parallel.enabled": bool,
    "expert_parallel.autoep_size": lambda size: size > 1,
    "compile.enabled": bool,
    "zero_optimization.offload_optimizer.ratio": lambda ratio: ratio < 1,
    "zero_optimization.zenflow": lambda section: section is not None,
}


def unmodelled_options(config: Config) -> list[str]:
    """Options of ``config`` that are on and that the plan does not count: its bytes are then a bound, not
    a prediction, and no run is refused by them."""
    options = []
    for path, is_on in _UNMODELLED.items():
        value = get_by_path(config, path)
        if value is not None and value != "auto" and is_on(value):
            options.append(path)
    section = config.activation_checkpointing
    if section.partition_activations and section.policy != "none" and get_tp_size(config) > 1:
        options.append("activation_checkpointing.partition_activations")
    return options


def apply_changes(config_dict: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A ds_config with ``changes`` (dotted keys); the total batch size is left to follow from its factors."""
    config_dict = copy.deepcopy(config_dict)
    for key in _DERIVED_KEYS:
        config_dict.pop(key, None)
    for path, value in changes.items():
        node = config_dict
        *outer, last = path.split(".")
        for key in outer:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        node[last] = value
    return config_dict


def choose_max_in_cpu(config: Config, rank_memory: int | None) -> dict[str, Any]:
    """The changes that keep paged parameters in memory where a rank has ``rank_memory`` bytes: none where the config
    says how many, or has no tier that asks."""
    section = config.zero_optimization.offload_param
    if section.device != "nvme" or section.max_in_cpu is not None or rank_memory is None:
        return {}
    return {MAX_IN_CPU_KEY: min(MOST_IN_MEMORY, int(rank_memory * _RESIDENT_SHARE) // _RESIDENT_BYTES)}
