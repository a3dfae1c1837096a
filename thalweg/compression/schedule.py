"""What happens to compressed layers between steps: bits fall, ranges follow, sensitive layers are given time.

MoQ (``quantize_training``) quantises every layer that can be, from ``start_bits`` down to ``target_bits``.  With
``eigenvalue`` a layer's next period is longer by ``1 + floor(4 v)``, v the largest eigenvalue of the Hessian of the
loss by its block's weights, over the largest of all blocks: up to 5 times where the loss curves most (Q-BERT, Shen et
al. 2020).  It is found by power iteration; a product of the Hessian is the difference of two gradients,

    H v  ~  (g(w + e v) - g(w - e v)) / 2e,

each by a forward and a backward pass on the last batch, as ZeRO runs any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.compression.compress import init_compression, is_enabled, quantize_layer_weight, weight_quantization
from thalweg.compression.layers import CompressedLayer, Compression, compress_layer, is_compressible, iter_compressed
from thalweg.config import Config
from thalweg.device import widest_float
from thalweg.optim.accumulation import StepListener, StepResult
from thalweg.utils.log import get_logger
from thalweg.utils.trees import get_loss

_log = get_logger(__name__)


def setup_compression(
    model: nn.Module, config: Config, group: dist.ProcessGroup | None, *, user_params: bool
) -> CompressionSchedule | None:
    """Compress what the config names, where the program has not done so, and make the schedule of all compressed
    layers; None where there are none.  ``user_params``: the program says which parameters train.

    Raises:
        ValueError: masks that train would come after the program has listed its parameters.
    """
    section: Any = config.quantize_training
    if not iter_compressed(model) and (is_enabled(config) or config.compression_training.layer_reduction.enabled):
        known = {id(param) for param in model.parameters()}
        init_compression(model, config)
        if user_params and any(id(param) not in known for param in model.parameters()):
            raise ValueError(
                "masks with method topk train scores, which the optimizer given to initialize() does not have: call "
                "model = thalweg.compression.init_compression(model, config) before the optimizer is built"
            )
    if section.enabled:
        _quantize_all(model, section)
    compressed = iter_compressed(model)
    if not compressed:
        return None
    eigenvalue: Any = section.eigenvalue if section.eigenvalue.enabled else config.eigenvalue
    probe = BlockEigenvalues(model, eigenvalue, group) if eigenvalue.enabled else None
    return CompressionSchedule(compressed, group, probe)


def _quantize_all(model: nn.Module, section: Any) -> None:
    algorithm, schedule = section.quantize_algo, section.quantize_schedule
    pace = schedule.quantize_period, schedule.schedule_offset
    kind = algorithm.q_type or section.quantize_type
    spec = weight_quantization(section, section.quantize_bits, *pace, kind, algorithm.rounding)
    for index, (name, module) in enumerate(list(model.named_modules())):
        if is_compressible(module):
            compression = compress_layer(model, module, index)
            quantize_layer_weight(module, compression, spec, f"quantize_training: {name}")


class CompressionSchedule(StepListener):
    """Counts the steps of compressed layers.  ``group``: the ranks whose inputs make a range together."""

    def __init__(
        self, layers: dict[str, CompressedLayer], group: dist.ProcessGroup | None, eigenvalues: BlockEigenvalues | None
    ) -> None:
        self._compressions = {layer.compression: name for name, layer in layers.items()}  # of two layers it may be one
        self._group, self._eigenvalues = group, eigenvalues

    def after_step(self, result: StepResult) -> None:
        """Every layer is a step further."""
        due = any(compression.switch_is_due for compression in self._compressions)
        factors = self._eigenvalues.period_factors() if due and self._eigenvalues is not None else {}
        for compression, name in self._compressions.items():
            switched = compression.advance(factors.get(name, 1))
            if switched and compression.weight is not None and compression.weight.verbose:
                _log.info(
                    "%s: %d bits from step %d on; the next bit goes at %d",
                    name, compression.bits, compression.steps, compression.next_switch,
                )  # fmt: skip
        self._update_ranges()

    def _update_ranges(self) -> None:
        static = [c for c in self._compressions if c.activation is not None and c.activation.static]
        if not static:
            return
        sign = static[0].seen.new_tensor([1.0, -1.0])
        seen = torch.stack([compression.seen for compression in static]) * sign
        if self._group is not None:
            dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=self._group)
        for compression, bounds in zip(static, seen * sign, strict=True):
            compression.seen.copy_(bounds)
            compression.update_range()


class BlockEigenvalues:
    """The largest Hessian eigenvalue of each block of ``layer_name``, on the last batch of all ranks; collective."""

    def __init__(self, model: nn.Module, section: Any, group: dist.ProcessGroup | None) -> None:
        self._model, self._section, self._group = model, section, group
        try:
            children = dict(model.get_submodule(section.layer_name).named_children())
        except AttributeError:
            children = {}
        if not children or (section.layer_num and section.layer_num != len(children)):
            raise ValueError(
                f"eigenvalue: layer_name {section.layer_name!r} is a list of {len(children)} blocks and layer_num is "
                f"{section.layer_num}: name the model's list of layers"
            )
        self._blocks = {
            f"{section.layer_name}.{key}": {
                f"{section.layer_name}.{key}.{name}".rstrip("."): layer.compression
                for name, layer in iter_compressed(block).items()
            }
            for key, block in children.items()
        }
        self._batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._calls = 0
        self._factors: dict[str, int] = {}
        model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)

    def _keep_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._batch = (args, kwargs)

    def period_factors(self) -> dict[str, int]:
        """By how much the next period of each layer is longer: 1 to 5."""
        self._calls += 1
        if self._batch is None or (self._calls - 1) % max(1, self._section.gas_boundary_resolution):
            return self._factors
        values = self.compute()
        finite = [value for value in values.values() if math.isfinite(value)]
        largest = max(finite, default=0.0)
        for block, value in values.items():
            share = (value if math.isfinite(value) else largest) / largest if largest > 0 else 1.0
            self._factors |= dict.fromkeys(self._blocks[block], 1 + math.floor(4 * share))
        if self._section.verbose:
            _log.info("eigenvalues: %s", ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
        return self._factors

    def compute(self) -> dict[str, float]:
        """The absolute value of the largest eigenvalue of each block."""
        was_training = self._model.training
        self._model.eval()  # dropout would differ between the two gradients, and the batch be another
        try:
            return {name: self._iterate(list(block.values())) for name, block in self._blocks.items()}
        finally:
            self._model.train(was_training)

    def _iterate(self, block: list[Compression]) -> float:
        gradient, sizes = self._gradient(block, None, 0.0)
        generator = torch.Generator().manual_seed(0)  # the same direction on all ranks
        vector = [torch.randn(g.shape, generator=generator).to(g.device) for g in gradient]
        step = 1e-2 * math.sqrt(sizes / max(1, sum(g.numel() for g in gradient))) or 1e-3
        value = 0.0
        for _ in range(max(1, self._section.max_iter)):
            norm = _norm(vector) + self._section.stability
            vector = [torch.nan_to_num(v / norm, posinf=0.0, neginf=0.0) for v in vector]
            size = step * math.sqrt(sum(v.numel() for v in vector))  # a unit vector moves a weight by ``step`` at rms
            ahead, _ = self._gradient(block, vector, size)
            behind, _ = self._gradient(block, vector, -size)
            product = [(a - b) / (2 * size) for a, b in zip(ahead, behind, strict=True)]
            before, value = value, float(sum((p * v).sum() for p, v in zip(product, vector, strict=True)))
            if not math.isfinite(value):
                break
            if value == 0 or abs(value - before) / (abs(value) + self._section.stability) < self._section.tol:
                break
            vector = product
        return abs(value)

    def _gradient(
        self, block: list[Compression], direction: list[Tensor] | None, size: float
    ) -> tuple[list[Tensor], float]:
        """The mean gradient over ranks by the block's weights, ``size`` along a direction; their sum of squares."""
        assert self._batch is not None
        with torch.enable_grad(), _moved(block, direction, size):
            loss = get_loss(self._model(*self._batch[0], **self._batch[1]))
            leaves = [compression.leaf for compression in block]
            gradients = torch.autograd.grad(loss.float(), leaves)  # type: ignore[arg-type]
        sizes = float(sum((leaf.detach().float() ** 2).sum() for leaf in leaves))  # type: ignore[union-attr]
        gradients = [gradient.float() for gradient in gradients]
        if self._group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self._group)
                gradient.div_(dist.get_world_size(self._group))
        return gradients, sizes


@contextmanager
def _moved(block: list[Compression], direction: list[Tensor] | None, size: float) -> Iterator[None]:
    """Let a block compute with weights ``size`` along a direction, which are leaves of their own."""
    for index, compression in enumerate(block):
        compression.shift = torch.zeros(()) if direction is None else direction[index] * size
    try:
        yield
    finally:
        for compression in block:
            compression.shift = compression.leaf = None


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(float(sum((t.to(widest_float(t.device)) ** 2).sum() for t in tensors)))
