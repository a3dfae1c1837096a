"""Parts of a batch: what each rank of a sequence team gets, with labels and positions right.

A batch can be cut in the model's forward (every rank then has the whole one) or before, by the loader:
:func:`splitter_of` gives the same cut to both.  Labels are shifted before they are cut, so that the
last token of a part still has its target, which lies in another rank's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.mesh import Axes
from thalweg.observe.meter import PART
from thalweg.parallel.shares import Shares

IGNORED = -100
_BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels")


@dataclass
class Whole:
    """What is known of the whole sequence whose part is being computed."""

    length: int = 0
    padding: Tensor | None = None  # (B, T) true for tokens that count
    documents: Tensor | None = None  # (B, T) number of the document

    def to(self, device: torch.device) -> Whole:
        """The same on a device."""
        moved = (None if x is None else x.to(device) for x in (self.padding, self.documents))
        return Whole(self.length, *moved)


def documents_of(position_ids: Tensor) -> Tensor | None:
    """The number of the document of each token (B, T), from positions that begin again; None if none do."""
    begins = position_ids.diff(dim=-1) != 1
    if not bool(begins.any()):
        return None
    return F.pad(begins.long().cumsum(-1), (1, 0))


@dataclass
class Signature:
    """How a model takes its arguments."""

    names: list[str]
    hugging_face: bool
    open_ended: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        parameters = inspect.signature(type(model).forward).parameters
        kinds = {p.kind for p in parameters.values()}
        names = [name for name in parameters if name != "self"]
        return cls(names, hasattr(model, "main_input_name"), inspect.Parameter.VAR_KEYWORD in kinds)


def tokens_of(batch: Mapping[str, Any], signature: Signature) -> Tensor:
    if not signature.hugging_face:
        return next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1)
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    assert isinstance(tokens, Tensor)
    return tokens


def whole_of(batch: Mapping[str, Any], signature: Signature) -> Whole:
    """What attention must know of a whole batch.

    Raises:
        ValueError: the attention mask is not one by token.
    """
    tokens = tokens_of(batch, signature)
    length, positions = tokens.shape[1], batch.get("position_ids")
    padding = batch.get("attention_mask") if signature.hugging_face else None
    if padding is not None and padding.dim() != 2:
        raise ValueError(
            "sequence_parallel_size or context_parallel_size above 1 takes an attention_mask of shape "
            "(batch, tokens)"
        )
    documents = None
    if positions is not None and padding is None:
        documents = documents_of(positions if positions.dim() > 1 else positions[None])
        if documents is not None:
            documents = documents.expand(tokens.shape[0], -1)
    if padding is not None:
        padding = None if bool(padding.all()) else padding.bool()
    return Whole(length, padding, documents)


@dataclass(frozen=True)
class Splitter:
    """Hands each rank its part of a batch; ``shifts``: the model's loss shifts labels by itself."""

    shares: Shares
    signature: Signature
    shifts: bool = False

    def part(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Own tokens of everything in ``batch`` that is by token (dim 1), with positions and labels right.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        tokens = tokens_of(batch, self.signature)
        batch = dict(batch)
        positions = batch.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 1:
            batch["position_ids"] = positions[None]
        part = {
            key: self.shares.take(value) if self._by_token(key, value, length) else value
            for key, value in batch.items()
        }
        if positions is None:
            part["position_ids"] = self.shares.positions(length, tokens.device)[None]
        if not self.signature.hugging_face:
            return part
        if batch.get("attention_mask") is None:
            # Without it the model would look for documents in its own part of the positions.
            part["attention_mask"] = tokens.new_ones(tokens.shape[0], part["position_ids"].shape[1]).long()
        labels, shifted = batch.get("labels"), batch.get("shift_labels")
        if isinstance(shifted, Tensor):
            part["shift_labels"] = self.shares.take(shifted)
        elif self.shifts and isinstance(labels, Tensor):
            part["shift_labels"] = self.shares.take(F.pad(labels, (0, 1), value=IGNORED)[:, 1:])
        return {**part, "use_cache": False}

    def _by_token(self, key: str, value: Any, length: int) -> bool:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return False
        return key in _BY_TOKEN if self.signature.hugging_face else value.shape[1] == length

    def prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part with what the model must know of the whole, ready to be given to the model.

        Raises:
            ValueError: there are fewer tokens than ranks, or the attention mask is not one by token.
        """
        whole = whole_of(batch, self.signature)
        return {**self.part(batch, whole.length), PART: whole}


def splitter_of(model: nn.Module, shares: Shares) -> Splitter:
    """The cut that fits ``model``'s arguments and loss."""
    signature = Signature.of(model)
    causal = getattr(model, "loss_type", None) in (None, "ForCausalLM")
    return Splitter(shares, signature, signature.hugging_face and causal and signature.open_ended)


def splitter_for(model: nn.Module, axes: Axes) -> Splitter | None:
    """What cuts this rank's batches before they reach ``model``, or None where sequences are whole.

    Only for batches with names (Hugging Face's): others are cut in the model's forward.
    """
    if axes.sequence is None or not Signature.of(model).hugging_face:
        return None
    context = 1 if axes.ring is None else axes.ring.size()
    shares = Shares(context, axes.sequence.size() // context, axes.sequence.get_local_rank())
    return splitter_of(model, shares)
