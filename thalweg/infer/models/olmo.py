"""OLMo: Llama with layer norms that have no weights."""

from typing import Any

import torch

from thalweg.infer.models.llama import build_llama_like
from thalweg.infer.models.spec import DecoderSpec, NormSpec, UnsupportedModelError

_EPS = 1e-5  # as in the model's own code, which has no setting for it


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c = model.config
    if c.clip_qkv is not None:
        raise UnsupportedModelError("OLMo with queries, keys and values that are clipped")
    norm = NormSpec("layer", torch.ones(c.hidden_size), torch.zeros(c.hidden_size), _EPS)
    return build_llama_like(model, lambda _: norm)
