"""What the plan must know of a run besides the model; made from a resolved config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from thalweg.config import Config
from thalweg.remat import RematPolicy
from thalweg.zero.homes import Placement
from thalweg.zero.policy import Precision, ZeroPolicy
from thalweg.zero.units import UnitPolicy


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


@dataclass(frozen=True)
class Setting:
    """Everything that decides the bytes of a rank, but the model and its batch."""

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

    @property
    def replicates(self) -> bool:
        """Whether every rank holds all states."""
        return not self.policy.shards_states or self.ranks.world_size == 1

    @property
    def num_shards(self) -> int:
        """Into how many pieces states are cut."""
        return 1 if self.replicates else self.ranks.world_size

    @property
    def placement(self) -> Placement:
        """Where unsharded parameters live (see ``zero/homes.py``)."""
        if self.replicates:
            return "private"
        on_one_host = self.ranks.num_nodes == 1 and self.ranks.device == "cpu"
        return "shared" if on_one_host else "wire"

    @property
    def both_levels(self) -> bool:
        """Whether an arena on each host works together with the wire between hosts."""
        ranks = self.ranks
        return ranks.device == "cpu" and ranks.num_nodes > 1 and ranks.per_node > 1

    def with_stage(self, stage: int) -> Setting:
        """The same run at another stage."""
        return replace(self, policy=ZeroPolicy(stage))


def setting_of(config: Config, ranks: Ranks, options: Any) -> Setting:
    """The setting of a resolved config; ``options`` are the ``ShardOptions`` it gives for the model."""
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
        optimizer_params=dict(optimizer.params) if optimizer is not None else {},
        autocast=autocast,
        linear_kernels=config.cpu_kernels,
    )


def twin_on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on the meta device; the model is not touched."""
    import copy

    import torch

    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in memo:
            continue
        meta: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(model, memo)
