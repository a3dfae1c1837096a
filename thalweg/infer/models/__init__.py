"""A file for each family, whose ``build_decoder`` or ``build_encoder`` describes a Hugging Face model."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from thalweg.infer.models.spec import DecoderSpec, EncoderSpec, UnsupportedModelError

# Hugging Face's ``model_type`` to our file; what is described wrongly is found at load and not used.
DECODERS = {
    "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "mixtral": "llama",
    "qwen2_moe": "llama", "qwen3_moe": "llama", "smollm3": "llama", "granite": "llama", "olmo": "olmo",
    "stablelm": "stablelm", "cohere": "cohere", "starcoder2": "llama", "gptj": "gptj",
    "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma",
    "gpt2": "gpt2", "phi": "phi", "phi3": "llama", "opt": "opt", "bloom": "bloom", "gpt_neox": "gpt_neox",
    "falcon": "falcon", "t5": "t5", "mt5": "t5", "umt5": "t5", "bart": "bart", "mbart": "bart", "pegasus": "bart",
    "marian": "bart", "blenderbot": "bart", "m2m_100": "bart",
}  # fmt: skip


# The same for encoders.
ENCODERS = {
    "bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "camembert": "bert", "distilbert": "bert",
    "electra": "bert", "t5": "t5", "mt5": "t5", "umt5": "t5",
}  # fmt: skip


def build_decoder_spec(model: Any) -> DecoderSpec:
    """Describe a live Hugging Face model that generates; UnsupportedModelError where it cannot be."""
    return _build_spec(model, DECODERS, "build_decoder")


def build_encoder_spec(model: Any) -> EncoderSpec:
    """Describe a live Hugging Face encoder; UnsupportedModelError where it cannot be."""
    return _build_spec(model, ENCODERS, "build_encoder")


def _build_spec(model: Any, registry: dict[str, str], builder: str) -> Any:
    language_model = getattr(getattr(model, "model", None), "language_model", None)
    if language_model is not None:  # beside what reads pictures: what text alone goes through is described
        embeddings = {name: getattr(model, name) for name in ("get_input_embeddings", "get_output_embeddings")}
        model = SimpleNamespace(config=model.config.get_text_config(), model=language_model, **embeddings)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    module_name = registry.get(model_type or "")
    if module_name is None:
        raise UnsupportedModelError(f"no description of models of type {model_type!r}")
    try:
        return getattr(importlib.import_module(f"thalweg.infer.models.{module_name}"), builder)(model)
    except UnsupportedModelError:
        raise
    # A variant with other modules than the family's usual ones:
    except (AttributeError, AssertionError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        # Not the model's fault; torch's CPU allocator says so in words alone.
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        raise UnsupportedModelError(
            f"a {model_type} model with unusual modules: {type(error).__name__} {error}"
        ) from error
