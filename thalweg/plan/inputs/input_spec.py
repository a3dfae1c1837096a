"""What a model is fed with: the shapes of one micro-batch, found from its signature and its config."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from thalweg.utils.trees import first_positive_int


@dataclass(frozen=True)
class TensorSpec:
    """One input of a model: shape, dtype, and below which number its values are (integers)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = 2


_LEARNED_POSITION_NAMES = re.compile(r"(^|\.)(wpe|\w*position\w*)$")
_NON_TEXT_NAMES = re.compile("vision|visual|image|audio")


@dataclass(frozen=True)
class InputSpec:
    """A call's positional and keyword arguments, with a :class:`TensorSpec` in the place of each tensor."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensor_specs(self) -> list[TensorSpec]:
        """The tensors' shapes, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec)]

    @property
    def num_tokens(self) -> int:
        """Elements of the first two-dimensional integer tensor, else rows of the first tensor."""
        specs = self.tensor_specs
        for spec in specs:
            if len(spec.shape) == 2 and not spec.dtype.is_floating_point:
                return spec.shape[0] * spec.shape[1]
        return specs[0].shape[0] if specs and specs[0].shape else 1

    def with_batch_size(self, batch_size: int, current_batch_size: int) -> Self:
        """The same inputs for micro-batches of ``batch_size`` instead of ``current_batch_size``: the first dimension of
        every tensor is resized, but for those of 1, which all rows share.

        Raises:
            ValueError: the tensors do not show which dimension that is.
        """
        batch_dims = {field.shape[0] for field in self.tensor_specs if field.shape and field.shape[0] != 1}
        if len(batch_dims) != 1 or min(batch_dims) * batch_size % current_batch_size:
            raise ValueError(
                f"inputs of {sorted(batch_dims)} rows cannot be cut from {current_batch_size} to {batch_size}"
            )

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec) or not leaf.shape or leaf.shape[0] == 1:
                return leaf
            return replace(leaf, shape=(leaf.shape[0] * batch_size // current_batch_size, *leaf.shape[1:]))

        return replace(self, args=tree_map(resize, self.args), kwargs=tree_map(resize, self.kwargs))

    def make_random(self, generator: torch.Generator | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with random tensors of these shapes: normal ones, and integers below ``high``."""

        def draw(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            if leaf.dtype.is_floating_point:
                return torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
            return torch.randint(0, leaf.high, leaf.shape, dtype=leaf.dtype, generator=generator)

        return tree_map(draw, self.args), tree_map(draw, self.kwargs)

    def make_empty(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with empty tensors of these shapes."""
        return tree_map(_to_empty, self.args), tree_map(_to_empty, self.kwargs)


def input_spec_from_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputSpec:
    """The shapes of a call's arguments."""
    return InputSpec(tree_map(_to_spec, tuple(args)), tree_map(_to_spec, dict(kwargs)))


def input_spec_from_example(batch: Any) -> InputSpec:
    """The shapes of a given micro-batch: a mapping (keywords), a sequence of tensors, or one tensor."""
    if isinstance(batch, Mapping):
        return input_spec_from_call((), {str(key): value for key, value in batch.items()})
    return input_spec_from_call(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def infer_input_spec(model: nn.Module, micro_batch: int, sequence_length: int | None = None) -> InputSpec:
    """Shapes of one micro-batch of ``model``, by argument name.

    ``sequence_length`` in tokens; None takes the longest that the model's config allows, at most 1,024.

    Raises:
        ValueError: the model's arguments tell nothing, or it has learnt fewer positions; the message says
            what to give instead.
    """
    names = list(inspect.signature(model.forward).parameters)
    config = getattr(model, "config", None)
    if "pixel_values" in names and "input_ids" not in names:
        return _image_inputs(model, config, names, micro_batch)
    if "input_ids" not in names and {"input_features", "input_values"} & set(names):
        return _audio_inputs(model, config, names, micro_batch, sequence_length)
    if "pixel_values" in names and "return_loss" in names and hasattr(config, "vision_config"):
        return _image_text_inputs(model, config, micro_batch, sequence_length)
    length = _resolve_sequence_length(model, config, sequence_length)
    vocab_size = first_positive_int(config, "vocab_size") or 2
    tokens = next((name for name in names if name in ("input_ids", "tokens", "tokens_BT", "idx")), None)
    if tokens is None:
        raise ValueError(_cannot_infer_message(model, names))
    inputs = {tokens: TensorSpec((micro_batch, length), torch.int64, vocab_size)}
    labels = next((name for name in names if name in ("labels", "labels_BT", "targets")), None)
    if labels is not None:
        inputs[labels] = _label_spec(model, config, micro_batch, length, vocab_size)
    return InputSpec(kwargs=inputs)


def _cannot_infer_message(model: nn.Module, names: list[str]) -> str:
    return (
        f"{type(model).__name__}.forward takes {', '.join(names) or 'nothing'}: its inputs cannot be "
        "guessed; give batch=, one micro-batch of tensors (on any device, meta too)"
    )


def _resolve_sequence_length(model: nn.Module, config: Any, requested: int | None) -> int:
    """Tokens of a sequence: a lookup of shapes alone would not fail where that of a run does."""
    text = ((name, module) for name, module in model.named_modules() if not _NON_TEXT_NAMES.search(name))
    tables = {name: m for name, m in text if isinstance(m, nn.Embedding) and _LEARNED_POSITION_NAMES.search(name)}
    num_positions = {name: table.num_embeddings - _position_offset(table) for name, table in tables.items()}
    shortest = min(num_positions, key=lambda name: num_positions[name], default=None)
    if shortest is None:
        return requested or default_sequence_length(config)
    if requested is not None and requested > num_positions[shortest]:
        raise ValueError(
            f"sequence_length {requested} is longer than the {num_positions[shortest]} positions that "
            f"{type(model).__name__} has learnt ({shortest}): give at most {num_positions[shortest]}"
        )
    return requested or min(default_sequence_length(config), num_positions[shortest])


def _position_offset(positions: nn.Embedding) -> int:
    """Rows of learnt positions that no token has: RoBERTa counts from behind that of padding, OPT from 2."""
    offset = getattr(positions, "offset", 0)
    padding = positions.padding_idx
    return offset if isinstance(offset, int) and offset else 0 if padding is None else padding + 1


def default_sequence_length(config: Any) -> int:
    """The longest sequence that a model's config allows, at most 1,024."""
    longest = first_positive_int(config, "max_position_embeddings", "n_positions", "block_size", "max_seq_len")
    return min(longest or 1024, 1024)


def _to_spec(leaf: Any) -> Any:
    return TensorSpec(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _to_empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, TensorSpec) else leaf


def _label_spec(model: nn.Module, config: Any, batch_size: int, sequence_length: int, vocab_size: int) -> TensorSpec:
    name, num_labels = type(model).__name__, first_positive_int(config, "num_labels") or 2
    if name.endswith("ForSequenceClassification"):
        return TensorSpec((batch_size,), torch.int64, num_labels)
    high = num_labels if name.endswith("ForTokenClassification") else vocab_size
    return TensorSpec((batch_size, sequence_length), torch.int64, high)


def _image_inputs(model: nn.Module, config: Any, names: list[str], batch_size: int) -> InputSpec:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (batch_size, first_positive_int(config, "num_channels") or 3, height, width)
    inputs = {"pixel_values": TensorSpec(shape, torch.float32)}
    name = type(model).__name__
    if "labels" in names and "Detection" not in name and "MaskedImage" not in name:
        shape = (batch_size, height, width) if name.endswith("Segmentation") else (batch_size,)
        inputs["labels"] = TensorSpec(shape, torch.int64, first_positive_int(config, "num_labels") or 2)
    return InputSpec(kwargs=inputs)


def _audio_inputs(
    model: nn.Module, config: Any, names: list[str], batch_size: int, requested_length: int | None
) -> InputSpec:
    """Spectra as Whisper and its like take them (always a whole window), or samples; texts as labels."""
    frames, bands = (first_positive_int(config, "max_source_positions"), first_positive_int(config, "num_mel_bins"))
    if "input_features" in names and frames and bands:
        strides = [module.stride[0] for module in model.modules() if isinstance(module, nn.Conv1d)]
        shape: tuple[int, ...] = (batch_size, bands, frames * prod(strides))
    elif "input_values" in names and (strides := getattr(config, "conv_stride", None)):
        frames = (requested_length or default_sequence_length(config)) + max(config.conv_kernel)
        shape = (batch_size, frames * prod(strides))
    else:
        raise ValueError(_cannot_infer_message(model, names))
    inputs = {("input_features" if "input_features" in names else "input_values"): TensorSpec(shape, torch.float32)}
    if "labels" in names and "decoder_input_ids" in names:
        max_positions = first_positive_int(config, "max_target_positions") or 1024
        if requested_length is not None and requested_length > max_positions:
            raise ValueError(
                f"sequence_length {requested_length} is longer than the {max_positions} positions of "
                f"{type(model).__name__}"
            )
        vocab_size = first_positive_int(config, "vocab_size") or 2
        length = min(requested_length or default_sequence_length(config), max_positions)
        inputs["labels"] = TensorSpec((batch_size, length), torch.int64, vocab_size)
    return InputSpec(kwargs=inputs)


def _image_text_inputs(model: nn.Module, config: Any, batch_size: int, requested_length: int | None) -> InputSpec:
    """What CLIP and its like compare: as many texts as images."""
    text = getattr(config, "text_config", config)
    length = _resolve_sequence_length(model, text, requested_length)
    inputs: dict[str, Any] = {
        "input_ids": TensorSpec((batch_size, length), torch.int64, first_positive_int(text, "vocab_size") or 2),
        **_image_inputs(model, config.vision_config, ["pixel_values"], batch_size).kwargs,
    }
    return InputSpec(kwargs={**inputs, "return_loss": True})
