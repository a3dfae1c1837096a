"""A file for each family, whose ``decoder(model)`` or ``encoder(model)`` describes a Hugging Face model."""

from __future__ import annotations

import importlib
from typing import Any

from thalweg.infer.describe import Decoder, Encoder, Unsupported

FAMILIES = {
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "mixtral": "llama",
    "qwen2_moe": "llama", "qwen3_moe": "llama", "smollm3": "llama", "granite": "llama", "olmo": "olmo",
    "stablelm": "stablelm", "cohere": "cohere", "starcoder2": "starcoder2", "gptj": "gptj",
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma",
    "gpt2": "gpt2", "phi": "phi", "phi3": "phi3", "opt": "opt", "bloom": "bloom", "gpt_neox": "gpt_neox",
    "falcon": "falcon", "t5": "t5", "mt5": "t5", "umt5": "t5",
}  # fmt: skip
"""Hugging Face's ``model_type`` to our file; what is described wrongly is found at load and not used."""


ENCODERS = {
    "bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "camembert": "bert", "distilbert": "bert",
    "electra": "bert", "t5": "t5", "mt5": "t5", "umt5": "t5",
}  # fmt: skip
"""The same for models that only listen."""


def describe(model: Any) -> Decoder:
    """Describe a live Hugging Face model that generates, or raise Unsupported."""
    return _family(model, FAMILIES, "decoder")


def describe_encoder(model: Any) -> Encoder:
    """Describe a live Hugging Face model that only listens, or raise Unsupported."""
    return _family(model, ENCODERS, "encoder")


def _family(model: Any, families: dict[str, str], what: str) -> Any:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = families.get(kind or "")
    if family is None:
        raise Unsupported(f"no description of models of type {kind!r}")
    try:
        return getattr(importlib.import_module(f"thalweg.infer.models.{family}"), what)(model)
    except Unsupported:
        raise
    # A variant with other parts than the family's usual ones:
    except (
        AttributeError,
        AssertionError,
        TypeError,
        KeyError,
        IndexError,
        ValueError,
        RuntimeError,
    ) as error:
        raise Unsupported(f"a {kind} model with unusual parts: {type(error).__name__} {error}") from error
