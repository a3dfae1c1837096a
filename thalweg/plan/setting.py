"""What the plan must know of a run besides the model; made from a resolved config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from thalweg.config import Config
from thalweg.config.schema_base import value_at, with_values
from thalweg.config.schema_train import Optimizer, Tiling
from thalweg.optim import build_optimizer
from thalweg.optim.tiered import StateTier, state_tier
from thalweg.optim.worker import is_elementwise
from thalweg.remat import RematPolicy
from thalweg.zero.homes import Placement, Slot
from thalweg.zero.offload import Offload, memory_is_short
from thalweg.zero.policy import Precision, TrafficPolicy, ZeroPolicy
from thalweg.zero.units import UnitPolicy
from thalweg.zero.wiring import REDUCE_DEPTH, REPLICATED_DEPTH

INSIDE, BETWEEN = "inside a node", "between nodes"


@dataclass(frozen=True)
class Ranks:
    """``num_nodes`` hosts with ``per_node`` ranks each, on ``device`` ``"cpu"`` or ``"cuda"``."""

    num_nodes: int = 1
    per_node: int = 1
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.per_node

    def among(self, size: int) -> Ranks:
        """One rank of each group of ``size`` neighbours."""
        if self.per_node % size == 0:
            return replace(self, per_node=self.per_node // size)
        if size % self.per_node == 0:
            return replace(self, num_nodes=self.world_size // size, per_node=1)
        return replace(self, num_nodes=1, per_node=max(1, self.world_size // size))


@dataclass(frozen=True)
class Setting:
    """Everything that decides the bytes of a rank, but the model and its batch.

    ``ranks``: those that states are sharded over; ``tensor``: how many share each one's layers; ``sequence``:
    how many of them share a sequence.
    """

    ranks: Ranks
    policy: ZeroPolicy
    precision: Precision
    units: UnitPolicy = field(default_factory=UnitPolicy)
    remat: RematPolicy = field(default_factory=RematPolicy)
    fp32_modules: tuple[str, ...] = ()
    accumulation: int = 1
    micro_batch: int = 1
    optimizer: str | None = "AdamW"
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    autocast: Any = None
    linear_kernels: str = "auto"
    traffic: TrafficPolicy = field(default_factory=TrafficPolicy)
    offload: Offload = field(default_factory=Offload)
    states: StateTier = field(default_factory=StateTier)
    inputs_on: str = "none"
    memory_is_short: bool = False
    elementwise: bool = True
    tensor: int = 1
    sequence: int = 1
    tiling: Tiling = field(default_factory=Tiling)
    team_link: str = INSIDE

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on processors."""
        return self.ranks.device == "cpu"

    @property
    def replicates(self) -> bool:
        """Whether every rank holds all states."""
        return not self.policy.shards_states or self.num_shards == 1

    @property
    def num_shards(self) -> int:
        """Into how many pieces states are cut: one a rank, or one a rank of a group (MiCS)."""
        world, group = self.ranks.world_size, self.traffic.group_size
        if not self.policy.shards_states:
            return 1
        return world if group in (0, world) else group

    @property
    def num_copies(self) -> int:
        """Groups that hold the same shards (MiCS)."""
        return 1 if self.replicates else self.ranks.world_size // self.num_shards

    @property
    def span(self) -> Ranks:
        """The ranks among which states are sharded (replicated: averaged), by host."""
        ranks = self.ranks
        size = ranks.world_size if self.replicates else self.num_shards
        local = min(size, ranks.per_node)
        return Ranks(max(1, size // local), local, ranks.device)

    @property
    def states_on_host(self) -> bool:
        """Whether a GPU's shards lie in host memory and are copied to it as they are gathered."""
        return not self.on_cpu and (self.offload.device != "none" or self.states.device != "none")

    @property
    def placement(self) -> Placement:
        """Where unsharded parameters live (see ``zero/homes.py``)."""
        if self.states_on_host:
            return "wire"
        if self.replicates:
            return "private"
        if not self.on_cpu:
            return "wire"
        keeps = not self.policy.frees_parameters or self.traffic.secondary_size > 1
        return "shared" if self.span.num_nodes == 1 or (self.both_levels and keeps) else "wire"

    @property
    def both_levels(self) -> bool:
        """Whether an arena on each host works together with the wire between hosts."""
        return self.on_cpu and self.span.num_nodes > 1 and self.span.per_node > 1

    @property
    def in_arena(self) -> bool:
        """Whether gradients are added up in memory that the ranks of a host share."""
        return self.on_cpu and self.span.per_node > 1 and (self.span.num_nodes == 1 or self.both_levels)

    @property
    def num_reduction_slots(self) -> int:
        """Slots of the arena that each rank fills in turn."""
        return REPLICATED_DEPTH if self.replicates else REDUCE_DEPTH

    @property
    def spills(self) -> bool:
        """Whether gradients rest in the swap file until the update."""
        return self.on_cpu and self.states.device == "nvme"

    def master_leaves(self, slot: Slot) -> bool:
        """Whether the master of a parameter that stays in memory lies on a disk (see ``zero/masters.py``)."""
        own = slot.trains and slot.master != slot.compute and self.states.device == "nvme"
        return own and not self.offload.pages and not self.both_levels and self.placement != "wire"

    @property
    def updates_early(self) -> bool:
        """Whether a unit is updated within the backward pass, its gradients gone at once."""
        early = self.states.in_place if self.states.device == "cpu" else self.states.early
        possible = self.states.device == "cpu" or (self.states.device == "nvme" and self.offload.pages)
        return self.on_cpu and possible and early and self.elementwise

    def with_stage(self, stage: int) -> Setting:
        """The same run at another stage."""
        return replace(self, policy=ZeroPolicy(stage))


def setting_of(config: Config, ranks: Ranks, options: Any) -> Setting:
    """The setting of a resolved config; ``options`` are the ``ShardOptions`` it gives for the model.

    ``ranks``: all of the job.
    """
    tensor, per_node = tensor_ranks(config), ranks.per_node
    ranks = ranks.among(tensor)
    section, optimizer = config.activation_checkpointing, config.optimizer
    autocast = config.torch_autocast.dtype if config.torch_autocast.enabled else None
    return Setting(
        ranks=ranks,
        policy=options.policy,
        precision=options.precision,
        units=options.units,
        remat=RematPolicy(policy=section.policy, every=section.every),
        fp32_modules=options.fp32_modules,
        accumulation=int(config.gradient_accumulation_steps),
        micro_batch=int(config.train_micro_batch_size_per_gpu),
        optimizer=None if optimizer is None else optimizer.type,
        optimizer_params=_optimizer_params(config),
        autocast=autocast,
        linear_kernels=config.cpu_kernels,
        traffic=options.traffic,
        offload=options.offload,
        states=state_tier(config, on_cpu=ranks.device == "cpu"),
        inputs_on=_inputs_on(config),
        memory_is_short=memory_is_short(config),
        elementwise=_is_elementwise(config),
        tensor=tensor,
        sequence=int(config.sequence_parallel_size or 1),
        team_link=INSIDE if tensor * int(config.sequence_parallel_size or 1) <= per_node else BETWEEN,
        tiling=config.tiling,
    )


def tensor_ranks(config: Config) -> int:
    """How many ranks share each layer."""
    section = config.tensor_parallel
    return max(1, section.autotp_size, section.tp.tp_size)


def _inputs_on(config: Config) -> str:
    """Where inputs of checkpointed units wait."""
    section = config.activation_checkpointing
    if section.policy == "none":
        return "none"
    return "cpu" if section.cpu_checkpointing and not config.compile.enabled else section.offload


def _optimizer_params(config: Config) -> dict[str, Any]:
    """Its keywords, as ``assemble.py`` gives them."""
    params = dict(config.optimizer.params) if config.optimizer is not None else {}
    if config.bf16.bf16_optimizer_states:
        params.setdefault("state_dtype", "bf16")
    return params


def with_optimizer(config: Config, given: Any) -> Config:
    """``config`` with the optimizer that a program has built itself, where it is one of torch's.

    What is known of any other class is too little to plan with: the config is left as it is.
    """
    kind = given if isinstance(given, type) else getattr(given, "func", type(given))
    if given is None or getattr(torch.optim, getattr(kind, "__name__", ""), None) is not kind:
        return config
    groups = getattr(given, "param_groups", None) or [getattr(given, "keywords", {})]
    wider = ("momentum", "amsgrad", "centered")  # what makes more state
    params = {key: groups[0][key] for key in wider if groups[0].get(key)}
    found = with_values(config, {"optimizer": Optimizer(type=kind.__name__, params=params)})
    assert isinstance(found, Config)
    return found


def _is_elementwise(config: Config) -> bool:
    if config.optimizer is None:
        return True
    probe = nn.Parameter(torch.zeros(2, 2))
    try:
        return is_elementwise(build_optimizer(config.optimizer.type, [probe], _optimizer_params(config)))
    except ValueError:  # an optimizer that wants to see the model
        return False


# What makes a run smaller (or its traffic another) and is not counted: (option, whether it is on).
_NOT_COUNTED: dict[str, Any] = {
    "context_parallel_size": lambda size: size > 1,
    "pipeline.stages": lambda stages: isinstance(stages, int) and stages > 1,
    "expert_parallel.enabled": bool,
    "expert_parallel.autoep_size": lambda size: size > 1,
    "compile.enabled": bool,
    "zero_optimization.offload_optimizer.ratio": lambda ratio: ratio < 1,
    "zero_optimization.zenflow": lambda section: section is not None,
}


def unmodelled(config: Config) -> list[str]:
    """Options of ``config`` that are on and that the plan does not count: its bytes are then a bound, not
    a prediction, and no run is refused by them."""
    found = []
    for path, is_on in _NOT_COUNTED.items():
        value = value_at(config, path)
        if value is not None and value != "auto" and is_on(value):
            found.append(path)
    section = config.activation_checkpointing
    if section.partition_activations and section.policy != "none" and tensor_ranks(config) > 1:
        found.append("activation_checkpointing.partition_activations")
    return found


def twin_on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on the meta device; the model is not touched."""
    import copy

    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in memo:
            continue
        meta: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(model, memo)
