"""Refusing a job that cannot fit, before the kernel kills it.

Twice, as not everything is known at once: when the engine is made, what parameters,
gradients and optimizer take; at the first forward pass in training, when the shapes of a
batch are there, what the activations add.  Both ask a cheap bound first and the plan only
where that leaves a doubt, so a job that is small against its machine pays nothing.

The limit is ``memory.host_limit`` (all ranks of a host together) or ``memory.device_limit``
of the config, else what the device, the kernel (MemAvailable), the cgroup and the process
limits leave.  ``memory.preflight``: ``"refuse"``, ``"warn"`` or ``"off"``.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.config import Config
from thalweg.optim.build import build_optimizer
from thalweg.plan import runtime
from thalweg.plan.inputs.input_spec import InputSpec, infer_input_spec, input_spec_from_call
from thalweg.plan.inputs.model_loader import MetaModel
from thalweg.plan.planner import Planner
from thalweg.plan.result import Plan, format_byte_table, format_changes
from thalweg.plan.search.search import suggest
from thalweg.plan.spec.run_spec import RunSpec, get_tp_size, run_spec_from_config, unmodelled_options, with_optimizer
from thalweg.plan.trace.step import build_param_specs, resident_params, shard_bytes
from thalweg.utils.formatting import format_bytes
from thalweg.utils.log import get_logger
from thalweg.utils.procfs import resident_bytes
from thalweg.zero.options import build_shard_options, get_model_size
from thalweg.zero.storage.nvme import shards_on_host

_log = get_logger(__name__)
# Bytes a transformer may save for each token, layer and unit of width: more than any is seen to.
_ACTIVATION_BYTES_BOUND = 400
_SEARCH_SECONDS = 3.0
# Of processor time for one trace: no job waits longer for what it may use.
_TRACE_CPU_BUDGET_S = 15.0


class PredictedOutOfMemoryError(ValueError):
    """A job that cannot fit; ``plan`` is None where the states alone are too much to go on."""

    def __init__(self, message: str, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class Preflight:
    """The two checks of one job on this rank; collective over ``mesh`` where it is made.

    Raises:
        PredictedOutOfMemoryError: with the table of bytes and the nearest configuration that fits.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, config: Config, device: torch.device, optimizer: Any = None
    ) -> None:
        """``optimizer``: the one that the program has built, if any, or what makes it."""
        self.mode = config.memory.preflight
        config = with_optimizer(config, optimizer)
        self._config, self._device = config, device
        self._topology = runtime.get_topology(mesh, device, get_tp_size(config))
        # Where shards, gradients and optimizer state lie between two steps.
        on_host = shards_on_host(config.zero_optimization, device.type == "cpu")
        self._state_device = torch.device("cpu") if on_host else device
        groups = [mesh.size(), get_tp_size(config)]
        self._process_bytes = runtime.measure_process_bytes(model, self._state_device, groups)
        self._rank_process_bytes = runtime.measure_process_bytes(model, device, groups)
        limit_bytes = runtime.find_memory_limit(config, self._state_device, self._num_local_ranks, resident_bytes())
        self._meta_model: MetaModel | None = None
        self._state_bytes = 0
        unmodelled = unmodelled_options(config)
        if unmodelled and self.mode != "off":
            self.mode = "off"
            runtime.skip_memory_check(f"{', '.join(unmodelled)} is not modelled yet; watch the memory of the job")
        if self.mode == "off" or limit_bytes is None:
            return
        self._limit_bytes = limit_bytes
        self._state_bytes = self._compute_state_bytes(model)
        exceeds_limit = self._state_bytes > self._limit_bytes
        if mesh.size() > 1:
            flag = torch.tensor([int(exceeds_limit)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.get_group())
            exceeds_limit = bool(flag.item())
        if exceeds_limit or self._needs_batch_check():
            self._meta_model = runtime.try_meta_copy(model)
        if exceeds_limit:
            inputs = _try_infer_inputs(model, config) if self._state_device == self._device else None
            self._reject(None, inputs)

    def check_first_batch(self, model: nn.Module) -> None:
        """Check once more when the first batch is there; call when the model is in its final form."""
        if self._meta_model is None:
            return

        def pre_forward_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled() and module.training:
                handle.remove()
                self._check_batch(input_spec_from_call(args, kwargs))

        handle = model.register_forward_pre_hook(pre_forward_hook, prepend=True, with_kwargs=True)

    def _check_batch(self, input_spec: InputSpec) -> None:
        """Refuse what the activations of this batch make too large.  Not collective: a rank that
        refuses closes its engine, and its peers notice."""
        assert self._meta_model is not None
        facts = get_model_size(self._meta_model.model)
        if facts.hidden_size and facts.num_layers:
            vocab_size = getattr(getattr(self._meta_model.model, "config", None), "vocab_size", 0) or 0
            bytes_per_token = facts.hidden_size * facts.num_layers * _ACTIVATION_BYTES_BOUND + vocab_size * 40
            # Gradients, holes of the heap and what a first step brings are in the factor.
            activations = self._num_local_ranks * input_spec.num_tokens * bytes_per_token
            if 2 * (self._state_bytes + activations) < self._limit_bytes:
                return
        plan = self._try_predict(input_spec)
        if plan is not None and plan.not_counted:  # a bound: no job is refused by it
            runtime.skip_memory_check(f"{', '.join(plan.not_counted)} is not modelled yet for {plan.model}")
        if plan is None or plan.fits is not False:
            return
        without_holes = replace(plan, per_rank=replace(plan.per_rank, fragmentation=0))
        if self._device.type != "cpu" and without_holes.fits:
            _log.warning(
                "this job may not fit, by %s of holes that the allocator leaves: "
                "PYTORCH_ALLOC_CONF=expandable_segments:True avoids most of them",
                format_bytes(plan.excess_bytes),
            )
            return
        self._reject(plan, input_spec)

    @property
    def _num_local_ranks(self) -> int:
        return self._topology.ranks_per_node if self._state_device.type == "cpu" else 1

    def _compute_state_bytes(self, model: nn.Module) -> int:
        """The least that the ranks of this host (or this device) hold between two steps."""
        topology = self._topology
        run_spec = run_spec_from_config(self._config, topology, build_shard_options(model, self._config))
        resident_specs = resident_params(build_param_specs(model, run_spec), model, run_spec)
        state_itemsize = 0 if run_spec.optimizer_on_disk else _optimizer_bytes_per_element(run_spec)
        # A split layer's part is no larger than this; what stays whole is left out of the least.
        in_memory_specs = [spec for spec in resident_specs.values() if not run_spec.master_on_disk(spec)]
        shards_bytes = sum(shard_bytes(param_spec) for param_spec in in_memory_specs) // run_spec.tp_size
        updated_specs = (spec for spec in in_memory_specs if spec.requires_grad)
        updated = sum(spec.shard_numel for spec in updated_specs) // run_spec.tp_size
        unsharded_bytes = sum(param_spec.unsharded_bytes for param_spec in resident_specs.values())
        grads = 0 if run_spec.grads_leave_early else run_spec.precision.master_dtype.itemsize
        bytes_per_rank = updated * (grads + state_itemsize) if run_spec.optimizer else 0
        has_copy = run_spec.precision.compute_dtype != run_spec.precision.master_dtype
        if run_spec.storage_kind == "shared":
            bytes_per_rank += shards_bytes if has_copy else 0
            return self._num_local_ranks * (self._process_bytes + bytes_per_rank) + unsharded_bytes
        copies = unsharded_bytes // run_spec.tp_size if has_copy and run_spec.storage_kind == "private" else 0
        return self._num_local_ranks * (self._process_bytes + bytes_per_rank + shards_bytes + copies)

    def _needs_batch_check(self) -> bool:
        """Whether the activations could matter: with states of a sixteenth of the limit, or a limit given."""
        if self._state_device != self._device:  # the limit is of the host's memory, and activations are not there
            return False
        return self._state_bytes > self._limit_bytes // 16 or self._config.memory.host_limit is not None

    def _try_predict(self, input_spec: InputSpec) -> Plan | None:
        """The plan with this batch, or None if the model cannot be traced."""
        assert self._meta_model is not None
        try:
            return self._build_planner(input_spec).predict(self._config)
        except (ValueError, RuntimeError) as error:
            runtime.skip_memory_check(f"{type(self._meta_model.model).__name__} is not modelled yet", error)
            return None

    def _build_planner(self, input_spec: InputSpec) -> Planner:
        assert self._meta_model is not None
        cluster = runtime.build_job_cluster(self._topology, self._device, self._limit_bytes, self._config)
        micro = int(self._config.train_micro_batch_size_per_gpu)
        planner = Planner(self._meta_model, cluster, input_spec, None, self._rank_process_bytes, micro_batch=micro)
        deferred = not self._meta_model.is_materialized
        return replace(planner, cpu_budget_s=_TRACE_CPU_BUDGET_S, deferred_init=deferred)

    def _reject(self, plan: Plan | None, input_spec: InputSpec | None) -> None:
        if plan is None and input_spec is not None:
            plan = self._try_predict(input_spec)
        message = self._explain_rejection(plan, input_spec)
        if self.mode == "warn":
            _log.warning("%s", message)
            return
        raise PredictedOutOfMemoryError(message, plan)

    def _explain_rejection(self, plan: Plan | None, input_spec: InputSpec | None) -> str:
        """What is needed, what there is, and what would fit."""
        subject = f"the {self._num_local_ranks} ranks of this host" if self._num_local_ranks > 1 else "this rank"
        needed_bytes = self._state_bytes if plan is None else (plan.per_host or plan.per_rank.total)
        comparison = f"{format_bytes(needed_bytes)}, and there are {format_bytes(self._limit_bytes)}"
        lines = [f"this job does not fit: {subject} would need {comparison}"]
        if plan is not None and input_spec is not None:
            lines.append(format_byte_table(plan.per_rank, plan.limit, plan.per_host))
            hopeless = self._num_local_ranks * self._process_bytes > self._limit_bytes
            planner = self._build_planner(input_spec)
            changes = None if hopeless else suggest(planner, self._config, _SEARCH_SECONDS, plan)[0]
            if changes:
                lines.append(f"The nearest configuration that fits: {format_changes(changes)}.")
            else:
                lines.append("No configuration that was tried fits: take a smaller model, or more hosts.")
        else:
            lines.append("Parameters, gradients and optimizer state alone are too much.")
        lines.append('To go on regardless: "memory": {"preflight": "warn"}; to set another limit: "host_limit".')
        return "\n".join(lines)


def _optimizer_bytes_per_element(run_spec: RunSpec) -> int:
    """Bytes of optimizer state for each element of a matrix, seen on a small one; 0 where nobody can say."""
    if run_spec.optimizer is None:
        return 0
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    try:
        optimizer = build_optimizer(run_spec.optimizer, [probe], run_spec.optimizer_params)
        optimizer.step()
    except (ValueError, RuntimeError) as error:  # one that wants to see the model, or a device
        runtime.skip_memory_check(f"the state of {run_spec.optimizer} is not modelled yet", error)
        return 0
    values = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in values if value.numel() >= probe.numel()) // probe.numel()


def _try_infer_inputs(model: nn.Module, config: Config) -> InputSpec | None:
    """A batch as the model's config suggests it, to fill the table; None where nothing does."""
    try:
        return infer_input_spec(model, int(config.train_micro_batch_size_per_gpu))
    except ValueError:
        return None
