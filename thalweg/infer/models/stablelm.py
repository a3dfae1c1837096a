"""StableLM: Llama with layer norms, part of each head rotated, attention and MLP side by side where asked."""

from typing import Any

from thalweg.infer.models.llama import build_llama_like
from thalweg.infer.models.spec import DecoderSpec, UnsupportedModelError


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    if model.config.qk_layernorm:
        raise UnsupportedModelError("StableLM with layer norms on queries and keys")
    return build_llama_like(model, parallel=model.config.use_parallel_residual)
