"""The engine: forward, backward, step; save and load.

``initialize`` loads the config and assembles the parts, which the engine drives.  At every stage:

* the window of accumulation ends in a step, ``engine.step()`` or the optimizer's own;
* a gradient that can be seen is the true mean, unscaled, in the master dtype;
* an update happens on every rank or on none.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from thalweg.checkpoint.background_save import join_saves
from thalweg.checkpoint.training_state import TrainingState
from thalweg.comm import CommsLog
from thalweg.config import Config, load, resolve
from thalweg.data.batch_feed import BatchFeed
from thalweg.data.engine_loader import build_engine_loader, connect_loader, set_custom_schedules, take_batch_size
from thalweg.deferred_init.replay import pause_recording
from thalweg.device import configure_malloc, pick_device, synchronize, trim_malloc
from thalweg.observe.flops import memory_text
from thalweg.observe.recorder import Recorder
from thalweg.optim.accumulation import StepCallbacks, StepResult
from thalweg.optim.lr_scheduler import set_group_lr
from thalweg.optim.step import EngineOptimizer
from thalweg.parallel.pipeline.pipeline_runner import PipelineRunner
from thalweg.parallel.sequence.batch_split import build_loader_splitter
from thalweg.parallel_dims import ParallelMeshes, build_meshes, init_distributed
from thalweg.parallelize import Components, get_model_info, merge_model_settings, parallel_dims_from_config, parallelize
from thalweg.utils.env import read_rank_info
from thalweg.utils.log import enable_console, get_logger
from thalweg.utils.trees import call_model, get_loss
from thalweg.utils.versions import warn_of_untried_torch
from thalweg.zero.offload_states import STATES
from thalweg.zero.replica_check import check_replicas
from thalweg.zero.shard import ShardedModel, unshard_model
from thalweg.zero.storage.nvme import prefers_low_memory
from thalweg.zero.whole_tensors import gather_state_dict

_log = get_logger(__name__)
EngineT = TypeVar("EngineT", bound="Engine")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh: DeviceMesh | None = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Make an engine of a model; returns ``(engine, optimizer, dataloader, lr_scheduler)``.

    ``config``: a path, dict or JSON text of DeepSpeed's keys (or ``args.deepspeed_config``).
    ``optimizer``: an optimizer over the model's parameters, a callable that makes one, or
    None for the config's.  ``model_parameters``: parameters or groups for the config's
    optimizer, by default all that require gradients.  ``training_data``: a dataset or a
    DataLoader, whose batch size is the config's micro-batch.  ``lr_scheduler``: an object with ``step()`` or a
    callable of the optimizer.

    The model is changed in place.  Called by every rank, or by one plain ``python`` process.

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: no parameters, an optimizer over foreign ones, data that cannot fill the ranks, a DataLoader with
            another batch size than the config's.
    """
    if model is None:
        raise ValueError("initialize() needs a model: thalweg.initialize(model=model, config=...)")
    if mpu is not None:
        raise ValueError("mpu= is not needed: the axes follow from the config; leave it out")
    source = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c), None)
    user_args = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler}
    start = {"distributed_port": distributed_port, "dist_init_required": dist_init_required}
    engine, loader = build_engine(Engine, source, model, training_data, collate_fn, mesh, start, **user_args)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def build_engine(
    engine_class: type[EngineT],
    source: Any,
    model: nn.Module,
    training_data: Any,
    collate_fn: Callable[..., Any] | None,
    mesh: DeviceMesh | None,
    start: Mapping[str, Any],
    **user_args: Any,
) -> tuple[EngineT, Any]:
    """An engine of this class and its data loader, from the config ``source``; see :func:`initialize`.

    ``start``: for ``init_distributed``; ``user_args``: optimizer, its parameters and schedule, for ``parallelize``.
    """
    from thalweg.plan.runtime import fill_auto_for_job  # the plan is loaded by jobs, not by every import

    parsed, former_params = load(source), {}
    if parsed.deterministic:  # which CUDA's first product, as of a plan that measures, reads once and for all
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enable_console(parsed.log_level)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        _log.warning("this %s is another engine's, which has it no longer", type(model).__name__)
        former_params = unshard_model(model)
    warn_of_untried_torch(torch.__version__)
    parsed = take_batch_size(merge_model_settings(parsed, model), training_data)
    rank_info = init_distributed(**start, device=parsed.device)
    device = pick_device(rank_info.local_rank, parsed.device, rank_info.local_world_size)
    meshes = build_meshes(device, mesh, parallel_dims_from_config(parsed))
    parsed = fill_auto_for_job(parsed, model, meshes.fsdp, meshes.world_group, device, user_args["optimizer"])
    resolved = resolve(parsed, world_size=meshes.world_size, model=get_model_info(model))
    if device.type == "cpu":
        configure_malloc(prefers_low_memory(resolved))
    dp_coords = (meshes.dp.get_local_rank(), meshes.dp.size())
    loader = build_engine_loader(training_data, resolved, *dp_coords, collate_fn, build_loader_splitter(model, meshes))
    with pause_recording():  # a caller may still be inside `with zero.Init():`
        components = parallelize(model, meshes, resolved, device, former_params=former_params, **user_args)
    engine = engine_class(components, resolved, loader)
    connect_loader(loader, components, resolved)
    return engine, loader


