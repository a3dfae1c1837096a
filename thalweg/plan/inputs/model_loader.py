"""The model of a plan, on the meta device, from whatever describes it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.utils.trees import copy_to_meta

_GPT_CONFIG_KEYS = {"vocab_size", "n_layer", "n_head", "n_embd", "block_size", "dropout", "tied"}


@dataclass(frozen=True)
class MetaModel:
    """``model`` on meta; ``initial_param_bytes``: its parameters as the user's program holds them before sharding."""

    model: nn.Module
    initial_param_bytes: tuple[int, ...]
    name: str
    is_materialized: bool = False

    def copy_model(self) -> nn.Module:
        """A copy that may be changed."""
        return copy_to_meta(self.model)


def load_meta_model(model: Any, model_kwargs: Mapping[str, Any] | None = None) -> MetaModel:
    """Find the model that ``model`` describes, without allocating it.

    ``model``: a module (live or on meta), a class or function that makes one (with
    ``model_kwargs``), a Hugging Face config (object, dict, JSON file, or a folder with
    ``config.json``).

    Raises:
        ValueError: nothing of this kind.
        FileNotFoundError: no such file or folder.
    """
    if isinstance(model, nn.Module):
        is_materialized = not all(parameter.is_meta for parameter in model.parameters())
        return _make_meta_model(copy_to_meta(model), type(model).__name__, is_materialized)
    if isinstance(model, str | Path):
        return _from_path(Path(model))
    if isinstance(model, Mapping):
        return _from_dict(dict(model))
    if inspect.isclass(model) or inspect.isfunction(model):
        with torch.device("meta"):
            built = model(**(model_kwargs or {}))
        if not isinstance(built, nn.Module):
            raise ValueError(f"{model.__name__} makes a {type(built).__name__}; the plan needs a torch.nn.Module")
        return _make_meta_model(built, type(built).__name__)
    if hasattr(model, "model_type") and hasattr(model, "to_dict"):
        return _from_hf_config(model)
    raise ValueError(
        f"cannot plan a {type(model).__name__}: give a module, a class with model_kwargs, a Hugging Face "
        "config, or the path of a folder with config.json"
    )


def _make_meta_model(model: nn.Module, name: str, is_materialized: bool = False) -> MetaModel:
    return MetaModel(model, tuple(p.nbytes for p in model.parameters()), name, is_materialized)


def build_cpu_model(path: str | Path) -> nn.Module:
    """The model of a config file or folder with its own initial values, on the CPU."""
    return _build_module(_read_config_fields(Path(path)))


def _from_path(path: Path) -> MetaModel:
    return _from_dict(_read_config_fields(path))


def _read_config_fields(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there: --model takes a folder with config.json, or that file")
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds a {type(fields).__name__}; a model's config is an object")
    return fields


def _from_dict(fields: dict[str, Any]) -> MetaModel:
    with torch.device("meta"):
        model = _build_module(fields)
    return _make_meta_model(model, type(model).__name__)


def _build_module(fields: dict[str, Any]) -> nn.Module:
    """The model of a config, on the default device."""
    if "model_type" not in fields and fields and set(fields) <= _GPT_CONFIG_KEYS:
        transformer_module = importlib.import_module("thalweg.nn.transformer")
        with _explain_config_errors():
            return transformer_module.GPT(transformer_module.GPTConfig(**fields))
    if "model_type" not in fields:
        raise ValueError(
            "the model's config has no model_type: a Hugging Face config.json has one, and the reference GPT "
            f"takes {', '.join(sorted(_GPT_CONFIG_KEYS))} alone"
        )
    library = _import_transformers()
    rest = {
        key: value for key, value in fields.items() if key != "model_type" and not _requests_flash_attention(key, value)
    }
    kind, config_mapping = fields["model_type"], library.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in config_mapping:
        suggestions = difflib.get_close_matches(str(kind), list(config_mapping), 1)
        did_you_mean = f" (did you mean {suggestions[0]!r}?)" if suggestions else ""
        remote_code_hint = "; its own code (auto_map) is not run: make the model on meta and give thalweg.plan() that"
        remote_code_hint = remote_code_hint if "auto_map" in fields and not suggestions else ""
        raise ValueError(
            f"transformers {library.__version__} has no model_type {kind!r}{did_you_mean}{remote_code_hint}"
        )
    with _explain_config_errors():
        config = library.AutoConfig.for_model(kind, **rest)
    return _build_hf_model(config)


def _requests_flash_attention(key: str, value: Any) -> bool:
    """A wish for a library that need not be here: torch's own attention takes the same memory."""
    return "attn_implementation" in key and isinstance(value, str) and "flash" in value


@contextmanager
def _explain_config_errors() -> Iterator[None]:
    """Whatever a model's own code makes of wrong values is an error of its config."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"no model can be made of this config: {' '.join(str(error).split())}") from error


def _from_hf_config(config: Any) -> MetaModel:
    with torch.device("meta"):
        model = _build_hf_model(config)
    return _make_meta_model(model, type(model).__name__)


def _build_hf_model(config: Any) -> nn.Module:
    library = _import_transformers()
    names = getattr(config, "architectures", None) or []
    candidates = (getattr(library, name, None) for name in names if isinstance(name, str))
    cls = next((one for one in candidates if inspect.isclass(one) and issubclass(one, nn.Module)), None)
    with _explain_config_errors():
        model = _build_default_class(library, config) if cls is None else cls(config)
    return model.float()  # a checkpoint in bf16 is loaded as fp32 masters


_DECODER_AUTO_CLASSES = ("AutoModelForCausalLM",)
_ENCODER_DECODER_AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def _build_default_class(library: Any, config: Any) -> nn.Module:
    """The class that people train of a kind of model, where its config names none."""
    first = _ENCODER_DECODER_AUTO_CLASSES if getattr(config, "is_encoder_decoder", False) else _DECODER_AUTO_CLASSES
    for name in (*first, *_DECODER_AUTO_CLASSES, *_ENCODER_DECODER_AUTO_CLASSES, "AutoModelForMaskedLM", "AutoModel"):
        auto = getattr(library, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ValueError(f"no model class is known for model_type {config.model_type!r}")


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError("a Hugging Face config needs transformers: pip install 'thalweg[hf]'") from None
