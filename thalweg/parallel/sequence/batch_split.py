"""Parts of a batch: what each rank of a sequence team gets, with labels and positions right.

A batch can be cut in the model's forward (every rank then has the whole one) or before, by the loader:
:func:`build_splitter` gives the same cut to both.  Labels are shifted before they are cut, so that the
last token of a part still has its target, which lies in another rank's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.observe.step_meter import SEQUENCE_META_KEY
from thalweg.parallel.sequence.partition import SequencePartition
from thalweg.parallel_dims import ParallelMeshes

IGNORE_INDEX = -100
_TOKEN_KEYS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels")


@dataclass
class SequenceMeta:
    """What is known of the whole sequence whose part is being computed."""

    length: int = 0
    padding: Tensor | None = None  # (B, T) true for tokens that count
    documents: Tensor | None = None  # (B, T) number of the document
    has_own_loss: bool = False  # the model's is that of the rank's own targets; the program weighs those of the team
    is_whole: bool = False  # this rank has all of it, and the others have others

    def to(self, device: torch.device) -> SequenceMeta:
        """The same on a device."""
        padding, documents = (None if x is None else x.to(device) for x in (self.padding, self.documents))
        return replace(self, padding=padding, documents=documents)


def document_ids_from_positions(position_ids: Tensor) -> Tensor | None:
    """The number of the document of each token (B, T), from positions that begin again; None if none do."""
    starts = position_ids.diff(dim=-1) != 1
    if not bool(starts.any()):
        return None
    return F.pad(starts.long().cumsum(-1), (1, 0))


@dataclass
class ForwardSignature:
    """How a model takes its arguments."""

    arg_names: list[str]
    is_hugging_face: bool
    accepts_kwargs: bool = False

    @classmethod
    def from_model(cls, model: Any) -> ForwardSignature:
        parameters = inspect.signature(type(model).forward).parameters
        kinds = {p.kind for p in parameters.values()}
        names = [name for name in parameters if name not in ("self", "args", "kwargs")]
        adapters = getattr(model, "active_peft_config", None)
        if adapters is not None and not adapters.is_prompt_learning:  # PEFT's wrapper passes on what it does not name
            names += cls.from_model(model.get_base_model()).arg_names
        return cls(names, hasattr(model, "main_input_name"), inspect.Parameter.VAR_KEYWORD in kinds)


def get_tokens(batch: Mapping[str, Any], signature: ForwardSignature) -> Tensor:
    if not signature.is_hugging_face:
        return next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1)
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    assert isinstance(tokens, Tensor)
    return tokens


def sequence_meta_from_batch(batch: Mapping[str, Any], signature: ForwardSignature) -> SequenceMeta:
    """What attention must know of a whole batch.

    Raises:
        ValueError: the attention mask is not one by token.
    """
    tokens = get_tokens(batch, signature)
    length, positions = tokens.shape[1], batch.get("position_ids")
    padding = batch.get("attention_mask") if signature.is_hugging_face else None
    if padding is not None and padding.dim() != 2:
        raise ValueError(
            "sequence_parallel_size or context_parallel_size above 1 takes an attention_mask of shape (batch, tokens)"
        )
    documents = None
    if positions is not None and padding is None:
        documents = document_ids_from_positions(positions if positions.dim() > 1 else positions[None])
        if documents is not None:
            documents = documents.expand(tokens.shape[0], -1)
    if padding is not None:
        padding = None if bool(padding.all()) else padding.bool()
    return SequenceMeta(length, padding, documents)


@dataclass(frozen=True)
class BatchSplitter:
    """Hands each rank its part of a batch; ``shifts_labels``: the model's loss shifts labels by itself."""

    partition: SequencePartition
    signature: ForwardSignature
    shifts_labels: bool = False

    def local_batch(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Own tokens of everything in ``batch`` that is by token (dim 1), with positions and labels right.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        tokens = get_tokens(batch, self.signature)
        batch = dict(batch)
        positions = batch.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 1:
            batch["position_ids"] = positions[None]
        local = {
            key: self.partition.local_tokens(value) if self._has_token_dim(key, value, length) else value
            for key, value in batch.items()
        }
        if positions is None:
            local["position_ids"] = self.partition.positions(length, tokens.device)[None]
        if not self.signature.is_hugging_face:
            return local
        if batch.get("attention_mask") is None:
            # Without it the model would look for documents in its own part of the positions.
            local["attention_mask"] = tokens.new_ones(tokens.shape[0], local["position_ids"].shape[1]).long()
        labels, shift_labels = batch.get("labels"), batch.get("shift_labels")
        if isinstance(shift_labels, Tensor):
            local["shift_labels"] = self.partition.local_tokens(shift_labels)
        elif self.shifts_labels and isinstance(labels, Tensor):
            local["shift_labels"] = self.partition.local_tokens(F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:])
        return {**local, "use_cache": False}

    def _has_token_dim(self, key: str, value: Any, length: int) -> bool:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return False
        return key in _TOKEN_KEYS if self.signature.is_hugging_face else value.shape[1] == length

    def split_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part with what the model must know of the whole, ready to be given to the model.

        Raises:
            ValueError: there are fewer tokens than ranks, or the attention mask is not one by token.
        """
        sequence_meta = sequence_meta_from_batch(batch, self.signature)
        return {**self.local_batch(batch, sequence_meta.length), SEQUENCE_META_KEY: sequence_meta}


def build_splitter(model: nn.Module, partition: SequencePartition) -> BatchSplitter:
    """The cut that fits ``model``'s arguments and loss."""
    signature = ForwardSignature.from_model(model)
    causal = None, "ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration"
    has_causal_loss = getattr(model, "loss_type", None) in causal
    shifts_labels = signature.is_hugging_face and has_causal_loss and signature.accepts_kwargs
    return BatchSplitter(partition, signature, shifts_labels)


def build_loader_splitter(model: nn.Module, meshes: ParallelMeshes) -> BatchSplitter | None:
    """What cuts this rank's batches before they reach ``model``, or None where sequences are whole.

    Only for batches with names (Hugging Face's): others are cut in the model's forward.
    """
    if meshes.sequence is None or not ForwardSignature.from_model(model).is_hugging_face:
        return None
    cp_size = 1 if meshes.cp is None else meshes.cp.size()
    partition = SequencePartition(cp_size, meshes.sequence.size() // cp_size, meshes.sequence.get_local_rank())
    return build_splitter(model, partition)
