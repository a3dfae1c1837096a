"""From a model to an engine: describe it, check the description against the model's own logits, choose a
runner.

The runners in order of preference: ``native`` (CPUs with AVX-512, llvmlite installed), ``eager`` (plain torch
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

from thalweg.infer.api import EngineOptions, ModelFacts
from thalweg.infer.batch import Batch, Runner, Span
from thalweg.infer.describe import Decoder, Unsupported
from thalweg.infer.eager import EagerRunner
from thalweg.infer.engine import Engine
from thalweg.infer.foreign import ForeignRunner
from thalweg.infer.guides import Guides, available
from thalweg.infer.invariant import OneByOne
from thalweg.infer.models import describe
from thalweg.infer.pack import packing
from thalweg.infer.source import load_model, load_tokenizer, map_model
from thalweg.ops import native
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_PROBE = 13  # tokens of the check at load
_TOLERANCE = {torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_BLOCK = 16
_SHARE = 0.25  # of the free memory, at most, for the KV cache that nobody asked for


def load_engine(
    model: str | Path | nn.Module,
    options: EngineOptions | None = None,
    tokenizer: Any = None,
    *,
    runner: str | None = None,
    source: Any = None,
    peers: Any = None,
) -> Engine:
    """Return an engine for a Hugging Face model: a directory (or name) of one, or a live one.

    A live model is read, never changed; its weights are copied where a runner packs them.  ``tokenizer``:
    by default the directory's own, or none for a live model.  ``runner`` insists on ``native``, ``eager`` or
    ``foreign``.  ``source``: what a live model's weights are known by, where streamed ones are to be found
    again.  ``peers``: the other ranks of ``options.tensor_parallel`` (``ranks.py``), by default processes
    that are started here.  Raises ValueError where the model has no causal form or the runner cannot run it.
    """
    options = options or EngineOptions()
    if options.tensor_parallel > 1 and peers is None:
        return _with_peers(model, options, tokenizer, runner)
    form = _form(options)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    key = source
    if not isinstance(model, nn.Module):
        tokenizer = tokenizer or load_tokenizer(model, options)
        if options.stream or peers is not None:
            model, key = map_model(model, options)
        else:
            model = load_model(model, options)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise ValueError(f"{name} is no Hugging Face causal model: it has no config or no generate()")
    made, max_length = _runner(model, options, form, runner, key, peers)
    foreign = isinstance(made, ForeignRunner)
    if options.batch_invariant and isinstance(getattr(made, "inner", made), EagerRunner | ForeignRunner):
        made = OneByOne(made)
    facts = ModelFacts(
        name=name,
        kind="causal",
        max_length=max_length,
        vocab_size=config.get_text_config().vocab_size,
        dtype="fp32" if form == "fp32" else "fp16" if options.dtype == "fp16" else "bf16",
        quantize=options.quantize,
        eos_token_ids=_ends(model),
        bos_token_id=getattr(config, "bos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
    )
    return Engine(
        made,
        facts,
        tokenizer,
        max_batch=len(made.tables),
        max_step_tokens=options.max_step_tokens,
        prefix_cache=options.prefix_cache and not foreign,
        speculate=0 if foreign else options.speculate,  # a foreign cache cannot take back a wrong guess
        guides=Guides(tokenizer, facts.vocab_size, facts.eos_token_ids) if available(tokenizer) else None,
    )


def _with_peers(model: Any, options: EngineOptions, tokenizer: Any, runner: str | None) -> Engine:
    """Start the other ranks; a live model goes to them through files."""
    from thalweg.infer.ranks import saved, spawned

    if not isinstance(model, nn.Module):
        return load_engine(model, options, tokenizer, runner=runner, peers=spawned(model, options))
    with saved(model) as folder:
        return load_engine(model, options, tokenizer, runner=runner, peers=spawned(folder, options))


def _form(options: EngineOptions) -> str:
    """Return what weights become: fp32, bf16, fp16, int8 or int4."""
    if options.quantize:
        return options.quantize
    if options.dtype != "auto":
        return options.dtype
    if options.device != "cpu":
        return "bf16"
    return "fp32" if native.missing("bf16") else "bf16"


def _ends(model: Any) -> tuple[int, ...]:
    for holder in (getattr(model, "generation_config", None), model.config):
        ends = getattr(holder, "eos_token_id", None)
        if ends is not None:
            return tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    return ()


def _runner(
    model: Any, options: EngineOptions, form: str, wanted: str | None, key: Any, peers: Any
) -> tuple[Runner, int]:
    if peers is not None:
        try:
            return _parallel(model, options, form, wanted, peers)
        except BaseException:
            peers.close()
            raise
    reasons = []
    if wanted in (None, "native", "eager"):
        try:
            decoder = describe(model)
            if options.stream:
                return _streamed(model, decoder, options, form, wanted, key)
            _compare(model, decoder)
            return _described(decoder, options, form, wanted)
        except Unsupported as reason:
            if wanted is not None:
                raise
            reasons.append(str(reason))
    if options.stream:
        raise ValueError(f"streamed weights need a described model: {'; '.join(reasons)}")
    if options.kv_cache_dtype in ("int8", "fp8"):
        raise ValueError(f"a cache in {options.kv_cache_dtype} needs a described model: {'; '.join(reasons)}")
    if options.quantize:
        raise ValueError(f"{options.quantize} weights need a described model: {'; '.join(reasons)}")
    log.info("running the model through its own code: %s", "; ".join(reasons) or "as asked")
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
    length = min(options.max_length or most, most)
    return ForeignRunner(model, num_slots=options.max_batch, max_length=length), length


def _described(decoder: Decoder, options: EngineOptions, form: str, wanted: str | None) -> tuple[Runner, int]:
    length = min(options.max_length or decoder.max_length, decoder.max_length)
    cache = _cache(options, form)
    blocks = _num_blocks(decoder, options, length, cache)
    on_cpu = torch.device(options.device).type == "cpu"
    if wanted != "eager" and on_cpu and form != "fp16":
        try:
            from thalweg.infer.native import NativeRunner

            made = NativeRunner(
                decoder,
                form=form,
                num_blocks=blocks,
                num_slots=options.max_batch,
                max_length=length,
                max_tokens=options.max_step_tokens,
                cache=cache,
            )
            return made, length
        except Unsupported as reason:
            if wanted == "native":
                raise
            log.info("running on torch's operators: %s", reason)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(form, torch.bfloat16)
    if form in ("int8", "int4") and on_cpu:
        dtype = torch.float32
    made = EagerRunner(
        decoder,
        dtype=dtype,
        num_blocks=blocks,
        num_slots=options.max_batch,
        max_length=length,
        block_size=_BLOCK,
        device=options.device,
        make_linear=packing(form) if on_cpu else None,
        cache=cache,
    )
    return made, length


def _parallel(
    model: Any, options: EngineOptions, form: str, wanted: str | None, peers: Any
) -> tuple[Runner, int]:
    """Return rank 0's runner of a model that the peers have a part in."""
    from thalweg.infer.parallel import Plan, lead, suits_kernels
    from thalweg.infer.shard import shard

    try:
        decoder = describe(model)
        _compare(model, decoder, keep=False)
    except Unsupported as reason:
        raise ValueError(f"tensor_parallel needs a described model: {reason}") from None
    length = min(options.max_length or decoder.max_length, decoder.max_length)
    cache = _cache(options, form)
    why = suits_kernels(decoder, peers.size, form, cache)
    on_cpu = torch.device(options.device).type == "cpu"
    fast = wanted != "eager" and on_cpu and form != "fp16" and not why
    if not fast:
        if wanted == "native":
            raise Unsupported(why or "the native kernels are not for this")
        log.info("running on torch's operators: %s", why or "as asked")
    part = shard(decoder, 0, peers.size)
    blocks = _num_blocks(part, options, length, cache, sharers=peers.size)
    plan = Plan(fast, form, cache, blocks, options.max_batch, length, options.max_step_tokens)
    return lead(decoder, plan, peers, options.device), length


