"""Cohere's Command R: attention and MLP side by side, neighbouring dims rotated, scaled logits."""

from typing import Any

from thalweg.infer.models.llama import build_llama_like
from thalweg.infer.models.spec import DecoderSpec, UnsupportedModelError, build_layer_norm


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    if model.config.use_qk_norm:
        raise UnsupportedModelError("Cohere with layer norms on queries and keys")
    scale = float(model.config.logit_scale)
    return build_llama_like(model, build_layer_norm, logit_scale=scale, parallel=True, interleaved=True)
