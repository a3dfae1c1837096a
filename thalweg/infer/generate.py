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


def _config(module: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generation config that holds for a call, and the arguments that are not part of it."""
    given = kwargs.get("generation_config")
    config = copy.deepcopy(module.generation_config if given is None else given)
    rest = {key: value for key, value in kwargs.items() if key != "generation_config"}
    return config, config.update(**rest)


def unsupported(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], most: int = 0) -> str:
    """Return why the engine leaves this call to the module's own ``generate``, or an empty text.

    ``most``: the longest sequence that the engine was made for; 0 where it is to end there.
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
    width = 1 if getattr(module.config, "is_encoder_decoder", False) else tokens.shape[1]
    asked = config.max_new_tokens if config.max_new_tokens is not None else (config.max_length or 20) - width
    if most and max(width + asked, tokens.shape[1]) > most:
        return f"{width + asked} tokens, where the engine has room for {most}"
    return ""


def generate(engine: Engine, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return (batch * num_return_sequences, longest) token ids: the prompts, then what was generated.

    A model that listens repeats no prompt: its first token stands there.
    """
    config, rest = _config(module, kwargs)
    tokens: Any = args[0] if args else rest.get("input_ids", rest.get("inputs"))
    mask = rest.get("attention_mask")
    ends = config.eos_token_id
    ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)
    samples = getattr(config, "num_return_sequences", None) or 1
    start = list(engine.start)
    width = len(start) or tokens.shape[1]
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
            params = _params(config, width, len(prompt), ends, samples, seed + row)
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


def _params(
    c: Any, width: int, length: int, ends: tuple[int, ...], samples: int, seed: int
) -> SamplingParams:
    """Translate a generation config.  Lengths count the padded prompt, as in Hugging Face's code."""
    most = c.max_new_tokens if c.max_new_tokens is not None else (c.max_length or 20) - width
    if most < 1:
        raise ValueError(f"max_length {c.max_length} is not above the prompt's {width}: give max_new_tokens")
    least = getattr(c, "min_new_tokens", None)
    if least is None:
        least = max((getattr(c, "min_length", 0) or 0) - width, 0)
    sampled: dict[str, Any] = {"temperature": 0.0}
    if c.do_sample:
        sampled = {
            "temperature": 1.0 if c.temperature is None else c.temperature,
            "top_k": c.top_k if c.top_k is not None else 50,
            "top_p": 1.0 if c.top_p is None else c.top_p,
            "min_p": getattr(c, "min_p", None) or 0.0,
            "seed": seed,
        }
    return SamplingParams(
        max_tokens=most,
        min_tokens=min(least, most),
        n=samples,
        repetition_penalty=getattr(c, "repetition_penalty", None) or 1.0,
        stop=tuple(getattr(c, "stop_strings", None) or ()),
        stop_token_ids=ends,
        ignore_eos=True,
        **sampled,
    )
