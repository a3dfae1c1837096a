"""Sequence parallelism: each rank has a part of every sequence, and attention brings them together.

Two ways, alone or one inside the other.  Ulysses (:mod:`.ulysses`; Jacobs et al. 2023), on a team of two:

    everywhere else     all heads, own tokens      (B, H, T/2, D)
         | all-to-all: q, k, v
    attention           own heads, all tokens      (B, H/2, T, D)
         | all-to-all: the result
    everywhere else     all heads, own tokens

so activations shrink by the size of the team, and a rank sends (n-1)/n of its part of q, k,
v and the output, whatever the sequence's length; it takes as many heads as ranks.  The ring
(:mod:`.ring_attention`) moves keys instead, and takes any number of ranks.  Together, Ulysses gathers the tokens
of one ring rank, and the ring those of all.

* **Shares.**  Lengths differ by at most one token (:mod:`.partition`), heads are dealt out like tensor ranks'
  (:mod:`thalweg.parallel.tensor.tensor_parallel.heads`), so neither has to divide.
* **Masks** are made from what the user gave for the whole sequence: padding, and documents
  packed one behind the other (positions that begin again); piece by piece where sequences are long.
* **Loss.**  Each rank sums over its own targets, and the team's number of targets divides, so
  the mean over ranks is the mean over tokens, also where a shard has none.

Attention is found in Hugging Face's attention interface (by an implementation of its own, set
on this model's config) or as ``F.scaled_dot_product_attention``, seen by a function mode while
this model's blocks run.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.observe.step_meter import SEQUENCE_META_KEY
from thalweg.ops.attention.intercept import (
    find_attention_configs,
    intercepting_forward,
    is_trivial_mask,
    register_attention,
)
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.sequence import batch_split
from thalweg.parallel.sequence.batch_split import SequenceMeta
from thalweg.parallel.sequence.loss import SequenceParallelLoss, replace_loss_by_mean
from thalweg.parallel.sequence.partition import SequencePartition
from thalweg.parallel.sequence.ring_attention import MaskFn, RingAttention, RingAttentionSpec
from thalweg.parallel.sequence.ulysses import heads_to_tokens, tokens_to_heads
from thalweg.parallel.shard_spec import split_evenly
from thalweg.parallel.tensor.heads import AttentionHeads, assign_heads
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.utils.trees import iter_tensors

_TILE_TOKENS = 1024  # tokens up to which a mask of the whole sequence is made; on CUDA, whose kernels
_CUDA_TILE_FACTOR = 16  # for blocks take no mask, 16 times as many
_CONFIG_KEYS = "sequence_parallel_size or context_parallel_size above 1"


@dataclass(frozen=True)
class SequenceGroups:
    """The ranks that share a sequence: all of them, those that exchange heads, those on the ring."""

    sp_group: ParallelGroup
    ulysses_group: ParallelGroup | None = None
    cp_group: ParallelGroup | None = None

    @property
    def partition(self) -> SequencePartition:
        """Who has which tokens."""
        cp_size = self.cp_group.size if self.cp_group else 1
        return SequencePartition(cp_size, self.ulysses_group.size if self.ulysses_group else 1, self.sp_group.rank)


class SequenceParallelAttention:
    """One model's attention over sequences that its ranks share, and the sequence it is working on.

    ``on_token_count`` is called with the number of targets of each loss.
    """

    def __init__(self, groups: SequenceGroups, on_token_count: Callable[[Tensor], None] | None = None) -> None:
        self.groups, self.partition = groups, groups.partition
        self.ring_attention = RingAttention(groups.cp_group)
        self.sequence_meta = SequenceMeta()
        self.is_attending = False  # while the parts of attention are computed, which are not to be taken for it
        self.on_token_count = on_token_count

    def save_context(self) -> SequenceMeta:
        """What is known of the sequence at hand, for a backward pass that recomputes."""
        return self.sequence_meta

    def restore_context(self, sequence_meta: SequenceMeta) -> None:
        """Be again at the sequence that :meth:`keep` was asked at."""
        self.sequence_meta = sequence_meta

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskFn | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attention over the whole sequence: q (B, H, own T, D), k and v (B, Hkv, own T, D) -> as q.

        ``mask`` is a function of positions in the whole sequence.
        """
        length, ring = self.sequence_meta.length, self.ring_attention
        group = None if self.sequence_meta.is_whole else self.groups.ulysses_group
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

        def ring_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Of the heads at hand, with those of the ring."""
            is_short = length <= (_TILE_TOKENS if q.is_cpu else _CUDA_TILE_FACTOR * _TILE_TOKENS)
            if ring.size == 1 and (mask is None or dropout > 0 or is_short):
                # Kernels that take a mask know no groups of heads: torch would go by the scores of all pairs, in fp32.
                if q.shape[1] > k.shape[1] and (q.is_cpu or mask is not None):
                    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
                index = torch.arange(length, device=q.device)
                dense_mask = None if mask is None else mask(index, index)
                is_causal = causal and mask is None
                options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] > k.shape[1]}
                return F.scaled_dot_product_attention(q, k, v, dense_mask, dropout, is_causal, **options)
            if dropout > 0:
                raise ValueError(
                    f"context_parallel_size above 1 cannot drop attention weights (probability {dropout}): set "
                    "the model's attention dropout to 0; dropout elsewhere is fine"
                )
            if ring.size == 1:  # tile by tile: a mask of the whole would take T x T
                spans = (tuple(split_evenly(length, -(-length // _TILE_TOKENS))),)
            else:
                spans = tuple(self.partition.cp_spans(length, rank) for rank in range(ring.size))
            return ring.attend(q, k, v, RingAttentionSpec(spans, causal, mask, scale))

        was_attending, self.is_attending = self.is_attending, True
        try:
            if group is None:
                return ring_attend(query, key, value)
            if query.shape[1] < group.size:
                raise ValueError(
                    f"sequence_parallel_size = {group.size} is more than the {query.shape[1]} attention heads of "
                    "a rank; set it to at most that, and context_parallel_size to the rest"
                )
            token_counts = self.partition.ulysses_token_counts(length)
            assignment = assign_heads(AttentionHeads(query.shape[1], key.shape[1], query.shape[3]), group.size)
            query_heads = [list(range(*span)) for span in assignment.query_spans]
            kv_heads = [list(own) for own in assignment.kv_heads]
            q, k, v = tokens_to_heads([query, key, value], [query_heads, kv_heads, kv_heads], token_counts, group)
            y = ring_attend(q, k, v)
            return heads_to_tokens(y, [len(own) for own in query_heads], token_counts, group)
        finally:
            self.is_attending = was_attending

    def attend_sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, scale: float | None
    ) -> Tensor:
        """:meth:`attend` in place of ``F.scaled_dot_product_attention``."""
        if mask is not None:
            raise ValueError(
                f"{_CONFIG_KEYS} needs attention without a mask of its own (is_causal=True), "
                "or a model of Hugging Face's attention interface, whose mask is made for the whole sequence"
            )
        return self.attend(q, k, v, self.document_mask(causal), dropout, causal, scale)

    def document_mask(self, causal: bool) -> MaskFn | None:
        """What documents need, as a function of positions; None for one document."""
        documents = self.sequence_meta.documents
        if documents is None:
            return None

        def mask_fn(rows: Tensor, columns: Tensor) -> Tensor:
            same = documents[:, None, rows, None] == documents[:, None, None, columns]
            return same & (columns <= rows[:, None]) if causal else same

        return mask_fn


def apply_sequence_parallel(
    model: nn.Module,
    groups: SequenceGroups,
    blocks: Iterable[nn.Module],
    on_token_count: Callable[[Tensor], None] | None = None,
) -> SequenceParallelAttention:
    """Let ``model`` work on parts of sequences; it then takes whole batches, alike on all ranks of the team.

    ``blocks``: its transformer blocks, in which attention happens.  Logits, where returned, are those
    of the own part; the loss is the whole batch's.

    Raises:
        ValueError: the model has two sequences, takes no positions, or biases attention by head.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    needs_whole = getattr(model, "loss_type", None) in ("ForSequenceClassification", "ForQuestionAnswering")
    if (
        getattr(config, "is_encoder_decoder", False)
        or model_type in ("bloom", "mpt", "falcon", "gemma2")
        or needs_whole
    ):
        raise ValueError(
            f"{_CONFIG_KEYS} does not work for {type(model).__name__}, whose attention has biases by head, caps, or "
            "two sequences, or whose loss needs the whole sequence; set it to 1"
        )
    signature = batch_split.ForwardSignature.from_model(model)
    if "position_ids" not in signature.arg_names:
        raise ValueError(
            f"{_CONFIG_KEYS} needs {type(model).__name__}.forward to take position_ids, as "
            "each rank has a part of the positions"
        )
    attention = SequenceParallelAttention(groups, on_token_count)
    if signature.is_hugging_face:
        _register_attention_interface([model], attention)
    else:
        install_attention(list(blocks) or [model], attention)
    splitter = batch_split.build_splitter(model, attention.partition)
    inner, sp_group = type(model).forward, attention.groups.sp_group

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {**dict(zip(signature.arg_names, args, strict=False)), **kwargs}
        sequence_meta = batch.pop(SEQUENCE_META_KEY, None)
        tokens = batch_split.get_tokens(batch, signature)
        if sequence_meta is not None and sequence_meta.is_whole:
            own = batch_split.sequence_meta_from_batch(batch, signature)
            attention.sequence_meta, local_batch = replace(own, has_own_loss=True, is_whole=True), batch
        elif sequence_meta is None:
            attention.sequence_meta = batch_split.sequence_meta_from_batch(batch, signature)
            sp_group.verify_same_batch(tokens, "sequence")
            local_batch = splitter.local_batch(batch, attention.sequence_meta.length)
        else:
            attention.sequence_meta, local_batch = sequence_meta.to(tokens.device), batch
        own_meta = attention.sequence_meta
        if own_meta.has_own_loss:
            output = inner(self, **local_batch)
        else:
            with SequenceParallelLoss(sp_group, attention.on_token_count):
                output = replace_loss_by_mean(inner(self, **local_batch), sp_group)
        for tensor in iter_tensors(output):
            if tensor.requires_grad:  # a backward pass that recomputes is at this sequence again, whatever came between
                tensor.register_hook(lambda _: attention.restore_context(own_meta))
        return output

    replace_forward(model, forward)
    return attention


