"""From logits to tokens.

Rows are processed in Hugging Face's order: penalties and biases, ends masked before ``min_tokens``, temperature,
top-k, top-p, min-p.  The draw is one uniform number, a hash of the sequence's seed, its index and its length, put
through the inverse of the cumulative distribution: no state, so that neither the rest of the batch nor a preemption
can change what is drawn.

The picture of :func:`sample`, for the rows of a step:

    host      what each row asks for, masks of grammars  -> two copies to the logits' device, not waited for
    device    the most likely token of all rows; rows that ask for more are processed together, stage by stage
    host      one copy of the tokens back, the one thing that is waited for (log-probabilities are a second)

No operator mixes rows, and none's shape that a row's bits depend on comes from another row.  A row with draft tokens
before it is sampled as if they had been accepted; :class:`.engine.LLMEngine` drops it where they are not.
"""

import hashlib
import math
import struct
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.device import widest_float
from thalweg.infer.engine.scheduler import Sequence
from thalweg.infer.runners.base import arrays_to_device
from thalweg.infer.types import SamplingParams, TokenLogprob

_NUM_CANDIDATES = 1024  # the most likely tokens, which usually hold all that top-p keeps
_MIN_TEMPERATURE = 1e-6  # what is nearer to 0 is no warmer, and logits divided by it would leave the range of floats
_NOT_FINITE, _NEEDS_ALL = -1, -2  # in a token's place: the logits are no numbers; the candidates do not suffice
_MAX_SCORED_ROWS = 64  # rows of the vocabulary whose log-probabilities are in memory at a time


class NotFiniteError(ArithmeticError):
    """A row of logits holds what is no number."""


