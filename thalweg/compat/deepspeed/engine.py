"""DeepSpeed's engine over Thalweg's.

What the words mean here and there:

* ``config`` is the user's dict there; the resolved one stays reachable as ``resolved_config``.
* A loss is divided by ``gradient_accumulation_steps`` and by nothing else, so a window that a program closes early
  weighs its micro-batches as accelerate does without DeepSpeed.  Thalweg's own engine takes the mean over those that
  there were.  A window that an epoch's end leaves open goes on with the next epoch there, and ends here.
* So is that of a plain ``loss.backward()``; Thalweg's own engine leaves that to the program.
* ``set_gradient_accumulation_boundary`` says which backward pass is the window's last; accelerate then calls ``step``
  for the last one alone, and not for each micro-batch.
"""

import copy
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import thalweg
from thalweg.checkpoint.errors import CheckpointError
from thalweg.compat.deepspeed.logs import logger
from thalweg.compat.deepspeed.timers import ThroughputTimer
from thalweg.config import Config
from thalweg.config.schema.base import get_by_path, replace_by_path
from thalweg.data.engine_loader import build_engine_loader
from thalweg.data.loader import PositionedLoader, build_loader
from thalweg.data.repeating_loader import RepeatingLoader
from thalweg.engine import Engine
from thalweg.nn.layer_drop import ProgressiveLayerDrop
from thalweg.observe.step_meter import SEQUENCE_META_KEY
from thalweg.optim.accumulation import register_loss_scale_hooks
from thalweg.parallel.sequence.batch_split import SequenceMeta
from thalweg.parallelize import Components
from thalweg.utils.dtypes import parse_dtype

# Methods of DeepSpeed's engine that say what the config says, and where it says so.
_GETTERS_FILE = Path(__file__).with_name("config_getters.toml")
CONFIG_GETTERS: dict[str, str] = tomllib.loads(_GETTERS_FILE.read_text(encoding="utf-8"))


class DeepSpeedUsageError(ValueError, AssertionError):
    """A call that means nothing here, or not now: DeepSpeed asserts, Thalweg raises a ValueError."""


