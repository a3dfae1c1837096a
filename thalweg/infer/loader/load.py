"""From a model to an engine: describe it, verify the description against the model's own logits, choose a runner.

A description (``models/``) whose logits differ from the model's is not used, so a family that has changed under us
costs speed, never a wrong token.  The runners in order of preference: ``cpu`` (kernels for AVX-512, AVX2 and NEON,
llvmlite installed), ``torch`` (plain operators, any device), ``transformers`` (the model's own code, which needs no
description).  The first that supports the model builds it; an error while it builds, out of memory too, is raised.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.device import resolve_device
from thalweg.infer.config import EngineConfig, limit_length
from thalweg.infer.engine.embedding import MAX_NUM_SEQS, EmbeddingEngine, load_max_seq_length, load_pooling
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.engine.structured_output import make_grammar_compiler
from thalweg.infer.loader.hf import ModelKind, get_model_kind, load_mmapped, load_model, load_tokenizer, to_local_folder
from thalweg.infer.lora import LoraManager
from thalweg.infer.models import build_decoder_spec, build_encoder_spec
from thalweg.infer.models.spec import DecoderSpec, EncoderSpec, MoESpec, UnsupportedModelError, get_max_model_len
from thalweg.infer.precision import NUM_PROBE_TOKENS, check_logits_close, eval_mode, get_weight_format
from thalweg.infer.runners import base, transformers_runner
from thalweg.infer.runners.cpu_encoder import CpuEncoder
from thalweg.infer.runners.cpu_runner import CpuRunner
from thalweg.infer.runners.torch_runner import TorchEncoder, TorchRunner
from thalweg.infer.runners.transformers_runner import TransformersEncoder, TransformersRunner
from thalweg.infer.spec_decode.draft_model import DraftModelProposer
from thalweg.infer.types import ModelMetadata, to_token_tuple
from thalweg.ops import cpu_kernels
from thalweg.utils.log import get_logger

log = get_logger(__name__)

DECODER_RUNNERS: tuple[Any, ...] = (CpuRunner, TorchRunner, TransformersRunner)
# By preference: the first that supports a model runs it.
ENCODER_RUNNERS: tuple[Any, ...] = (CpuEncoder, TorchEncoder, TransformersEncoder)
_KERNEL_GAIN = "give several times the tokens a second"
_SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_DRAFT_TOKENS = 4  # of a draft model in a step, unless asked otherwise


def load_engine(
    model: str | Path | nn.Module,
    options: EngineConfig | None = None,
    tokenizer: Any = None,
    *,
    runner: str | None = None,
    weights_id: Any = None,
    draft_model: nn.Module | None = None,
    workers: Any = None,
    spec: DecoderSpec | None = None,
) -> LLMEngine | EmbeddingEngine:
    """Return an engine for a Hugging Face model: a directory (or name) of one, or a live one.

    A live model is read, never changed; its weights are copied where a runner packs them.  ``tokenizer``: by
    default the directory's own, or none for a live model.  ``runner`` insists on ``cpu``, ``torch`` or
    ``transformers``.  ``weights_id``: the identity of a live model's weights, by which a file of packed ones is found
    again.  ``draft_model``: a live model in place of ``options.draft_model``.  ``workers``: the other ranks of the
    options, by default processes that are started here.  ``spec``: a live model's description, where the caller has
    made it, and verifies it.  Encoder models give an :class:`EmbeddingEngine`.  Raises ValueError where no runner can
    run the model as the options ask.
    """
    options = _with_device(options or EngineConfig(), model)
    if options.num_ranks > 1 and workers is None:
        return _load_with_workers(model, options, tokenizer, runner)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    folder, loaded_id = None, weights_id
    if not isinstance(model, nn.Module):
        model = folder = to_local_folder(model)
        tokenizer = tokenizer or load_tokenizer(model, options)
        if options.weight_offload or workers is not None:
            model, loaded_id = load_mmapped(model, options)
        else:  # on the host, from where a runner brings to its device what it computes with
            model = load_model(model, replace(options, device="cpu"))
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(f"{name} is no Hugging Face model: it has no config")
    kind = get_model_kind(model)
    if workers is not None and (kind != "causal" or options.lora_adapters or draft_model or options.draft_model):
        workers.close()
        raise ValueError(
            "tensor_parallel_size, pipeline_parallel_size, expert_parallel_size: for causal models without"
            " lora_adapters and draft_model; use 1"
        )
    if options.weight_offload and kind != "causal":
        raise ValueError("weight_offload: only the weights of causal models can be offloaded; leave it out")
    if kind != "encoder" and (options.pooling != "auto" or options.normalize is not None):
        raise ValueError("pooling, normalize: for encoders, and this model generates text; load it by its AutoModel")
    if kind == "encoder":
        return _load_encoder(model, options, tokenizer, runner, name, folder)
    if draft_model is None and options.draft_model is not None:
        _check_same_vocab(tokenizer, load_tokenizer(options.draft_model, options), options.draft_model)
        draft_model = load_model(options.draft_model, replace(options, device="cpu"))
    if options.lora_adapters and options.weight_offload:
        raise ValueError("lora_adapters: they need weights in memory; leave weight_offload out")
    draft_spec = None if draft_model is None else _build_draft_spec(draft_model, kind, options)
    if workers is not None:
        model_runner, max_length = _make_parallel_runner(model, options, runner, workers, spec)
    else:
        model_runner, max_length = _make_runner(model, options, runner, loaded_id, draft_spec, spec)
    metadata = _make_metadata(model, options, name, kind, max_length)
    proposer = None
    if draft_spec is not None:
        proposer = _make_proposer(draft_model, draft_spec, model_runner, options, metadata)
    is_transformers = isinstance(model_runner, TransformersRunner)
    num_speculative_tokens = options.num_speculative_tokens or (_DEFAULT_DRAFT_TOKENS if proposer is not None else 0)
    return LLMEngine(
        model_runner,
        metadata,
        tokenizer,
        max_num_seqs=model_runner.num_slots,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_cache=options.enable_prefix_caching and not is_transformers,
        # The cache of a model's own code cannot take back a rejected token.
        num_speculative_tokens=0 if is_transformers else num_speculative_tokens,
        proposer=proposer,
        grammar_compiler=make_grammar_compiler(tokenizer, metadata),
        decoder_start_ids=_decoder_start_ids(model) if kind == "seq2seq" else (),
        banned_token_ids=_banned_token_ids(model, metadata),
    )


def _with_device(options: EngineConfig, model: Any) -> EngineConfig:
    """Return the options with the device that they mean: with ``auto`` a live model's own."""
    device: str | torch.device = options.device
    if device == "auto" and isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else parameter.device
    return replace(options, device=str(resolve_device(device)))


