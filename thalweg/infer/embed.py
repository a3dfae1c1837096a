"""Models that only listen: texts in, one vector each.

Sequences are computed together, as many as fit, none of them padded; a vector is the mean of its tokens' last
states, or the first one (``cls``), as the directory of a sentence encoder says, of length 1 where it says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.api import EngineOptions, EngineStats, ModelFacts, Request, RequestOutput
from thalweg.infer.batch import Source, token_list
from thalweg.infer.describe import Encoder
from thalweg.infer.forms import evaluating
from thalweg.infer.operators import MakeLinear, Operators

MOST = 64  # sequences at a time


class EncoderRunner(Protocol):
    """An encoder."""

    max_tokens: int
    """Of one run."""

    def run(self, sources: Sequence[Source]) -> Tensor:
        """Return the last states, fp32 (tokens, width), sequence by sequence; valid until the next run."""
        ...

    def close(self) -> None:
        """Free the weights."""
        ...


@dataclass(frozen=True)
class Pooling:
    """How states become a vector: ``mean`` or ``cls``, and whether it is brought to length 1."""

    style: str = "mean"
    normalise: bool = False

    def __call__(self, states: Tensor) -> Tensor:
        """Return the vector (width,) of one sequence's states (tokens, width)."""
        vector = states[0].clone() if self.style == "cls" else states.mean(0)
        return F.normalize(vector, dim=0) if self.normalise else vector


def pooling_of(folder: str | Path | None, options: EngineOptions) -> Pooling:
    """Return what the options ask for, or else what a sentence encoder's directory says, or else plain means.

    Raises ValueError for a step after the pooling that is none of ours.
    """
    said = Pooling()
    modules = None if folder is None else Path(folder) / "modules.json"
    if modules is not None and modules.is_file():
        for module in json.loads(modules.read_text(encoding="utf-8")):
            kind, path = str(module["type"]).rsplit(".", 1)[-1], Path(folder or "") / module["path"]
            if kind == "Pooling":
                said = Pooling(_style(json.loads((path / "config.json").read_text(encoding="utf-8"))))
            elif kind == "Normalize":
                said = Pooling(said.style, True)
            elif kind != "Transformer":
                raise ValueError(
                    f"{folder}: its vectors go through a module of type {kind}, which is unknown here"
                )
    style = said.style if options.pooling == "auto" else options.pooling
    return Pooling(style, said.normalise if options.normalize is None else options.normalize)


def _style(config: dict[str, Any]) -> str:
    if "pooling_mode" in config:
        wanted = [str(config["pooling_mode"])]
    else:
        wanted = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    known = {
        "mean": "mean",
        "cls": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
    }
    if len(wanted) != 1 or wanted[0] not in known:
        raise ValueError(f"pooling by {', '.join(wanted) or 'nothing'}: only mean and cls are known here")
    return known[wanted[0]]


class EagerEncoder(Operators):
    """Runs a described encoder in plain operators."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        max_tokens: int,
        make_linear: MakeLinear | None = None,
    ) -> None:
        super().__init__(dtype, device, reach=max_length, make_linear=make_linear)
        self._encoder, self.max_tokens = encoder, max_tokens

    @torch.inference_mode()
    def run(self, sources: Sequence[Source]) -> Tensor:
        """Return the last states."""
        return torch.cat([self.encoded(self._encoder, source.tokens).float() for source in sources])

    def close(self) -> None:
        """Drop the weights."""
        self.drop()


class ForeignEncoder:
    """Runs a live model by its own code, one sequence at a time."""

    def __init__(self, model: Any, *, max_tokens: int) -> None:
        self._model, self.max_tokens = model, max_tokens

    @torch.inference_mode()
    def run(self, sources: Sequence[Source]) -> Tensor:
        """Return the last states."""
        return torch.cat([states_of(self._model, source.tokens) for source in sources])

    def close(self) -> None:
        """Drop the model."""
        self._model = None


@torch.inference_mode()
def states_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the last states, fp32 (tokens, width), that a live model gives in eval mode."""
    stack = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.base_model
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with evaluating(stack):
        out = stack(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)
    return out.last_hidden_state[0].float()


class Embedder:
    """An :class:`~thalweg.infer.api.EngineCore` that embeds and generates nothing."""

    def __init__(self, runner: EncoderRunner, facts: ModelFacts, tokenizer: Any, pooling: Pooling) -> None:
        self.runner, self.facts, self.tokenizer, self.pooling = runner, facts, tokenizer, pooling
        self._counts: Counter[str] = Counter()

    def embed(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors, fp32 (len(prompts), width); ValueError for a prompt that cannot be."""
        prompts = [token_list(prompt) for prompt in prompts]
        for prompt in prompts:
            self._check(prompt)
        rows: list[Tensor] = []
        part: list[Source] = []
        for prompt in prompts:
            tokens = sum(len(source.tokens) for source in part) + len(prompt)
            if part and (tokens > self.runner.max_tokens or len(part) == MOST):
                rows += self._pooled(part)
                part = []
            part.append(Source(0, prompt))
        rows += self._pooled(part)
        return torch.stack(rows) if rows else torch.empty(0, 0)

    def _pooled(self, sources: Sequence[Source]) -> list[Tensor]:
        if not sources:
            return []
        self._counts["steps"] += 1
        lengths = [len(source.tokens) for source in sources]
        self._counts["prompt"] += sum(lengths)
        return [self.pooling(states) for states in self.runner.run(sources).split(lengths)]

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self.facts.vocab_size:
            raise ValueError(f"the prompt has tokens outside of 0 to {self.facts.vocab_size - 1}")
        if len(prompt) > self.facts.max_length:
            raise ValueError(f"the prompt has {len(prompt)} tokens; this model takes {self.facts.max_length}")

    def add(self, request: Request) -> None:
        """Refuse: an encoder generates nothing."""
        raise ValueError(f"{self.facts.name} is an encoder and generates nothing: use embed")

    def abort(self, request_id: str) -> None:
        """Nothing is ever queued."""

    def step(self) -> list[RequestOutput]:
        """Nothing is ever queued."""
        return []

    def has_work(self) -> bool:
        """Nothing is ever queued."""
        return False

    @property
    def pending(self) -> AbstractSet[str]:
        """Nothing is ever queued."""
        return frozenset()

    def stats(self) -> EngineStats:
        """Return the counters."""
        return EngineStats(steps=self._counts["steps"], prompt_tokens=self._counts["prompt"])

    def close(self) -> None:
        """Free the weights."""
        self.runner.close()
