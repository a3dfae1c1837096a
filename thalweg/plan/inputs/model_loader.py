"""The model of a plan, on the meta device, from whatever describes it."""

import difflib
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.utils.trees import copy_to_meta
from thalweg.zero.quantized_params import unwrap_quantized_params

_GPT_CONFIG_KEYS = {"vocab_size", "n_layer", "n_head", "n_embd", "block_size", "dropout", "tied"}


@dataclass(frozen=True)
class MetaModel:
    """``model`` on meta; ``is_materialized``: the user's program holds its values."""

    model: nn.Module
    is_materialized: bool = False

    def copy_model(self) -> nn.Module:
        """A copy that may be changed."""
        return copy_to_meta(self.model)


def load_meta_model(model: Any, model_kwargs: Mapping[str, Any] | None = None) -> MetaModel:
    """Find the model that ``model`` describes, without allocating it.

    ``model``: what this returns, a module (live or on meta), a class or function that makes one (with
    ``model_kwargs``), a Hugging Face config (object, dict, JSON file, or a folder with
    ``config.json``).

    Raises:
        ValueError: nothing of this kind.
        FileNotFoundError: no such file or folder.
    """
    if isinstance(model, MetaModel):
        return model
    if isinstance(model, nn.Module):
        is_materialized = not all(parameter.is_meta for parameter in model.parameters())
        meta_model = copy_to_meta(model)
        unwrap_quantized_params(meta_model)
    else:
        if isinstance(model, str | Path):
            model = _read_config_fields(Path(model))
        is_materialized, make_model = False, _get_builder(model, model_kwargs or {})
        with torch.device("meta"):
            meta_model = make_model()
        if not isinstance(meta_model, nn.Module):
            made = type(meta_model).__name__
            raise ValueError(f"{model.__name__} makes a {made}; the plan needs a torch.nn.Module")
    return MetaModel(meta_model, is_materialized)


def _get_builder(model: Any, model_kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    if isinstance(model, Mapping):
        return partial(_build_module, dict(model))
    if inspect.isclass(model) or inspect.isfunction(model):
        return partial(model, **model_kwargs)
    if hasattr(model, "model_type") and hasattr(model, "to_dict"):
        return partial(_build_hf_model, model)
    raise ValueError(
        f"cannot plan a {type(model).__name__}: give a module, a class with model_kwargs, a Hugging Face "
        "config, or the path of a folder with config.json"
    )


def build_cpu_model(path: str | Path) -> nn.Module:
    """The model of a config file or folder with its own initial values, on the CPU."""
    return _build_module(_read_config_fields(Path(path)))


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
    # Flash attention is of a library that need not be here: torch's own takes the same memory.
    flash = [key for key, v in fields.items() if "attn_implementation" in key and isinstance(v, str) and "flash" in v]
    rest = {key: value for key, value in fields.items() if key not in ("model_type", *flash)}
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


@contextmanager
def _explain_config_errors() -> Iterator[None]:
    """Whatever a model's own code makes of wrong values is an error of its config."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"no model can be made of this config: {textwrap.shorten(str(error), 300)}") from error


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