def _load_with_workers(model: Any, options: EngineConfig, tokenizer: Any, runner: str | None) -> Any:
    """Start the other ranks; a live model goes to them through files."""
    from thalweg.infer.parallel.process_group import spawn_workers

    with tempfile.TemporaryDirectory(prefix="thalweg-infer-") as folder:
        if isinstance(model, nn.Module):
            model.save_pretrained(folder)  # type: ignore[operator]
        workers = spawn_workers(folder if isinstance(model, nn.Module) else to_local_folder(model), options)
        return load_engine(model, options, tokenizer, runner=runner, workers=workers)


def _make_metadata(model: Any, options: EngineConfig, name: str, kind: ModelKind, max_length: int) -> ModelMetadata:
    vocab_size = model.config.get_text_config().vocab_size
    is_fp16, weight_format = options.dtype == "fp16", get_weight_format(options)
    eos_ids = to_token_tuple(_generation_setting(model, "eos_token_id"))
    generation_config = getattr(model, "generation_config", None)
    settings = {} if generation_config is None else generation_config.to_diff_dict()
    return ModelMetadata(
        name=name,
        kind=kind,
        max_length=max_length,
        vocab_size=vocab_size,
        dtype="fp32" if weight_format == "fp32" else "fp16" if is_fp16 else "bf16",
        quantize=options.quantization,
        eos_token_ids=tuple(token for token in eos_ids if 0 <= token < vocab_size),
        bos_token_id=getattr(model.config, "bos_token_id", None),
        pad_token_id=getattr(model.config, "pad_token_id", None),
        adapters=tuple(options.lora_adapters),
        sampling_defaults={name: settings[name] for name in _SAMPLING_SETTINGS if settings.get(name) is not None},
    )


