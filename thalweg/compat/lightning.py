"""Lightning's Trainer on a Thalweg engine: ``Trainer(strategy=ThalwegStrategy(stage=3))``, on GPUs and on processors.

Lightning keeps its loop, its hooks, its schedulers and its loggers; the engine has the model, the optimizer, the
clipping of gradients and the precision.  A checkpoint is a folder: the engine's, and a file with what Lightning says
of its loops and callbacks.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from thalweg.config.reader import read_source
from thalweg.engine import Engine, initialize

_has_lightning = find_spec("lightning") is not None
# Without Lightning the class can be imported, and says what it lacks when it is made.
_Strategy: Any = import_module("lightning.pytorch.strategies").DDPStrategy if _has_lightning else object
_Precision: Any = import_module("lightning.pytorch.plugins.precision").Precision if _has_lightning else object

_LOOPS_KEY = "lightning"  # in the client state: the name of the file with the loops
_SECTION_BY_PRECISION = {"bf16": "bf16", "16": "fp16"}


class EnginePrecision(_Precision):
    """The engine casts, scales and clips."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """The step does it, by ``gradient_clipping``.

        Raises:
            ValueError: this is to clip otherwise.
        """
        if clip_val > 0 and (clip_val, gradient_clip_algorithm) != (optimizer.max_norm, "norm"):
            engine_clips = f"the engine clips, by norm, and gradient_clipping is {optimizer.max_norm}"
            raise ValueError(f"{engine_clips}: set that to {clip_val} in ThalwegStrategy's config")


class ThalwegStrategy(_Strategy):
    """``config``: a path or dict of the keys that ``thalweg.initialize`` takes; the micro-batches of a window and the
    precision are Trainer's, and the clipping where Trainer has a ``gradient_clip_val``.  ``stage``: the ZeRO stage,
    where the config says none.

    Raises:
        ImportError: there is no Lightning.

    Raises (when the fit starts):
        ValueError: several optimizers, gradients clipped by value, a precision without an equal.

    A program's ``clip_gradients`` with a limit that is not the engine's raises ValueError.
    """

    strategy_name = "thalweg"

    def __init__(self, config: Any = None, stage: int = 2, **options: Any) -> None:
        if not _has_lightning:
            raise ImportError("ThalwegStrategy needs Lightning: pip install lightning")
        super().__init__(**options)
        self._config: dict[str, Any] = {} if config is None else dict(read_source(config)[0].tree or {})
        self._config.setdefault("zero_optimization", {"stage": stage})
        self.engine: Engine | None = None

    # What is built

    @property
    def precision_plugin(self) -> Any:
        """Trainer's precision, which the engine carries out."""
        return self._engine_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._engine_precision = EnginePrecision(getattr(plugin, "precision", "32-true"))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The engine loads, so that it must be there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The engine restores it."""
        return False

    def setup(self, trainer: Any) -> None:
        """Build the engine; its optimizer is the one of ``configure_optimizers``, or the config's."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        is_training, optimizer = trainer.state.fn == "fit", None
        if is_training:
            init_optimizers = import_module("lightning.pytorch.core.optimizer")._init_optimizers_and_lr_schedulers
            optimizers, self.lr_scheduler_configs = init_optimizers(self.lightning_module)
            if len(optimizers) > 1:
                raise ValueError("ThalwegStrategy drives one optimizer: give its groups rates of their own instead")
            optimizer = None if "optimizer" in self._config else optimizers[0]
        if self.engine is None or self.engine.module is not self.lightning_module or is_training:
            config = self._engine_config(trainer) if is_training else {**self._config}
            config.setdefault("train_micro_batch_size_per_gpu", 1)
            self.engine, *_ = initialize(model=self.lightning_module, optimizer=optimizer, config=config)
        self.model = self.engine
        if is_training:
            self.optimizers = [self.engine.optimizer]  # pyright: ignore[reportAttributeAccessIssue]

    def _engine_config(self, trainer: Any) -> dict[str, Any]:
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ValueError("the engine clips the norm of the gradient: leave out gradient_clip_algorithm='value'")
        name = str(self.precision_plugin.precision)
        kind = name.partition("-")[0]
        if kind not in ("32", *_SECTION_BY_PRECISION):
            raise ValueError(f"precision={name!r} has no equal: take '32-true', 'bf16-mixed' or '16-mixed'")
        config = {**self._config, "gradient_accumulation_steps": trainer.accumulate_grad_batches}
        if trainer.gradient_clip_val is not None:
            config["gradient_clipping"] = float(trainer.gradient_clip_val)
        if kind in _SECTION_BY_PRECISION:
            config.setdefault(_SECTION_BY_PRECISION[kind], {"enabled": True})
        return config

    # The loop

    def _require_engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Around a micro-batch that does not end its window."""
        engine = self._require_engine()
        engine.set_gradient_accumulation_boundary(False)
        yield
        engine.step()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The engine's, of a loss that Lightning has divided by the window."""
        self._require_engine().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure's backward pass ends the window."""
        self._require_engine().set_gradient_accumulation_boundary(True)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the engine saves the model."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: the engine saves it."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """A folder at ``filepath``; collective."""
        folder = Path(self.broadcast(str(filepath)))
        name = self.broadcast(f"lightning-{uuid4().hex}.ckpt")
        # Under a name of their own, and first: whoever is killed midway leaves the older weights with the older loops.
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, folder / name, storage_options)
        self._require_engine().save_checkpoint(folder, tag=self.strategy_name, client_state={_LOOPS_KEY: name})
        self._require_engine().wait_for_checkpoint()  # Lightning removes an older folder as soon as this returns
        for path in set(folder.glob("lightning*.ckpt")) - {folder / name} if self.is_global_zero else ():
            self.checkpoint_io.remove_checkpoint(path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """What :meth:`save_checkpoint` wrote, at any stage and number of ranks; collective."""
        folder = Path(self.broadcast(str(checkpoint_path)))
        engine = self._require_engine()
        _, state = engine.load_checkpoint(folder, tag=self.strategy_name, load_module_only=engine.optimizer is None)
        loops = folder / (state or {}).get(_LOOPS_KEY, "lightning.ckpt")  # what older saves call it
        return self.checkpoint_io.load_checkpoint(loops, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to load."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to load."""
