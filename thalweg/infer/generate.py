"""Hugging Face's ``generate`` on an engine: its arguments in, its tensor out."""

from __future__ import annotations

import copy
import secrets
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.api import Request, SamplingParams
from thalweg.infer.engine import Engine

_TAKEN = {"input_ids", "inputs", "attention_mask", "generation_config", "tokenizer", "use_cache"}
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # Where the generation config says something else, Hugging Face's own code does it.
    "num_beams": (1, None), "num_beam_groups": (1, None), "penalty_alpha": (None,), "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None), "eta_cutoff": (0.0, None), "no_repeat_ngram_size": (0, None),
    "bad_words_ids": (None,), "force_words_ids": (None,), "constraints": (None,), "renormalize_logits":
    (False, None), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,), "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,), "guidance_scale": (None, 1.0), "sequence_bias": (None,), "max_time":
    (None,), "return_dict_in_generate": (False, None), "output_scores": (False, None), "dola_layers": (None,),
    "encoder_repetition_penalty": (1.0, None), "exponential_decay_length_penalty": (None,), "top_h": (None,),
    "watermarking_config": (None,), "prompt_lookup_num_tokens": (None,), "token_healing": (False, None),
    "remove_invalid_values": (False, None), "encoder_no_repeat_ngram_size": (0, None),
}  # fmt: skip
_USUAL = 20  # tokens that are generated where nobody says how many
_LEAST = 1e-9  # a top_p that keeps the most likely token alone, as 0 does


def _config(module: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generation config that holds for a call, and the arguments that are not part of it."""
    given = kwargs.get("generation_config")
    config = copy.deepcopy(module.generation_config if given is None else given)
    for name, value in module.generation_config.to_dict().items():  # what a config leaves open is the model's
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    rest = {key: value for key, value in kwargs.items() if key != "generation_config"}
    rest = config.update(**rest)
    if kwargs.get("max_length") is None and config.max_length == type(config)().max_length:
        config.max_length = None  # nobody has set one: 4.x fills in a number
    return config, rest


def _most(module: Any, config: Any, width: int) -> int:
    """Return how many tokens to generate at most behind a prompt of ``width``."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is not None:
        return config.max_length - width
    length = getattr(module.config, "max_position_embeddings", None)
    return _USUAL if length is None else min(_USUAL, length - width)


def _listens(module: Any) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))


def _mask(module: Any, config: Any, tokens: Tensor, given: Any) -> Any:
    """Return the mask of a call, or None; without one, what a model that speaks alone takes for padding."""
    pad, ends = config.pad_token_id, config.eos_token_id
    if given is not None or pad is None or _listens(module):
        return given
    is_pad = tokens == pad
    return None if pad in _ends(ends) or not is_pad.any() else ~is_pad