def _load_encoder(
    model: Any, options: EngineConfig, tokenizer: Any, forced_runner: str | None, name: str, folder: Any
) -> EmbeddingEngine:
    """Return the engine of a model that embeds; ``folder``: where it came from."""
    if options.lora_adapters:
        raise ValueError("lora_adapters: an encoder takes none; merge the adapter into the model")
    pooling = load_pooling(folder, options)
    if (max_seq_length := load_max_seq_length(folder)) is not None:
        options = replace(options, max_model_len=limit_length(max_seq_length, options.max_model_len))
    spec, undescribed = (None, "") if forced_runner == "transformers" else _describe(model, options, "encoder")
    runner_type = choose_runner(ENCODER_RUNNERS, spec, options, forced_runner, undescribed)
    if spec is None:
        model_max = getattr(model.config, "max_position_embeddings", None) or 512
        for name, child in model.named_modules():  # MPNet's positions begin behind that of the padding
            if name.endswith("position_embeddings") and isinstance(getattr(child, "padding_idx", None), int):
                model_max = min(model_max, child.num_embeddings - 1 - child.padding_idx)
        max_length = limit_length(model_max, options.max_model_len)
    else:
        max_length = get_max_model_len(spec, options.max_model_len)
    runner = runner_type(base.RunnerRequest(model, spec, options, max_length, num_slots=MAX_NUM_SEQS))
    return EmbeddingEngine(runner, _make_metadata(model, options, name, "encoder", max_length), tokenizer, pooling)


def choose_runner(
    runners: Sequence[Any],
    spec: DecoderSpec | EncoderSpec | None,
    options: EngineConfig,
    forced_runner: str | None = None,
    undescribed: str = "",
) -> Any:
    """Return the first runner that supports a model, or the one of that name.

    ``undescribed``: why there is no ``spec``.  Raises UnsupportedModelError, with the reasons, where none does.
    """
    reasons: list[str] = []
    for runner in runners:
        if forced_runner not in (None, runner.name):
            continue
        reason = runner.supports(spec, options)
        if reason is None:
            why = "; ".join(filter(None, [*reasons, undescribed]))
            if (isa := cpu_kernels.host_isa()) is not None and runner.name == "cpu":
                log.info("running by CPU kernels for %s", isa.name)
            elif why and resolve_device(options.device).type == "cpu":
                log.warning("running by %s, not by CPU kernels, which %s: %s", runner.__name__, _KERNEL_GAIN, why)
            elif why:
                log.info("running by %s: %s", runner.__name__, why)
            return runner
        reasons.append(reason)
    if not reasons:
        raise ValueError(f"there is no runner {forced_runner!r}: there are {', '.join(x.name for x in runners)}")
    cause = f": {undescribed}" if undescribed else ""
    raise UnsupportedModelError("; ".join(dict.fromkeys(reasons)) + cause)


def _describe(model: Any, options: EngineConfig, kind: str) -> tuple[Any, str]:
    """Return a model's description, or None and why there is none that gives the model's own logits.

    With ``weight_offload`` it is verified when the runner is built, unless its packed weights have been before.
    """
    try:
        spec = build_encoder_spec(model) if kind == "encoder" else build_decoder_spec(model)
        if not options.weight_offload:
            verify(model, spec)
        return spec, ""
    except UnsupportedModelError as reason:
        return None, str(reason)


def _make_runner(
    model: Any,
    options: EngineConfig,
    forced_runner: str | None,
    weights_id: Any,
    draft_spec: DecoderSpec | None,
    spec: DecoderSpec | None,
) -> tuple[base.ModelRunner, int]:
    """Return the runner of a model in this process, and its longest sequence."""
    undescribed = ""
    if spec is None and forced_runner != "transformers":
        spec, undescribed = _describe(model, options, "decoder")
    runner_type = choose_runner(DECODER_RUNNERS, spec, options, forced_runner, undescribed)
    if spec is None:
        max_length = transformers_runner.get_max_length(model.config.get_text_config(), options.max_model_len)
        return runner_type(base.RunnerRequest(model, None, options, max_length, options.max_num_seqs)), max_length
    max_length = get_max_model_len(spec, options.max_model_len)
    num_slots = options.max_num_seqs
    if num_slots == 0:
        from thalweg.infer.offload.weight_ring import throughput_batch_size

        num_slots = throughput_batch_size(spec, get_weight_format(options), options, max_length)
    count_blocks = partial(base.count_kv_blocks, spec, replace(options, max_num_seqs=num_slots), max_length, draft_spec)
    # On a device its memory is what counts, once the weights are there.
    num_blocks = count_blocks() if resolve_device(options.device).type == "cpu" else count_blocks
    lora = LoraManager(options.lora_adapters, model, spec) if options.lora_adapters else None
    request = base.RunnerRequest(model, spec, options, max_length, num_slots, num_blocks, lora)
    if not options.weight_offload:
        return runner_type(request), max_length
    return _build_offloaded(runner_type, request, weights_id), max_length


