"""Layers that compute with compressed weights, and keep the whole ones to train.

A layer stays the object that it was, with its parameters under their names; its class becomes a subclass that
computes with

    weight, bias  ->  quantized  ->  masked (single weights, rows, heads)  ->  the layer's own product

and it gets a child ``compression`` that holds what this needs: scores of masks that train (parameters, cut by ZeRO as
any), fixed masks and ranges (buffers), and how far the schedule has come (its extra state, in checkpoints).
Everything happens in the layer's own forward pass, on the parameters as they are there: gathered at every ZeRO stage.
Gradients pass rounding and masks' thresholds straight through.

A *row* is an output of a layer, whatever way its weight lies: of a linear layer and a convolution the first dim, of
Hugging Face's Conv1D the second.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.compression.quantize import fake_quantize, straight_through


@dataclass(frozen=True)
class WeightQuantization:
    """``start_bits`` fall to ``target_bits``, one at step ``period`` after ``offset``, the next at twice that, ..."""

    start_bits: int
    target_bits: int
    period: int = 1
    offset: int = 0
    num_groups: int = 1
    symmetric: bool = True
    stochastic: bool = False
    change_ratio: float = 0.0  # above 0: the whole weight's share falls from 1 by this a step, at every number of bits
    verbose: bool = False


@dataclass(frozen=True)
class ActivationQuantization:
    """Inputs in ``bits``: each token by its own range, or (``static``) all by one that is averaged in training."""

    bits: int
    symmetric: bool = True
    static: bool = False
    offset: int = 0


class Mask(nn.Module):
    """Which of some units are kept: the share ``dense_ratio`` with the largest norms (``l1``), fixed now, or with
    the largest ``scores`` (``topk``), which train: their gradient is that of the mask (Sanh et al. 2020).

    ``related``: names of layers from which the same units go when they are removed.
    """

    kept: Tensor

    def __init__(
        self, norms: Tensor, dense_ratio: float, method: str, offset: int, related: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.dense_ratio, self.offset, self.related = dense_ratio, offset, related
        self.scores: nn.Parameter | None = None
        norms = norms.detach().float()
        if method == "topk":
            # Of the size of a layer's first weights, so that a rate that suits these suits the scores.
            start = norms / norms.max().clamp(min=1e-12) / math.sqrt(max(1, norms.shape[-1]))
            self.scores = nn.Parameter(start.clone())
        else:
            self.register_buffer("kept", keep_largest(norms, dense_ratio))

    def forward(self) -> Tensor:
        """1 for units that are kept, 0 for others."""
        if self.scores is None:
            return self.kept
        return straight_through(self.scores, keep_largest(self.scores.detach(), self.dense_ratio))


def keep_largest(values: Tensor, share: float) -> Tensor:
    """A boolean mask of the ``share`` (at least one) of elements with the largest values; of equal ones the first."""
    count = max(1, math.ceil(share * values.numel() - 1e-9))
    order = values.flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    return mask.index_fill_(0, order[:count], True).view(values.shape)


class Compression(nn.Module):
    """What a layer's compression needs; ``steps`` counts updates."""

    range: Tensor  # where inputs have one range: the least and the largest value, averaged over windows
    seen: Tensor  # and those of the window at hand

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.is_table = seed, False  # is_table: of an embedding, perhaps among others
        self.weight: WeightQuantization | None = None
        self.activation: ActivationQuantization | None = None
        self.sparse: Mask | None = None
        self.row: Mask | None = None
        self.head: Mask | None = None
        self.steps = self.bits = self.next_switch = self.switched_at = 0
        # For a derivative by the weight as it is used: a leaf in its place, moved by ``shift``.
        self.shift: Tensor | None = None
        self.leaf: Tensor | None = None

    def quantize_weight(self, spec: WeightQuantization) -> None:
        """Quantise the weight from now on, as ``spec`` says."""
        if spec.start_bits < spec.target_bits:
            raise ValueError(f"start_bits {spec.start_bits} are fewer than target_bits {spec.target_bits}: swap them")
        self.weight, self.bits, self.next_switch, self.switched_at = spec, spec.start_bits, spec.period, spec.offset
        self._switch_bits(1)

    def quantize_activation(self, spec: ActivationQuantization) -> None:
        """Quantise what comes in from now on, as ``spec`` says."""
        self.activation = spec
        if spec.static:
            self.register_buffer("range", torch.zeros(2))
            self.register_buffer("seen", torch.tensor([math.inf, -math.inf]), persistent=False)

    def get_extra_state(self) -> Tensor:
        """Steps, bits, the step of the next switch and that of the last: int64 (4,)."""
        return torch.tensor([self.steps, self.bits, self.next_switch, self.switched_at])

    def set_extra_state(self, state: Tensor) -> None:
        """Go on where ``state`` was."""
        self.steps, self.bits, self.next_switch, self.switched_at = (int(value) for value in state)

    @property
    def switch_is_due(self) -> bool:
        """Whether the next step takes a bit away."""
        spec = self.weight
        return spec is not None and self.bits > spec.target_bits and self.steps + 1 - spec.offset >= self.next_switch

    def advance(self, period_factor: int = 1) -> bool:
        """Count a step; whether a bit went.  ``period_factor``: how many times longer the next period is."""
        self.steps += 1
        return self._switch_bits(period_factor)

    def _switch_bits(self, period_factor: int) -> bool:
        spec, before = self.weight, self.bits
        if spec is None:
            return False
        while self.bits > spec.target_bits and self.steps - spec.offset >= self.next_switch:
            self.bits, self.next_switch = self.bits - 1, self.next_switch * 2 * period_factor
            self.switched_at = self.steps
        return self.bits != before

    def quantized(self, weight: Tensor, bits: int) -> Tensor:
        """The weight (any shape) in ``bits`` bits, nothing of it whole."""
        spec = self.weight
        assert spec is not None
        noise = None
        if spec.stochastic:
            # The same on every rank, in a recomputed forward pass and after a resume.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.steps)
            noise = torch.rand(spec.num_groups, weight.numel() // spec.num_groups, generator=generator)
            noise = noise.to(weight.device)
        return fake_quantize(weight, bits, spec.num_groups, spec.symmetric, noise=noise)

    def rows_and_bias(self, rows: Tensor, bias: Tensor | None, *, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """The weight, a row for each output, and the bias to compute with; ``final``: at the schedule's end."""
        spec, steps = self.weight, math.inf if final else self.steps
        if spec is not None and steps >= spec.offset and (bits := spec.target_bits if final else self.bits) < 16:
            rounded, share = self.quantized(rows, bits), spec.change_ratio * (steps + 1 - self.switched_at)
            rows = torch.lerp(rounded, rows, 1 - share) if 0 < share < 1 else rounded
        if self.sparse is not None and steps >= self.sparse.offset:
            rows = rows * self.sparse().view(rows.shape)
        if self.row is not None and steps >= self.row.offset:
            kept = self.row()
            rows, bias = rows * kept.view(-1, *[1] * (rows.dim() - 1)), None if bias is None else bias * kept
        if self.head is not None and steps >= self.head.offset:
            kept = self.head()
            rows = rows * kept.repeat_interleave(rows.shape[1] // kept.numel())
        if self.shift is not None:
            if self.leaf is None:  # a recomputed forward pass uses the one of the first
                self.leaf = (rows.detach() + self.shift.to(rows)).requires_grad_()
            rows = self.leaf
        return rows, bias

    def inputs(self, x: Tensor) -> Tensor:
        """What came in, quantised."""
        spec = self.activation
        if spec is None or self.steps < spec.offset or not x.is_floating_point():
            return x
        if not spec.static:
            return fake_quantize(x, spec.bits, max(1, x.numel() // x.shape[-1]), spec.symmetric)
        if self.training:
            low, high = x.detach().float().aminmax()
            self.seen.copy_(torch.stack([torch.minimum(self.seen[0], low), torch.maximum(self.seen[1], high)]))
        if self.steps == spec.offset:  # the first window tells the range
            return x
        return fake_quantize(x, spec.bits, 1, spec.symmetric, bounds=self.range)

    def update_range(self) -> None:
        """A window has ended: the range follows what was seen in it."""
        if not torch.isfinite(self.seen).all():
            return
        known = bool((self.range[0] != self.range[1]).item())
        self.range.copy_(torch.lerp(self.seen, self.range, 0.95) if known else self.seen)
        self.seen.copy_(self.seen.new_tensor([math.inf, -math.inf]))


class CompressedLayer(nn.Module):
    """Mixin: the layer with its ``compression``; of a table the weight alone, a convolution's rows are channels."""

    compression: Compression

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, bias = self.compression.rows_and_bias(get_rows(self), getattr(self, "bias", None))
        if isinstance(self, nn.Embedding):
            kept = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
            return F.embedding(x, weight, *kept)
        x = self.compression.inputs(x)
        return self._conv_forward(x, weight, bias) if isinstance(self, nn.Conv2d) else F.linear(x, weight, bias)

    def __reduce_ex__(self, protocol: Any) -> Any:  # copies and pickles: the class has no place in a module
        return _rebuild, (_plain_class(self),), self.__dict__


def _rebuild(kind: type) -> nn.Module:
    return nn.Module.__new__(_compressed_class(kind))


def _plain_class(layer: CompressedLayer) -> type:
    return next(k for k in type(layer).__mro__ if issubclass(k, nn.Module) and not issubclass(k, CompressedLayer))


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


@cache
def _compressed_class(kind: type) -> type:
    return type(f"Compressed{kind.__name__}", (CompressedLayer, kind), {"__doc__": kind.__doc__})


def is_compressible(module: nn.Module) -> bool:
    """Whether a module is of a kind that can be compressed, and not replaced by something else."""
    is_plain = type(module) in (nn.Linear, nn.Embedding, nn.Conv2d) or _is_conv1d(type(module))
    return is_plain or isinstance(module, CompressedLayer)


def compress_layer(model: nn.Module, module: Any, seed: int) -> Compression:
    """The compression of a model's layer, empty where it had none; in place.

    Layers with one weight, as an embedding that is the head, have one compression: the weight is one in the end.
    """
    if not isinstance(module, CompressedLayer):
        compression = Compression(seed).train(module.training)
        for layer in list[Any](model.modules()):
            if is_compressible(layer) and layer.weight is module.weight:
                layer.compression = compression
                compression.is_table |= isinstance(layer, nn.Embedding)
                layer.__class__ = _compressed_class(type(layer))
    return module.compression


def restore_layer(module: CompressedLayer) -> None:
    """Make it the plain layer that it was, with the parameters that it has."""
    del module.compression
    module.__class__ = _plain_class(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a weight lies as (inputs, outputs)."""
    return any(_is_conv1d(kind) for kind in type(module).__mro__)


def get_rows(module: Any) -> Tensor:
    """The weight with a row for each output: (outputs, inputs, ...)."""
    return module.weight.t() if is_transposed(module) else module.weight


def iter_compressed(model: nn.Module) -> dict[str, CompressedLayer]:
    """The compressed layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedLayer)}
