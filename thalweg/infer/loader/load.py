"""From a model to an engine: describe it, check the description against the model's own logits, choose a
runner.

The runners in order of preference: ``use_cpu_kernels`` (CPUs with AVX-512, llvmlite installed), ``eager`` (plain torch
operators), ``foreign`` (the model's own code).  A description whose logits differ from the model's is not
used, so a family that has changed under us costs speed, never a wrong token.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.infer.config import EngineConfig
from thalweg.infer.engine.embedding import EmbeddingEngine
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.engine.structured_output import GrammarCompiler, is_available
from thalweg.infer.loader.hf import get_model_kind, load_mmapped, load_model, load_tokenizer
from thalweg.infer.loader.load_encoder import load_encoder
from thalweg.infer.lora import LoraManager
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import DecoderSpec, MoESpec, UnsupportedModelError
from thalweg.infer.precision import (
    NUM_PROBE_TOKENS,
    check_logits_close,
    eval_mode,
    get_activation_dtype,
    get_compute_dtype,
    get_weight_format,
)
from thalweg.infer.quantization.pack import linear_packer, quantize_experts
from thalweg.infer.runners.base import EncoderInput, ModelInput, ModelRunner, QuerySpan
from thalweg.infer.runners.batch_invariant import BatchInvariantRunner
from thalweg.infer.runners.torch_runner import TorchRunner
from thalweg.infer.runners.transformers_runner import TransformersRunner, get_max_length
from thalweg.infer.spec_decode.draft_model import DraftModelProposer
from thalweg.infer.types import ModelMetadata
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_BLOCK_SIZE = 16
_DEFAULT_DRAFT_TOKENS = 4  # of a draft model in a step, unless asked otherwise
_MEMORY_FRACTION = 0.25  # of the free memory, at most, for the KV cache that nobody asked for


def load_engine(
    model: str | Path | nn.Module,
    options: EngineConfig | None = None,
    tokenizer: Any = None,
    *,
    runner: str | None = None,
    weights_id: Any = None,
    draft_model: nn.Module | None = None,
    workers: Any = None,
) -> LLMEngine | EmbeddingEngine:
    """Return an engine for a Hugging Face model: a directory (or name) of one, or a live one.

    A live model is read, never changed; its weights are copied where a runner packs them.  ``tokenizer``:
    by default the directory's own, or none for a live model.  ``runner`` insists on ``use_cpu_kernels``, ``eager`` or
    ``foreign``.  ``source``: what a live model's weights are known by, where streamed ones are to be found
    again.  ``draft``: a live model for what ``options.draft_model`` is.  ``peers``: the other ranks of
    the options (``ranks.py``), by default processes that are started here.  Models that do
    not generate give an :class:`EmbeddingEngine`.  Raises ValueError where the runner cannot run the model.
    """
    options = options or EngineConfig()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {options.device}: torch sees no GPU here; leave it out for the processor")
    if options.num_ranks > 1 and workers is None:
        return _load_with_workers(model, options, tokenizer, runner)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    folder, loaded_id = None if isinstance(model, nn.Module) else model, weights_id
    if not isinstance(model, nn.Module):
        tokenizer = tokenizer or load_tokenizer(model, options)
        if options.weight_offload or workers is not None:
            model, loaded_id = load_mmapped(model, options)
        else:
            model = load_model(model, options)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(f"{name} is no Hugging Face model: it has no config")
    if workers is not None and (
        get_model_kind(model) != "causal" or options.lora_adapters or draft_model or options.draft_model
    ):
        workers.close()
        raise ValueError(
            "tensor_parallel_size, pipeline_parallel_size, expert_parallel_size: for causal models without"
            " lora_adapters and draft_model; use 1"
        )
    if get_model_kind(model) == "encoder":
        return load_encoder(model, options, tokenizer, name=name, folder=folder, forced_runner=runner)
    if draft_model is None and options.draft_model is not None:
        _check_same_vocab(tokenizer, load_tokenizer(options.draft_model, options), options.draft_model)
        draft_model = load_model(options.draft_model, options)
    return _load_generator(model, options, tokenizer, runner, loaded_id, name, draft_model, workers)


def _check_same_vocab(tokenizer: Any, draft_tokenizer: Any, draft_name: str) -> None:
    if tokenizer is not None and draft_tokenizer is not None and tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        raise ValueError(
            f"draft_model: {draft_name} has another vocabulary than the model: take one of the same family"
        )


def _load_generator(
    model: Any,
    options: EngineConfig,
    tokenizer: Any,
    forced_runner: str | None,
    weights_id: Any,
    name: str,
    draft_model: Any,
    workers: Any,
) -> LLMEngine:
    """Return the engine of a model that generates."""
    kind, weight_format, config = get_model_kind(model), get_weight_format(options), model.config
    if options.lora_adapters and options.weight_offload:
        raise ValueError("lora_adapters: they need weights in memory; leave weight_offload out")
    if kind == "seq2seq" and options.weight_offload:
        raise ValueError("weight_offload: only the weights of causal models can be offloaded; leave it out")
    draft_spec = None if draft_model is None else _build_draft_spec(draft_model, kind, options)
    runner, max_length = _choose_runner(model, options, weight_format, forced_runner, weights_id, draft_spec, workers)
    vocab_size = config.get_text_config().vocab_size
    proposer = (
        None
        if draft_spec is None
        else _make_proposer(draft_spec, runner, options, weight_format, max_length, vocab_size)
    )
    is_transformers = isinstance(runner, TransformersRunner)
    if options.batch_invariant and isinstance(getattr(runner, "inner", runner), TorchRunner):
        runner = BatchInvariantRunner(runner)
    metadata = ModelMetadata(
        name=name,
        kind=kind,
        max_length=max_length,
        vocab_size=vocab_size,
        dtype=get_activation_dtype(weight_format, options),
        quantize=options.quantization,
        eos_token_ids=tuple(token for token in _eos_token_ids(model) if 0 <= token < vocab_size),
        bos_token_id=getattr(config, "bos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
        adapters=tuple(options.lora_adapters),
    )
    return LLMEngine(
        runner,
        metadata,
        tokenizer,
        max_num_seqs=len(runner.block_tables),
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_cache=options.enable_prefix_caching and not is_transformers,
        # A foreign cache cannot take back a wrong guess.
        num_speculative_tokens=0
        if is_transformers
        else options.num_speculative_tokens or (_DEFAULT_DRAFT_TOKENS if proposer is not None else 0),
        proposer=proposer,
        grammar_compiler=GrammarCompiler(tokenizer, metadata.vocab_size, metadata.eos_token_ids)
        if is_available(tokenizer)
        else None,
        decoder_start_ids=_decoder_start_ids(model) if kind == "seq2seq" else (),
    )


def _load_with_workers(model: Any, options: EngineConfig, tokenizer: Any, runner: str | None) -> Any:
    """Start the other ranks; a live model goes to them through files."""
    from thalweg.infer.parallel.workers import saved_to_tempdir, spawn_workers

    if not isinstance(model, nn.Module):
        return load_engine(model, options, tokenizer, runner=runner, workers=spawn_workers(model, options))
    with saved_to_tempdir(model) as folder:
        return load_engine(model, options, tokenizer, runner=runner, workers=spawn_workers(folder, options))


def _build_draft_spec(draft_model: Any, model_kind: str, options: EngineConfig) -> DecoderSpec:
    """Describe a draft model; ValueError where it cannot be one."""
    if model_kind != "causal" or get_model_kind(draft_model) != "causal" or options.weight_offload:
        raise ValueError("draft_model: only a causal model in memory can have one, and it must be causal itself")
    draft_spec = build_decoder_spec(draft_model)
    _verify_spec(draft_model, draft_spec)
    return draft_spec


def _make_proposer(
    draft_spec: DecoderSpec,
    target_runner: ModelRunner,
    options: EngineConfig,
    weight_format: str,
    max_length: int,
    vocab_size: int,
) -> DraftModelProposer:
    """Return the guesser of a described draft model, with a cache like that of the runner it guesses for."""
    if isinstance(target_runner, TransformersRunner):
        raise ValueError("draft_model: a model that runs through its own code cannot take back rejected tokens")
    if draft_spec.max_length < max_length:
        raise ValueError(
            f"draft_model: it takes {draft_spec.max_length} tokens and the model {max_length}: set max_model_len"
        )
    _max_length(draft_spec, replace(options, max_model_len=max_length))  # refuses what the draft rotates otherwise
    runner, _ = _make_runner(
        draft_spec, options, weight_format, None, max_length=max_length, num_blocks=target_runner.num_blocks
    )
    return DraftModelProposer(
        runner,
        max_num_batched_tokens=options.max_num_batched_tokens,
        vocab_size=vocab_size,
        draft_vocab_size=draft_spec.vocab_size,
    )


def _decoder_start_ids(model: Any) -> tuple[int, ...]:
    """Return what a model that listens begins to speak with."""
    configs = [getattr(model, "generation_config", None), model.config]
    ids = []
    for names in (("decoder_start_token_id", "bos_token_id"), ("forced_bos_token_id",)):
        values = [getattr(holder, name, None) for name in names for holder in configs]
        ids += [int(token) for token in values if token is not None][:1]
    if not ids:
        raise ValueError("the model's config has no decoder_start_token_id: set it")
    return tuple(ids)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()


def _choose_runner(
    model: Any,
    options: EngineConfig,
    weight_format: str,
    forced_runner: str | None,
    weights_id: Any,
    draft_spec: DecoderSpec | None,
    workers: Any,
) -> tuple[ModelRunner, int]:
    if workers is not None:
        try:
            return _make_parallel_runner(model, options, weight_format, forced_runner, workers)
        except BaseException:
            workers.close()
            raise
    reasons = []
    if forced_runner in (None, "native", "eager"):
        try:
            decoder = build_decoder_spec(model)
            if options.weight_offload:
                return _make_offloaded_runner(model, decoder, options, weight_format, forced_runner, weights_id)
            _verify_spec(model, decoder)
            lora = LoraManager(options.lora_adapters, model, decoder) if options.lora_adapters else None
            return _make_runner(decoder, options, weight_format, forced_runner, draft_spec=draft_spec, lora=lora)
        except UnsupportedModelError as reason:
            if forced_runner is not None:
                raise
            reasons.append(str(reason))
    if options.weight_offload:
        raise ValueError(f"weight_offload needs a described model: {'; '.join(reasons)}")
    if options.lora_adapters:
        raise ValueError(f"lora_adapters need a described model: {'; '.join(reasons)}")
    if options.kv_cache_dtype in ("int8", "fp8"):
        raise ValueError(f"a cache in {options.kv_cache_dtype} needs a described model: {'; '.join(reasons)}")
    if options.quantization:
        if torch.device(options.device).type != "cpu":
            raise ValueError(f"{options.quantization} weights need a described model: {'; '.join(reasons)}")
        from thalweg.infer.quantization.modules import quantized_copy

        model = quantized_copy(model, options.quantization)
    log.info("running the model through its own code: %s", "; ".join(reasons) or "as asked")
    max_length = get_max_length(model.config.get_text_config(), options.max_model_len)
    return TransformersRunner(model, num_slots=options.max_num_seqs, max_length=max_length), max_length


def _make_runner(
    decoder: DecoderSpec,
    options: EngineConfig,
    weight_format: str,
    forced_runner: str | None,
    *,
    max_length: int | None = None,
    num_blocks: int | None = None,
    draft_spec: DecoderSpec | None = None,
    lora: LoraManager | None = None,
) -> tuple[ModelRunner, int]:
    max_length = max_length or _max_length(decoder, options)
    kv_cache_dtype = _kv_cache_dtype(options, weight_format)
    num_blocks = num_blocks or _num_kv_blocks(decoder, options, max_length, kv_cache_dtype, draft_spec)
    on_cpu = torch.device(options.device).type == "cpu"
    if forced_runner != "eager" and on_cpu and weight_format != "fp16":
        try:
            from thalweg.infer.runners.cpu_runner import CpuRunner

            runner = CpuRunner(
                decoder,
                weight_format=weight_format,
                num_blocks=num_blocks,
                num_slots=options.max_num_seqs,
                max_length=max_length,
                max_num_batched_tokens=options.max_num_batched_tokens,
                kv_cache_dtype=kv_cache_dtype,
                lora=lora,
            )
            return runner, max_length
        except UnsupportedModelError as reason:
            if forced_runner == "native":
                raise
            log.info("running on torch's operators: %s", reason)
    runner = TorchRunner(
        quantize_experts(decoder, weight_format) if on_cpu else decoder,
        dtype=get_compute_dtype(weight_format, on_cpu),
        num_blocks=num_blocks,
        num_slots=options.max_num_seqs,
        max_length=max_length,
        block_size=_BLOCK_SIZE,
        device=options.device,
        make_linear=linear_packer(weight_format) if on_cpu else None,
        kv_cache_dtype=kv_cache_dtype,
        lora=lora,
    )
    return runner, max_length


def _make_parallel_runner(
    model: Any, options: EngineConfig, weight_format: str, forced_runner: str | None, workers: Any
) -> tuple[ModelRunner, int]:
    """Return rank 0's runner of a model that the peers have a part in."""
    from thalweg.infer.parallel.executor import RunnerConfig, kernel_gap, start_driver
    from thalweg.infer.parallel.shard import ParallelConfig, shard_for_rank

    parallel_config = ParallelConfig.from_options(options)
    try:
        decoder = build_decoder_spec(model)
        _verify_spec(model, decoder, cache_weights=False)
        max_length = _max_length(decoder, options)
    except UnsupportedModelError as reason:
        raise ValueError(f"parts of a model on several ranks need a described one: {reason}") from None
    kv_cache_dtype = _kv_cache_dtype(options, weight_format)
    assert parallel_config.num_ranks == workers.num_ranks, "there are as many ranks as the options ask for"
    stage_specs = [
        shard_for_rank(decoder, rank, parallel_config)
        for rank in range(0, parallel_config.num_ranks, parallel_config.ranks_per_stage)
    ]
    unsupported_reason = kernel_gap(decoder, parallel_config, weight_format, kv_cache_dtype)
    on_cpu = torch.device(options.device).type == "cpu"
    use_cpu_kernels = forced_runner != "eager" and on_cpu and weight_format != "fp16" and not unsupported_reason
    if not use_cpu_kernels:
        if forced_runner == "native":
            raise UnsupportedModelError(unsupported_reason or "the native kernels are not for this")
        log.info("running on torch's operators: %s", unsupported_reason or "as asked")
    # A stage's first rank has the most heads; each rank has as many blocks as the stage that needs most.
    num_blocks = min(
        _num_kv_blocks(x, options, max_length, kv_cache_dtype, num_processes=workers.num_ranks) for x in stage_specs
    )
    runner_config = RunnerConfig(
        use_cpu_kernels, weight_format, kv_cache_dtype, num_blocks, options.max_num_seqs, max_length,
        options.max_num_batched_tokens, parallel_config.tensor_parallel,
        parallel_config.pipeline_parallel, parallel_config.expert_parallel,
    )  # fmt: skip
    return start_driver(decoder, runner_config, workers, options.device), max_length