def _build_offloaded(runner_type: Any, request: base.DecoderRequest, weights_id: Any) -> base.ModelRunner:
    """Return a runner whose weights are read from a file of packed ones, or from the model's own tensors."""
    from thalweg.infer.offload.weight_ring import WeightRing

    if runner_type is not CpuRunner:
        for name in ("weight_offload_dir", "weight_offload_bytes"):
            if getattr(request.config, name) is not None:
                reason = CpuRunner.supports(request.spec, request.config) or f"{runner_type.name} was asked for"
                raise ValueError(
                    f"{name} is for the CPU kernels, which alone pack weights into a file, and they do not run this"
                    f" model here ({reason}): leave it out (in DeepSpeed's config: offload_param.device cpu); weights"
                    " are then read from the model's own files or memory"
                )
        verify(request.model, request.spec, cache_weights=False)
        return runner_type(request)
    weights = WeightRing(request.spec, request.weight_format, request.config, weights_id)
    try:
        if not weights.file.complete:
            verify(request.model, request.spec, cache_weights=False)
        runner = runner_type(replace(request, weights=weights))
        weights.finalize()
    except BaseException:
        weights.close()
        raise
    return runner


def _make_parallel_runner(
    model: Any, options: EngineConfig, forced_runner: str | None, workers: Any, decoder: DecoderSpec | None
) -> tuple[base.ModelRunner, int]:
    """Return rank 0's runner of a model of which each worker has a shard."""
    from thalweg.infer.parallel.executor import kernel_gap, start_driver
    from thalweg.infer.parallel.shard import shard_for_rank

    try:
        try:
            if decoder is None:
                decoder = build_decoder_spec(model)
                verify(model, decoder, cache_weights=False)
        except UnsupportedModelError as reason:
            raise ValueError(f"a model sharded on several ranks needs a description: {reason}") from None
        max_length = get_max_model_len(decoder, options.max_model_len)
        assert options.num_ranks == workers.num_ranks, "there are as many ranks as the options ask for"
        first_ranks = range(0, options.num_ranks, options.ranks_per_stage)
        stage_specs = [shard_for_rank(decoder, rank, options) for rank in first_ranks]
        gap = kernel_gap(decoder, options)
        if gap and forced_runner == "cpu":
            raise UnsupportedModelError(gap)
        runners = (TorchRunner,) if gap else DECODER_RUNNERS[:2]
        cpu = choose_runner(runners, decoder, options, forced_runner) is CpuRunner
        # A stage's first rank has the most heads; each rank has as many blocks as the stage that needs most.
        num_blocks = None
        if resolve_device(options.device).type == "cpu":
            ranks = workers.num_ranks
            num_blocks = min(base.count_kv_blocks(x, options, max_length, num_processes=ranks) for x in stage_specs)
        driver = start_driver(decoder, options, workers, cpu=cpu, num_blocks=num_blocks, max_length=max_length)
        return driver, max_length
    except BaseException:
        workers.close()
        raise