def _ends(ends: Any) -> tuple[int, ...]:
    return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def unsupported(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], most: int = 0, start: tuple[int, ...] = ()
) -> str:
    """Return why the engine leaves this call to the module's own ``generate``, or an empty text.

    ``most``: the longest sequence that the engine was made for; 0 where it is to end there.  ``start``: what
    the engine begins to speak with.
    """
    config, rest = _config(module, kwargs)
    other = set(rest) - _TAKEN
    if other or len(args) > 1:
        return f"arguments {', '.join(sorted(other)) or 'by position'}"
    for name, usual in _DEFAULTS.items():
        if getattr(config, name, usual[0]) not in usual:
            return f"{name}={getattr(config, name)}"
    if getattr(config, "num_return_sequences", 1) not in (1, None) and not config.do_sample:
        return "several sequences without sampling"
    if getattr(config, "stop_strings", None) and rest.get("tokenizer") is None:
        return "stop strings without a tokenizer"
    tokens = args[0] if args else rest.get("input_ids", rest.get("inputs"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] == 0:
        return "no 2-D input_ids"
    width = 1 if _listens(module) else tokens.shape[1]
    asked = _most(module, config, width)
    if most and max(width + asked, tokens.shape[1]) > most:
        return f"{width + asked} tokens, where the engine has room for {most}"
    mask = _mask(module, config, tokens, rest.get("attention_mask"))
    return _unusual_start(config, mask, start) if _listens(module) else _counted_padding(config, mask)


def _unusual_start(config: Any, mask: Any, start: tuple[int, ...]) -> str:
    first = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if start and start != (first,):
        return f"decoder_start_token_id={first}, where the engine begins with {start}"
    return "padding before the source" if mask is not None and (mask.int().diff(dim=1) > 0).any() else ""


def _counted_padding(config: Any, mask: Any) -> str:
    """Hugging Face's code punishes the padding's token as if it had been said."""
    padded = mask is not None and not mask.bool().all()
    return "a penalty that counts padding" if padded and config.repetition_penalty not in (None, 1.0) else ""


def generate(engine: Engine, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return (batch * num_return_sequences, longest) token ids: the prompts, then what was generated.

    A model that listens repeats no prompt: its first token stands there.
    """
    config, rest = _config(module, kwargs)
    tokens: Any = args[0] if args else rest.get("input_ids", rest.get("inputs"))
    mask = _mask(module, config, tokens, rest.get("attention_mask"))
    ends = _ends(config.eos_token_id)
    samples = getattr(config, "num_return_sequences", None) or 1
    start = list(engine.start)
    width = len(start) or tokens.shape[1]
    most = _most(module, config, width)
    spoken = tuple(token for token in ends if 0 <= token < engine.facts.vocab_size)
    outputs: dict[tuple[str, int], list[int]] = {}
    saved = engine.tokenizer
    engine.tokenizer = rest.get("tokenizer") or saved
    # Drawn from torch's generator, so that torch.manual_seed makes the samples repeatable.
    seed = int(torch.randint(2**31, ()).item()) if config.do_sample else 0
    tag = secrets.token_hex(4)
    names = []
    try:
        for row in range(len(tokens)):
            prompt = tokens[row] if mask is None else tokens[row][mask[row].bool()]
            params = _params(config, width, most, spoken, samples, seed + row)
            names.append(f"{tag}-{row}")
            engine.add(Request(names[-1], prompt.tolist(), params))
        mine = set(names)
        while any(name in engine.pending for name in mine):
            for output in engine.step():
                if output.error:
                    raise RuntimeError(f"generation failed: {output.error}")
                outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    except BaseException:
        for name in names:
            engine.abort(name)
        raise
    finally:
        engine.tokenizer = saved
    order = [outputs.get((name, index), []) for name in names for index in range(samples)]
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    longest = max(len(new) for new in order)
    result = tokens.new_full((len(order), width + longest), pad)
    said = tokens.new_tensor([start] * len(tokens)) if start else tokens
    result[:, :width] = said.repeat_interleave(samples, 0)
    for row, new in enumerate(order):
        result[row, width : width + len(new)] = torch.tensor(new, dtype=result.dtype)
    return result


def _params(c: Any, width: int, most: int, ends: tuple[int, ...], samples: int, seed: int) -> SamplingParams:
    """Translate a generation config.  Lengths count the padded prompt, as in Hugging Face's code."""
    if most < 1:
        raise ValueError(
            f"the prompt of {width} tokens leaves no room up to max_length ({c.max_length or width + most}):"
            " give max_new_tokens"
        )
    least = getattr(c, "min_new_tokens", None)
    if least is None:
        least = max((getattr(c, "min_length", 0) or 0) - width, 0)
    sampled: dict[str, Any] = {"temperature": 0.0}
    if c.do_sample:
        sampled = {
            "temperature": 1.0 if c.temperature is None else c.temperature,
            "top_k": c.top_k if c.top_k is not None else 50,
            "top_p": 1.0 if c.top_p is None else c.top_p or _LEAST,
            "min_p": getattr(c, "min_p", None) or 0.0,
            "seed": seed,
        }
    stop = getattr(c, "stop_strings", None) or ()
    return SamplingParams(
        max_tokens=most,
        min_tokens=min(least, most),
        n=samples,
        repetition_penalty=1.0 if c.repetition_penalty is None else c.repetition_penalty,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=ends,
        ignore_eos=True,
        **sampled,
    )
