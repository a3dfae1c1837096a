"""From a model that only listens to an engine that embeds; the runners are chosen as ``load.py`` does."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.api import EngineOptions, ModelFacts
from thalweg.infer.batch import Source
from thalweg.infer.describe import Encoder, Unsupported
from thalweg.infer.embed import (
    MOST,
    EagerEncoder,
    Embedder,
    EncoderRunner,
    ForeignEncoder,
    pooling_of,
    states_of,
)
from thalweg.infer.forms import PROBE, agree, dtype_of, eager_dtype, form_of
from thalweg.infer.models import describe_encoder
from thalweg.infer.pack import packing
from thalweg.utils.log import get_logger

log = get_logger(__name__)


def load_encoder(
    model: Any, options: EngineOptions, tokenizer: Any, *, name: str, folder: Any, wanted: str | None
) -> Embedder:
    """Return the engine of a live model that only listens; ``folder``: where it came from."""
    if options.stream:
        raise ValueError("stream: only the weights of causal models can be streamed; leave it out")
    if options.adapters:
        raise ValueError("adapters: an encoder takes none; merge the adapter into the model")
    pooling, form = pooling_of(folder, options), form_of(options)
    try:
        if wanted == "foreign":
            raise Unsupported("as asked")
        encoder = describe_encoder(model)
        made, length = _encoder(model, encoder, options, form, wanted)
    except Unsupported as reason:
        if wanted in ("native", "eager"):
            raise
        if options.quantize:
            if torch.device(options.device).type != "cpu":
                raise ValueError(f"{options.quantize} weights need a described model: {reason}") from None
            from thalweg.infer.swap import packed_copy

            model = packed_copy(model, options.quantize)
        log.info("running the model through its own code: %s", reason)
        most = getattr(model.config, "max_position_embeddings", None) or 512
        length = min(options.max_length or most, most)
        made = ForeignEncoder(model, max_tokens=max(options.max_step_tokens, length))
    facts = ModelFacts(
        name=name, kind="encoder", max_length=length, vocab_size=model.config.vocab_size,
        dtype=dtype_of(form, options), quantize=options.quantize,
        pad_token_id=getattr(model.config, "pad_token_id", None),
    )  # fmt: skip
    return Embedder(made, facts, tokenizer, pooling)


def _encoder(
    model: Any, encoder: Encoder, options: EngineOptions, form: str, wanted: str | None
) -> tuple[EncoderRunner, int]:
    parameter = next(model.parameters())
    probe = torch.arange(PROBE) * 7 % encoder.vocab
    want = states_of(model, probe.tolist())
    length = encoder.max_length if options.max_length is None else options.max_length
    length = length if encoder.positions is None else min(length, encoder.max_length)
    tokens = max(options.max_step_tokens, length)
    plain = EagerEncoder(
        encoder, dtype=parameter.dtype, device=parameter.device, max_length=PROBE, max_tokens=PROBE
    )
    agree(plain.run([Source(0, probe.tolist())]), want, parameter.dtype)
    on_cpu = torch.device(options.device).type == "cpu"
    if wanted != "eager" and on_cpu and form != "fp16":
        try:
            from thalweg.infer.encode import NativeEncoder
            from thalweg.infer.native import check

            cache = "fp32" if form == "fp32" else "bf16"
            check(encoder, form, cache)
            return NativeEncoder(
                encoder, form=form, cache=cache, max_length=length, max_tokens=tokens, most=MOST
            ), length
        except Unsupported as reason:
            if wanted == "native":
                raise
            log.info("running on torch's operators: %s", reason)
    made = EagerEncoder(
        encoder, dtype=eager_dtype(form, on_cpu), device=options.device, max_length=length,
        max_tokens=tokens, make_linear=packing(form) if on_cpu else None,
    )  # fmt: skip
    return made, length
