"""From an encoder model to an engine that embeds; its runners are chosen as ``load.py`` does."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.config import EngineConfig
from thalweg.infer.engine.embedding import (
    MAX_NUM_SEQS,
    EmbeddingEngine,
    EncoderRunner,
    TorchEncoder,
    TransformersEncoder,
    compute_hidden_states,
    load_pooling,
)
from thalweg.infer.models import build_encoder_spec
from thalweg.infer.models.spec import EncoderSpec, UnsupportedModelError
from thalweg.infer.precision import (
    NUM_PROBE_TOKENS,
    check_logits_close,
    get_activation_dtype,
    get_compute_dtype,
    get_weight_format,
)
from thalweg.infer.quantization.pack import linear_packer
from thalweg.infer.runners.base import EncoderInput
from thalweg.infer.types import ModelMetadata
from thalweg.utils.log import get_logger

log = get_logger(__name__)


def load_encoder(
    model: Any, options: EngineConfig, tokenizer: Any, *, name: str, folder: Any, forced_runner: str | None
) -> EmbeddingEngine:
    """Return the engine of a live encoder model; ``folder``: where it came from."""
    if options.weight_offload:
        raise ValueError("weight_offload: only the weights of causal models can be offloaded; leave it out")
    if options.lora_adapters:
        raise ValueError("lora_adapters: an encoder takes none; merge the adapter into the model")
    pooling, weight_format = load_pooling(folder, options), get_weight_format(options)
    try:
        if forced_runner == "foreign":
            raise UnsupportedModelError("as asked")
        encoder = build_encoder_spec(model)
        runner, max_length = _make_encoder(model, encoder, options, weight_format, forced_runner)
    except UnsupportedModelError as reason:
        if forced_runner in ("native", "eager"):
            raise
        if options.quantization:
            if torch.device(options.device).type != "cpu":
                raise ValueError(f"{options.quantization} weights need a described model: {reason}") from None
            from thalweg.infer.quantization.modules import quantized_copy

            model = quantized_copy(model, options.quantization)
        log.info("running the model through its own code: %s", reason)
        model_max = getattr(model.config, "max_position_embeddings", None) or 512
        max_length = min(options.max_model_len or model_max, model_max)
        runner = TransformersEncoder(model, max_num_batched_tokens=max(options.max_num_batched_tokens, max_length))
    metadata = ModelMetadata(
        name=name, kind="encoder", max_length=max_length, vocab_size=model.config.vocab_size,
        dtype=get_activation_dtype(weight_format, options), quantize=options.quantization,
        pad_token_id=getattr(model.config, "pad_token_id", None),
    )  # fmt: skip
    return EmbeddingEngine(runner, metadata, tokenizer, pooling)


def _make_encoder(
    model: Any, encoder: EncoderSpec, options: EngineConfig, weight_format: str, forced_runner: str | None
) -> tuple[EncoderRunner, int]:
    parameter = next(model.parameters())
    probe = torch.arange(NUM_PROBE_TOKENS) * 7 % encoder.vocab_size
    expected = compute_hidden_states(model, probe.tolist())
    max_length = encoder.max_length if options.max_model_len is None else options.max_model_len
    max_length = max_length if encoder.position_embeddings is None else min(max_length, encoder.max_length)
    max_num_batched_tokens = max(options.max_num_batched_tokens, max_length)
    reference = TorchEncoder(
        encoder,
        dtype=parameter.dtype,
        device=parameter.device,
        max_length=NUM_PROBE_TOKENS,
        max_num_batched_tokens=NUM_PROBE_TOKENS,
    )
    check_logits_close(reference.run([EncoderInput(0, probe.tolist())]), expected, parameter.dtype)
    on_cpu = torch.device(options.device).type == "cpu"
    if forced_runner != "eager" and on_cpu and weight_format != "fp16":
        try:
            from thalweg.infer.runners.cpu_encoder import CpuEncoder
            from thalweg.infer.runners.cpu_runner import check_supported

            kv_cache_dtype = "fp32" if weight_format == "fp32" else "bf16"
            check_supported(encoder, weight_format, kv_cache_dtype)
            return CpuEncoder(
                encoder,
                weight_format=weight_format,
                kv_cache_dtype=kv_cache_dtype,
                max_length=max_length,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=MAX_NUM_SEQS,
            ), max_length
        except UnsupportedModelError as reason:
            if forced_runner == "native":
                raise
            log.info("running on torch's operators: %s", reason)
    runner = TorchEncoder(
        encoder, dtype=get_compute_dtype(weight_format, on_cpu), device=options.device, max_length=max_length,
        max_num_batched_tokens=max_num_batched_tokens, make_linear=linear_packer(weight_format) if on_cpu else None,
    )  # fmt: skip
    return runner, max_length