class SampledRow(NamedTuple):
    """A row of logits whose token is wanted: the one after the sequence's tokens and these draft tokens."""

    row: int
    sequence: Sequence
    draft_tokens: AbstractSequence[int] = ()

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated before this one."""
        return self.sequence.num_generated_tokens + len(self.draft_tokens)


@dataclass
class SamplerOutput:
    """What was drawn, on the host; by rows of the logits."""

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    # Why a row could not be processed.
    failures: dict[int, BaseException] = field(default_factory=dict)


ArgmaxResult = tuple[list[int], list[float]]


@torch.inference_mode()
def sample(logits: Tensor, rows: AbstractSequence[SampledRow], argmax: ArgmaxResult | None = None) -> SamplerOutput:
    """Choose a token for each of these rows of fp32 logits (rows, vocab).

    ``argmax``: the most likely token of each row and its logit, where the runner knows them.
    """
    output, processed, masks = SamplerOutput({}), [], {}
    for x in rows:
        if _is_plain_greedy(x):
            continue
        try:
            if x.sequence.grammar is not None:
                masks[x.row] = x.sequence.grammar.next_mask(logits.shape[1], x.draft_tokens)
            processed.append(x)
        except BaseException as error:  # a panic of compiled code is no Exception
            output.failures[x.row] = error
    indices = drawn = processed_logits = None
    if processed:
        processed_logits = logits
        if len(processed) < len(logits):
            (indices,) = arrays_to_device([np.array([x.row for x in processed])], logits.device)
            processed_logits = logits.index_select(0, indices)
        processed_logits = _process_logits(processed_logits, processed, masks)
        drawn = _draw(processed_logits, processed)
    if argmax is None:
        values, tokens = logits.max(dim=1)
        argmax = (tokens.tolist(), values.tolist()) if logits.device.type == "cpu" else None
    if argmax is None:
        if drawn is not None:
            tokens = drawn if indices is None else tokens.index_copy(0, indices, drawn)
        of_rows = torch.where(values.isfinite(), tokens, _NOT_FINITE).tolist()
    else:
        of_rows = list(argmax[0])
        if drawn is not None:
            for x, token in zip(processed, drawn.tolist(), strict=True):
                of_rows[x.row] = token
        of_rows = [t if math.isfinite(v) else _NOT_FINITE for t, v in zip(of_rows, argmax[1], strict=True)]
    output.tokens = {x.row: of_rows[x.row] for x in rows}
    if processed_logits is not None:
        redrawn = _redraw(processed_logits, processed, [output.tokens[x.row] for x in processed])
        output.tokens.update((processed[n].row, token) for n, token in redrawn.items())
    if scored := [x for x in rows if x.sequence.params.logprobs is not None and output.tokens[x.row] >= 0]:
        chosen, num_top = [output.tokens[x.row] for x in scored], [x.sequence.params.logprobs or 0 for x in scored]
        logprobs = token_logprobs(logits, [x.row for x in scored], chosen, num_top)
        output.logprobs = {x.row: logprob for x, logprob in zip(scored, logprobs, strict=True)}
    return output


def sample_token(output: SamplerOutput, row: int, sequence: Sequence) -> tuple[int, TokenLogprob | None]:
    """Take a row's token for its sequence, whose grammar goes on with it, and its log-probability where asked for.

    Raises what went wrong with the row: NotFiniteError, GrammarError, or anything else.
    """
    if (failure := output.failures.get(row)) is not None:
        raise failure
    token = output.tokens[row]
    if token == _NOT_FINITE:
        raise NotFiniteError("the model's output was not a finite number")
    if sequence.grammar is not None:
        sequence.grammar.advance(token)
    return token, output.logprobs.get(row)


@torch.inference_mode()
def draw_tokens(logits: Tensor, rows: AbstractSequence[SampledRow]) -> list[int]:
    """Draw from a draft model's logits (rows, vocab) the tokens that the target would draw from the same.

    Penalties, biases and grammars are left out: their state is the target's.
    """
    tokens = _draw(logits, rows).tolist()
    for n, token in _redraw(logits, rows, tokens).items():
        tokens[n] = token
    return tokens


def _is_plain_greedy(x: SampledRow) -> bool:
    """Whether the most likely token is the choice as it stands."""
    p = x.sequence.params
    if _is_penalized(p) or p.logit_bias:
        return False
    return p.greedy and x.sequence.grammar is None and x.num_generated_tokens >= p.min_tokens


def _is_penalized(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _process_logits(x: Tensor, rows: AbstractSequence[SampledRow], masks: dict[int, np.ndarray]) -> Tensor:
    """Apply what changes the logits (rows, vocab) themselves, to a copy; ``masks``: of grammars, by row."""
    vocab_size, device = x.shape[1], x.device
    penalized = [(n, row) for n, row in enumerate(rows) if _is_penalized(row.sequence.params)]
    if penalized:
        every = len(penalized) == len(rows)
        (indices,) = arrays_to_device([np.array([n for n, _ in penalized])], device)
        changed = _penalize(x if every else x.index_select(0, indices), [row for _, row in penalized])
        x = changed if every else x.index_copy(0, indices, changed)
    if any(row.sequence.params.logit_bias for row in rows):
        biases = [(n, *item) for n, row in enumerate(rows) for item in row.sequence.params.logit_bias.items()]
        (indices,) = arrays_to_device([np.array([n * vocab_size + token for n, token, _ in biases])], device)
        (values,) = arrays_to_device([np.array([value for _, _, value in biases], np.float32)], device)
        x = x.reshape(-1).index_add(0, indices, values).view_as(x)
    if masks:
        masked = [n for n, row in enumerate(rows) if row.row in masks]
        (indices,) = arrays_to_device([np.array(masked)], device)
        (bits,) = arrays_to_device([np.stack([masks[rows[n].row] for n in masked])], device)
        allowed = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
        allowed = allowed.flatten(1)[:, :vocab_size].bool()
        x = x.index_copy(0, indices, x.index_select(0, indices).masked_fill_(~allowed, -math.inf))
    too_short = [(n, s) for n, s in enumerate(rows) if s.num_generated_tokens < s.sequence.params.min_tokens]
    if stops := [n * vocab_size + token for n, row in too_short for token in row.sequence.stop_ids]:
        (indices,) = arrays_to_device([np.array(stops)], device)
        without_stops = x.reshape(-1).index_fill(0, indices, -math.inf).view_as(x)
        # A structure may allow nothing but the end.
        x = torch.where(without_stops.amax(1, keepdim=True) > -math.inf, without_stops, x)
    return x


def _penalize(x: Tensor, rows: AbstractSequence[SampledRow]) -> Tensor:
    """Return the logits with penalties.

    A sequence keeps which tokens it holds and how often each was generated, as of the last time; the tokens since then
    are added here, for all rows at once.
    """
    vocab_size, device = x.shape[1], x.device
    none_seen, no_counts = torch.zeros(vocab_size, dtype=torch.bool, device=device), x.new_zeros(vocab_size)
    states, seen_tokens, generated = [], [], []
    for n, (_, sequence, draft_tokens) in enumerate(rows):
        history = sequence.token_history
        num_known = 0 if history is None else history[2]
        states.append((none_seen, no_counts) if history is None else history[:2])
        new = np.array([*sequence.tokens[num_known:], *draft_tokens], np.int64) + n * vocab_size
        seen_tokens.append(new)
        generated.append(new[max(sequence.num_initial_tokens - num_known, 0) :])
    arrays = [np.concatenate(seen_tokens), np.concatenate(generated)]
    seen_indices, generated_indices = arrays_to_device(arrays, device)
    seen, counts = (torch.stack(t) for t in zip(*states, strict=True))
    seen.view(-1).index_fill_(0, seen_indices, True)
    counts.view(-1).index_add_(0, generated_indices, torch.ones_like(generated_indices, dtype=counts.dtype))
    for n, (_, sequence, draft_tokens) in enumerate(rows):
        if not draft_tokens:
            sequence.token_history = seen[n], counts[n], len(sequence.tokens)
    params = [row.sequence.params for row in rows]
    penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    (on_device,) = arrays_to_device([np.array(penalties, np.float32)], device)
    repetition, frequency, presence = on_device.unsqueeze(2).unbind(1)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - (counts * frequency + (counts > 0) * presence)


def _draw(x: Tensor, rows: AbstractSequence[SampledRow], with_all: bool = False) -> Tensor:
    """Return tokens (rows,) drawn from processed logits (rows, vocab), or ``_NEEDS_ALL`` where the most likely ones do
    not hold all that top-p and min-p keep; ``with_all``: look at all tokens."""
    vocab_size, members = x.shape[1], dict[tuple[str, int], list[int]]()
    for n, row in enumerate(rows):
        members.setdefault(_candidates(row.sequence.params, vocab_size, with_all), []).append(n)
    ints, floats = [], []
    for own in members.values():
        draws = [seeded_uniform(rows[n].sequence, len(rows[n].draft_tokens)) for n in own]
        params = [rows[n].sequence.params for n in own]
        # A draw has 56 bits, more than floats of most devices: it travels as a whole number.
        ints += [np.array(own), np.array([int(draw * 2**56) for draw in draws])]
        ints.append(np.array([min(p.top_k or vocab_size, vocab_size) for p in params]))
        limits = [p.top_p if p.top_p < 1 else math.inf for p in params]  # sums of probabilities may pass 1
        warmth = [max(p.temperature, _MIN_TEMPERATURE) for p in params]
        floats.append(np.array([warmth, limits, [p.min_p for p in params]], np.float32))
    on_device, floats_on_device = arrays_to_device(ints, x.device), arrays_to_device(floats, x.device)
    parts = []
    for group, (kind, num_candidates) in enumerate(members):
        indices, draws, top_k = on_device[3 * group : 3 * group + 3]
        logits = x if len(members) == 1 else x.index_select(0, indices)
        if kind == "greedy":
            found = logits.argmax(dim=1)
        else:
            temperature, top_p, min_p = floats_on_device[group][:, :, None]
            logits = logits / temperature
            if kind == "all":
                found = _draw_from(logits, draws)
            else:
                found = _draw_from_top(logits, draws, num_candidates, kind == "top_k", top_k[:, None], top_p, min_p)
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    (places,) = arrays_to_device([np.argsort([n for own in members.values() for n in own])], x.device)
    return torch.cat(parts).index_select(0, places)


def _candidates(p: SamplingParams, vocab_size: int, with_all: bool) -> tuple[str, int]:
    """Return how to draw, and among how many of the most likely tokens: rows of one kind are drawn together.

    The number follows from the row's own parameters alone, or its sums would depend on the others'.
    """
    if p.greedy:
        return "greedy", 0
    if p.top_k:
        return "top_k", min(1 << (p.top_k - 1).bit_length(), vocab_size)
    if p.top_p < 1 or p.min_p:
        return "top_p", vocab_size if with_all else min(_NUM_CANDIDATES, vocab_size)
    return "all", 0


def _draw_from(logits: Tensor, draws: Tensor) -> Tensor:
    """Return for each row of logits the token at its draw (rows,), of 2**56, of the cumulative distribution."""
    cumulative = logits.softmax(dim=1).to(widest_float(logits.device)).cumsum(dim=1)
    targets = draws[:, None].to(cumulative.dtype) / 2**56 * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _draw_from_top(
    logits: Tensor, draws: Tensor, num_candidates: int, has_top_k: bool, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Draw from what top-k, top-p and min-p, each (rows, 1), leave over; see :func:`_draw` for the rest."""
    values, token_ids = logits.topk(num_candidates)
    if has_top_k:
        values = values.masked_fill(torch.arange(num_candidates, device=logits.device) >= top_k, -math.inf)
    probs = (values - (values if has_top_k else logits).logsumexp(1, keepdim=True)).exp()
    cumulative = probs.cumsum(1)
    keep = (cumulative - probs < top_p) & (probs >= min_p * probs[:, :1]) & (values > -math.inf)
    keep[:, 0] = True
    places = _draw_from(values.masked_fill(~keep, -math.inf), draws)[:, None]
    places = torch.minimum(places, keep.sum(1, keepdim=True) - 1)
    tokens = token_ids.gather(1, places)
    if not has_top_k and num_candidates < logits.shape[1]:
        # Either of the two ends what is kept, and one that ends within the candidates is enough.
        ends_within = (cumulative[:, -1:] >= top_p) | (probs[:, -1:] < min_p * probs[:, :1])
        tokens = torch.where(ends_within, tokens, _NEEDS_ALL)
    return tokens[:, 0]


