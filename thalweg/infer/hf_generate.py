"""Hugging Face's ``generate`` on an engine: its arguments in, its tensor out."""

import copy
import secrets
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.parallel.executor import GroupEngine
from thalweg.infer.types import Request, SamplingParams, collect_results, to_token_tuple

_HANDLED_ARGS = {"input_ids", "inputs", "attention_mask", "generation_config", "tokenizer", "use_cache"}
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # Where the generation config says something else, Hugging Face's own code does it.
    "num_beams": (1, None), "num_beam_groups": (1, None), "penalty_alpha": (None,), "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None), "eta_cutoff": (0.0, None), "no_repeat_ngram_size": (0, None),
    "bad_words_ids": (None,), "force_words_ids": (None,), "constraints": (None,), "renormalize_logits":
    (False, None), "forced_eos_token_id": (None,), "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,), "guidance_scale": (None, 1.0), "sequence_bias": (None,), "max_time":
    (None,), "return_dict_in_generate": (False, None), "output_scores": (False, None), "dola_layers": (None,),
    "encoder_repetition_penalty": (1.0, None), "exponential_decay_length_penalty": (None,), "top_h": (None,),
    "watermarking_config": (None,), "prompt_lookup_num_tokens": (None,), "token_healing": (False, None),
    "remove_invalid_values": (False, None), "encoder_no_repeat_ngram_size": (0, None),
}  # fmt: skip
_DEFAULT_NEW_TOKENS = 20  # tokens that are generated where nobody says how many
_MIN_TOP_P = 1e-9  # a top_p that keeps the most likely token alone, as 0 does


def _resolve_config(module: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generation config that holds for a call, and the arguments that are not part of it."""
    call_config = kwargs.get("generation_config")
    config = copy.deepcopy(module.generation_config if call_config is None else call_config)
    for name, value in module.generation_config.to_dict().items():  # what a config leaves open is the model's
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    other_kwargs = {key: value for key, value in kwargs.items() if key != "generation_config"}
    other_kwargs = config.update(**other_kwargs)
    if kwargs.get("max_length") is None and config.max_length == type(config)().max_length:
        config.max_length = None  # nobody has set one: 4.x fills in a number
    return config, other_kwargs


def _max_new_tokens(module: Any, config: Any, prompt_length: int) -> int:
    """Return how many tokens to generate at most after a prompt of ``prompt_length``."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is not None:
        return config.max_length - prompt_length
    length = getattr(module.config, "max_position_embeddings", None)
    return _DEFAULT_NEW_TOKENS if length is None else min(_DEFAULT_NEW_TOKENS, length - prompt_length)


def _is_encoder_decoder(module: Any) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))


