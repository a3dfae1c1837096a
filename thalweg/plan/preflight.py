"""Refusing a job that cannot fit, before the kernel kills it.

Twice, as not everything is known at once: when the engine is made, what parameters,
gradients and optimizer take; at the first forward pass in training, when the shapes of a
batch are there, what the activations add.  Both ask a cheap bound first and the plan only
where that leaves a doubt, so a job that is small against its machine pays nothing.

The limit is ``memory.host_limit`` (all ranks of a host together) or ``memory.device_limit``
of the config, else what the device, the kernel (MemAvailable), the cgroup and the process
limits leave.  ``memory.preflight``: ``"refuse"``, ``"warn"`` or ``"off"``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.config import Config
from thalweg.observe import resident_mib
from thalweg.optim import build_optimizer
from thalweg.plan.batch import Batch, batch_of, batch_of_call
from thalweg.plan.core import Plan, Question
from thalweg.plan.job import cluster_of_job, find_limit, process_bytes, ranks_of, twin
from thalweg.plan.rehearsal import in_memory, shard_bytes, slots_of
from thalweg.plan.report import byte_table, show_changes
from thalweg.plan.search import suggest
from thalweg.plan.setting import Setting, setting_of, tensor_ranks, unmodelled, with_optimizer
from thalweg.plan.sizes import show_bytes
from thalweg.plan.source import Source
from thalweg.utils.log import get_logger
from thalweg.zero.options import model_facts, shard_options

_log = get_logger(__name__)
# Bytes a transformer may save for each token, layer and unit of width: more than any is seen to.
_GENEROUS = 400
_SEARCH_SECONDS = 3.0
# Of processor time for one rehearsal: no job waits longer for what it may use.
_PATIENCE = 15.0


class DoesNotFit(ValueError):
    """A job that cannot fit; ``plan`` is None where the states alone are too much to go on."""

    def __init__(self, message: str, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class Preflight:
    """The two checks of one job on this rank; collective over ``mesh`` where it is made.

    Raises:
        DoesNotFit: with the table of bytes and the nearest configuration that fits.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        config: Config,
        device: torch.device,
        optimizer: Any = None,
    ) -> None:
        """``optimizer``: the one that the program has built, if any, or what makes it."""
        self.mode = config.memory.preflight
        config = with_optimizer(config, optimizer)
        self._config, self._device = config, device
        self._ranks = ranks_of(mesh, device, tensor_ranks(config))
        self._resident = int(resident_mib() * 2**20)
        self._process_bytes = process_bytes(model, device)
        self._limit = find_limit(config, device, self._num_local, self._resident)
        self._source: Source | None = None
        self._states = 0
        missing = unmodelled(config)
        if missing and self.mode != "off":
            self.mode = "off"
            if not dist.is_initialized() or dist.get_rank() == 0:
                _log.warning(
                    "whether this job fits is not checked: the plan does not count %s yet; "
                    "watch its memory, or test with a smaller model",
                    ", ".join(missing),
                )
        if self.mode == "off" or self._limit is None:
            return
        self._states = self._bytes_of_states(model)
        over = self._states > self._limit
        if mesh.size() > 1:
            flag = torch.tensor([int(over)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.get_group())
            over = bool(flag.item())
        if over or self._is_tight():
            self._source = twin(model)
        if over:
            self._refuse(None, _any_batch(model, config))

    def watch(self, model: nn.Module) -> None:
        """Check once more when the first batch is there; call when the model is in its final form."""
        if self.mode == "off" or self._limit is None or self._source is None:
            return

        def once(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled() and module.training:
                handle.remove()
                self._check_batch(batch_of_call(args, kwargs))

        handle = model.register_forward_pre_hook(once, prepend=True, with_kwargs=True)

    def _check_batch(self, batch: Batch) -> None:
        """Refuse what the activations of this batch make too large.  Not collective: a rank that
        refuses closes its engine, and its peers notice."""
        assert self._source is not None and self._limit is not None
        facts = model_facts(self._source.model)
        if facts.hidden_size and facts.num_layers:
            vocabulary = getattr(getattr(self._source.model, "config", None), "vocab_size", 0) or 0
            width = facts.hidden_size * facts.num_layers * _GENEROUS + vocabulary * 40
            # Gradients, holes of the heap and what a first step brings are in the factor.
            if 2 * (self._states + self._num_local * batch.num_tokens * width) < self._limit:
                return
        plan = self._ask(batch)
        if plan is not None and plan.fits is False:
            self._refuse(plan, batch)

    @property
    def _num_local(self) -> int:
        return self._ranks.per_node if self._device.type == "cpu" else 1

    def _bytes_of_states(self, model: nn.Module) -> int:
        """The least that the ranks of this host (or this device) hold between two steps."""
        ranks = self._ranks
        setting = setting_of(self._config, ranks, shard_options(model, self._config))
        slots = in_memory(slots_of(model, setting), model, setting)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = 0 if setting.states.device == "nvme" else _state_bytes(setting)
        # A split layer's part is no larger than this; what stays whole is left out of the least.
        kept = {name: slot for name, slot in slots.items() if not setting.master_leaves(slot)}
        shards = sum(shard_bytes(slot) for slot in kept.values()) // setting.tensor
        updated = sum(slot.padded_numel // slot.num_shards for name, slot in kept.items() if name in trained)
        updated //= setting.tensor
        homes = sum(slot.home_bytes for slot in slots.values())
        leave = setting.spills or setting.updates_early  # then gradients never are there all at once
        grads = 0 if leave else setting.precision.master.itemsize
        own = updated * (grads + state) if setting.optimizer else 0
        if setting.placement == "shared":
            own += 0 if setting.precision.compute == setting.precision.master else shards
            return self._num_local * (self._process_bytes + own) + homes
        separate = setting.placement == "private" and setting.precision.compute != setting.precision.master
        copies = homes // setting.tensor if separate else 0
        return self._num_local * (self._process_bytes + own + shards + copies)

    def _is_tight(self) -> bool:
        """Whether the activations could matter: with states of a sixteenth of the limit, or a limit given."""
        assert self._limit is not None
        return self._states > self._limit // 16 or self._config.memory.host_limit is not None

    def _ask(self, batch: Batch) -> Plan | None:
        """The plan with this batch, or None if the model cannot be rehearsed (and then nobody knows)."""
        try:
            return self._question(batch).answer(self._config)
        except Exception as error:
            _log.debug("the model cannot be rehearsed: %s: %s", type(error).__name__, error)
            return None

    def _question(self, batch: Batch) -> Question:
        assert self._source is not None
        cluster = cluster_of_job(self._ranks, self._device, self._limit, self._config)
        micro = int(self._config.train_micro_batch_size_per_gpu)
        asked = Question(self._source, cluster, batch, None, self._process_bytes, micro_batch=micro)
        return replace(asked, patience=_PATIENCE)

    def _refuse(self, plan: Plan | None, batch: Batch | None) -> None:
        if plan is None and batch is not None:
            plan = self._ask(batch)
        message = self._explain(plan, batch)
        if self.mode == "warn":
            _log.warning("%s", message)
            return
        raise DoesNotFit(message, plan)

    def _explain(self, plan: Plan | None, batch: Batch | None) -> str:
        """What is needed, what there is, and what would fit."""
        assert self._limit is not None
        where = f"the {self._num_local} ranks of this host" if self._num_local > 1 else "this rank"
        need = self._states if plan is None else (plan.per_host or plan.per_rank.total)
        there = f"{show_bytes(need)}, and there are {show_bytes(self._limit)}"
        lines = [f"this job does not fit: {where} would need {there}"]
        if plan is not None and batch is not None:
            lines.append(byte_table(plan.per_rank, plan.limit, plan.per_host))
            hopeless = self._num_local * self._process_bytes > self._limit
            question = self._question(batch)
            changes = None if hopeless else suggest(question, self._config, _SEARCH_SECONDS)[0]
            if changes:
                lines.append(f"The nearest configuration that fits: {show_changes(changes)}.")
            else:
                lines.append("No configuration that was tried fits: take a smaller model, or more hosts.")
        else:
            lines.append("Parameters, gradients and optimizer state alone are too much.")
        lines.append(
            'To go on regardless: "memory": {"preflight": "warn"}; to set another limit: "host_limit".'
        )
        return "\n".join(lines)


def _state_bytes(setting: Setting) -> int:
    """Bytes of optimizer state for each element of a matrix, seen on a small one; 0 where nobody can say."""
    if setting.optimizer is None:
        return 0
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    try:
        optimizer = build_optimizer(setting.optimizer, [probe], setting.optimizer_params)
        optimizer.step()
    except Exception as error:
        _log.debug("the state of %s is not known: %s", setting.optimizer, error)
        return 0
    values = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in values if value.numel() >= probe.numel()) // probe.numel()


def _any_batch(model: nn.Module, config: Config) -> Batch | None:
    """A batch as the model's config suggests it, to fill the table; None where nothing does."""
    try:
        return batch_of(model, int(config.train_micro_batch_size_per_gpu))
    except ValueError:
        return None
