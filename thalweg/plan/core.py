"""``thalweg.plan``: the question, the answer, and the order in which one becomes the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from thalweg.config import Config, load, resolve
from thalweg.observe import resident_mib
from thalweg.plan.auto import settle
from thalweg.plan.batch import Batch, batch_of, like
from thalweg.plan.changes import nvme_folder
from thalweg.plan.cluster import Cluster, cluster_of, disk_limit
from thalweg.plan.depth import at_full_depth, stacks_of
from thalweg.plan.memory import simulate
from thalweg.plan.process import Moment, PerRank
from thalweg.plan.published import transformer_activations, zero_states
from thalweg.plan.rehearsal import rehearse
from thalweg.plan.setting import Setting, setting_of, unmodelled
from thalweg.plan.source import Source, open_source
from thalweg.plan.teams import can_split
from thalweg.plan.time import compose, time_of
from thalweg.plan.timeline import aligned, highest, moments
from thalweg.plan.traffic import traffic_of
from thalweg.utils.log import get_logger
from thalweg.zero.options import model_facts, shard_options

_log = get_logger(__name__)


@dataclass
class Plan:
    """What a run will need: bytes of each rank, bytes over each link, seconds of a step.

    ``fits`` is None where no limit is known.  ``suggestion``: the changes to the config (keys
    as in a ``ds_config.json``) of the cheapest run that fits, empty if this one is it, None if
    none was found or asked for.  ``tiers``: bytes beyond ``per_rank``: ``host`` and ``disk`` of one rank,
    ``disk_read`` and ``disk_written`` in a step.  ``published``: what the literature's formulas give for the
    same run (see ``published.py``), in bytes.  ``not_counted``: options that are on and whose effect
    is not in these numbers; the bytes are then a bound, and ``fits`` is never False.
    """

    per_rank: PerRank
    limit: int | None
    per_host: int
    host_limit: int | None
    traffic: dict[str, int]
    links: dict[str, int]
    tiers: dict[str, int]
    seconds: float
    parts: dict[str, float]
    bottleneck: str
    num_parameters: int
    tokens: int
    world_size: int
    timeline: list[Moment] = field(default_factory=list)
    suggestion: dict[str, Any] | None = None
    reasons: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)
    published: dict[str, float] = field(default_factory=dict)
    model: str = ""
    config: Config | None = None
    disk_limit: int | None = None
    ranks_per_node: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within its device, the ranks of a host together within it and its disk."""
        over = self._over
        within = max(over.values()) <= 0 if over else None
        return within if within or not self.not_counted else None

    @property
    def short_of(self) -> str:
        """What is exceeded the most, ``"memory"`` or ``"disk"``; of a run that fits, ``"memory"``."""
        over = self._over
        if "disk" in over and over["disk"] > max(0, over.get("memory", 0)):
            return "disk"
        return "memory"

    @property
    def missing_bytes(self) -> int:
        """By how much what :attr:`short_of` names is exceeded (negative: what is to spare)."""
        return self._over.get(self.short_of, 0)

    @property
    def _over(self) -> dict[str, int]:
        """Bytes beyond each limit that is known (negative: what is to spare)."""
        memory, found = [], {}
        if self._on_host:
            memory.append(self.per_host - (self.host_limit or 0))
        if self.limit is not None and (not self._on_host or self.tiers.get("host")):
            memory.append(self.per_rank.total - self.limit)
        if memory:
            found["memory"] = max(memory)
        if self.disk_limit is not None and self.tiers.get("disk"):
            found["disk"] = self.tiers["disk"] * self.ranks_per_node - self.disk_limit
        return found

    @property
    def _on_host(self) -> bool:
        """Whether something is held in a host's memory, whose size is known."""
        return self.per_host > 0 and self.host_limit is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys that `thalweg plan --json` prints."""
        from thalweg.plan.report import as_json

        return as_json(self)

    def __str__(self) -> str:
        from thalweg.plan.report import as_table

        return as_table(self)


@dataclass(frozen=True)
class Question:
    """A model, a batch and the machines; configs are then asked about, one after the other.

    ``states_only``: activations are left out, as nobody knows the model's inputs.  ``micro_batch``: of which
    ``train_micro_batch_size_per_gpu`` the ``batch`` is one; another one is answered with fewer or more rows.
    ``patience``: seconds of processor time that one rehearsal may take (a model that goes token by token has
    a million operators).
    """

    source: Source
    cluster: Cluster
    batch: Any = None
    sequence_length: int | None = None
    process_bytes: int = 0
    states_only: bool = False
    micro_batch: int | None = None
    patience: float | None = None

    def answer(self, config: Config) -> Plan:
        """The plan of a resolved config."""
        model = self.source.model
        setting = setting_of(config, self.cluster.ranks, shard_options(model, config))
        missing = unmodelled(config)
        if setting.tensor > 1 and not can_split(self.source.fresh(), setting.tensor):
            setting = replace(setting, tensor=1)
            missing.append("tensor_parallel.autotp_size")
        shapes = self._shapes(model, setting)
        timelines: list[list[Moment]] = []
        stacks = stacks_of(model)

        def measure(shallow: nn.Module) -> dict[str, Any]:
            # A GPU gets the parameters one by one; on a CPU the whole model is there first.
            on_cpu = self.cluster.device == "cpu"
            given = [parameter.nbytes for parameter in shallow.parameters()] if on_cpu else []
            depths = {name: len(list(shallow.get_submodule(name).children())) for name in stacks}
            found = rehearse(shallow, shapes, setting, self.patience)
            held = {"process_bytes": self.process_bytes, "given_bytes": given}
            memory = simulate(found, setting, **held)
            traffic = traffic_of(found, setting)
            time = time_of(found, setting, traffic, memory, self.cluster)
            if setting.updates_early and time.disk_keeps_up:
                memory = simulate(found, setting, keeps_up=True, **held)
            timelines.append(memory.timeline)
            return {
                "stretches": aligned(memory.stretches, depths),
                "again": {"bytes": memory.counted_again},
                "tiers": {
                    "host": memory.host_bytes,
                    "disk": memory.disk_bytes,
                    "disk_read": memory.disk_read,
                    "disk_written": memory.disk_written,
                },
                "memory": asdict(memory.peak),
                "traffic": traffic.collectives,
                "links": traffic.links,
                "time": time.parts,
            }

        # Buffers and paged units fill up at some depth: no line goes through that.
        try:
            found = at_full_depth(self.source.fresh, measure, whole=setting.memory_is_short)
        except Exception as error:
            if setting.sequence == 1:
                raise
            _log.debug("not rehearsed on parts of sequences: %s", error)
            setting = replace(setting, sequence=1)
            missing.append("sequence_parallel_size")
            timelines.clear()
            found = at_full_depth(self.source.fresh, measure, whole=setting.memory_is_short)
        seconds, bottleneck = compose(found["time"], self.cluster)
        whole, cluster = len(timelines) == 1, self.cluster
        per_rank = PerRank(**found["memory"]) if whole else highest(found["stretches"])
        if cluster.device == "cpu":
            groups = cluster.devices_per_node // setting.ranks.per_node  # each has an arena of its own
            host = cluster.devices_per_node * per_rank.total - groups * found["again"]["bytes"]
        else:
            host = cluster.devices_per_node * found["tiers"]["host"]
        return Plan(
            per_rank=per_rank,
            limit=cluster.limit_per_rank(),
            per_host=host,
            host_limit=cluster.host_memory,
            traffic=found["traffic"],
            links=found["links"],
            tiers=found["tiers"],
            seconds=seconds,
            parts=found["time"],
            bottleneck=bottleneck,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            tokens=(shapes.num_tokens if shapes else setting.micro_batch)
            * setting.accumulation
            * setting.ranks.world_size
            // setting.sequence,
            world_size=self.cluster.world_size,
            timeline=timelines[0] if whole else moments(found["stretches"]),
            not_counted=missing,
            published=self._published(setting, shapes),
            disk_limit=disk_limit(cluster, nvme_folder(config)),
            ranks_per_node=cluster.devices_per_node,
            model=self.source.name,
            config=config,
        )

    def _published(self, setting: Setting, shapes: Batch | None) -> dict[str, float]:
        facts = model_facts(self.source.model)
        count = sum(parameter.numel() for parameter in self.source.model.parameters())
        found = {"zero_states": zero_states(count, setting.ranks.world_size, setting.policy.stage)}
        if shapes is not None and facts.hidden_size and facts.num_layers:
            tokens = shapes.num_tokens
            found["activations"] = transformer_activations(facts.hidden_size, facts.num_layers, 1, tokens)
        return found

    def _shapes(self, model: nn.Module, setting: Setting) -> Batch | None:
        if self.states_only:
            return None
        if self.batch is not None:
            given = self.batch if isinstance(self.batch, Batch) else like(self.batch)
            own = self.micro_batch or setting.micro_batch
            return given if own == setting.micro_batch else given.with_rows(setting.micro_batch, own)
        return batch_of(model, setting.micro_batch, self.sequence_length)


def plan(
    model: Any,
    config: Any = None,
    *,
    cluster: Cluster | None = None,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
    suggest: bool = True,
) -> Plan:
    """What a run will need, before anything is allocated.

    ``model``: a module (live or on meta), a class with ``model_kwargs``, a Hugging Face config
    (object, dict, path).  ``config``: a path, dict or JSON text of DeepSpeed's keys.
    ``cluster``, or its parts: sizes are bytes or texts such as ``"80GiB"``; ``device`` is
    ``"cpu"`` or the name of a GPU (``"h100"``).  ``batch``: one micro-batch of tensors on any
    device, else it is made of ``sequence_length`` tokens.  ``suggest``: look for the cheapest
    configuration that fits where this one does not.  ``process_bytes``: what a CPU rank holds
    before the model is there (by default, what this process does).

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: nothing that describes a model; inputs that cannot be guessed.
    """
    question = question_of(
        model,
        cluster=cluster,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        batch=batch,
        sequence_length=sequence_length,
        model_kwargs=model_kwargs,
        process_bytes=process_bytes,
    )
    world_size, facts = question.cluster.world_size, model_facts(question.source.model)
    resolved = resolve(settle(load(config), question), world_size=world_size, model=facts)
    question = replace(question, micro_batch=int(resolved.train_micro_batch_size_per_gpu))
    answer = question.answer(resolved)
    if suggest and answer.fits is False:
        from thalweg.plan.search import suggest as search

        answer.suggestion, answer.reasons = search(question, resolved)
    return answer


def question_of(
    model: Any,
    *,
    cluster: Cluster | None = None,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch: Any = None,
    sequence_length: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    process_bytes: int | None = None,
) -> Question:
    """The model and the machines of :func:`plan`, to be asked about one config after the other."""
    source = open_source(model, model_kwargs)
    where = cluster or cluster_of(
        num_nodes, devices_per_node, device=device, device_memory=device_memory, host_memory=host_memory
    )
    if process_bytes is None:
        process_bytes = _process_bytes(source, where)
    return Question(source, where, batch, sequence_length, process_bytes)


def _process_bytes(source: Source, cluster: Cluster) -> int:
    """What this process holds without the model: the ranks will be such processes."""
    if cluster.device != "cpu":
        return 0
    resident = int(resident_mib() * 2**20)
    return max(0, resident - sum(source.given_bytes)) if source.is_live else resident
