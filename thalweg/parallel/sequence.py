"""Sequence parallelism (Ulysses): each rank has a part of every sequence, and all of it for some heads.

The picture, for one attention on a team of two (Jacobs et al. 2023, "DeepSpeed Ulysses"):

    everywhere else     all heads, own tokens      (B, H, T/2, D)
         | all-to-all: q, k, v
    attention           own heads, all tokens      (B, H/2, T, D)
         | all-to-all: the result
    everywhere else     all heads, own tokens

so activations shrink by the size of the team, and a rank sends (n-1)/n of its part of q, k,
v and the output, whatever the sequence's length.

* **Shards.**  Lengths differ by at most one token, heads are dealt out like tensor ranks'
  (:mod:`.heads`), so neither has to divide.
* **Masks** are made for the whole sequence from what the user gave for the whole: padding,
  and documents packed one behind the other (positions that begin again).
* **Loss.**  Each rank sums over its own targets, and the team's number of targets divides, so
  the mean over ranks is the mean over tokens, also where a shard has none.

Attention is found in Hugging Face's attention interface (by an implementation of its own, set
on this model's config) or as ``F.scaled_dot_product_attention``, seen by a function mode while
this model's blocks run.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.parallel.heads import Heads, deal
from thalweg.parallel.layers import give_forward
from thalweg.parallel.parts import Signature, Splitter, documents_of, sequence_sizes
from thalweg.parallel.team import Team

_serial = itertools.count()


@dataclass
class Whole:
    """What is known of the whole sequence whose part is being computed."""

    length: int = 0
    padding: Tensor | None = None  # (B, T) true for tokens that count
    documents: Tensor | None = None  # (B, T) number of the document


class Ulysses:
    """One model's sequence team, and the sequence it is working on."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.whole = Whole()

    @property
    def sizes(self) -> list[int]:
        """Lengths of all ranks' shards."""
        return sequence_sizes(self.whole.length, self.team.size)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attention over the whole sequence: q (B, H, own T, D), k and v (B, Hkv, own T, D) -> as q.

        ``mask`` is for the whole sequence: (B or 1, 1, T, T).
        """
        dealt = deal(Heads(query.shape[1], key.shape[1], query.shape[3]), self.team.size)
        queries = [list(range(*span)) for span in dealt.query]
        pairs = [list(own) for own in dealt.key_value]
        q, k, v = self._to_heads([query, key, value], [queries, pairs, pairs])
        repeat = dealt.repeat[self.team.rank]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
        )
        return self._to_tokens(y, [len(own) for own in queries])

    def mask(self, causal: bool) -> Tensor | None:
        """The mask (B, 1, T, T) that documents need, or None where there is one document."""
        documents = self.whole.documents
        if documents is None:
            return None
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same.tril() if causal else same

    def _to_heads(self, tensors: list[Tensor], heads: list[list[list[int]]]) -> list[Tensor]:
        """Own tokens of all heads -> all tokens of own heads; one exchange for all ``tensors``."""
        team, sizes = self.team, self.sizes
        parts: list[list[Tensor]] = [[] for _ in range(team.size)]
        for tensor, by_rank in zip(tensors, heads, strict=True):
            for rank, own in enumerate(by_rank):
                parts[rank].append(tensor[:, own].reshape(-1))
        batch = tensors[0].shape[0]
        shapes = [
            [
                (batch, len(by_rank[team.rank]), size, t.shape[3])
                for t, by_rank in zip(tensors, heads, strict=True)
            ]
            for size in sizes
        ]
        received = _exchange(parts, shapes, team)
        return [torch.cat([from_rank[i] for from_rank in received], 2) for i in range(len(tensors))]

    def _to_tokens(self, y: Tensor, heads: list[int]) -> Tensor:
        """All tokens of own heads -> own tokens of all heads."""
        team, sizes = self.team, self.sizes
        parts = [[part.reshape(-1)] for part in y.split(sizes, 2)]
        own = sizes[team.rank]
        shapes = [[(y.shape[0], count, own, y.shape[3])] for count in heads]
        return torch.cat([received[0] for received in _exchange(parts, shapes, team)], 1)


def _exchange(
    parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], team: Team
) -> list[list[Tensor]]:
    """Send ``parts[rank]`` (flat) to each rank; returns what each sent here, in ``shapes[rank]``."""
    sent = torch.cat([piece for pieces in parts for piece in pieces])
    send_counts = [sum(piece.numel() for piece in pieces) for pieces in parts]
    lengths = [[torch.Size(shape).numel() for shape in own] for own in shapes]
    counts = [sum(own) for own in lengths]
    received = _AllToAll.apply(sent, send_counts, counts, team)
    result = []
    for flat, own, sizes in zip(received.split(counts), shapes, lengths, strict=True):  # type: ignore[union-attr]
        result.append([piece.view(shape) for piece, shape in zip(flat.split(sizes), own, strict=True)])
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, sent: Tensor, send_counts: list[int], counts: list[int], team: Team
    ) -> Tensor:
        ctx.send_counts, ctx.counts, ctx.team = send_counts, counts, team
        return team.all_to_all(sent, send_counts, counts, "attention")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.team.all_to_all(grads[0].contiguous(), ctx.counts, ctx.send_counts, "attention")
        return back, None, None, None


# The loss


class _Averaged(torch.autograd.Function):
    """The team's mean of a loss, for everybody to see; the gradient is that of the own part."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, team: Team) -> Tensor:  # type: ignore[override]
        return team.all_reduce(loss.detach().clone(), "loss") / team.size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def token_mean(total: Tensor, count: Tensor, team: Team) -> Tensor:
    """A loss whose mean over the team's ranks is the mean over the team's tokens.

    ``total``: the sum of this rank's token losses (0-dim); ``count``: its number of targets.
    """
    whole = team.all_reduce(count.detach().clone().to(torch.float64), "loss")
    return total * (team.size / whole).to(total.dtype)


