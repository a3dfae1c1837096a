"""One sequence on its way: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thalweg.infer.api import Request, SamplingParams, TokenLogprob


@dataclass(eq=False)
class Sequence:
    """Sample ``index`` of a request.  ``tokens``: what the model goes on from and its output; the first
    ``computed`` are in the cache."""

    request: Request
    index: int
    arrival: int
    limit: int
    """Length at which it ends."""
    ends: frozenset[int]
    """Tokens that end it."""
    start: tuple[int, ...] = ()
    """Where the model listens: the tokens that it begins to speak with; the prompt is its ``source`` then."""
    stream: Any = None
    """The :class:`~thalweg.infer.text.TextStream` of its output, where the engine has a tokenizer."""
    leader: Sequence | None = None
    """The request's first sample, whose prompt this one waits for in order to share it."""
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    source_blocks: list[int] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    """Prompt tokens that were found in the prefix cache when it was first admitted."""
    admitted: bool = False
    recorded: int = 0
    before: Hashable = None
    """Identity of its last recorded block."""
    seed: int = 0
    seen: Tensor | None = None
    """(vocab,) whether a token is in prompt or output; made where a penalty asks for it."""
    counts: Tensor | None = None
    """(vocab,) how often a token was generated."""
    guide: Any = None
    lookup: Any = None
    """The :class:`~thalweg.infer.speculate.Lookup` of its tokens, where the engine guesses by these."""
    drafted: int = 0
    """Tokens that a draft model has in its cache."""
    trust: int = 1 << 30
    """Guesses that seem worth while: one more than the last ones that were right."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    told_prompt: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.start or self.request.prompt)
        given = self.params.seed
        self.seed = secrets.randbits(64) if given is None else given
        self.before = self.root

    @property
    def params(self) -> SamplingParams:
        """How to sample."""
        return self.request.params

    @property
    def num_prompt(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def begun(self) -> int:
        """Tokens that were there before the first generated one."""
        return len(self.start) or len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.begun

    @property
    def source(self) -> Sequence_[int]:
        """What the model listens to; empty where it does not."""
        return self.request.prompt if self.start else ()

    @property
    def root(self) -> Hashable:
        """What the first block's identity follows: prefixes are shared among equals only."""
        return (self.request.cache_salt, self.request.adapter, tuple(self.source))

    @property
    def source_root(self) -> Hashable:
        """The same for the blocks of the source, which are shared whole or not at all."""
        return ("source", self.root)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return (self.request.priority, self.arrival, self.index)
