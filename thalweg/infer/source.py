"""A Hugging Face model from its directory: loaded, or left in its files with only its structure made."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from thalweg.infer.api import EngineOptions
from thalweg.infer.prequantised import check_complete, load_quantised, method_of, readable
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.folder import check_model_path

Kind = Literal["causal", "seq2seq", "encoder"]


def load_tokenizer(model: str | Path, options: EngineOptions) -> Any:
    """Return the directory's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with contextlib.suppress(OSError, ValueError, KeyError):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=options.trust_remote_code)
    return None


def kind_of(model: Any) -> Kind:
    """Return what a live Hugging Face model does: ``causal``, ``seq2seq`` or ``encoder``."""
    speaks = model.can_generate() if hasattr(model, "can_generate") else hasattr(model, "generate")
    if not speaks or (_listens_alone(model.config) and not type(model).__name__.endswith(_SPEAKING)):
        return "encoder"
    return "seq2seq" if getattr(model.config, "is_encoder_decoder", False) else "causal"


_SPEAKING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def _architectures(config: Any, ends: tuple[str, ...]) -> bool:
    return any(name.endswith(ends) for name in getattr(config, "architectures", None) or ())


def _listens_alone(config: Any) -> bool:
    from thalweg.infer.models import ENCODERS

    alone = config.model_type in ENCODERS and not getattr(config, "is_encoder_decoder", False)
    return alone and not getattr(config, "is_decoder", False)


def _kind_of_files(config: Any, remote: bool) -> Kind:
    """Return the same for a directory: what its model was saved as, or else what such models can do."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if _architectures(config, ("EncoderModel",)):
        return "encoder"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if _architectures(config, _SPEAKING):
        return "causal"
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or remote
    return "causal" if known and not _listens_alone(config) else "encoder"


def load_model(model: str | Path, options: EngineOptions) -> Any:
    """Load a model that generates, or an encoder, in the dtype and onto the device of the options."""
    import transformers

    check_model_path(model)
    remote = options.trust_remote_code
    dtype: Any = "auto" if options.dtype == "auto" else parse_dtype(options.dtype)
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=remote)
    kind = _kind_of_files(config, remote)
    auto: Any = {
        "causal": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "encoder": transformers.AutoModelForTextEncoding
        if config.model_type in _HALVES
        else transformers.AutoModel,
    }[kind]
    if readable(config) and Path(model).is_dir():
        plain = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.bfloat16
        return load_quantised(auto, Path(model), config, plain, remote).to(options.device).eval()
    try:
        loaded, about = auto.from_pretrained(
            model, dtype=dtype, trust_remote_code=remote, output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they can be named
        )  # fmt: skip
    except (ImportError, RuntimeError, *_DAMAGED) as error:
        if method_of(config) is not None:
            raise ValueError(f"{model}: its weights are quantised by {method_of(config)}: {error}") from error
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{model}: {_damage(Path(model)) or f'{type(error).__name__} {error}'}") from error
    check_complete(model, about)
    return loaded.to(options.device).eval()


_DAMAGED = (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError)
"""What a loader says of files that are cut short or hold something else."""


def _damage(folder: Path) -> str:
    """Return which of a directory's files cannot be read, or an empty text."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path.name} is damaged ({error}): download or save it again"
    for path in sorted(folder.glob("*.index.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            return f"{path.name} is damaged: download or save it again"
    return ""


_HALVES = ("t5", "mt5", "umt5")  # their AutoModel is both halves


def map_model(model: str | Path, options: EngineOptions) -> tuple[Any, Any]:
    """Return a model whose parameters are its safetensors files, mapped, and what identifies these files.

    The parameters keep the files' dtypes; reading them takes page cache, never memory of this process.  A
    model without such files is loaded, and has no identity.
    """
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if not files:
        return load_model(model, options), None
    # In their own dtype, Hugging Face's loader takes tensors as the mapped files give them.
    made = load_model(model, replace(options, dtype="auto", device="cpu"))
    facts = [(path, path.stat()) for path in (*files, Path(model) / "config.json")]
    return made, [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in facts]
