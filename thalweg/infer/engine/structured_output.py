"""Structured output: only tokens that keep the text within a JSON schema, a regex or a choice are drawn.

The grammars are those of ``llguidance``, which computes for each state which tokens may come next.  A
:class:`GrammarState` belongs to one sequence; tokens that end it are allowed where the text is complete.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from thalweg.infer.types import ModelMetadata, StructuredOutput

_CACHE_BYTES = 4 << 20  # bytes of compiled grammars' text


class GrammarError(ValueError):
    """A structure that cannot be followed any further; the message begins with "the structure"."""


class GrammarCompiler:
    """Compiles structures for one tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids) or [tokenizer.eos_token_id]
        self._llg_tokenizer: Any = None
        # Matchers, and how many characters their sources have.
        self._compiled: dict[StructuredOutput, tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def __contains__(self, structure: StructuredOutput) -> bool:
        return structure in self._compiled

    def compile(self, structure: StructuredOutput) -> Any:
        """Return a matcher for :meth:`new_state`; raises ValueError where the structure is not understood, with why.

        May take seconds; any thread may call it.
        """
        import llguidance

        cached = self._compiled.get(structure)
        if cached is not None:
            return cached[0]
        with self._lock:
            if self._llg_tokenizer is None:
                from llguidance.hf import from_tokenizer

                eos_token_ids = [token for token in self._eos_token_ids if token is not None]
                self._llg_tokenizer = from_tokenizer(self._tokenizer, eos_token=eos_token_ids or None)
        source = _grammar_source(structure)
        matcher = llguidance.LLMatcher(self._llg_tokenizer, source, log_level=0)  # other threads go on meanwhile
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().splitlines()[0]
            raise ValueError(f"the structure is not understood: {reason}")
        with self._lock:
            self._compiled[structure] = matcher, len(source)
            while len(self._compiled) > 1 and sum(size for _, size in self._compiled.values()) > _CACHE_BYTES:
                self._compiled.pop(next(iter(self._compiled)))
        return matcher

    def new_state(self, matcher: Any, stop_ids: frozenset[int]) -> GrammarState:
        """Return the state of a sequence that these tokens end."""
        # A table has an end token even where the model has none: another one then stands in for it.
        return GrammarState(matcher.deep_copy(), stop_ids, list(self._llg_tokenizer.eos_tokens))


def make_grammar_compiler(tokenizer: Any, metadata: ModelMetadata) -> GrammarCompiler | None:
    """Return a model's compiler; None without llguidance, or a tokenizer of the fast kind."""
    if importlib.util.find_spec("llguidance") is None or not hasattr(tokenizer, "backend_tokenizer"):
        return None
    return GrammarCompiler(tokenizer, metadata.eos_token_ids)


def _grammar_source(structure: StructuredOutput) -> str:
    import llguidance

    matcher = llguidance.LLMatcher
    try:
        if structure.json_schema is not None:
            # Spaces and indented lines, but not any number of blanks: a weak model would go on with them.
            json_options: Any = {"whitespace_pattern": r" |\n {0,12}"}
            return matcher.grammar_from_json_schema(structure.json_schema, defaults=json_options)
        if structure.regex is not None:
            return matcher.grammar_from_regex(structure.regex)
    except ValueError as error:
        raise ValueError(f"the structure is not understood: {error}") from None
    assert structure.choices is not None
    return "start: " + " | ".join(json.dumps(choice) for choice in structure.choices)


class GrammarState:
    """Follows one sequence."""

    def __init__(self, matcher: Any, stop_ids: frozenset[int], eos_token_ids: list[int]) -> None:
        self._matcher, self._stop_ids = matcher, sorted(stop_ids)
        self._forbidden_ids = [] if stop_ids else eos_token_ids
        # Whether the text is complete and nothing can follow.
        self.finished = False

    def next_mask(self, vocab_size: int, draft_tokens: Sequence[int] = ()) -> np.ndarray:
        """Return which tokens may come next, or after these draft tokens: a bit each, the lowest first."""
        matcher = self._matcher
        if draft_tokens:
            matcher = matcher.deep_copy()
            for token in draft_tokens:
                matcher.consume_token(token)
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        self._check(matcher)
        bits = np.zeros(-(-vocab_size // 8), dtype=np.uint8)
        bits[: len(allowed)] = allowed[: len(bits)]
        if vocab_size % 8:
            bits[-1] &= (1 << vocab_size % 8) - 1
        for token in self._forbidden_ids:
            bits[token // 8] &= ~np.uint8(1 << token % 8)
        if matcher.is_accepting() or not bits.any():
            for token in self._stop_ids:
                bits[token // 8] |= np.uint8(1 << token % 8)
        if not bits.any():
            raise GrammarError("the structure allows no further text, and the model has no end token")
        return bits

    def advance(self, token: int) -> None:
        """The sequence goes on with a token."""
        if token in self._stop_ids:
            self.finished = True
            return
        self._matcher.consume_token(token)
        self._check(self._matcher)
        # A model that cannot say that it ends does so with the first complete text.
        self.finished = bool(self._matcher.is_stopped() or (self._forbidden_ids and self._matcher.is_accepting()))

    @staticmethod
    def _check(matcher: Any) -> None:
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().splitlines()[0][:200]
            raise GrammarError(f"the structure is too complex to follow: {reason}")