class _Losses(TorchFunctionMode):
    """While the model runs: ``F.cross_entropy`` weighs tokens alike across shards."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        given = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        reduction, target, weight = named["reduction"], named["target"], named["weight"]
        if reduction == "none":
            return func(*args, **kwargs)
        total = func(*given.args[:2], **{**dict(list(named.items())[2:]), "reduction": "sum"})
        if reduction == "sum":
            return total * self._team.size
        if target.is_floating_point():
            count = torch.tensor(float(target.numel() // target.shape[1]), device=target.device)
        else:
            kept = target != named["ignore_index"]
            count = kept.sum() if weight is None else weight[target[kept]].sum()
        return token_mean(total, count, self._team)


class _Attentions(TorchFunctionMode):
    """While a block runs: ``F.scaled_dot_product_attention`` is over the whole sequence."""

    def __init__(self, ulysses: Ulysses) -> None:
        super().__init__()
        self._ulysses = ulysses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if named.get("attn_mask") is not None:
            raise ValueError(
                "sequence_parallel_size above 1 needs attention without a mask of its own (is_causal=True), "
                "or a model of Hugging Face's attention interface, whose mask is made for the whole sequence"
            )
        mask = self._ulysses.mask(named.get("is_causal", False))
        return self._ulysses.attend(
            named["query"],
            named["key"],
            named["value"],
            mask,
            named.get("dropout_p", 0.0),
            named.get("is_causal", False),
            named.get("scale"),
        )


def sequence_parallel(model: nn.Module, team: Team, blocks: Iterable[nn.Module]) -> Ulysses:
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
            f"sequence_parallel_size above 1 does not work for {type(model).__name__}, whose attention has "
            "biases by head, caps, or two sequences; set it to 1"
        )
    signature = Signature.of(model)
    if "position_ids" not in signature.names:
        raise ValueError(
            f"sequence_parallel_size above 1 needs {type(model).__name__}.forward to take position_ids, as "
            "each rank has a part of the positions"
        )
    ulysses = Ulysses(team)
    shifts = signature.hugging_face and getattr(model, "loss_type", None) in (None, "ForCausalLM")
    splitter = Splitter(team.rank, team.size, shifts and signature.open_ended)
    if signature.hugging_face:
        _use_interface(model, ulysses)
    else:
        for block in list(blocks) or [model]:
            give_forward(block, _within(type(block).forward, lambda: _Attentions(ulysses)))
    give_forward(model, _root_forward(model, ulysses, splitter, signature))
    return ulysses


def _within(inner: Callable[..., Any], mode: Callable[[], TorchFunctionMode]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return inner(self, *args, **kwargs)

    return forward


def _root_forward(
    model: nn.Module, ulysses: Ulysses, splitter: Splitter, signature: Signature
) -> Callable[..., Any]:
    inner = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {**dict(zip(signature.names, args, strict=False)), **kwargs}
        part = _part(batch, ulysses, splitter, signature)
        with _Losses(ulysses.team):
            output = inner(self, **part)
        return _with_mean_loss(output, ulysses.team)

    return forward


def _part(
    batch: dict[str, Any], ulysses: Ulysses, splitter: Splitter, signature: Signature
) -> dict[str, Any]:
    if not signature.hugging_face:
        first = next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1)
        length = first.shape[1]
        start, stop = splitter.span(length)
        part = {
            key: value[:, start:stop].contiguous()
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            else value
            for key, value in batch.items()
        }
        given = batch.get("position_ids")
        ulysses.whole = Whole(length, None, None if given is None else documents_of(given))
        if given is None:
            part["position_ids"] = torch.arange(start, stop, device=first.device)[None]
        return part
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    assert isinstance(tokens, Tensor)
    length = tokens.shape[1]
    given, padding = batch.get("position_ids"), batch.get("attention_mask")
    if padding is not None and padding.dim() != 2:
        raise ValueError("sequence_parallel_size above 1 takes an attention_mask of shape (batch, tokens)")
    documents = documents_of(given) if given is not None and padding is None else None
    if documents is not None and documents.shape[0] != tokens.shape[0]:
        documents = documents.expand(tokens.shape[0], -1)
    whole_padding = None if padding is None or bool(padding.all()) else padding.bool()
    ulysses.whole = Whole(length, whole_padding, documents)
    if padding is None:
        # Without it the model would look for documents in its own part of the positions.
        batch["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return splitter.part({**batch, "use_cache": False}, length)


def _with_mean_loss(output: Any, team: Team) -> Any:
    if isinstance(output, Tensor):
        return _Averaged.apply(output, team) if output.dim() == 0 else output
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return (_Averaged.apply(output[0], team), *output[1:])
    result: Any = output
    if isinstance(getattr(result, "loss", None), Tensor):
        result.loss = _Averaged.apply(result.loss, team)
    return result


# Hugging Face's attention interface


def _use_interface(model: nn.Module, ulysses: Ulysses) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask

    name = f"thalweg_sequence_{next(_serial)}"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise ValueError(f"sequence_parallel_size above 1 does not work with attention's {option!r}")
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
        y = ulysses.attend(query, key, value, attention_mask, dropout, causal, scale)
        return y.transpose(1, 2).contiguous(), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, *, mask_function: Any, **kwargs: Any
    ) -> Tensor | None:
        whole = ulysses.whole
        if whole.documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(whole.documents))
            kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        kwargs["attention_mask"] = whole.padding
        return sdpa_mask(batch_size, whole.length, whole.length, mask_function=mask_function, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
