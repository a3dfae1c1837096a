"""Encoder models: texts in, one vector each.

Sequences are computed together, as many as fit, none of them padded; a vector is the mean of its tokens' last
states, or the first one (``cls``) or last one of them, as the directory of a sentence encoder says, of length 1
where it says so.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer import types as infer_types
from thalweg.infer.config import EngineConfig
from thalweg.infer.runners.base import EncoderInput, EncoderRunner
from thalweg.infer.types import EngineStats, ModelMetadata
from thalweg.utils.buckets import iter_buckets

MAX_NUM_SEQS = 64  # sequences at a time


@dataclass(frozen=True)
class Pooling:
    """How states become a vector: ``mean``, ``cls`` or ``last``, and whether it is brought to length 1."""

    mode: str = "mean"
    normalize: bool = False

    def __call__(self, states: Tensor) -> Tensor:
        """Return the vector (width,) of one sequence's states (tokens, width)."""
        one = {"cls": 0, "last": -1}.get(self.mode)
        vector = states.mean(0) if one is None else states[one].clone()
        return F.normalize(vector, dim=0) if self.normalize else vector


def load_pooling(folder: Path | None, options: EngineConfig) -> Pooling:
    """Return what the options ask for, or else what a sentence encoder's directory says, or else plain means.

    Raises ValueError for a step after the pooling that is none of ours.
    """
    pooling = Pooling()
    if folder is not None and (folder / "modules.json").is_file():
        for module in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
            kind, path = str(module["type"]).rsplit(".", 1)[-1], folder / module["path"]
            if kind == "Pooling":
                pooling = Pooling(_pooling_mode(json.loads((path / "config.json").read_text(encoding="utf-8"))))
            elif kind == "Normalize":
                pooling = Pooling(pooling.mode, True)
            elif kind != "Transformer":
                raise ValueError(f"{folder}: its vectors go through a module of type {kind}, which is unknown here")
    mode = pooling.mode if options.pooling == "auto" else options.pooling
    return Pooling(mode, pooling.normalize if options.normalize is None else options.normalize)


def load_max_seq_length(folder: Path | None) -> int | None:
    """Return how many tokens a sentence encoder's directory lets a text have, or None where it does not say."""
    for file in folder.glob("sentence_*_config.json") if folder is not None else ():
        return json.loads(file.read_text(encoding="utf-8")).get("max_seq_length")
    return None


def _pooling_mode(config: dict[str, Any]) -> str:
    if "pooling_mode" in config:
        modes = [str(config["pooling_mode"])]
    else:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    known = {"mean": "mean", "cls": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
             "lasttoken": "last", "pooling_mode_lasttoken": "last"}  # fmt: skip
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"pooling by {', '.join(modes) or 'nothing'}: only mean, cls and last token are known here")
    return known[modes[0]]


class EmbeddingEngine(infer_types.EngineCore):
    """An :class:`~thalweg.infer.types.EngineCore` that embeds and generates nothing."""

    def __init__(self, runner: EncoderRunner, metadata: ModelMetadata, tokenizer: Any, pooling: Pooling) -> None:
        self.runner, self.metadata, self.tokenizer, self.pooling = runner, metadata, tokenizer, pooling
        self._counters: Counter[str] = Counter()

    def embed(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors, fp32 (len(prompts), width); ValueError for a prompt that cannot be."""
        prompts, max_length = [infer_types.to_token_ids(prompt) for prompt in prompts], self.metadata.max_length
        for prompt in prompts:
            infer_types.check_prompt(prompt, self.metadata.vocab_size)
            if len(prompt) > max_length:
                raise ValueError(f"the prompt has {len(prompt)} tokens; this model takes {max_length}")
        rows: list[Tensor] = []
        for batch in iter_buckets(prompts, len, self.runner.max_num_batched_tokens, MAX_NUM_SEQS):
            lengths = [len(prompt) for prompt in batch]
            self._counters.update(steps=1, prompt=sum(lengths))
            states = self.runner.run([EncoderInput(0, prompt) for prompt in batch])
            rows += [self.pooling(own) for own in states.split(lengths)]
        return torch.stack(rows) if rows else torch.empty(0, 0)

    def stats(self) -> EngineStats:
        """Return the counters."""
        return EngineStats(steps=self._counters["steps"], prompt_tokens=self._counters["prompt"])

    def close(self) -> None:
        """Free the weights."""
        self.runner.close()
