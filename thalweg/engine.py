"""The engine: forward, backward, step; save and load.

``initialize`` loads the config and assembles the parts, which the engine drives.  At every stage:

* the window of accumulation ends in a step, ``engine.step()`` or the optimizer's own;
* a gradient that can be seen is the true mean, unscaled, in the master dtype;
* an update happens on every rank or on none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.assemble import Parts, Runner, assemble, degrees_of, facts_of, with_model
from thalweg.checkpoint.training import TrainingState
from thalweg.comm import Ledger
from thalweg.config import Config, load, resolve
from thalweg.data.feed import Feed
from thalweg.data.for_engine import make_loader
from thalweg.device import choose_allocation, pick_device, return_freed_memory, synchronize
from thalweg.mesh import build_mesh, init_distributed
from thalweg.observe import resident_mib
from thalweg.optim.managed import ManagedOptimizer
from thalweg.parallel.parts import splitter_for
from thalweg.plan.job import settle_job
from thalweg.utils.log import enable_console, get_logger
from thalweg.utils.trees import call_with, loss_of
from thalweg.zero.init import paused
from thalweg.zero.offload import memory_is_short

_log = get_logger(__name__)


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
    DataLoader.  ``lr_scheduler``: an object with ``step()`` or a callable of the optimizer.

    The model is changed in place.  Called by every rank, or by one plain ``python`` process.

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: no parameters, an optimizer over foreign ones, data that cannot fill the ranks.
    """
    if model is None:
        raise ValueError("initialize() needs a model: thalweg.initialize(model=model, config=...)")
    if mpu is not None:
        raise ValueError("mpu= is not needed: the axes follow from the config; leave it out")
    source = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c), None)
    parsed = load(source)
    enable_console(parsed.log_level)
    parsed = with_model(parsed, model)
    info = init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    device = pick_device(info.local_rank)
    axes = build_mesh(device, mesh, degrees_of(parsed))
    parsed = settle_job(parsed, model, axes.data, axes.everyone, device, optimizer)
    resolved = resolve(parsed, world_size=axes.size, model=facts_of(model))
    if device.type == "cpu":
        choose_allocation(memory_is_short(resolved))
    place = (axes.batch.get_local_rank(), axes.batch.size())
    loader = make_loader(training_data, resolved, *place, collate_fn, splitter_for(model, axes))
    asked = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler}
    with paused():  # a caller may still be inside `with zero.Init():`
        parts = assemble(model, axes, resolved, device, **asked)
    engine = Engine(parts, resolved, loader)
    return engine, engine.optimizer, loader, engine.lr_scheduler