def _max_length(decoder: DecoderSpec, options: EngineConfig) -> int:
    """Return the longest sequence; relative positions have no end of their own."""
    is_unbounded = decoder.encoder is not None and decoder.position_embeddings is None
    model_max = max(decoder.max_length, options.max_model_len or 0) if is_unbounded else decoder.max_length
    max_length = min(options.max_model_len or model_max, model_max)
    rope_limits = [x.attention.rope.max_valid_length for x in decoder.layers if x.attention.rope is not None]
    rope_limit = min((x for x in rope_limits if x), default=max_length)
    if max_length > rope_limit:
        raise UnsupportedModelError(
            f"positions that change with lengths above {rope_limit}, which max_model_len may set"
        )
    return max_length


def _make_offloaded_runner(
    model: Any,
    decoder: DecoderSpec,
    options: EngineConfig,
    weight_format: str,
    forced_runner: str | None,
    weights_id: Any,
) -> tuple[ModelRunner, int]:
    """Return a runner whose weights pass by (``stream.py``), or come from the model's own tensors."""
    from thalweg.infer.offload.weight_ring import build_streamed_weights, throughput_batch_size
    from thalweg.infer.runners.cpu_runner import CpuRunner, check_supported

    max_length = _max_length(decoder, options)
    num_slots = options.max_num_seqs or throughput_batch_size(decoder, weight_format, options, max_length)
    kv_cache_dtype = _kv_cache_dtype(options, weight_format)
    num_blocks = _num_kv_blocks(decoder, replace(options, max_num_seqs=num_slots), max_length, kv_cache_dtype)
    shape: dict[str, Any] = {"num_blocks": num_blocks, "num_slots": num_slots, "max_length": max_length}
    try:
        if forced_runner == "eager" or options.device != "cpu" or weight_format == "fp16":
            raise UnsupportedModelError("the native kernels are not for this")
        check_supported(decoder, weight_format, kv_cache_dtype)
    except UnsupportedModelError as reason:
        if forced_runner == "native":
            raise
        if options.quantization:
            raise ValueError(f"{options.quantization} weights cannot be streamed here: {reason}") from None
        log.info("streaming through torch's operators: %s", reason)
        dtype = get_compute_dtype(weight_format, torch.device(options.device).type == "cpu")
        _verify_spec(model, decoder, cache_weights=False)
        torch_runner = TorchRunner(
            decoder,
            dtype=dtype,
            block_size=_BLOCK_SIZE,
            device=options.device,
            cache_weights=False,
            kv_cache_dtype=kv_cache_dtype,
            **shape,
        )
        return torch_runner, max_length
    weights = build_streamed_weights(decoder, weight_format, options, weights_id)
    try:
        if not weights.file.complete:
            _verify_spec(model, decoder, cache_weights=False)
        cpu_runner = CpuRunner(
            decoder, weight_format=weight_format, max_num_batched_tokens=options.max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype, weights=weights, **shape,
        )  # fmt: skip
        weights.finalize()
    except BaseException:
        weights.close()
        raise
    return cpu_runner, max_length


