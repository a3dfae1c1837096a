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

from thalweg.infer.adapters import Adapters
from thalweg.infer.api import EngineOptions, ModelFacts
from thalweg.infer.batch import Batch, Runner, Source, Span
from thalweg.infer.describe import Decoder, Experts, Unsupported
from thalweg.infer.draft import Draft
from thalweg.infer.eager import EagerRunner
from thalweg.infer.embed import Embedder
from thalweg.infer.engine import Engine
from thalweg.infer.foreign import ForeignRunner, own_length
from thalweg.infer.forms import PROBE, agree, dtype_of, eager_dtype, evaluating, form_of
from thalweg.infer.guides import Guides, available
from thalweg.infer.invariant import OneByOne
from thalweg.infer.load_encoder import load_encoder
from thalweg.infer.models import describe
from thalweg.infer.pack import pack_experts, packing
from thalweg.infer.source import kind_of, load_model, load_tokenizer, map_model
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_BLOCK = 16
_GUESSES = 4  # of a draft model in a step, unless asked otherwise
_SHARE = 0.25  # of the free memory, at most, for the KV cache that nobody asked for


def load_engine(
    model: str | Path | nn.Module,
    options: EngineOptions | None = None,
    tokenizer: Any = None,
    *,
    runner: str | None = None,
    source: Any = None,
    draft: nn.Module | None = None,
    peers: Any = None,
) -> Engine | Embedder:
    """Return an engine for a Hugging Face model: a directory (or name) of one, or a live one.

    A live model is read, never changed; its weights are copied where a runner packs them.  ``tokenizer``:
    by default the directory's own, or none for a live model.  ``runner`` insists on ``native``, ``eager`` or
    ``foreign``.  ``source``: what a live model's weights are known by, where streamed ones are to be found
    again.  ``draft``: a live model for what ``options.draft`` is.  ``peers``: the other ranks of
    the options (``ranks.py``), by default processes that are started here.  Models that do
    not generate give an :class:`Embedder`.  Raises ValueError where the runner cannot run the model.
    """
    options = options or EngineOptions()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {options.device}: torch sees no GPU here; leave it out for the processor")
    if options.ranks > 1 and peers is None:
        return _with_peers(model, options, tokenizer, runner)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    folder, key = None if isinstance(model, nn.Module) else model, source
    if not isinstance(model, nn.Module):
        tokenizer = tokenizer or load_tokenizer(model, options)
        if options.stream or peers is not None:
            model, key = map_model(model, options)
        else:
            model = load_model(model, options)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(f"{name} is no Hugging Face model: it has no config")
    if peers is not None and (kind_of(model) != "causal" or options.adapters or draft or options.draft):
        peers.close()
        raise ValueError(
            "tensor_parallel, pipeline_parallel, expert_parallel: for causal models without adapters and"
            " draft; use 1"
        )
    if kind_of(model) == "encoder":
        return load_encoder(model, options, tokenizer, name=name, folder=folder, wanted=runner)
    if draft is None and options.draft is not None:
        _same_words(tokenizer, load_tokenizer(options.draft, options), options.draft)
        draft = load_model(options.draft, options)
    return _speaking(model, options, tokenizer, runner, key, name, draft, peers)


def _same_words(mine: Any, other: Any, name: str) -> None:
    if mine is not None and other is not None and mine.get_vocab() != other.get_vocab():
        raise ValueError(f"draft: {name} has another vocabulary than the model: take one of the same family")


