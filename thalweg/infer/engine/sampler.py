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

from thalweg.infer.engine.scheduler import Sequence
from thalweg.infer.engine.structured_output import GrammarError
from thalweg.infer.types import SamplingParams, TokenLogprob

_NUM_CANDIDATES = 1024  # the most likely tokens, which usually hold all that top-p keeps
_MIN_TEMPERATURE = 1e-6  # what is nearer to 0 is no warmer, and logits divided by it would leave the range of floats


@dataclass(frozen=True)
class SampledToken:
    """The chosen token; ``error`` where the logits are not finite or the grammar fails."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    # Whether ``error`` is the request's own fault.
    invalid_request: bool = False


ArgmaxResult = tuple[list[int], list[float]]


def argmax(logits: Tensor) -> ArgmaxResult:
    """Return the most likely token of each row of logits (rows, vocab), and its logit."""
    values, tokens = logits.max(dim=1)
    return tokens.tolist(), values.tolist()


def sample_token(logits: Tensor, row: int, token: int, max_logit: float, sequence: Sequence) -> SampledToken:
    """Choose a sequence's next token from a row of fp32 logits (rows, vocab), whose largest, ``max_logit``, is
    ``token``'s."""
    params = sequence.params
    if not math.isfinite(max_logit):
        return SampledToken(0, error="the model's output was not a finite number")
    try:
        if not _is_plain_greedy(sequence):
            token = draw_token(_process_logits(logits[row], sequence), sequence)
        _update_state(sequence, token)
    except GrammarError as error:
        return SampledToken(0, error=str(error), invalid_request=True)
    return SampledToken(token, None if params.logprobs is None else token_logprob(logits[row], token, params.logprobs))


def _is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the most likely token is the choice as it stands."""
    p = sequence.params
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty or p.logit_bias:
        return False
    return p.greedy and sequence.grammar is None and sequence.num_generated_tokens >= p.min_tokens


def _process_logits(row: Tensor, sequence: Sequence) -> Tensor:
    """Apply what changes the logits themselves; returns a new tensor."""
    p = sequence.params
    row = row.clone()
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
        seen, counts = _token_history(sequence, row)
        if p.repetition_penalty != 1:
            penalized = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
            row = torch.where(seen, penalized, row)
        row -= counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if sequence.grammar is not None:
        sequence.grammar.apply_mask(row)
    if sequence.num_generated_tokens < p.min_tokens and sequence.stop_ids:
        without_stops = row.clone()
        without_stops[list(sequence.stop_ids)] = -math.inf
        row = without_stops if without_stops.max() > -math.inf else row  # a structure may allow nothing but the end
    return row


def _token_history(sequence: Sequence, row: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens there are, and how often each was generated: like ``row``, on its device."""
    if sequence.context_mask is None or sequence.output_token_counts is None:
        mask = torch.zeros(row.shape[0], dtype=torch.bool)
        mask[torch.tensor(sequence.tokens)] = True
        output = torch.tensor(sequence.tokens[sequence.num_initial_tokens :], dtype=torch.int64)
        counts = torch.bincount(output, minlength=row.shape[0]).float()
        sequence.context_mask, sequence.output_token_counts = mask.to(row.device), counts.to(row.device)
    return sequence.context_mask, sequence.output_token_counts


def _update_state(sequence: Sequence, token: int) -> None:
    if sequence.context_mask is not None and sequence.output_token_counts is not None:
        sequence.context_mask[token] = True
        sequence.output_token_counts[token] += 1
    if sequence.grammar is not None:
        sequence.grammar.advance(token)


def draw_token(row: Tensor, sequence: Sequence, num_ahead: int = 0) -> int:
    """Draw from logits (vocab,) the sequence's next token, or from a draft model's the one ``num_ahead`` after it.

    Of the latter penalties, biases and grammar are left out: they would need the draft tokens before it.
    """
    p = sequence.params
    if p.greedy:
        return int(row.argmax())
    row = row / max(p.temperature, _MIN_TEMPERATURE)
    token_ids: Tensor | None = None
    if p.top_k or p.top_p < 1 or p.min_p:
        row, token_ids = _filter_top(row, p)
    cumulative = row.softmax(dim=0).double().cumsum(dim=0)
    position = torch.searchsorted(cumulative, seeded_uniform(sequence, num_ahead) * cumulative[-1:], right=True)
    index = min(int(position), row.shape[0] - 1)
    return index if token_ids is None else int(token_ids[index])


def _filter_top(row: Tensor, p: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the logits, best first, that top-k, top-p and min-p leave over, and their tokens."""
    vocab_size = row.shape[0]
    num_candidates = min(p.top_k or max(_NUM_CANDIDATES, 1), vocab_size)
    values, token_ids = row.topk(num_candidates)
    log_total = values.logsumexp(0) if p.top_k else row.logsumexp(0)
    probs = (values - log_total).exp()
    if not p.top_k and num_candidates < vocab_size and (probs.sum() < p.top_p or probs[-1] >= p.min_p * probs[0] > 0):
        values, token_ids = row.sort(descending=True)
        probs = (values - log_total).exp()
    mask = torch.ones_like(probs, dtype=torch.bool)
    if p.top_p < 1:
        preceding = probs.cumsum(0) - probs
        mask &= preceding < p.top_p
    if p.min_p:
        mask &= probs >= p.min_p * probs[0]
    mask[0] = True
    return values[mask], token_ids[mask]


def seeded_uniform(sequence: Sequence, num_ahead: int = 0) -> float:
    """Return the number in [0, 1) that this sequence's draw ``num_ahead`` tokens from now uses."""
    low = sequence.seed & (2**64 - 1)
    packed = struct.pack("<QQQ", low, sequence.index, sequence.num_generated_tokens + num_ahead)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little") / 2**56


def token_logprob(row: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a token's log-probability under raw logits (vocab,), and the ``num_top`` most likely ones."""
    logprobs = row.float().log_softmax(dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, token_ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