def install_attention(blocks: Sequence[nn.Module], attention: SequenceParallelAttention) -> None:
    """Let attention in ``blocks`` be over the sequences that ``attention`` knows of."""
    if find_attention_configs(blocks):
        _register_attention_interface(blocks, attention)
    for block in blocks:
        how = attention.attend_sdpa, lambda: attention.is_attending
        replace_forward(block, intercepting_forward(type(block).forward, *how))


# Hugging Face's attention interface


def _register_attention_interface(models: Sequence[nn.Module], attention: SequenceParallelAttention) -> None:
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, padding_mask_function, sdpa_mask

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, dropout: float, scale: float | None) -> Tensor:
        if isinstance(mask, Tensor):
            raise ValueError(f"{_CONFIG_KEYS} needs masks that the model makes for the whole sequence by itself")
        return attention.attend(q, k, v, mask, dropout, causal, scale)

    def make_mask(
        batch_size: int, q_length: int, kv_length: int, *, mask_function: Any, **kwargs: Any
    ) -> MaskFn | None:
        sequence_meta = attention.sequence_meta
        if sequence_meta.documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(sequence_meta.documents))
            kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        if kwargs.get("use_vmap"):  # functions of its own, which take one position at a time
            if attention.ring_attention.size > 1:
                raise ValueError(
                    "context_parallel_size above 1 does not work with the mask that "
                    f"{type(models[0]).__name__} makes of functions of its own; set it to 1"
                )
            kwargs["attention_mask"] = sequence_meta.padding
            length = sequence_meta.length
            dense_mask = sdpa_mask(batch_size, length, length, mask_function=mask_function, **kwargs)
            return None if dense_mask is None else lambda queries, keys: dense_mask[:, :, queries[:, None], keys]
        if sequence_meta.padding is not None:
            mask_function = and_masks(mask_function, padding_mask_function(sequence_meta.padding))
        elif is_trivial_mask(sequence_meta.length, **kwargs):
            return None
        rows = torch.arange(batch_size, device=kwargs.get("device", "cpu"))[:, None, None, None]
        head = torch.zeros_like(rows[:1])

        def mask_fn(queries: Tensor, keys: Tensor) -> Tensor:
            attended = mask_function(rows, head, queries[None, None, :, None], keys[None, None, None, :])
            return attended.expand(attended.shape[0], 1, len(queries), len(keys))

        return mask_fn

    refusal = f"{_CONFIG_KEYS} does not work with attention's {{}}"
    register_attention("sequence", find_attention_configs(models), attend, make_mask, refusal)
