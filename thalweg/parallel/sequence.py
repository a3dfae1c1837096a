"""Sequence parallelism: each rank has a part of every sequence, and attention brings them together.

Two ways, alone or one inside the other.  Ulysses (:mod:`.ulysses`; Jacobs et al. 2023), on a team of two:

    everywhere else     all heads, own tokens      (B, H, T/2, D)
         | all-to-all: q, k, v
    attention           own heads, all tokens      (B, H/2, T, D)
         | all-to-all: the result
    everywhere else     all heads, own tokens

so activations shrink by the size of the team, and a rank sends (n-1)/n of its part of q, k,
v and the output, whatever the sequence's length; it takes as many heads as ranks.  The ring
(:mod:`.context`) moves keys instead, and takes any number of ranks.  Together, Ulysses gathers the tokens
of one ring rank, and the ring those of all.

* **Shares.**  Lengths differ by at most one token (:mod:`.shares`), heads are dealt out like tensor ranks'
  (:mod:`.heads`), so neither has to divide.
* **Masks** are made from what the user gave for the whole sequence: padding, and documents
  packed one behind the other (positions that begin again); piece by piece where sequences are long.
* **Loss.**  Each rank sums over its own targets, and the team's number of targets divides, so
  the mean over ranks is the mean over tokens, also where a shard has none.

Attention is found in Hugging Face's attention interface (by an implementation of its own, set
on this model's config) or as ``F.scaled_dot_product_attention``, seen by a function mode while
this model's blocks run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.observe.meter import PART
from thalweg.parallel.context import Layout, Ring, Seen
from thalweg.parallel.cuts import even
from thalweg.parallel.heads import Heads, deal
from thalweg.parallel.layers import give_forward
from thalweg.parallel.losses import TeamLosses, with_mean_loss
from thalweg.parallel.parts import Signature, Splitter, Whole, splitter_of, tokens_of, whole_of
from thalweg.parallel.shares import Shares
from thalweg.parallel.team import Team
from thalweg.parallel.ulysses import to_heads, to_tokens

_serial = itertools.count()
_TILE = 1024  # tokens up to which a mask of the whole sequence is made; on CUDA, whose kernels
_CUDA_TILES = 16  # for blocks take no mask, 16 times as many
_KEYS = "sequence_parallel_size or context_parallel_size above 1"


@dataclass(frozen=True)
class SequenceTeams:
    """The ranks that share a sequence: all of them, those that exchange heads, those on the ring."""

    everyone: Team
    heads: Team | None = None
    ring: Team | None = None

    @property
    def shares(self) -> Shares:
        """Who has which tokens."""
        context = self.ring.size if self.ring else 1
        return Shares(context, self.heads.size if self.heads else 1, self.everyone.rank)

    @property
    def all(self) -> list[Team]:
        """The teams there are."""
        return [team for team in (self.everyone, self.heads, self.ring) if team is not None]


class Attention:
    """One model's attention over sequences that its ranks share, and the sequence it is working on."""

    def __init__(self, teams: SequenceTeams) -> None:
        self.teams, self.shares = teams, teams.shares
        self.ring = Ring(teams.ring)
        self.whole = Whole()
        self.busy = False  # while the parts of attention are computed, which are not to be taken for it
        # Hears of the number of targets of each loss, if anybody wants to know.
        self.tell: Callable[[Tensor], None] | None = None
        self._checks = 2  # whole batches still to be compared

    def trust_rows(self) -> None:
        """Compare no batches: there is nobody to compare them with."""
        self._checks = 0

    def keep(self) -> Whole:
        """What is known of the sequence at hand, for a backward pass that recomputes."""
        return self.whole

    def resume(self, whole: Whole) -> None:
        """Be again at the sequence that :meth:`keep` was asked at."""
        self.whole = whole

    def check_rows(self, tokens: Tensor) -> None:
        """See that all ranks of the team were given the same first batches; collective.

        Raises:
            ValueError: they were not.
        """
        if self._checks == 0:
            return
        self._checks -= 1
        place = torch.arange(1, tokens.numel() + 1, device=tokens.device, dtype=torch.float64)
        own = torch.stack([(tokens.detach().reshape(-1).double() * place.sin()).sum(), place[-1]])
        team = self.teams.everyone
        low = team.all_reduce(own.clone(), "batch", dist.ReduceOp.MIN)
        high = team.all_reduce(own.clone(), "batch", dist.ReduceOp.MAX)
        if not torch.allclose(low, high, rtol=1e-9):
            raise ValueError(
                "the ranks that share a sequence were given different batches: deal rows out over the ranks "
                "of other sequences alone (training_data= given to initialize() is dealt so)"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Seen | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attention over the whole sequence: q (B, H, own T, D), k and v (B, Hkv, own T, D) -> as q.

        ``mask`` is a function of positions in the whole sequence.
        """
        before, self.busy = self.busy, True
        try:
            return self._attend(query, key, value, mask, dropout, causal, scale)
        finally:
            self.busy = before

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Seen | None,
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if self.teams.heads is None:
            return self._over_ring(
                query, key, value, query.shape[1] // key.shape[1], mask, dropout, causal, scale
            )
        team, sizes = self.teams.heads, self.shares.sizes(self.whole.length)
        if query.shape[1] < team.size:
            raise ValueError(
                f"sequence_parallel_size = {team.size} is more than the {query.shape[1]} attention heads of "
                "a rank; set it to at most that, and context_parallel_size to the rest"
            )
        dealt = deal(Heads(query.shape[1], key.shape[1], query.shape[3]), team.size)
        queries = [list(range(*span)) for span in dealt.query]
        pairs = [list(own) for own in dealt.key_value]
        q, k, v = to_heads([query, key, value], [queries, pairs, pairs], sizes, team)
        y = self._over_ring(q, k, v, dealt.repeat[team.rank], mask, dropout, causal, scale)
        return to_tokens(y, [len(own) for own in queries], sizes, team)

    def _over_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        repeat: int,
        mask: Seen | None,
        dropout: float,
        causal: bool,
        scale: float,
    ) -> Tensor:
        length = self.whole.length
        short = length <= (_TILE if q.is_cpu else _CUDA_TILES * _TILE)
        if self.ring.size == 1 and (mask is None or dropout > 0 or short):
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            index = torch.arange(length, device=q.device)
            hidden = None if mask is None else mask(index, index)
            causal = causal and mask is None
            return F.scaled_dot_product_attention(q, k, v, hidden, dropout, causal, scale=scale)
        if dropout > 0:
            raise ValueError(
                f"context_parallel_size above 1 cannot drop attention weights (probability {dropout}): set "
                "the model's attention dropout to 0; dropout elsewhere is fine"
            )
        if self.ring.size == 1:  # tile by tile: a mask of the whole would take T x T
            spans = (tuple(even(length, -(-length // _TILE))),)
        else:
            spans = tuple(self.shares.ring(length, rank) for rank in range(self.ring.size))
        return self.ring.attend(q, k, v, Layout(spans, causal, mask, scale, repeat))

    def mask(self, causal: bool) -> Seen | None:
        """What documents need, as a function of positions; None for one document."""
        documents = self.whole.documents
        if documents is None:
            return None

        def seen(rows: Tensor, columns: Tensor) -> Tensor:
            same = documents[:, None, rows, None] == documents[:, None, None, columns]
            return same & (columns <= rows[:, None]) if causal else same

        return seen


class _Attentions(TorchFunctionMode):
    """While a block runs: ``F.scaled_dot_product_attention`` is over the whole sequence."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or self._attention.busy:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if named.get("attn_mask") is not None:
            raise ValueError(
                f"{_KEYS} needs attention without a mask of its own (is_causal=True), "
                "or a model of Hugging Face's attention interface, whose mask is made for the whole sequence"
            )
        mask = self._attention.mask(named.get("is_causal", False))
        return self._attention.attend(
            named["query"],
            named["key"],
            named["value"],
            mask,
            named.get("dropout_p", 0.0),
            named.get("is_causal", False),
            named.get("scale"),
        )


def sequence_parallel(model: nn.Module, teams: SequenceTeams, blocks: Iterable[nn.Module]) -> Attention:
    """Let ``model`` work on parts of sequences; it then takes whole batches, alike on all ranks of the team.

    ``blocks``: its transformer blocks, in which attention happens.  Logits, where returned, are those
    of the own part; the loss is the whole batch's.

    Raises:
        ValueError: the model has two sequences, takes no positions, or biases attention by head.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False) or kind in ("bloom", "mpt", "falcon", "gemma2"):
        raise ValueError(
            f"{_KEYS} does not work for {type(model).__name__}, whose attention has "
            "biases by head, caps, or two sequences; set it to 1"
        )
    signature = Signature.of(model)
    if "position_ids" not in signature.names:
        raise ValueError(
            f"{_KEYS} needs {type(model).__name__}.forward to take position_ids, as "
            "each rank has a part of the positions"
        )
    attention = Attention(teams)
    if signature.hugging_face:
        _use_interface([model], attention)
    else:
        attend_together(list(blocks) or [model], attention)
    give_forward(model, _root_forward(model, attention, splitter_of(model, attention.shares), signature))
    return attention


def attend_together(blocks: Sequence[nn.Module], attention: Attention) -> None:
    """Let attention in ``blocks`` be over the sequences that ``attention`` knows of."""
    if any(hasattr(getattr(m, "config", None), "_attn_implementation") for b in blocks for m in b.modules()):
        _use_interface(blocks, attention)
    for block in blocks:
        give_forward(block, _within(type(block).forward, lambda: _Attentions(attention)))


def _within(inner: Callable[..., Any], mode: Callable[[], TorchFunctionMode]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return inner(self, *args, **kwargs)

    return forward


def _root_forward(
    model: nn.Module, attention: Attention, splitter: Splitter, signature: Signature
) -> Callable[..., Any]:
    inner, team = type(model).forward, attention.teams.everyone

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {**dict(zip(signature.names, args, strict=False)), **kwargs}
        given = batch.pop(PART, None)
        tokens = tokens_of(batch, signature)
        if given is None:
            attention.whole = whole_of(batch, signature)
            attention.check_rows(tokens)
            part = splitter.part(batch, attention.whole.length)
        else:
            attention.whole, part = given.to(tokens.device), batch
        with TeamLosses(team, attention.tell):
            output = inner(self, **part)
        return with_mean_loss(output, team)

    return forward


# Hugging Face's attention interface


def _use_interface(models: Sequence[nn.Module], attention: Attention) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        and_masks,
        packed_sequence_mask_function,
        padding_mask_function,
        sdpa_mask,
    )

    name = f"thalweg_sequence_{next(_serial)}"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise ValueError(f"{_KEYS} does not work with attention's {option!r}")
        if isinstance(attention_mask, Tensor):
            raise ValueError(f"{_KEYS} needs masks that the model makes for the whole sequence by itself")
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
        y = attention.attend(query, key, value, attention_mask, dropout, causal, scale)
        return y.transpose(1, 2).contiguous(), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, *, mask_function: Any, **kwargs: Any
    ) -> Seen | None:
        whole = attention.whole
        if whole.documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(whole.documents))
            kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        if kwargs.get("use_vmap"):  # functions of its own, which take one position at a time
            if attention.ring.size > 1:
                raise ValueError(
                    "context_parallel_size above 1 does not work with the mask that "
                    f"{type(models[0]).__name__} makes of functions of its own; set it to 1"
                )
            kwargs["attention_mask"] = whole.padding
            made = sdpa_mask(batch_size, whole.length, whole.length, mask_function=mask_function, **kwargs)
            return None if made is None else lambda queries, keys: made[:, :, queries[:, None], keys]
        if whole.padding is not None:
            mask_function = and_masks(mask_function, padding_mask_function(whole.padding))
        elif _plain(whole.length, **kwargs):
            return None
        rows = torch.arange(batch_size, device=kwargs.get("device", "cpu"))[:, None, None, None]
        head = torch.zeros_like(rows[:1])

        def seen(queries: Tensor, keys: Tensor) -> Tensor:
            found = mask_function(rows, head, queries[None, None, :, None], keys[None, None, None, :])
            return found.expand(found.shape[0], 1, len(queries), len(keys))

        return seen

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    modules = [module for model in models for module in model.modules()]
    configs: dict[int, Any] = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _plain(
    length: int,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether a mask that nothing is hidden by is just causal, or none at all."""
    wide = local_size is None or length < local_size
    return wide and (allow_is_causal_skip or allow_is_bidirectional_skip)
