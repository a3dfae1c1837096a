"""What a model is fed with: the shapes of one micro-batch, found from its signature and its config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Field:
    """One input of a model: shape, dtype, and below which number its values are (integers)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = 2


_LEARNT, _NO_TEXT = re.compile(r"(^|\.)(wpe|\w*position\w*)$"), re.compile("vision|visual|image|audio")


@dataclass(frozen=True)
class Batch:
    """A call's positional and keyword arguments, with a :class:`Field` in the place of each tensor."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> list[Field]:
        """The tensors' shapes, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Field)]

    @property
    def num_tokens(self) -> int:
        """Elements of the first two-dimensional integer tensor, else rows of the first tensor."""
        fields = self.fields
        for one in fields:
            if len(one.shape) == 2 and not one.dtype.is_floating_point:
                return one.shape[0] * one.shape[1]
        return fields[0].shape[0] if fields and fields[0].shape else 1

    def with_rows(self, rows: int, of: int) -> Batch:
        """The same inputs for micro-batches of ``rows`` instead of ``of``: every tensor's first dimension is
        cut, but for those of 1, which all rows share.

        Raises:
            ValueError: the tensors do not show which dimension that is.
        """
        first = {field.shape[0] for field in self.fields if field.shape and field.shape[0] != 1}
        if len(first) != 1 or min(first) * rows % of:
            raise ValueError(f"inputs of {sorted(first)} rows cannot be cut from {of} to {rows}")

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Field) or not leaf.shape or leaf.shape[0] == 1:
                return leaf
            return replace(leaf, shape=(leaf.shape[0] * rows // of, *leaf.shape[1:]))

        return Batch(tree_map(cut, self.args), tree_map(cut, self.kwargs))

    def build(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with empty tensors of these shapes."""
        return tree_map(_empty, self.args), tree_map(_empty, self.kwargs)


def batch_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """The shapes of a call's arguments."""
    return Batch(tree_map(_shape, tuple(args)), tree_map(_shape, dict(kwargs)))


def like(batch: Any) -> Batch:
    """The shapes of a given micro-batch: a mapping (keywords), a sequence of tensors, or one tensor."""
    if isinstance(batch, Mapping):
        return batch_of_call((), {str(key): value for key, value in batch.items()})
    return batch_of_call(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def batch_of(model: nn.Module, micro_batch: int, sequence_length: int | None = None) -> Batch:
    """Shapes of one micro-batch of ``model``, by argument name.

    ``sequence_length`` in tokens; None takes the longest that the model's config allows, at most 1,024.

    Raises:
        ValueError: the model's arguments tell nothing, or it has learnt fewer positions; the message says
            what to give instead.
    """
    names = list(inspect.signature(model.forward).parameters)
    config = getattr(model, "config", None)
    if "pixel_values" in names and "input_ids" not in names:
        return _images(model, config, names, micro_batch)
    if "input_ids" not in names and {"input_features", "input_values"} & set(names):
        return _sounds(model, config, names, micro_batch, sequence_length)
    if "pixel_values" in names and "return_loss" in names and hasattr(config, "vision_config"):
        return _pairs(model, config, micro_batch, sequence_length)
    length = _length(model, config, sequence_length)
    vocabulary = _first(config, "vocab_size") or 2
    tokens = next((name for name in names if name in ("input_ids", "tokens", "tokens_BT", "idx")), None)
    if tokens is None:
        raise ValueError(_unknown(model, names))
    inputs = {tokens: Field((micro_batch, length), torch.int64, vocabulary)}
    labels = next((name for name in names if name in ("labels", "labels_BT", "targets")), None)
    if labels is not None:
        inputs[labels] = _labels(model, config, micro_batch, length, vocabulary)
    return Batch(kwargs=inputs)


def _unknown(model: nn.Module, names: list[str]) -> str:
    return (
        f"{type(model).__name__}.forward takes {', '.join(names) or 'nothing'}: its inputs cannot be "
        "guessed; give batch=, one micro-batch of tensors (on any device, meta too)"
    )


def _length(model: nn.Module, config: Any, wanted: int | None) -> int:
    """Tokens of a sequence: a lookup of shapes alone would not fail where that of a run does."""
    learnt = {
        name: module.num_embeddings - _unused(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _LEARNT.search(name) and not _NO_TEXT.search(name)
    }
    fewest = min(learnt, key=lambda name: learnt[name], default=None)
    if fewest is None:
        return wanted or default_length(config)
    if wanted is not None and wanted > learnt[fewest]:
        raise ValueError(
            f"sequence_length {wanted} is longer than the {learnt[fewest]} positions that "
            f"{type(model).__name__} has learnt ({fewest}): give at most {learnt[fewest]}"
        )
    return wanted or min(default_length(config), learnt[fewest])


def _unused(positions: nn.Embedding) -> int:
    """Rows of learnt positions that no token has: RoBERTa counts from behind that of padding, OPT from 2."""
    offset = getattr(positions, "offset", 0)
    padding = positions.padding_idx
    return offset if isinstance(offset, int) and offset else 0 if padding is None else padding + 1


def default_length(config: Any) -> int:
    """The longest sequence that a model's config allows, at most 1,024."""
    longest = _first(config, "max_position_embeddings", "n_positions", "block_size", "max_seq_len")
    return min(longest or 1024, 1024)


def _shape(leaf: Any) -> Any:
    return Field(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Field) else leaf


def _labels(model: nn.Module, config: Any, rows: int, length: int, vocabulary: int) -> Field:
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return Field((rows,), torch.int64, _first(config, "num_labels") or 2)
    if name.endswith("ForTokenClassification"):
        return Field((rows, length), torch.int64, _first(config, "num_labels") or 2)
    return Field((rows, length), torch.int64, vocabulary)


def _images(model: nn.Module, config: Any, names: list[str], rows: int) -> Batch:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    inputs = {
        "pixel_values": Field((rows, _first(config, "num_channels") or 3, height, width), torch.float32)
    }
    name = type(model).__name__
    if "labels" in names and "Detection" not in name and "MaskedImage" not in name:
        shape = (rows, height, width) if name.endswith("Segmentation") else (rows,)
        inputs["labels"] = Field(shape, torch.int64, _first(config, "num_labels") or 2)
    return Batch(kwargs=inputs)


def _sounds(model: nn.Module, config: Any, names: list[str], rows: int, wanted: int | None) -> Batch:
    """Spectra as Whisper and its like take them (always a whole window), or samples; texts as labels."""
    frames, bands = _first(config, "max_source_positions"), _first(config, "num_mel_bins")
    if "input_features" in names and frames and bands:
        strides = [module.stride[0] for module in model.modules() if isinstance(module, nn.Conv1d)]
        shape: tuple[int, ...] = (rows, bands, frames * prod(strides))
    elif "input_values" in names and (strides := getattr(config, "conv_stride", None)):
        shape = (
            rows,
            (wanted or default_length(config)) * prod(strides) + max(config.conv_kernel) * prod(strides),
        )
    else:
        raise ValueError(_unknown(model, names))
    inputs = {
        ("input_features" if "input_features" in names else "input_values"): Field(shape, torch.float32)
    }
    if "labels" in names and "decoder_input_ids" in names:
        most = _first(config, "max_target_positions") or 1024
        if wanted is not None and wanted > most:
            raise ValueError(
                f"sequence_length {wanted} is longer than the {most} positions of {type(model).__name__}"
            )
        vocabulary = _first(config, "vocab_size") or 2
        inputs["labels"] = Field((rows, min(wanted or default_length(config), most)), torch.int64, vocabulary)
    return Batch(kwargs=inputs)


def _pairs(model: nn.Module, config: Any, rows: int, wanted: int | None) -> Batch:
    """What CLIP and its like compare: as many texts as images."""
    text = getattr(config, "text_config", config)
    length = _length(model, text, wanted)
    inputs: dict[str, Any] = {
        "input_ids": Field((rows, length), torch.int64, _first(text, "vocab_size") or 2),
        **_images(model, config.vision_config, ["pixel_values"], rows).kwargs,
    }
    return Batch(kwargs={**inputs, "return_loss": True})


def _first(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
