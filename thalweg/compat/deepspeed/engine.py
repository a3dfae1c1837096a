"""DeepSpeed's ``initialize`` and engine over Thalweg's.

What the words mean here and there:

* ``config`` is the user's dict there; the resolved one stays reachable as ``resolved_config``.
* A loss is divided by ``gradient_accumulation_steps`` and by nothing else, so a window that is closed early (the tail
  of an epoch) weighs its micro-batches as accelerate does without DeepSpeed.  Thalweg's own engine takes the mean
  over those that there were.
* ``set_gradient_accumulation_boundary`` says which backward pass is the window's last; accelerate then calls ``step``
  for the last one alone, and not for each micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.compat.deepspeed.leaf_modules import add_model_settings
from thalweg.compat.deepspeed.live_engines import add_engine
from thalweg.compat.deepspeed.tensor_access import gather_state_dict
from thalweg.config import Config
from thalweg.config.reader import read_source
from thalweg.engine import Engine, build_engine
from thalweg.parallel_dims import ParallelMeshes
from thalweg.parallelize import Components
from thalweg.utils.env import read_rank_info


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
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """``deepspeed.initialize``: ``(engine, optimizer, dataloader, lr_scheduler)``.

    Raises:
        ConfigError: with every problem of the config at once.
        ValueError: no model, no config or two of them, an ``mpu``.
    """
    if model is None:
        raise ValueError("initialize() needs a model: deepspeed.initialize(model=model, config=...)")
    if mpu is not None:
        raise ValueError(
            "mpu= is not offered by Thalweg: the axes follow from the config "
            "(tensor_parallel.autotp_size, sequence_parallel_size, pipeline.stages); leave it out"
        )
    if mesh_param is not None:
        raise ValueError(
            "mesh_param= is not offered by Thalweg: the mesh follows from the config "
            "(sequence_parallel_size); leave it out"
        )
    sources = [config, config_params, getattr(args, "deepspeed_config", None)]
    given = [source for source in sources if source]
    if not given:
        raise ValueError("initialize() needs a config: config= (a dict or a path), or --deepspeed_config in args")
    tree = read_source(given[0])[0].tree
    source = given[0] if tree is None else add_model_settings(model, tree)  # None: load() reports what is wrong
    engine, loader = build_engine(
        DeepSpeedEngine,
        source,
        model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
    )
    engine.set_raw_config(given[0] if isinstance(given[0], Mapping) else tree)
    add_engine(engine)
    return engine, engine.optimizer, loader, engine.lr_scheduler


class DeepSpeedEngine(Engine):
    """Thalweg's engine under the names of DeepSpeed's."""

    def __init__(self, components: Components, config: Config, loader: Any = None) -> None:
        super().__init__(components, config, loader)
        self._raw_config: dict[str, Any] = {}
        self.resolved_config = config
        self._num_updates_before = 0

    # What differs

    @property
    def config(self) -> Any:  # type: ignore[override]
        """The config as the user gave it."""
        return self._raw_config

    def set_raw_config(self, config: Any) -> None:
        """The dict that :attr:`config` shows."""
        self._raw_config = copy.deepcopy(dict(config))

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> Tensor:
        """Run the backward pass of ``loss``, divided by the accumulation steps unless the caller has done so."""
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        return super().backward(scaled, retain_graph=retain_graph, scale_wrt_gas=False, **options)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; the last of a window updates."""
        optimizer = self.optimizer
        self._num_updates_before = 0 if optimizer is None else optimizer.num_updates
        super().step(lr_kwargs)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters."""
        return self.optimizer is not None and self.optimizer.num_updates > self._num_updates_before

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

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether Hugging Face may write whole weights at stage 3."""
        return bool(self.resolved_config.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    def gradient_clipping(self) -> float:
        """The largest norm of the gradient; 0 for no limit."""
        return float(self.resolved_config.gradient_clipping)

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return bool(self.resolved_config.fp16.enabled)

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return bool(self.resolved_config.bf16.enabled)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of an update, samples of a micro-batch, micro-batches of an update."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self._require_optimizer().param_groups:
            group["lr"] = lr

    # The rest

    def empty_partition_cache(self) -> None:
        """Nothing to free: a unit is freed after its use."""

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Nothing to do: backward passes reduce what a step will need."""

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:  # type: ignore[override]
        """Compile the model's forward pass."""
        self.module.compile(**({} if backend is None else {"backend": backend}), **(compile_kwargs or {}))

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Rank 0: the whole weights in the dtype that the model computes in, on the CPU; collective.

        Raises:
            ValueError: at other stages than 3.
        """
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode: use engine.state_dict() below stage 3")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else None
        frozen = {
            name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad
        }
        state = self.module.state_dict()
        named = {name: v for name, v in state.items() if not (exclude_frozen_parameters and name in frozen)}
        return gather_state_dict(named, dtype=dtype, keep=dist.get_rank() == 0)


PipelineEngine = DeepSpeedEngine