def _streamed(
    model: Any, decoder: Decoder, options: EngineOptions, form: str, wanted: str | None, key: Any
) -> tuple[Runner, int]:
    """Return a runner whose weights pass by (``stream.py``), or come from the model's own tensors."""
    from thalweg.infer.native import NativeRunner, check
    from thalweg.infer.stream import planned_batch, streamed_weights

    length = min(options.max_length or decoder.max_length, decoder.max_length)
    slots = options.max_batch or planned_batch(decoder, form, options, length)
    cache = _cache(options, form)
    blocks = _num_blocks(decoder, replace(options, max_batch=slots), length, cache)
    shape: dict[str, Any] = {"num_blocks": blocks, "num_slots": slots, "max_length": length}
    try:
        if wanted == "eager" or options.device != "cpu" or form == "fp16":
            raise Unsupported("the native kernels are not for this")
        check(decoder, form, cache)
    except Unsupported as reason:
        if wanted == "native":
            raise
        if options.quantize:
            raise ValueError(f"{options.quantize} weights cannot be streamed here: {reason}") from None
        log.info("streaming through torch's operators: %s", reason)
        dtype = next(model.parameters()).dtype
        _compare(model, decoder, keep=False)
        plain = EagerRunner(
            decoder, dtype=dtype, block_size=_BLOCK, device=options.device, keep=False, cache=cache, **shape
        )
        return plain, length
    weights = streamed_weights(decoder, form, options, key)
    try:
        if not weights.file.complete:
            _compare(model, decoder, keep=False)
        made = NativeRunner(
            decoder, form=form, max_tokens=options.max_step_tokens, cache=cache, weights=weights, **shape,
        )  # fmt: skip
        weights.seal()
    except BaseException:
        weights.close()
        raise
    return made, length


