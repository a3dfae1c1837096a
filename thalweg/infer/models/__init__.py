"""One file for each family of decoders; its ``decoder(model)`` describes a live Hugging Face model."""

from __future__ import annotations

import importlib
from typing import Any

from thalweg.infer.describe import Decoder, Unsupported

FAMILIES = {
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "mixtral": "llama",
    "qwen2_moe": "llama", "qwen3_moe": "llama", "olmo": "llama", "smollm3": "llama",
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma",
    "gpt2": "gpt2", "phi": "phi", "phi3": "phi3", "opt": "opt", "bloom": "bloom", "gpt_neox": "gpt_neox",
    "falcon": "falcon",
}  # fmt: skip
"""Hugging Face's ``model_type`` to our file; what is described wrongly is found at load and not used."""


def describe(model: Any) -> Decoder:
    """Describe a live Hugging Face causal model, or raise Unsupported."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = FAMILIES.get(kind or "")
    if family is None:
        raise Unsupported(f"no description of models of type {kind!r}")
    try:
        return importlib.import_module(f"thalweg.infer.models.{family}").decoder(model)
    except AttributeError as error:  # a variant with other parts than the family's usual ones
        raise Unsupported(f"a {kind} model with unusual parts: {error}") from error
