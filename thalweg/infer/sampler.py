"""From logits to tokens.

Each row is processed on its own, in Hugging Face's order: penalties and biases, ends masked before
``min_tokens``, temperature, top-k, top-p, min-p.  The draw is one uniform number, a hash of the sequence's
seed, its index and its length, put through the inverse of the cumulative distribution: no state, so that
neither the rest of the batch nor a preemption can change what is drawn.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.infer.api import SamplingParams, TokenLogprob
from thalweg.infer.guides import Beyond
from thalweg.infer.sequence import Sequence

_CANDIDATES = 1024  # the most likely tokens, which usually hold all that top-p keeps
_COLDEST = 1e-6  # what is nearer to 0 is no warmer, and logits divided by it would leave the range of floats


@dataclass(frozen=True)
class Choice:
    """The chosen token; ``error`` where the model's output was not finite or its structure is beyond us."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


Best = tuple[list[int], list[float]]


def find_best(logits: Tensor) -> Best:
    """Return the most likely token of each row of logits (rows, vocab), and its logit."""
    values, tokens = logits.max(dim=1)
    return tokens.tolist(), values.tolist()


def choose_one(row: Tensor, token: int, value: float, sequence: Sequence) -> Choice:
    """Choose a sequence's next token from fp32 logits (vocab,), whose largest is ``value``, at ``token``."""
    params = sequence.params
    if not math.isfinite(value):
        return Choice(0, error="the model's output was not a finite number")
    try:
        if not _plain(sequence):
            token = _draw(_processed(row, sequence), sequence)
        _remember(sequence, token)
    except Beyond as error:
        return Choice(0, error=str(error))
    return Choice(token, None if params.logprobs is None else score(row, token, params.logprobs))


def _plain(sequence: Sequence) -> bool:
    """Whether the most likely token is the choice as it stands."""
    p = sequence.params
    return (
        p.greedy
        and p.repetition_penalty == 1
        and not p.presence_penalty
        and not p.frequency_penalty
        and not p.logit_bias
        and sequence.guide is None
        and sequence.generated >= p.min_tokens
    )


def _processed(row: Tensor, sequence: Sequence) -> Tensor:
    """Apply what changes the logits themselves; returns a new tensor."""
    p = sequence.params
    row = row.clone()
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
        seen, counts = _history(sequence, row.shape[0])
        if p.repetition_penalty != 1:
            weaker = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
            row = torch.where(seen, weaker, row)
        row -= counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if sequence.guide is not None:
        sequence.guide.mask(row)
    if sequence.generated < p.min_tokens and sequence.ends:
        longer = row.clone()
        longer[list(sequence.ends)] = -math.inf
        row = longer if longer.max() > -math.inf else row  # a structure may allow nothing but the end
    return row


def _history(sequence: Sequence, vocab: int) -> tuple[Tensor, Tensor]:
    if sequence.seen is None or sequence.counts is None:
        sequence.seen = torch.zeros(vocab, dtype=torch.bool)
        sequence.seen[torch.tensor(sequence.tokens)] = True
        output = torch.tensor(sequence.tokens[sequence.begun :], dtype=torch.int64)
        sequence.counts = torch.bincount(output, minlength=vocab).float()
    return sequence.seen, sequence.counts


def _remember(sequence: Sequence, token: int) -> None:
    if sequence.seen is not None and sequence.counts is not None:
        sequence.seen[token] = True
        sequence.counts[token] += 1
    if sequence.guide is not None:
        sequence.guide.accept(token)


def _draw(row: Tensor, sequence: Sequence, ahead: int = 0) -> int:
    p = sequence.params
    if p.greedy:
        return int(row.argmax())
    row = row / max(p.temperature, _COLDEST)
    where: Tensor | None = None
    if p.top_k or p.top_p < 1 or p.min_p:
        row, where = _kept(row, p)
    chances = row.softmax(dim=0).double().cumsum(dim=0)
    at = torch.searchsorted(chances, uniform(sequence, ahead) * chances[-1:], right=True)
    index = min(int(at), row.shape[0] - 1)
    return index if where is None else int(where[index])


def _kept(row: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the logits, best first, that top-k, top-p and min-p leave over, and their tokens."""
    vocab = row.shape[0]
    count = min(p.top_k or max(_CANDIDATES, 1), vocab)
    values, where = row.topk(count)
    everything = values.logsumexp(0) if p.top_k else row.logsumexp(0)
    chances = (values - everything).exp()
    if not p.top_k and count < vocab and (chances.sum() < p.top_p or chances[-1] >= p.min_p * chances[0] > 0):
        values, where = row.sort(descending=True)
        chances = (values - everything).exp()
    keep = torch.ones_like(chances, dtype=torch.bool)
    if p.top_p < 1:
        before = chances.cumsum(0) - chances
        keep &= before < p.top_p
    if p.min_p:
        keep &= chances >= p.min_p * chances[0]
    keep[0] = True
    return values[keep], where[keep]


def draw_ahead(row: Tensor, sequence: Sequence, ahead: int) -> int:
    """Draw from other logits (vocab,) what this sequence may draw ``ahead`` tokens from now; a guess.

    Penalties, biases and structure are left out: they would need the guesses before it.
    """
    return _draw(row, sequence, ahead)


def uniform(sequence: Sequence, ahead: int = 0) -> float:
    """Return the number in [0, 1) that this sequence's draw ``ahead`` tokens from now uses."""
    low = sequence.seed & (2**64 - 1)
    packed = struct.pack("<QQQ", low, sequence.index, sequence.generated + ahead)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little") / 2**56


def score(row: Tensor, token: int, count: int) -> TokenLogprob:
    """Return a token's log-probability under raw logits (vocab,), and the ``count`` most likely ones."""
    scores = row.float().log_softmax(dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, where = scores.topk(min(count, scores.shape[0]))
        top = tuple(zip(where.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(scores[token]), top)