class Engine(nn.Module):
    """Drives one model; several engines may live in one process.

    Attributes: ``module`` the model, ``optimizer``, ``lr_scheduler``, ``config`` (resolved, immutable),
    ``device``, ``global_steps`` (windows closed, skipped ones too), ``ledger`` (what was communicated).
    """

    def __init__(self, parts: Parts, config: Config, loader: Any = None) -> None:
        super().__init__()
        self.module = parts.module
        self.config = config
        self.device = parts.device
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.lr_scheduler
        self.training_dataloader = loader
        self._parts = parts
        self._training = TrainingState(parts, config, loader)
        self._window = parts.window
        self._feed = Feed(loader, self.device)
        self._sync = True
        if self.optimizer is not None:
            self.optimizer.after_step(self._count_update)
        _log.info("%s", json.dumps(config.to_dict(), indent=2) if config.dump_state else config.describe())
        self._note_memory("initialize")

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its gradients will be those of the window at hand."""
        self._refuse_parts()
        if torch.is_grad_enabled():
            self._parts.meter.saw_batch(args, kwargs)
            self._parts.sharded.prepare_backward(self._window.is_last, self._sync)
        with self._parts.phases.span("forward"), self._parts.forward_context(), self._or_rest():
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
        self._refuse_parts()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"backward() needs a scalar loss, got {kind}: pass output.loss or loss.mean()")
        window = self._window
        self._parts.meter.saw_loss(loss)
        self._parts.sharded.prepare_backward(window.is_last, self._sync)
        scaled = self._parts.averaging.share(loss, scale_wrt_gas, num_items)
        scale = self._parts.scaler.scale
        with (
            self._parts.phases.span("backward"),
            self._or_rest(backward=True),
            window.backward(scaled=scale_wrt_gas, retained=retain_graph, loss=loss),
        ):
            (scaled if scale == 1.0 else scaled.float() * scale).backward(retain_graph=retain_graph)
        return scaled

    @contextmanager
    def _or_rest(self, backward: bool = False) -> Iterator[None]:
        """Bring the model back to rest if the pass within raises, so that a caller who catches can go on.
        A backward pass may have reduced some gradients and not others, a step may have used some up: the
        window begins anew."""
        try:
            yield
        except BaseException:
            self._parts.sharded.abandon_iteration()
            if backward:
                self.zero_grad()
            raise

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; the last of a window updates the parameters and the schedule."""
        self._refuse_parts()
        self._need_optimizer()
        epoch_ends = self._feed.epoch_ends()
        if self._window.end_micro_batch() or epoch_ends:
            self._update(lr_kwargs)

    def _update(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Close the window, whatever it holds."""
        optimizer = self._need_optimizer()
        with self._parts.phases.span("step"), self._or_rest(backward=True):
            optimizer.step()
        if self.lr_scheduler is not None and not optimizer.overflow:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        optimizer.zero_grad()

    def _need_optimizer(self) -> ManagedOptimizer:
        if self.optimizer is None:
            example = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
            raise ValueError(f"step() needs an optimizer: give initialize() one, or name it: {example}")
        return self.optimizer

    def _refuse_parts(self) -> None:
        """An engine that runs whole windows has no forward, backward and step of its own."""
        if self._parts.runner is not None:
            raise ValueError(self._parts.runner.refusal)

    def _count_update(self) -> None:
        """After every update, the engine's own or the optimizer's."""
        assert self.optimizer is not None
        self._training.global_steps += 1
        micro_batch = self.train_batch_size() // self._window.size
        self._training.global_samples += micro_batch * self._window.last_size
        self._parts.meter.step(
            self.global_steps,
            lr=self.get_lr()[0],
            grad_norm=self.optimizer.grad_norm,
            loss_scale=self.optimizer.loss_scale,
            skipped=self.optimizer.overflow,
            phases=self._parts.phases.take(),
        )
        if self.global_steps == 1:
            self._note_memory("the first step")

    def _note_memory(self, after: str) -> None:
        if self.config.memory_breakdown:
            _log.info("after %s: %.0f MiB, %.0f at the peak", after, resident_mib(), resident_mib(peak=True))

    def log_communication(self) -> str:
        """A table of what was communicated so far: kind, module, calls, MiB, ms."""
        return self.ledger.table(by_module=self.config.comms_logger.verbose)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the window's last."""
        return self._window.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch at hand is the window's last; None counts again."""
        self._window.force(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank; the step reduces them."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients and begin a new window."""
        self._window.close()
        if self.optimizer is None:
            self._parts.sharded.drop_gradients()
            self.module.zero_grad(set_to_none=True)
        else:
            self.optimizer.zero_grad()

    # Whole batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one window of micro-batches; returns their mean loss over all ranks (0-dim).

        A batch: a mapping (keyword arguments), a tuple (positional) or a tensor; the model returns the loss,
        or an object with a ``loss``.  An iterator that ends within a window makes it shorter.
        """
        self.train()
        if self._parts.runner is not None:
            return self._mean(self._train_window(self._parts.runner, data_iter))
        losses, noted = [], self._parts.averaging.noted
        for batch in self._feed.take(data_iter, self._window.size):
            loss = loss_of(call_with(self, batch))
            losses.append(noted(loss))
            self.backward(loss)
            if len(losses) < self._window.size:
                self.step()
        if 0 < len(losses) < self._window.size:
            self._update()  # step() has counted the short window's micro-batches
        elif losses:
            self.step()
        return self._mean(_mean_of(self._parts, losses))

    def _train_window(self, runner: Runner, data_iter: Iterator[Any] | None) -> Tensor:
        """One window at once; its mean loss over this rank's data."""
        self._need_optimizer()
        batches = self._whole_window(runner, data_iter)
        with (
            self._parts.phases.span("forward and backward"),
            self._or_rest(backward=True),
            self._window.backward(scaled=False, retained=False, count=len(batches)),
        ):
            loss = runner.train(batches)
        self._parts.meter.saw_window(batches, loss)
        self._update()
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Mean loss over all ranks of one window of micro-batches, without gradients."""
        was_training = self.training
        self.eval()
        if (runner := self._parts.runner) is not None:
            loss = runner.evaluate(self._whole_window(runner, data_iter))
        else:
            with torch.no_grad():
                batches, noted = self._feed.take(data_iter, self._window.size), self._parts.averaging.noted
                loss = _mean_of(self._parts, [noted(loss_of(call_with(self, batch))) for batch in batches])
        self.train(was_training)
        return self._mean(loss)

    def _whole_window(self, runner: Runner, data_iter: Iterator[Any] | None) -> list[Any]:
        reads = runner.needs_batch or data_iter is not None
        return runner.agree(self._feed.window(data_iter, self._window.size) if reads else None)

    def _mean(self, value: Tensor) -> Tensor:
        mesh = self._parts.mesh
        if mesh.size() > 1:
            dist.all_reduce(value, group=mesh.get_group())
        return value / mesh.size()

    # Facts

    @property
    def global_steps(self) -> int:
        """Windows closed so far, skipped updates included."""
        return self._training.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those windows over all ranks."""
        return self._training.global_samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient was not finite."""
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def micro_steps(self) -> int:
        """Micro-batches ended so far."""
        return self._window.micro_steps

    @property
    def ledger(self) -> Ledger:
        """What was communicated, by kind and module."""
        return self._parts.sharded.ledger

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (1 except in fp16)."""
        return self._parts.scaler.scale

    def get_global_grad_norm(self) -> float | None:
        """Global gradient norm of the last update, before clipping; None before the first."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else [0.0]

    def train_batch_size(self) -> int:
        """Samples of one update over all ranks."""
        return int(self.config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return int(self.config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return self._window.size

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self.config.zero_optimization.stage)

    # State

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The model's full tensors on the CPU, under the names of the plain model; collective."""
        return self._training.full_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Load full tensors (or shards of this layout) into the model; collective."""
        return self._training.load_state(state_dict, strict)

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
        """
        synchronize(self.device)
        return self._training.save(
            save_dir, tag, client_state, latest=save_latest, frozen=not exclude_frozen_parameters
        )

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
        """
        self.zero_grad()
        self._feed.rewind()
        return self._training.load(
            load_dir,
            tag,
            strict=load_module_strict,
            with_optimizer=load_optimizer_states,
            with_schedule=load_lr_scheduler_states,
            only_module=load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in 16 bits in the Hugging Face layout; collective."""
        self._training.save_16bit(save_dir)
        return True

    def close(self) -> None:
        """Leave shared memory, close the writers, drop gradients; the model stays usable for its state."""
        self.zero_grad()
        if self.config.comms_logger.enabled:
            _log.info("communication\n%s", self.log_communication())
        self._parts.meter.close()
        self._parts.sharded.close()
        if self.device.type == "cpu":
            return_freed_memory()

    destroy = close


def _mean_of(parts: Parts, noted: list[Tensor]) -> Tensor:
    if not noted:
        raise StopIteration("the data iterator is empty")
    return parts.averaging.mean(torch.stack(noted).sum(0))