@torch.inference_mode()
def verify(model: Any, spec: DecoderSpec | EncoderSpec, cache_weights: bool = True) -> None:
    """Raise UnsupportedModelError unless the description gives the model's own logits, an encoder's its last states."""
    parameter = next(model.parameters())
    config = EngineConfig(device=str(parameter.device))
    request: Any = base.RunnerRequest(None, spec, config, max_model_len=base.BLOCK_SIZE, num_slots=1, num_blocks=2)
    if isinstance(spec, EncoderSpec):
        probe = (torch.arange(NUM_PROBE_TOKENS) * 7 % spec.vocab_size).tolist()
        states = TorchEncoder(request, parameter.dtype).run([base.EncoderInput(0, probe)])
        return check_logits_close(states, transformers_runner.compute_hidden_states(model, probe), parameter.dtype)
    tokens = torch.randint(spec.vocab_size, (NUM_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([tokens], device=parameter.device)
    extra_inputs = {} if spec.encoder is None else {"decoder_input_ids": ids.flip(1)}
    with eval_mode(model):
        expected = model(input_ids=ids, return_dict=True, **extra_inputs).logits[0].float()
    reference = TorchRunner(request, parameter.dtype, cache_weights)
    spans, rows = [base.QuerySpan(0, 0, NUM_PROBE_TOKENS)], range(NUM_PROBE_TOKENS)
    batch = base.ModelInput(tokens, spans, rows, block_tables=[[0]])
    if spec.encoder is not None:
        reference.run_encoder([base.EncoderInput(0, tokens, blocks=[1])])
        batch.tokens, batch.encoder_block_tables, batch.encoder_seq_lens = tokens[::-1], [[1]], [NUM_PROBE_TOKENS]
    is_moe = any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)
    return check_logits_close(reference.run(batch), expected, parameter.dtype, is_moe=is_moe)


def _check_same_vocab(tokenizer: Any, draft_tokenizer: Any, draft_name: str) -> None:
    if tokenizer is not None and draft_tokenizer is not None and tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        raise ValueError(f"draft_model: {draft_name} has another vocabulary than the model: take one of its family")


def _build_draft_spec(draft_model: Any, model_kind: str, options: EngineConfig) -> DecoderSpec:
    """Describe a draft model; ValueError where it cannot be one."""
    if model_kind != "causal" or get_model_kind(draft_model) != "causal" or options.weight_offload:
        raise ValueError("draft_model: only a causal model in memory can have one, and it must be causal itself")
    draft_spec = build_decoder_spec(draft_model)
    verify(draft_model, draft_spec)
    return draft_spec


def _make_proposer(
    draft_model: Any, draft_spec: DecoderSpec, target: base.ModelRunner, options: EngineConfig, metadata: ModelMetadata
) -> DraftModelProposer:
    """Return the proposer of a described draft model, with a cache of the same blocks as its target's."""
    max_length = metadata.max_length
    if isinstance(target, TransformersRunner):
        raise ValueError("draft_model: a model that runs through its own code cannot take back rejected tokens")
    if draft_spec.max_length < max_length:
        raise ValueError(
            f"draft_model: it takes {draft_spec.max_length} tokens and the model {max_length}: set max_model_len"
        )
    # What it proposes is verified: it may depend on who else runs.
    options = replace(options, max_model_len=max_length, batch_invariant=False)
    runner_type, num_blocks = choose_runner(DECODER_RUNNERS[:2], draft_spec, options), target.num_blocks
    request = base.RunnerRequest(draft_model, draft_spec, options, max_length, options.max_num_seqs, num_blocks)
    return DraftModelProposer(
        runner_type(request),
        max_num_batched_tokens=options.max_num_batched_tokens,
        vocab_size=metadata.vocab_size,
        draft_vocab_size=draft_spec.vocab_size,
    )


def _generation_setting(model: Any, *names: str) -> Any:
    """Return the first of these that a model's generation config or config sets, or None."""
    configs = [getattr(model, "generation_config", None), model.config]
    values = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in values if value is not None), None)


def _decoder_start_ids(model: Any) -> tuple[int, ...]:
    """Return the first decoder tokens of an encoder-decoder model."""
    start = _generation_setting(model, "decoder_start_token_id", "bos_token_id")
    ids = [int(token) for token in (start, _generation_setting(model, "forced_bos_token_id")) if token is not None]
    if not ids:
        raise ValueError("the model's config has no decoder_start_token_id: set it")
    return tuple(ids)


def _banned_token_ids(model: Any, metadata: ModelMetadata) -> list[int]:
    """Return the tokens that a model never says, wherever it is; words of several are not among them."""
    words = _generation_setting(model, "bad_words_ids") or []
    # As for Hugging Face's code an end is no bad word.
    tokens = [word[0] for word in words if len(word) == 1 and word[0] not in metadata.eos_token_ids]
    tokens += _generation_setting(model, "suppress_tokens") or []
    return [token for token in tokens if 0 <= token < metadata.vocab_size]