def _cache(options: EngineOptions, form: str) -> str:
    """Return what keys and values are kept as."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return form if form in ("fp32", "fp16") else "bf16"


def _num_blocks(decoder: Decoder, options: EngineOptions, length: int, cache: str, sharers: int = 1) -> int:
    """Return how many KV blocks the memory asked for, or a share of what is free, holds.

    ``sharers``: the processes that share what is free, each with as many blocks.
    """
    size = {"fp32": 4, "int8": 1, "fp8": 1}.get(cache, 2)
    scale = 4 if cache == "int8" else 0
    per_token = sum(2 * a.kv_heads * (a.dim * size + scale) for a in (x.attention for x in decoder.layers))
    per_block = per_token * _BLOCK
    one = -(-length // _BLOCK)
    if options.kv_memory is not None:
        blocks = options.kv_memory // per_block
        if blocks < 1:
            raise ValueError(f"kv_memory of {options.kv_memory} bytes does not hold a block ({per_block})")
        return blocks
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if torch.device(options.device).type == "cuda":
        free = torch.cuda.mem_get_info(options.device)[0]
    return max(one, min(one * options.max_batch, int(free * _SHARE) // (sharers * per_block)))


@torch.inference_mode()
def _compare(model: Any, decoder: Decoder, keep: bool = True) -> None:
    """Raise Unsupported unless the description gives the model's own logits."""
    parameter = next(model.parameters())
    tokens = torch.randint(decoder.vocab, (_PROBE,), generator=torch.Generator().manual_seed(0)).tolist()
    training = model.training
    model.eval()
    try:
        want = model(input_ids=torch.tensor([tokens], device=parameter.device)).logits[0].float()
    finally:
        model.train(training)
    plain = EagerRunner(
        decoder, dtype=parameter.dtype, num_blocks=1, num_slots=1, max_length=_BLOCK,
        device=parameter.device, keep=keep,
    )  # fmt: skip
    got = plain.run(Batch(tokens, [Span(0, 0, _PROBE)], range(_PROBE)))
    # Of each token's logits the mean error: the largest of a deep model's many in bf16 says little.
    error = ((got - want).square().mean(1).sqrt().max() / want.std().clamp(min=1e-6)).item()
    if not error < _TOLERANCE.get(parameter.dtype, 5e-2):
        raise Unsupported(f"our description's logits are off by {error:.2g} standard deviations")