def _speaking(
    model: Any,
    options: EngineOptions,
    tokenizer: Any,
    wanted: str | None,
    key: Any,
    name: str,
    draft: Any,
    peers: Any,
) -> Engine:
    """Return the engine of a model that generates."""
    kind, form, config = kind_of(model), form_of(options), model.config
    if options.adapters and options.stream:
        raise ValueError("adapters: they need weights in memory; leave stream out")
    if kind == "seq2seq" and options.stream:
        raise ValueError("stream: only the weights of causal models can be streamed; leave it out")
    beside = None if draft is None else _draft_decoder(draft, kind, options)
    made, max_length = _runner(model, options, form, wanted, key, beside, peers)
    vocab = config.get_text_config().vocab_size
    guesser = None if beside is None else _drafting(beside, made, options, form, max_length, vocab)
    foreign = isinstance(made, ForeignRunner)
    if options.batch_invariant and isinstance(getattr(made, "inner", made), EagerRunner):
        made = OneByOne(made)
    facts = ModelFacts(
        name=name,
        kind=kind,
        max_length=max_length,
        vocab_size=vocab,
        dtype=dtype_of(form, options),
        quantize=options.quantize,
        eos_token_ids=tuple(token for token in _ends(model) if 0 <= token < vocab),
        bos_token_id=getattr(config, "bos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
        adapters=tuple(options.adapters),
    )
    return Engine(
        made,
        facts,
        tokenizer,
        max_batch=len(made.tables),
        max_step_tokens=options.max_step_tokens,
        prefix_cache=options.prefix_cache and not foreign,
        # A foreign cache cannot take back a wrong guess.
        speculate=0 if foreign else options.speculate or (_GUESSES if guesser is not None else 0),
        guesser=guesser,
        guides=Guides(tokenizer, facts.vocab_size, facts.eos_token_ids) if available(tokenizer) else None,
        start=_starts(model) if kind == "seq2seq" else (),
    )


def _with_peers(model: Any, options: EngineOptions, tokenizer: Any, runner: str | None) -> Any:
    """Start the other ranks; a live model goes to them through files."""
    from thalweg.infer.ranks import saved, spawned

    if not isinstance(model, nn.Module):
        return load_engine(model, options, tokenizer, runner=runner, peers=spawned(model, options))
    with saved(model) as folder:
        return load_engine(model, options, tokenizer, runner=runner, peers=spawned(folder, options))


def _draft_decoder(draft: Any, kind: str, options: EngineOptions) -> Decoder:
    """Describe a draft model; ValueError where it cannot be one."""
    if kind != "causal" or kind_of(draft) != "causal" or options.stream:
        raise ValueError("draft: only a causal model in memory can have one, and it must be causal itself")
    decoder = describe(draft)
    _compare(draft, decoder)
    return decoder


def _drafting(
    decoder: Decoder, made: Runner, options: EngineOptions, form: str, length: int, vocab: int
) -> Draft:
    """Return the guesser of a described draft model, with a cache like that of the runner it guesses for."""
    if isinstance(made, ForeignRunner):
        raise ValueError("draft: a model that runs through its own code cannot take back wrong guesses")
    if decoder.max_length < length:
        raise ValueError(
            f"draft: it takes {decoder.max_length} tokens and the model {length}: set max_length"
        )
    _length(decoder, replace(options, max_length=length))  # refuses what the draft rotates otherwise
    runner, _ = _described(decoder, options, form, None, length=length, blocks=made.num_blocks)
    return Draft(runner, max_tokens=options.max_step_tokens, vocab=vocab, known=decoder.vocab)


def _starts(model: Any) -> tuple[int, ...]:
    """Return what a model that listens begins to speak with."""
    holders = [getattr(model, "generation_config", None), model.config]
    found = []
    for names in (("decoder_start_token_id", "bos_token_id"), ("forced_bos_token_id",)):
        given = [getattr(holder, name, None) for name in names for holder in holders]
        found += [int(token) for token in given if token is not None][:1]
    if not found:
        raise ValueError("the model's config has no decoder_start_token_id: set it")
    return tuple(found)


def _ends(model: Any) -> tuple[int, ...]:
    for holder in (getattr(model, "generation_config", None), model.config):
        ends = getattr(holder, "eos_token_id", None)
        if ends is not None:
            return tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    return ()


def _runner(
    model: Any,
    options: EngineOptions,
    form: str,
    wanted: str | None,
    key: Any,
    beside: Decoder | None,
    peers: Any,
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
            held = Adapters(options.adapters, model, decoder) if options.adapters else None
            return _described(decoder, options, form, wanted, beside=beside, adapters=held)
        except Unsupported as reason:
            if wanted is not None:
                raise
            reasons.append(str(reason))
    if options.stream:
        raise ValueError(f"streamed weights need a described model: {'; '.join(reasons)}")
    if options.adapters:
        raise ValueError(f"adapters need a described model: {'; '.join(reasons)}")
    if options.kv_cache_dtype in ("int8", "fp8"):
        raise ValueError(f"a cache in {options.kv_cache_dtype} needs a described model: {'; '.join(reasons)}")
    if options.quantize:
        if torch.device(options.device).type != "cpu":
            raise ValueError(f"{options.quantize} weights need a described model: {'; '.join(reasons)}")
        from thalweg.infer.swap import packed_copy

        model = packed_copy(model, options.quantize)
    log.info("running the model through its own code: %s", "; ".join(reasons) or "as asked")
    length = own_length(model.config.get_text_config(), options.max_length)
    return ForeignRunner(model, num_slots=options.max_batch, max_length=length), length


def _described(
    decoder: Decoder,
    options: EngineOptions,
    form: str,
    wanted: str | None,
    *,
    length: int | None = None,
    blocks: int | None = None,
    beside: Decoder | None = None,
    adapters: Adapters | None = None,
) -> tuple[Runner, int]:
    length = length or _length(decoder, options)
    cache = _cache(options, form)
    blocks = blocks or _num_blocks(decoder, options, length, cache, beside)
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
                adapters=adapters,
            )
            return made, length
        except Unsupported as reason:
            if wanted == "native":
                raise
            log.info("running on torch's operators: %s", reason)
    made = EagerRunner(
        pack_experts(decoder, form) if on_cpu else decoder,
        dtype=eager_dtype(form, on_cpu),
        num_blocks=blocks,
        num_slots=options.max_batch,
        max_length=length,
        block_size=_BLOCK,
        device=options.device,
        make_linear=packing(form) if on_cpu else None,
        cache=cache,
        adapters=adapters,
    )
    return made, length


def _parallel(
    model: Any, options: EngineOptions, form: str, wanted: str | None, peers: Any
) -> tuple[Runner, int]:
    """Return rank 0's runner of a model that the peers have a part in."""
    from thalweg.infer.parallel import Plan, lead, suits_kernels
    from thalweg.infer.shard import Degrees, part

    degrees = Degrees.of(options)
    try:
        decoder = describe(model)
        _compare(model, decoder, keep=False)
        length = _length(decoder, options)
    except Unsupported as reason:
        raise ValueError(f"parts of a model on several ranks need a described one: {reason}") from None
    cache = _cache(options, form)
    assert degrees.size == peers.size, "there are as many ranks as the options ask for"
    parts = [part(decoder, rank, degrees) for rank in range(0, degrees.size, degrees.places)]
    why = suits_kernels(decoder, degrees, form, cache)
    on_cpu = torch.device(options.device).type == "cpu"
    fast = wanted != "eager" and on_cpu and form != "fp16" and not why
    if not fast:
        if wanted == "native":
            raise Unsupported(why or "the native kernels are not for this")
        log.info("running on torch's operators: %s", why or "as asked")
    # A stage's first rank has the most heads; each rank has as many blocks as the stage that needs most.
    blocks = min(_num_blocks(x, options, length, cache, sharers=peers.size) for x in parts)
    plan = Plan(
        fast, form, cache, blocks, options.max_batch, length, options.max_step_tokens, degrees.tensor,
        degrees.stages, degrees.experts,
    )  # fmt: skip
    return lead(decoder, plan, peers, options.device), length


def _length(decoder: Decoder, options: EngineOptions) -> int:
    """Return the longest sequence; relative positions have no end of their own."""
    endless = decoder.encoder is not None and decoder.positions is None
    most = max(decoder.max_length, options.max_length or 0) if endless else decoder.max_length
    length = min(options.max_length or most, most)
    reaches = [x.attention.rotary.reach for x in decoder.layers if x.attention.rotary is not None]
    reach = min((x for x in reaches if x), default=length)
    if length > reach:
        raise Unsupported(f"positions that change with lengths above {reach}, which max_length may set")
    return length


def _streamed(
    model: Any, decoder: Decoder, options: EngineOptions, form: str, wanted: str | None, key: Any
) -> tuple[Runner, int]:
    """Return a runner whose weights pass by (``stream.py``), or come from the model's own tensors."""
    from thalweg.infer.native import NativeRunner, check
    from thalweg.infer.stream import planned_batch, streamed_weights

    length = _length(decoder, options)
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
        dtype = eager_dtype(form, torch.device(options.device).type == "cpu")
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


def _num_blocks(
    decoder: Decoder,
    options: EngineOptions,
    length: int,
    cache: str,
    beside: Decoder | None = None,
    sharers: int = 1,
) -> int:
    """Return how many KV blocks the memory asked for, or a share of what is free, holds.

    ``beside``: a draft model, whose keys and values take part of the same memory.  ``sharers``: the processes
    that share what is free, each with as many blocks.
    """
    size = {"fp32": 4, "int8": 1, "fp8": 1}.get(cache, 2)
    scale = 4 if cache == "int8" else 0
    layers = [*decoder.layers, *(() if beside is None else beside.layers)]
    per_token = sum(2 * a.kv_heads * (a.dim * size + scale) for a in (x.attention for x in layers))
    per_block = per_token * _BLOCK
    one = -(-length // _BLOCK) * (1 if decoder.encoder is None else 2)
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
    tokens = torch.randint(decoder.vocab, (PROBE,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([tokens], device=parameter.device)
    given = {} if decoder.encoder is None else {"decoder_input_ids": ids.flip(1)}
    with evaluating(model):
        want = model(input_ids=ids, return_dict=True, **given).logits[0].float()
    plain = EagerRunner(
        decoder, dtype=parameter.dtype, num_blocks=2, num_slots=1, max_length=_BLOCK,
        device=parameter.device, keep=keep,
    )  # fmt: skip
    if decoder.encoder is not None:
        plain.sources[0, 0], plain.source_lengths[0] = 1, PROBE
        plain.encode([Source(0, tokens)])
        tokens = tokens[::-1]
    got = plain.run(Batch(tokens, [Span(0, 0, PROBE)], range(PROBE)))
    chooses = any(isinstance(layer.mlp, Experts) for layer in decoder.layers)
    agree(got, want, parameter.dtype, chooses=chooses)