def _redraw(x: Tensor, rows: AbstractSequence[SampledRow], tokens: list[int]) -> dict[int, int]:
    """Return, by number of the row, the tokens of those for which the candidates did not suffice."""
    again = [n for n, token in enumerate(tokens) if token == _NEEDS_ALL]
    if not again:
        return {}
    (indices,) = arrays_to_device([np.array(again)], x.device)
    found = _draw(x.index_select(0, indices), [rows[n] for n in again], with_all=True)
    return dict(zip(again, found.tolist(), strict=True))


def seeded_uniform(sequence: Sequence, num_ahead: int = 0) -> float:
    """Return the number in [0, 1) that this sequence's draw ``num_ahead`` tokens from now uses."""
    low = sequence.seed & (2**64 - 1)
    packed = struct.pack("<QQQ", low, sequence.index, sequence.num_generated_tokens + num_ahead)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little") / 2**56


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, rows: AbstractSequence[int], tokens: AbstractSequence[int], num_top: AbstractSequence[int]
) -> list[TokenLogprob]:
    """Return tokens' log-probabilities under these rows of raw logits (rows, vocab), and each one's most likely."""
    found: list[TokenLogprob] = []
    for start in range(0, len(rows), _MAX_SCORED_ROWS):
        own = slice(start, start + _MAX_SCORED_ROWS)
        indices, chosen = arrays_to_device([np.array(rows[own]), np.array(tokens[own])], logits.device)
        logprobs = logits.index_select(0, indices).float().log_softmax(dim=1)
        most = min(max(num_top[own]), logits.shape[1])
        values, token_ids = logprobs.topk(most)
        # Numbers of tokens are exact as floats, and so all comes in one copy.
        table = torch.cat([logprobs.gather(1, chosen[:, None]), values, token_ids.float()], 1).tolist()
        for token, count, (logprob, *top) in zip(tokens[own], num_top[own], table, strict=True):
            pairs = zip(map(int, top[most:]), top[:most], strict=True)
            found.append(TokenLogprob(token, logprob, tuple(pairs)[:count]))
    return found