class DeepSpeedEngine(Engine):
    """Thalweg's engine under the names of DeepSpeed's."""

    def __init__(self, components: Components, config: Config, loader: Any = None) -> None:
        super().__init__(components, config, loader)
        self._raw_config: dict[str, Any] = {}
        self._batch_feed.ends_windows = False  # one goes on with the next epoch's batches
        self._loader: Any = PositionedLoader() if loader is None else loader
        self._training_state.load_position = None if loader is None else self._load_position
        self.set_batch_fn(lambda batch: batch)
        self.is_compiled, self._last_save_dir = False, ""
        self.collate_fn: Callable[..., Any] | None = None  # of initialize()
        self._data_iterator: Iterator[Any] | None = None
        self.is_whole_in_eval = False  # ranks that share sequences in training have their own in evaluation
        components.loss_normalizer.user_divides = False
        if not (config.fp16.enabled or config.token_weighted_loss):  # which have these hooks
            register_loss_scale_hooks(components.module, components.window, lambda: self._loss_scale)
        self.resolved_config = config
        # Timed and not logged: the progress line has its own figure.
        self.tput_timer = ThroughputTimer(None, self.train_batch_size())

    # What differs

    @property
    def config(self) -> Any:  # type: ignore[override]
        """The config as the user gave it."""
        return self._raw_config

    def set_raw_config(self, config: Any) -> None:
        """The dict that :attr:`config` shows."""
        self._raw_config = copy.deepcopy(dict(config))

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write and commit a checkpoint, beside it the ``zero_to_fp32.py`` that is run in its folder; collective.

        Into another folder than the last it is never asynchronous: who has a folder for each checkpoint (Trainer,
        accelerate) removes the older ones when this returns.
        """
        try:
            path = super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
            if str(save_dir) != self._last_save_dir:
                self.wait_for_checkpoint()
                self._last_save_dir = str(save_dir)
        except ValueError as error:
            raise error if isinstance(error, CheckpointError) else DeepSpeedUsageError(error) from None
        if dist.get_rank() == 0:
            program = Path(thalweg.__file__).parent / "cli" / "bin" / "zero_to_fp32.py"
            shutil.copyfile(program, Path(save_dir) / program.name)
            self._change_recovery_script_permissions(Path(save_dir) / program.name)
        return path

    def _change_recovery_script_permissions(self, dst: str | Path) -> None:
        """Make it executable; a file system without permissions (Azure's file shares) leaves it as it is."""
        try:
            Path(dst).chmod(Path(dst).stat().st_mode | stat.S_IEXEC)
        except OSError as error:
            logger.info("%s cannot be made executable (%s): run it as `python %s`", dst, error, dst)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients at hand; the window goes on, so that a call in each micro-batch prevents no update."""
        self._drop_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within keep their gradients on this rank; no step and no other such block goes there."""
        if not self._sync_grads:
            raise DeepSpeedUsageError("no_sync context manager reentry is unsupported: one block is enough")
        with super().no_sync():
            yield

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; the last of a window updates the parameters and the schedule."""
        if not self._sync_grads:
            raise DeepSpeedUsageError(
                "It is illegal to call Engine.step() inside no_sync context manager: call it after the block"
            )
        super().step(lr_kwargs)
        self.tput_timer.stop(global_step=self._step_updates)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; in training a micro-batch begins for :attr:`tput_timer`."""
        if self.training:
            self._loader.is_in_use = True
            self.tput_timer.start()
        elif self.is_whole_in_eval:
            kwargs[SEQUENCE_META_KEY] = SequenceMeta(is_whole=True)
        return super().forward(*args, **kwargs)

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer within :attr:`optimizer`."""
        return getattr(self.optimizer, "inner", self.optimizer)

    def get_pld_theta(self) -> float | None:
        """theta(t) of progressive layer drop, where it is enabled."""
        section = self.resolved_config.progressive_layer_drop
        drop = ProgressiveLayerDrop(section.theta, section.gamma)
        drop.update_state(max(0, self.global_steps - 1))  # of the step before, as DeepSpeed has it
        return drop.get_theta() if section.enabled else None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Where :meth:`train_batch` takes its batches from where it is given none."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """The same, of a loader that begins anew when it ends."""
        self._data_iterator = iter(RepeatingLoader(loader))

    def _load_position(self, position: dict[str, Any]) -> None:
        """Bring the loader where a checkpoint's was; DeepSpeed saves no such place, so other data may be given now."""
        try:
            self._loader.load_state_dict(position)
            self._loader.is_in_use = False
        except ValueError as error:
            logger.warning("as with DeepSpeed the data begin at their start: %s", error)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one window of micro-batches."""
        return super().train_batch(self._data_iterator if data_iter is None else data_iter)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """What makes a micro-batch, a tuple of inputs and labels, of what an iterator gives."""

        def take(batch: Any) -> Any:
            self._loader.is_in_use |= self.training  # a pipeline takes several before it runs
            return fn(batch)

        self._batch_feed.batch_fn = take

    def eval_batch(  # type: ignore[override]
        self, data_iter: Iterator[Any] | None = None, return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The mean loss of so many micro-batches, on every rank."""
        if return_logits or not compute_loss or reduce_output != "avg":
            raise DeepSpeedUsageError("eval_batch() returns the mean loss alone: leave out what asks for outputs")
        return super().eval_batch(self._data_iterator if data_iter is None else data_iter, num_micro_batches)

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> Tensor:
        """Run the backward pass of ``loss``, divided by the accumulation steps unless the caller has done so."""
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        return super().backward(scaled, retain_graph=retain_graph, scale_wrt_gas=False, **options)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch at hand is the window's last; None counts again."""
        try:
            super().set_gradient_accumulation_boundary(is_boundary)
        except ValueError as error:
            raise DeepSpeedUsageError(error) from None

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes within once, at the end; one block to a step."""
        if not self.resolved_config.managed_gradient_accumulation:
            raise DeepSpeedUsageError(
                "coalesce_grad_reduction() does not go with managed_gradient_accumulation: false, where step() says "
                "when to reduce: leave it out"
            )
        with self.no_sync():
            yield
        self._components.sharded.finalize_grads()

    @property
    def lr_scheduler(self) -> Any:
        """The schedule; one that is set here is stepped, saved and loaded."""
        return self._components.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        if "_components" in vars(self):  # not yet within __init__, which sets what the components have
            self._components.lr_scheduler = value

    # Where this rank is

    @property
    def data_parallel_group(self) -> Any:
        """The process group of those ranks."""
        return self.meshes.dp.get_group()

    @property
    def seq_parallel_group(self) -> Any:
        """The ranks that share this one's sequences; None where none do."""
        sequence = self.meshes.sequence
        return None if sequence is None else sequence.get_group()

    # What the config says

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of an update, samples of a micro-batch, micro-batches of an update."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    # The rest

    def loss_scale(self) -> float:  # type: ignore[override]
        """The fixed factor on the loss by the config; the one in use is ``optimizer.loss_scale``."""
        fp16 = self.resolved_config.fp16
        return float(fp16.loss_scale) if fp16.enabled else 1.0

    def dynamic_loss_scale(self) -> bool:
        """Whether overflows move the loss scale."""
        return self.fp16_enabled() and self.loss_scale() == 0

    def optimizer_name(self) -> str | None:
        """The optimizer of the config in small letters; without one, the class of the user's."""
        section = self.resolved_config.optimizer
        return section.type.lower() if section else type(self.optimizer.inner).__name__ if self.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Its parameters."""
        section = self.resolved_config.optimizer
        return dict(section.params) if section else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its parameters."""
        section = self.resolved_config.scheduler
        return dict(section.params) if section else None

    def get_mom(self) -> list[Any]:
        """The momentum of each group."""
        key = "momentum" if self.optimizer_name() in ("sgd", "rmsprop", "SGD", "RMSprop") else "betas"
        return [group[key] for group in self._require_optimizer().param_groups if key in group]

    def get_type(self) -> list[Any]:
        """The type of each group, where it says one."""
        return [group["type"] for group in self._require_optimizer().param_groups if "type" in group]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What the model computes in, and what gradients accumulate in."""
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        accumulated = self.resolved_config.data_types.grad_accum_dtype
        return dtype, dtype if accumulated is None else parse_dtype(accumulated)

    def zero_offload_optimizer(self) -> bool:
        """Whether the optimizer's state leaves the device."""
        return self.resolved_config.zero_optimization.offload_optimizer.device != "none"

    def zero_offload_param(self) -> bool:
        """Whether parameters leave the device."""
        return self.resolved_config.zero_optimization.offload_param.device != "none"

    zero_cpu_offload = zero_use_cpu_optimizer = zero_offload_optimizer

    # Modules whose gradients are reduced sparse: all are reduced dense.
    sparse_tensor_module_names: frozenset[str] = frozenset()

    @property
    def mp_world_size(self) -> int:
        """Ranks that share a layer."""
        return 1 if self.meshes.tp is None else self.meshes.tp.size()

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.meshes.sequence is None else self.meshes.sequence.size()

    def module_state_dict(self, prefix: str = "", exclude_frozen_parameters: bool = False, **options: Any) -> Any:
        """The model's own tensors, on this rank alone; where ranks hold parts of them (stage 3, tensor parallelism,
        pipelines), whole copies on the CPU: then collective."""
        self.reload_states()
        state = self.module.state_dict(prefix=prefix, **options)
        if self._components.runner is not None or any(isinstance(value, DTensor) for value in state.values()):
            state = {prefix + name: value for name, value in self.state_dict().items()}
        frozen = {prefix + name for name, param in self.module.named_parameters() if not param.requires_grad}
        return {name: v for name, v in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        """Load whole tensors into the model; collective."""
        self.load_state_dict(state_dict, strict)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Any = None, collate_fn: Any = None, num_local_io_workers: int | None = None,
    ) -> Any:  # fmt: skip
        """A loader of this rank's batches of ``dataset``: by ``data_sampler``, or shuffled for the route "train" and
        in the dataset's order for others."""
        rank, world_size = self.meshes.dp.get_local_rank(), self.dp_world_size
        batch_size, collate_fn = batch_size or self.train_micro_batch_size_per_gpu(), collate_fn or self.collate_fn
        options = {"batch_size": batch_size, "collate_fn": collate_fn, "num_workers": num_local_io_workers or 0}
        if data_sampler is not None:
            pins = pin_memory and self.device.type != "cpu"
            return DataLoader(dataset, sampler=data_sampler, pin_memory=pins, **options)
        if route != "train":
            return build_loader(dataset, rank=rank, world_size=world_size, shuffle=False, **options)
        config = replace_by_path(self.resolved_config, {"train_micro_batch_size_per_gpu": batch_size})
        return build_engine_loader(dataset, config, rank, world_size, collate_fn)

    def set_data_post_process_func(self, post_process_func: Any) -> None:
        """Not offered."""
        raise DeepSpeedUsageError("set_data_post_process_func() is not offered: give initialize() a collate_fn")

    def scale(self, loss: Tensor) -> Tensor:
        """``loss``, for a ``backward()`` of the program's own: Thalweg's hooks scale its gradients in fp16."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise DeepSpeedUsageError("scale() needs a scalar tensor with a graph: the loss")
        self._require_optimizer()
        return loss

    def __getattr__(self, name: str) -> Any:
        if name in CONFIG_GETTERS:
            return partial(get_by_path, self.resolved_config, CONFIG_GETTERS[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = vars(self)["_modules"].get("module")
            if model is None or not hasattr(model, name):
                raise
            return getattr(model, name)  # DeepSpeed's engine has whatever its model has

    def _reentrant_activation_checkpointing(self) -> bool:
        return False  # a pipeline's inputs need no gradient for their layers to be recomputed

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Nothing to do: backward passes reduce what a step will need."""

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:  # type: ignore[override]
        """Compile the model's forward pass."""
        self.is_compiled = True
        self.module.compile(**({} if backend is None else {"backend": backend}), **(compile_kwargs or {}))


PipelineEngine = DeepSpeedEngine
