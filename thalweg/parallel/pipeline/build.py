"""From a model and a config to this rank's part of a pipeline.

    open     what is to be cut: a PipelineModule's layers, or the anatomy of any other model
    cut      the model becomes this rank's stages; weights that stages share agree on their values
    drive    once it is sharded: the driver of whole windows

In between the model is split over tensor ranks and the like, as without a pipeline.  A rank's
*place* is its position in the pipeline; stages are numbered along the model, and the schedule
says which places have which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thalweg.comm import Ledger
from thalweg.config import Config
from thalweg.mesh import Axes
from thalweg.parallel.pipeline.actions import Schedule
from thalweg.parallel.pipeline.blocks import Anatomy, StagedModel, cut_blocks, dissect
from thalweg.parallel.pipeline.choose import candidates, choose
from thalweg.parallel.pipeline.cut import partition
from thalweg.parallel.pipeline.driver import Around, Driver, Reduction, Staged
from thalweg.parallel.pipeline.measure import PartCost, measure_blocks, stage_costs
from thalweg.parallel.pipeline.module import NOTHING, PipelineModule, StagedLayers, hold_something
from thalweg.parallel.pipeline.names import Naming, SharedWeights, shared_names, ties_of
from thalweg.parallel.pipeline.schedules import Name, build, placement_of
from thalweg.parallel.pipeline.sequences import LayerSequences
from thalweg.parallel.sequence import Attention, SequenceTeams
from thalweg.parallel.tensor import agree_on_values
from thalweg.zero.init import has_pending

_STREAM = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Layout:
    """Where this rank is: ``place`` of ``size`` in ``group``, which is None for a pipeline of one."""

    place: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, axes: Axes) -> Layout:
        """This rank's, of the job's axes."""
        if axes.pipeline is None:
            return cls(0, 1, None)
        return cls(axes.pipeline.get_local_rank(), axes.pipeline.size(), axes.pipeline.get_group())


def chunks_of(config: Config) -> int:
    """Stages on each rank where the schedule is interleaved."""
    return config.pipeline.virtual_stages if config.pipeline.virtual_stages > 1 else 2


class Pipeline:
    """This rank's part of one model's pipeline; ``model`` is what the rank holds of it.

    ``batch``: keyword arguments of a micro-batch, for a model that is no PipelineModule.
    ``limit_bytes``: what a rank may hold, where a cut by measured costs is to heed it.

    Raises:
        ValueError: the model cannot be cut so.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        config: Config,
        batch: Mapping[str, Any] | None,
        limit_bytes: int | None = None,
    ) -> None:
        self._config, self._axes, self._limit = config, axes, limit_bytes
        self.layout = Layout.of(axes)
        self._staged: Staged | None = None
        self._anatomy: Anatomy | None = None
        self._parts: list[PartCost] | None = None
        self._shared: list[list[str]] = []
        self._weights: SharedWeights | None = None
        self.naming = Naming(group=self.layout.group)
        self.model = model
        if isinstance(model, PipelineModule):
            most = len(model.specs)
        else:
            assert batch is not None
            self._anatomy = dissect(model, batch)
            self._shared = shared_names(model)
            most = self._anatomy.num_blocks
            if "auto" in (config.pipeline.schedule, config.pipeline.partition):
                self._parts = self._measure(model, self._anatomy, batch)
        self.schedule: Name = self._choose(most)
        self._placement = placement_of(self.schedule, self.layout.size, chunks_of(config))
        self.num_stages = len(self._placement)
        self._mine = [s for s, place in enumerate(self._placement) if place == self.layout.place]
        if isinstance(model, PipelineModule):
            self._take_layers(model)

    def _measure(self, model: nn.Module, anatomy: Anatomy, batch: Mapping[str, Any]) -> list[PartCost] | None:
        """What each block costs on the job's first rank; None where there are no values to run on."""
        table = torch.zeros(anatomy.num_blocks, 4, dtype=torch.float64)
        root = dist.get_global_rank(self._axes.everyone, 0)
        if dist.get_rank() == root and not any(p.is_meta for p in model.parameters()):
            parts = measure_blocks(model, anatomy.blocks, batch)
            rows = [[c.forward, c.backward, c.saved_bytes, c.parameter_bytes] for c in parts]
            table = torch.tensor(rows, dtype=torch.float64)
        dist.broadcast(table, src=root, group=self._axes.everyone)
        if not table.any():
            return None
        return [PartCost(f, b, int(saved), int(held)) for f, b, saved, held in table.tolist()]

    def _choose(self, most_stages: int) -> Name:
        section, parts, num_ranks = self._config.pipeline, self._parts, self.layout.size
        name = section.schedule
        if name != "auto":
            return name
        costs_of = None
        if parts is not None:
            seconds = [part.seconds for part in parts]
            costs_of = lambda stages: stage_costs(parts, partition(seconds, stages, least=1))
        steps = int(self._config.gradient_accumulation_steps)
        found = candidates(num_ranks, steps, most_stages, costs_of, chunks_of(self._config))
        best = choose(found)
        by = "measured" if parts is not None else "equal"
        self._config.note(
            "pipeline.schedule", f"{best.name}: a bubble of {best.timeline.bubble:.1%} by {by} costs"
        )
        return best.name

    def _schedule(self, count: int) -> Schedule:
        """The schedule of ``count`` micro-batches; a window may end too early for DualPipeV, but ZBV has
        the same placement."""
        name: Name = self.schedule
        num_ranks = self.layout.size
        if name == "dualpipev" and count < 2 * num_ranks:
            name = "zbv"
        return build(name, num_ranks, count, chunks=chunks_of(self._config))

    def _cuts(self, model: nn.Module, anatomy: Anatomy) -> list[range]:
        parts = self._parts if self._config.pipeline.partition == "auto" else None
        if parts is None:
            return cut_blocks(model, anatomy, self.num_stages)
        fits = None if self._limit is None else partial(self._fits, parts, self._limit)
        return cut_blocks(model, anatomy, self.num_stages, [part.seconds for part in parts], fits)

    def _fits(self, parts: list[PartCost], limit: int, stage: int, start: int, stop: int) -> bool:
        """Whether a rank has room for these blocks: weight, gradient, two moments; activations in flight."""
        sharded = self._config.zero_optimization.stage >= 1
        copies = 2 + 2 / (self._axes.data.size() if sharded else 1)
        held = copies * sum(part.parameter_bytes for part in parts[start:stop])
        in_flight = max(1, self.num_stages - stage)
        return held + in_flight * sum(part.saved_bytes for part in parts[start:stop]) <= limit

    def _take_layers(self, whole: PipelineModule) -> None:
        method = self._config.pipeline.partition
        cuts = whole.cut(self.num_stages, None if method == "best" else method)
        every = self._config.pipeline.activation_checkpoint_interval or whole.activation_checkpoint_interval
        staged = self._staged = StagedLayers(whole, cuts, self._mine, every)
        self.model = staged.module
        where = {i: self._placement[stage] for stage, cut in enumerate(cuts) for i in cut}
        self._shared, places = [], {}
        for key in whole.ties().values():
            for attr in key[0][1]:
                names = [f"layers.{index}.{attr}" for index, _ in key]
                self._shared.append(names)
                places.update(zip(names, (where[index] for index, _ in key), strict=True))
        self._join(places)

    def cut(self) -> None:
        """Cut a model that is no list of layers in place; collective over the job."""
        if self._anatomy is None:
            return
        model, anatomy = self.model, self._anatomy
        if self._axes.tensor is None and not has_pending(model):  # else the tensor ranks have done so
            agree_on_values(model, self._axes.everyone)
        cuts = self._cuts(model, anatomy)
        self._staged = StagedModel(model, anatomy, cuts, self._mine)
        hold_something(model)
        last = len(cuts) - 1
        places = {f"{anatomy.blocks}.{i}": self._placement[s] for s, cut in enumerate(cuts) for i in cut}
        places |= dict.fromkeys(anatomy.entry, self._placement[0])
        places |= dict.fromkeys(anatomy.exit, self._placement[last])
        shared = [name for names in self._shared for name in names]
        found = {name: place for name in shared if (place := _place_of(name, places)) is not None}
        self._join(found)

    def share_sequences(self, teams: SequenceTeams) -> Attention | None:
        """Let a list of layers work on parts of sequences; None for a model with a forward of its own."""
        if not isinstance(self._staged, StagedLayers):
            return None
        self._staged.sequences = LayerSequences.of(self._staged.module.layers.values(), teams)
        return self._staged.sequences.attention

    def _join(self, places: dict[str, int]) -> None:
        ties = ties_of(self._shared, places)
        local = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        renamed = {
            name: tie.names[0]
            for tie in ties
            if self.layout.place in tie.places
            for name in tie.names
            if name in local and tie.names[0] not in local
        }
        self.naming = Naming(renamed, frozenset({NOTHING}), self.layout.group)
        if self.layout.group is None:
            return
        self._weights = SharedWeights(ties, self.layout.place, self.layout.group)
        self._weights.agree(self.model)

    def local_name(self, name: str) -> str | None:
        """The name by which this rank knows a parameter of the whole model; None if it lies elsewhere."""
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        if name in known:
            return name
        others = next((names for names in self._shared if name in names), [])
        return next((other for other in others if other in known), None)

    def separate_streams(self) -> None:
        """Give each place random numbers of its own, so that dropout differs from stage to stage."""
        draw = int(torch.randint(1 << 62, ()))
        if self.layout.place:
            torch.manual_seed((draw + _STREAM * self.layout.place) % (1 << 63))

    def peers(self) -> SharedWeights | None:
        """What an optimizer must know of the other stages; after sharding."""
        if self._weights is not None:
            self._weights.settle(self.model)
        return self._weights

    def drive(self, reduction: Reduction, device: torch.device, around: Around, ledger: Ledger) -> Driver:
        """What runs whole windows; after sharding.  ``ledger`` counts what stages send each other."""
        assert self._staged is not None
        place, group, back = self.layout.place, self.layout.group, self._axes.back
        if self._weights is not None:
            self._weights.ledger = ledger
        return Driver(self._staged, self._schedule, place, group, device, reduction, around, ledger, back)


def _place_of(name: str, places: Mapping[str, int]) -> int | None:
    """The place of the module that a parameter belongs to, or of one around it."""
    while name:
        if name in places:
            return places[name]
        name = name.rpartition(".")[0]
    return None