def _kv_cache_dtype(options: EngineConfig, weight_format: str) -> str:
    """Return what keys and values are kept as."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return weight_format if weight_format in ("fp32", "fp16") else "bf16"


def _num_kv_blocks(
    decoder: DecoderSpec,
    options: EngineConfig,
    max_length: int,
    kv_cache_dtype: str,
    draft_spec: DecoderSpec | None = None,
    num_processes: int = 1,
) -> int:
    """Return how many KV blocks the memory asked for, or a share of what is free, holds.

    ``beside``: a draft model, whose keys and values take part of the same memory.  ``num_processes``: the processes
    that share what is free, each with as many blocks.
    """
    element_size = {"fp32": 4, "int8": 1, "fp8": 1}.get(kv_cache_dtype, 2)
    scale_bytes = 4 if kv_cache_dtype == "int8" else 0
    layers = [*decoder.layers, *(() if draft_spec is None else draft_spec.layers)]
    per_token = sum(
        2 * a.num_kv_heads * (a.head_dim * element_size + scale_bytes) for a in (x.attention for x in layers)
    )
    per_block = per_token * _BLOCK_SIZE
    blocks_per_seq = -(-max_length // _BLOCK_SIZE) * (1 if decoder.encoder is None else 2)
    if options.kv_cache_bytes is not None:
        blocks = options.kv_cache_bytes // per_block
        if blocks < 1:
            raise ValueError(f"kv_cache_bytes of {options.kv_cache_bytes} bytes does not hold a block ({per_block})")
        return blocks
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if torch.device(options.device).type == "cuda":
        free = torch.cuda.mem_get_info(options.device)[0]
    return max(
        blocks_per_seq,
        min(blocks_per_seq * options.max_num_seqs, int(free * _MEMORY_FRACTION) // (num_processes * per_block)),
    )


@torch.inference_mode()
def _verify_spec(model: Any, decoder: DecoderSpec, cache_weights: bool = True) -> None:
    """Raise Unsupported unless the description gives the model's own logits."""
    parameter = next(model.parameters())
    tokens = torch.randint(decoder.vocab_size, (NUM_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([tokens], device=parameter.device)
    extra_inputs = {} if decoder.encoder is None else {"decoder_input_ids": ids.flip(1)}
    with eval_mode(model):
        expected = model(input_ids=ids, return_dict=True, **extra_inputs).logits[0].float()
    reference = TorchRunner(
        decoder, dtype=parameter.dtype, num_blocks=2, num_slots=1, max_length=_BLOCK_SIZE,
        device=parameter.device, cache_weights=cache_weights,
    )  # fmt: skip
    if decoder.encoder is not None:
        reference.encoder_block_tables[0, 0], reference.encoder_seq_lens[0] = 1, NUM_PROBE_TOKENS
        reference.run_encoder([EncoderInput(0, tokens)])
        tokens = tokens[::-1]
    actual = reference.run(ModelInput(tokens, [QuerySpan(0, 0, NUM_PROBE_TOKENS)], range(NUM_PROBE_TOKENS)))
    is_moe = any(isinstance(layer.mlp, MoESpec) for layer in decoder.layers)
    check_logits_close(actual, expected, parameter.dtype, is_moe=is_moe)
