"""One running sequence: its tokens, how many of them are computed, and what it holds."""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thalweg.infer.types import Request, SamplingParams, TokenLogprob


@dataclass(eq=False)
class Sequence:
    """Sample ``index`` of a request.  ``tokens``: prompt (or decoder start) and output; the first
    ``num_computed_tokens`` are in the cache."""

    request: Request
    index: int
    arrival: int
    max_length: int
    """Length at which it ends."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    decoder_start_ids: tuple[int, ...] = ()
    """Of an encoder-decoder model: the first decoder tokens; the prompt is the ``encoder_prompt`` then."""
    detokenizer: Any = None
    """The :class:`.detokenizer.IncrementalDetokenizer` of its output, where the engine has a tokenizer."""
    prefix_owner: Sequence | None = None
    """The request's first sample, whose prompt this one waits for in order to share it."""
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    encoder_blocks: list[int] = field(default_factory=list)
    slot: int = -1
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when it was first admitted."""
    admitted: bool = False
    num_cached_blocks: int = 0
    last_block_id: Hashable = None
    """Identity of its last block in the prefix cache."""
    seed: int = 0
    context_mask: Tensor | None = None
    """(vocab,) whether a token is in prompt or output; made when a penalty needs it."""
    output_token_counts: Tensor | None = None
    """(vocab,) how often a token was generated."""
    grammar: Any = None
    ngram_index: Any = None
    """The :class:`~thalweg.infer.spec_decode.ngram.NgramIndex` of its tokens, with prompt lookup."""
    num_draft_computed: int = 0
    """Tokens that a draft model has in its cache."""
    draft_budget: int = 1 << 30
    """Draft tokens worth computing: one more than were accepted last time."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    sent_prompt_logprobs: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.decoder_start_ids or self.request.prompt)
        requested_seed = self.params.seed
        self.seed = secrets.randbits(64) if requested_seed is None else requested_seed
        self.last_block_id = self.prefix_root

    @property
    def params(self) -> SamplingParams:
        """How to sample."""
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def num_initial_tokens(self) -> int:
        """Tokens that were there before the first generated one."""
        return len(self.decoder_start_ids) or len(self.request.prompt)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_initial_tokens

    @property
    def encoder_prompt(self) -> Sequence_[int]:
        """The tokens of the encoder; empty without one."""
        return self.request.prompt if self.decoder_start_ids else ()

    @property
    def prefix_root(self) -> Hashable:
        """What the first block's identity follows: prefixes are shared among equals only."""
        return (self.request.cache_salt, self.request.adapter, tuple(self.encoder_prompt))

    @property
    def encoder_prefix_root(self) -> Hashable:
        """The same for the encoder's blocks, which are shared whole or not at all."""
        return ("source", self.prefix_root)

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return (self.request.priority, self.arrival, self.index)