def _attention_mask(module: Any, config: Any, tokens: Tensor, mask: Any) -> Any:
    """Return the mask of a call, or None; without one, what a decoder-only model takes for padding."""
    pad, eos_ids = config.pad_token_id, config.eos_token_id
    if mask is not None or pad is None or _is_encoder_decoder(module):
        return mask
    is_pad = tokens == pad
    return None if pad in to_token_tuple(eos_ids) or not is_pad.any() else ~is_pad


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the prompts among the arguments of a call."""
    return args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))


def unsupported_reason(
    module: Any, args: Any, kwargs: dict[str, Any], engine_max_length: int = 0, decoder_start_ids: tuple[int, ...] = ()
) -> str:
    """Return why the engine leaves this call to the module's own ``generate``, or an empty text.

    ``engine_max_length``: the longest sequence of the engine; 0 where generation is to end there.
    ``decoder_start_ids``: the engine's first decoder tokens.
    """
    config, other_kwargs = _resolve_config(module, kwargs)
    unknown = set(other_kwargs) - _HANDLED_ARGS
    if unknown or len(args) > 1:
        return f"arguments {', '.join(sorted(unknown)) or 'by position'}"
    for name, allowed in _DEFAULTS.items():
        if getattr(config, name, allowed[0]) not in allowed:
            return f"{name}={getattr(config, name)}"
    if getattr(config, "num_return_sequences", 1) not in (1, None) and not config.do_sample:
        return "several sequences without sampling"
    if getattr(config, "stop_strings", None) and other_kwargs.get("tokenizer") is None:
        return "stop strings without a tokenizer"
    tokens = input_ids(args, other_kwargs)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] == 0:
        return "no 2-D input_ids"
    prompt_length = 1 if _is_encoder_decoder(module) else tokens.shape[1]
    max_new_tokens = _max_new_tokens(module, config, prompt_length)
    if engine_max_length and max(prompt_length + max_new_tokens, tokens.shape[1]) > engine_max_length:
        return f"{prompt_length + max_new_tokens} tokens, where the engine has room for {engine_max_length}"
    mask = _attention_mask(module, config, tokens, other_kwargs.get("attention_mask"))
    forced = to_token_tuple(config.forced_bos_token_id)
    if forced and (max_new_tokens < 2 or not _is_encoder_decoder(module)):
        return f"forced_bos_token_id={forced[0]} alone, or after a prompt"
    if _is_encoder_decoder(module):
        first = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        # The engine's own second token, that of the generation config, gives way to another one, not to none.
        if decoder_start_ids and decoder_start_ids != (first, *(forced and decoder_start_ids[1:])):
            return f"decoder_start_token_id={first}, where the engine begins with {decoder_start_ids}"
        return "padding before the encoder prompt" if mask is not None and (mask.int().diff(dim=1) > 0).any() else ""
    # Hugging Face's code punishes the padding's token as if it had been said.
    padded = mask is not None and not mask.bool().all()
    return "a penalty that counts padding" if padded and config.repetition_penalty not in (None, 1.0) else ""


def generate(engine: LLMEngine | GroupEngine, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return (batch * num_return_sequences, longest) token ids: the prompts, then what was generated.

    An encoder-decoder model repeats no prompt: its first decoder token stands there.  Ranks that generate together
    each bring prompts of their own, and get theirs.
    """
    config, other_kwargs = _resolve_config(module, kwargs)
    tokens = input_ids(args, other_kwargs)
    mask = _attention_mask(module, config, tokens, other_kwargs.get("attention_mask"))
    eos_ids = to_token_tuple(config.eos_token_id)
    num_samples = getattr(config, "num_return_sequences", None) or 1
    alone = isinstance(engine, LLMEngine)
    forced = to_token_tuple(config.forced_bos_token_id)
    decoder_start_ids = [*engine.decoder_start_ids[:1], *forced] if alone else []
    prompt_length = 1 if decoder_start_ids else tokens.shape[1]
    max_new_tokens = _max_new_tokens(module, config, prompt_length)
    vocab_size = engine.metadata.vocab_size if alone else module.config.vocab_size
    stop_ids = tuple(token for token in eos_ids if 0 <= token < vocab_size)
    # Drawn from torch's generator, so that torch.manual_seed makes the samples repeatable.
    seed = int(torch.randint(2**31, ()).item()) if config.do_sample else 0
    tag, requests = secrets.token_hex(4), []
    for row in range(len(tokens)):
        prompt = tokens[row] if mask is None else tokens[row][mask[row].bool()]
        params = _sampling_params(config, prompt_length, max_new_tokens, stop_ids, num_samples, seed + row)
        requests.append(Request(f"{tag}-{row}", prompt.tolist(), params))
    core: Any = engine if alone else engine.member
    saved = getattr(core, "tokenizer", None)
    core.tokenizer = other_kwargs.get("tokenizer") or saved
    try:
        results = collect_results(engine.run_requests(requests), "generation failed")
    finally:
        core.tokenizer = saved
    order = [results[x.request_id, index].token_ids for x in requests for index in range(num_samples)]
    pad = config.pad_token_id if config.pad_token_id is not None else (eos_ids[0] if eos_ids else 0)
    generated = pad_sequence([tokens.new_tensor(new) for new in order], batch_first=True, padding_value=pad)
    prefix = tokens.new_tensor([decoder_start_ids] * len(tokens)) if decoder_start_ids else tokens
    return torch.cat([prefix.repeat_interleave(num_samples, 0), generated], 1)


def _sampling_params(
    config: Any, prompt_length: int, max_new_tokens: int, stop_ids: tuple[int, ...], num_samples: int, seed: int
) -> SamplingParams:
    """Translate a generation config.  Lengths count the padded prompt, as in Hugging Face's code."""
    if max_new_tokens < 1:
        raise ValueError(
            f"the prompt of {prompt_length} tokens leaves no room up to max_length"
            f" ({config.max_length or prompt_length + max_new_tokens}): give max_new_tokens"
        )
    min_new_tokens = getattr(config, "min_new_tokens", None)
    if min_new_tokens is None:
        min_new_tokens = max((getattr(config, "min_length", 0) or 0) - prompt_length, 0)
    sampled: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        sampled = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k if config.top_k is not None else 50,
            "top_p": 1.0 if config.top_p is None else config.top_p or _MIN_TOP_P,
            "min_p": getattr(config, "min_p", None) or 0.0,
            "seed": seed,
        }
    stop = getattr(config, "stop_strings", None) or ()
    num_forced = len(to_token_tuple(config.forced_bos_token_id))  # which Hugging Face counts as generated
    return SamplingParams(
        max_tokens=max_new_tokens - num_forced,
        min_tokens=max(min(min_new_tokens, max_new_tokens) - num_forced, 0),
        forced_bos_token_id=config.forced_bos_token_id,
        n=num_samples,
        repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=stop_ids,
        ignore_eos=True,
        **sampled,
    )