@dataclass
class _StepCounters:
    """What an engine has counted; saved and loaded with its checkpoints."""

    global_steps: int = 0
    global_samples: int = 0


class Engine(nn.Module):
    """Drives one model; several engines may live in one process.

    Attributes: ``module`` the model, ``optimizer``, ``lr_scheduler``, ``device``, ``global_steps`` (windows closed,
    skipped ones too), ``ledger`` (what was communicated).
    """

    def __init__(self, components: Components, config: Config, loader: Any = None) -> None:
        super().__init__()
        self.module = components.module
        self._config = config
        self.device = components.device
        self.optimizer = components.optimizer
        self.lr_scheduler = components.lr_scheduler
        self.training_dataloader = loader
        self._components = components
        self._counters = _StepCounters()
        self._training_state = TrainingState(components, config, loader, self._counters)
        self._window = components.window
        self._batch_feed = BatchFeed(loader, self.device)
        self._meter, self._phase_timer = components.meter, components.phase_timer
        self._span = self._phase_timer.span if self._phase_timer.enabled else nullcontext
        self._sync_grads, self._step_updates = True, False
        self._window.add_listener(StepCallbacks(on_step=self._after_step))
        asks = _log.isEnabledFor(logging.DEBUG)
        shown = config.describe() if asks else f"{config.summarize()} (log_level debug says why)"
        _log.info("%s", json.dumps(config.to_dict(), indent=2) if config.dump_state else shown)
        self._log_memory("initialize")

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its gradients will be those of the window at hand."""
        self._check_step_api()
        if torch.is_grad_enabled():
            if self._meter is not None:
                self._meter.add_batch(args, kwargs)
            self._components.sharded.set_backward_flags(self._window.is_last, self._sync_grads)
        with self._span("forward"), self._components.forward_context(), self._reset_on_error():
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        num_items: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Run the backward pass of ``loss`` (a 0-dim tensor), divided by the accumulation steps.

        Returns what was differentiated.  A plain ``loss.backward()`` does the same, but for that division.
        ``num_items``: targets of the loss, where that counts and the model did not compute it.
        """
        self._check_step_api()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"backward() needs a scalar loss, got {kind}: pass output.loss or loss.mean()")
        window = self._window
        if self._meter is not None:
            self._meter.add_loss(loss)
        self._components.sharded.set_backward_flags(window.is_last, self._sync_grads)
        scaled = self._components.loss_normalizer.scale_loss(loss, scale_wrt_gas, num_items)
        scale = self._loss_scale
        with (
            self._span("backward"),
            self._reset_on_error(backward=True),
            window.backward(loss_divided=scale_wrt_gas, retain_graph=retain_graph, loss=loss),
        ):
            (scaled if scale == 1.0 else scaled.float() * scale).backward(retain_graph=retain_graph)
        return scaled

    @contextmanager
    def _reset_on_error(self, backward: bool = False) -> Iterator[None]:
        """Bring the model back to rest if the pass within raises, so that a caller who catches can go on.
        A backward pass may have reduced some gradients and not others, a step may have used some up: the
        window begins anew."""
        try:
            yield
        except BaseException as error:
            if "setStorage" in str(error):  # of an inner pass, which has freed the parameters that this one needs
                error.add_note("gradients of gradients (create_graph=True) need parameters that stay: set stage 2")
            self._components.sharded.reset_iteration_state()
            if backward:
                self._restart_window()
            raise

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; the last of a window updates the parameters and the schedule.  With
        ``managed_gradient_accumulation: false`` every call does, for all backward passes since the one before."""
        self._check_step_api()
        self._require_optimizer()
        epoch_ends = self.training_dataloader is not None and self._batch_feed.is_epoch_end()
        self._step_updates = self._window.end_micro_batch() or epoch_ends
        if self._step_updates:
            self._update_parameters(lr_kwargs)

    def _update_parameters(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Close the window, whatever it holds."""
        self._step_updates = True
        optimizer = self._require_optimizer()
        with self._span("step"), self._reset_on_error(backward=True):
            optimizer.step()
        if self.lr_scheduler is not None and optimizer.advances(self.lr_scheduler):
            self.lr_scheduler.step(**(lr_kwargs or {}))
        optimizer.zero_grad()
        reason, optimizer.guard.rewind_reason = optimizer.guard.rewind_reason, ""
        if reason:
            self._training_state.rewind(reason)

    def _require_optimizer(self) -> EngineOptimizer:
        if self.optimizer is None:
            example = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
            raise ValueError(f"step() needs an optimizer: give initialize() one, or name it: {example}")
        return self.optimizer

    def _check_step_api(self) -> None:
        """An engine that runs whole windows has no forward, backward and step of its own."""
        if self._components.runner is not None:
            raise ValueError(self._components.runner.unsupported_message)

    def _after_step(self, result: StepResult) -> None:
        """After every update, the engine's own or the optimizer's."""
        self._counters.global_steps += 1
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        self._counters.global_samples += samples * self._window.last_num_micro_batches
        if self._meter is not None:
            phases = self._phase_timer.pop_seconds()
            if self._meter.is_due(self.global_steps):
                scalars = {"lr": self.get_lr()[0], "grad_norm": result.grad_norm, "loss_scale": self._loss_scale}
                self._meter.step(self.global_steps, skipped=result.skipped, phases=phases, **scalars)
        if self.global_steps == 1:
            self._log_memory("the first step")
        every = self._config.health.replica_check_steps
        # Sites of an outer optimizer have parameters of their own between their exchanges.
        if every and self.global_steps % every == 0 and self._config.outer_optimizer is None:
            check_replicas(self.sharded_model, self.meshes.world_group, f"after step {self.global_steps}")

    def _log_memory(self, after: str) -> None:
        if self._config.memory_breakdown:
            _log.info("after %s: %s", after, memory_text(self.device))

    def log_communication(self) -> str:
        """A table of what was communicated so far: kind, module, calls, MiB, ms."""
        return self.ledger.table(by_module=self._config.comms_logger.verbose)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the window's last."""
        return self._window.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch at hand is the window's last; None counts again."""
        self._window.set_is_last(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank; the step reduces them."""
        self._sync_grads = False
        try:
            yield
        finally:
            self._sync_grads = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients and begin a new window."""
        self._restart_window()

    def _restart_window(self) -> None:
        self._window.restart()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._window.discard()
        (self.module if self.optimizer is None else self.optimizer.inner).zero_grad(set_to_none=True)

    # Whole batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one window of micro-batches; returns their mean loss over all ranks (0-dim).

        A batch: a mapping (keyword arguments), a tuple (positional) or a tensor; the model returns the loss,
        or an object with a ``loss``.  An iterator that ends within a window, or the loader's epoch, makes it shorter.
        """
        self.train()
        if self._components.runner is not None:
            return self._mean_over_ranks(self._train_window(self._components.runner, data_iter))
        losses, loss_and_weight = [], self._components.loss_normalizer.loss_and_weight
        self._step_updates = False
        for batch in self._batch_feed.next_batches(data_iter, self._window.num_micro_batches):
            loss = get_loss(call_model(self, batch))
            losses.append(loss_and_weight(loss))
            self.backward(loss)
            if self._window.managed:
                self.step()
            if self._step_updates:  # the window is full, or the loader's epoch over
                break
        if losses and not self._step_updates:
            self._update_parameters()  # step() has counted the short window's micro-batches
        return self._mean_over_ranks(_mean_loss(self._components, losses))

    def _train_window(self, runner: PipelineRunner, data_iter: Iterator[Any] | None) -> Tensor:
        """One window at once; its mean loss over this rank's data."""
        self._require_optimizer()
        batches = self._next_window(runner, data_iter, self._window.num_micro_batches)
        with (
            self._span("forward and backward"),
            self._reset_on_error(backward=True),
            self._window.backward(loss_divided=False, retain_graph=False, num_micro_batches=len(batches)),
        ):
            loss = runner.train(batches)
        if self._meter is not None:
            self._meter.add_window(batches, loss)
        self._update_parameters()
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None, num_micro_batches: int | None = None) -> Tensor:
        """Mean loss over all ranks of so many micro-batches (by default a window's), without gradients."""
        was_training, count = self.training, num_micro_batches or self._window.num_micro_batches
        self.eval()
        try:
            if (runner := self._components.runner) is not None:
                loss = runner.evaluate(self._next_window(runner, data_iter, count))
            else:
                loss_and_weight = self._components.loss_normalizer.loss_and_weight
                with torch.no_grad():
                    batches = self._batch_feed.next_batches(data_iter, count)
                    losses = [loss_and_weight(get_loss(call_model(self, batch))) for batch in batches]
                    loss = _mean_loss(self._components, losses)
        finally:
            self.train(was_training)
        return self._mean_over_ranks(loss)

    def _next_window(self, runner: PipelineRunner, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        self.reload_states()  # a stage is called without the model
        batches = None
        if runner.needs_batch or data_iter is not None:
            batches = self._batch_feed.next_window(data_iter, count)
        return runner.agree_micro_batches(batches)

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        mesh = self.meshes.fsdp
        if mesh.size() > 1:
            dist.all_reduce(value, group=mesh.get_group())
        return value / mesh.size()

    # Facts

    @property
    def config(self) -> Config:
        """The resolved config; immutable."""
        return self._config

    @property
    def global_steps(self) -> int:
        """Windows closed so far, skipped updates included."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those windows over all ranks."""
        return self._counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient was not finite."""
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def micro_steps(self) -> int:
        """Micro-batches ended so far."""
        return self._window.micro_steps

    @property
    def sharded_model(self) -> ShardedModel:
        """The model under ZeRO: its units, and where their parameters are."""
        return self._components.sharded

    @property
    def ledger(self) -> CommsLog:
        """What was communicated, by kind and module."""
        return self._components.sharded.ledger

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (1 except in fp16)."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:  # under the alias the public name is a method
        optimizer = self._components.optimizer
        return self._components.scaler.scale if optimizer is None else optimizer.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """Global gradient norm of the last update, before clipping; None before the first."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        if self.optimizer is None:
            return [0.0]
        self.optimizer.settle()
        return [group.get("lr", 0.0) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups; a schedule writes its own at its next step."""
        for group in self._require_optimizer().param_groups:
            set_group_lr(group, lr)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Give metrics with ``schedule_type: custom`` (the older block's is called seqlen) a function of the step,
        counted from 1, that returns the difficulty; the same on every rank, and again after a restart."""
        set_custom_schedules(self.training_dataloader, self._components, schedule_func_dict)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters."""
        return self._step_updates and not self._require_optimizer().overflow

    @property
    def monitor(self) -> Recorder:
        """The monitors of the config: ``engine.monitor.write_events([(name, value, step)])``."""
        return Recorder() if self._meter is None else self._meter.recorder

    def empty_partition_cache(self) -> None:
        """Nothing to free: the parameters of a unit are freed after its use."""

    def train_batch_size(self) -> int:
        """Samples of one update over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next update on, so many samples, by more or fewer micro-batches of the same size.

        Raises:
            ValueError: they are no whole number of micro-batches.
        """
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % samples:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): {self.dp_world_size} ranks with micro-batches of "
                f"{self.train_micro_batch_size_per_gpu()} need a multiple of {samples}"
            )
        self._window.resize(train_batch_size // samples)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return int(self._config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return self._window.num_micro_batches

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self._config.zero_optimization.stage)

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def gradient_clipping(self) -> float:
        """The largest norm of the gradient; 0 for no limit."""
        return float(self._config.gradient_clipping)

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return bool(self._config.fp16.enabled)

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return bool(self._config.bf16.enabled)

    # Where this rank is

    @property
    def meshes(self) -> ParallelMeshes:
        """The job's ranks by axis."""
        return self._components.meshes

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return read_rank_info().local_rank

    @property
    def global_rank(self) -> int:
        """This rank's number in the job."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.meshes.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks that have data of their own."""
        return self.meshes.dp.size()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1 without."""
        return 1 if self.meshes.pp is None else self.meshes.pp.size()

    @property
    def stage_id(self) -> int:
        """The stage of the pipeline that this rank has."""
        return 0 if self.meshes.pp is None else self.meshes.pp.get_local_rank()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    # State

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Leave the device's memory to somebody else: what training keeps there rests on the host, page-locked or not.

        ``include``: which of ``optim_states``, ``hp_params`` (masters beside what is computed with), ``lp_params`` and
        ``lp_grads``; None for all.  They are back after :meth:`reload_states`, or when they are needed next: the model
        is called, the optimizer stepped, state saved or loaded.  Who reads them otherwise meanwhile finds no memory.

        Raises:
            ValueError: there is no such state, or another device than "cpu".
        """
        states = STATES if include is None else [str(getattr(state, "value", state)) for state in include]
        if unknown := {*states} - {*STATES}:
            raise ValueError(f"offload_states() knows {', '.join(STATES)}, not {', '.join(sorted(unknown))}")
        if (where := getattr(device, "value", device)) != "cpu":
            raise ValueError(f"offload_states() moves states to the cpu, not to {where}")
        if self.optimizer is not None:
            self.optimizer.settle()
        self.wait_for_checkpoint()
        optimizer_state = {} if self.optimizer is None else self.optimizer.state
        self.sharded_model.offload_states(states, optimizer_state, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back to the device what :meth:`offload_states` has moved."""
        self.sharded_model.reload_states(non_blocking=non_blocking)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Rank 0: the whole weights in the dtype that the model computes in, on the CPU; collective.

        Raises:
            ValueError: at other stages than 3.
        """
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode: use engine.state_dict() below stage 3")
        self.reload_states()
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        params = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in params if exclude_frozen_parameters and not param.requires_grad}
        named = {name: value for name, value in self.module.state_dict().items() if name not in frozen}
        return gather_state_dict(named, dtype=dtype, keep=dist.get_rank() == 0)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The model's full tensors on the CPU, under the names of the plain model; collective."""
        return self._training_state.get_model_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Load full tensors (or shards of this layout) into the model; collective."""
        self.reload_states()
        return self._training_state.set_model_state_dict(state_dict, strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write and commit a checkpoint under ``save_dir/tag`` (``global_step<N>``); collective.

        ``client_state``: any tree of JSON values and tensors, returned by ``load_checkpoint``.
        With ``checkpoint.asynchronous`` this rank's part of the state is copied, and a thread goes on with the copy;
        the path is there once it has committed.  One save is under way at most: another waits for it first.

        Raises:
            CheckpointError: this save failed, or the one before it that was under way; the same on all ranks.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint() needs a folder, not {save_dir!r}")
        synchronize(self.device)
        return self._training_state.save(
            save_dir, tag, client_state, save_latest=save_latest, include_frozen=not exclude_frozen_parameters
        )

    def wait_for_checkpoint(self) -> None:
        """Return when no asynchronous save is under way: the last one is committed.

        Raises:
            CheckpointError: it failed, on every rank; what was committed before is intact.
        """
        self._training_state.background.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of any stage and world size; returns ``(path, client_state)``; collective.

        Without a tag, the newest good one.  ``(None, None)`` only where the directory holds none and the
        config's ``checkpoint.resume`` allows a fresh start.

        Raises:
            ValueError: a ``custom_load_fn``, which is not supported.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is not supported: tensors are read one by one into this layout's shards, so there is "
                "no whole state dict to hand to it; thalweg.checkpoint.Checkpoint.open(DIR).read(NAME) reads a tensor"
            )
        self._restart_window()
        self._batch_feed.rewind()
        what = {"load_optimizer": load_optimizer_states, "load_lr_scheduler": load_lr_scheduler_states}
        return self._training_state.load(load_dir, tag, strict=load_module_strict, module_only=load_module_only, **what)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in 16 bits in the Hugging Face layout; collective.

        ``exclude_frozen_parameters`` leaves out parameters that need no gradient.  The files are always named
        ``model.safetensors`` (or numbered, with an index), so that ``from_pretrained`` finds them.
        """
        if save_filename != "model.safetensors":
            _log.warning("save_16bit_model writes model.safetensors, whatever save_filename says (%s)", save_filename)
        self._training_state.save_16bit(save_dir, include_frozen=not exclude_frozen_parameters)
        return True

    def close(self) -> None:
        """Leave shared memory, close the writers, drop gradients; the model stays usable for its state.

        Raises:
            CheckpointError: an asynchronous save has failed, and nobody was told yet.
        """
        self._restart_window()
        if self._config.comms_logger.enabled:
            _log.info("communication\n%s", self.log_communication())
        for listener in self._window.listeners:
            listener.close()
        join_saves()
        if self.device.type == "cpu":
            trim_malloc()
        self.wait_for_checkpoint()

    destroy = close


def _mean_loss(components: Components, losses_and_weights: list[Tensor]) -> Tensor:
    if not losses_and_weights:
        raise StopIteration("the data iterator is empty")
    return components.loss_normalizer.mean(torch.stack(losses_and_weights).sum(0))
