"""Structured output: only tokens that keep the text within a JSON schema, a regex or a choice are drawn.

The grammars are those of ``llguidance``, which computes for each state which tokens may come next.  A guide
belongs to one sequence; tokens that end the sequence are allowed where the text is complete.
"""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.api import Structure

_KEPT = 4 << 20  # bytes of compiled grammars' text


def available(tokenizer: Any) -> bool:
    """Whether guides can be made here for a tokenizer: it must be one of the fast ones."""
    return importlib.util.find_spec("llguidance") is not None and hasattr(tokenizer, "backend_tokenizer")


class Beyond(ValueError):
    """A structure that cannot be followed any further; the message begins with "the structure"."""


class Guides:
    """Compiles structures for one tokenizer and a model with ``vocab`` outputs."""

    def __init__(self, tokenizer: Any, vocab: int, eos: tuple[int, ...] = ()) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._eos = list(eos) or [tokenizer.eos_token_id]
        self._table: Any = None
        self._grammars: dict[Structure, Grammar] = {}
        self._changing = threading.Lock()

    def __contains__(self, structure: Structure) -> bool:
        return structure in self._grammars

    def compile(self, structure: Structure) -> Grammar:
        """Return a grammar; raises ValueError with the reason where the structure is not understood.

        May take seconds; any thread may call it.
        """
        import llguidance

        found = self._grammars.get(structure)
        if found is not None:
            return found
        with self._changing:
            if self._table is None:
                from llguidance.hf import from_tokenizer

                known = [token for token in self._eos if token is not None]
                self._table = from_tokenizer(self._tokenizer, eos_token=known or None)
        text = _grammar(structure)
        matcher = llguidance.LLMatcher(self._table, text, log_level=0)  # other threads go on meanwhile
        if matcher.is_error():
            problem = str(matcher.get_error()).strip().splitlines()[0]
            raise ValueError(f"the structure is not understood: {problem}")
        made = Grammar(matcher, len(text), list(self._table.eos_tokens))
        with self._changing:
            self._grammars[structure] = made
            while len(self._grammars) > 1 and sum(x.size for x in self._grammars.values()) > _KEPT:
                self._grammars.pop(next(iter(self._grammars)))
        return made


def _grammar(structure: Structure) -> str:
    import llguidance

    matcher = llguidance.LLMatcher
    try:
        if structure.json_schema is not None:
            # Spaces and indented lines, but not any number of blanks: a weak model would go on with them.
            blanks: Any = {"whitespace_pattern": r" |\n {0,12}"}
            return matcher.grammar_from_json_schema(structure.json_schema, defaults=blanks)
        if structure.regex is not None:
            return matcher.grammar_from_regex(structure.regex)
    except ValueError as error:
        raise ValueError(f"the structure is not understood: {error}") from None
    assert structure.choices is not None
    return "start: " + " | ".join(json.dumps(choice) for choice in structure.choices)


class Grammar:
    """What a request's text must look like."""

    def __init__(self, matcher: Any, size: int, ends: list[int]) -> None:
        self._matcher, self.size, self._ends = matcher, size, ends

    def start(self, ends: frozenset[int]) -> Guide:
        """Return a guide for a sequence that these tokens end."""
        # A table has an end token even where the model has none: another one then stands in for it.
        return Guide(self._matcher.deep_copy(), ends, self._ends)


class Guide:
    """Follows one sequence."""

    def __init__(self, matcher: Any, ends: frozenset[int], known: list[int]) -> None:
        self._matcher, self._ends = matcher, sorted(ends)
        self._not_ends = [] if ends else known
        self.finished = False
        """Whether the text is complete and nothing can follow."""

    def mask(self, row: Tensor) -> None:
        """Set the logits (vocab,) of tokens that must not come next to minus infinity, in place."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        mask = torch.zeros(len(row), dtype=torch.bool)
        mask[: len(allowed)] = allowed[: len(row)]
        mask[self._not_ends] = False
        if self._matcher.is_accepting() or not mask.any():
            mask[self._ends] = True
        if not mask.any():
            raise Beyond("the structure allows no further text, and the model has no end token")
        row.masked_fill_(~mask, -math.inf)

    def accept(self, token: int) -> None:
        """The sequence goes on with a token."""
        if token in self._ends:
            self.finished = True
            return
        self._matcher.consume_token(token)
        self._check()
        # A model that cannot say that it ends does so with the first complete text.
        self.finished = bool(self._matcher.is_stopped() or (self._not_ends and self._matcher.is_accepting()))

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).strip().splitlines()[0][:200]
            raise Beyond(f"the structure is too complex to follow: {reason}")
