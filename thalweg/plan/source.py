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

from thalweg.plan.setting import twin_on_meta

_OURS = {"vocab_size", "n_layer", "n_head", "n_embd", "block_size", "dropout", "tied"}


@dataclass(frozen=True)
class Source:
    """``model`` on meta; ``given_bytes``: its parameters as the user's program holds them before sharding."""

    model: nn.Module
    given_bytes: tuple[int, ...]
    name: str
    is_live: bool = False

    def fresh(self) -> nn.Module:
        """A copy that may be changed."""
        return twin_on_meta(self.model)


def open_source(model: Any, model_kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find the model that ``model`` describes, without allocating it.

    ``model``: a module (live or on meta), a class or function that makes one (with
    ``model_kwargs``), a Hugging Face config (object, dict, JSON file, or a folder with
    ``config.json``).

    Raises:
        ValueError: nothing of this kind.
        FileNotFoundError: no such file or folder.
    """
    if isinstance(model, nn.Module):
        live = not all(parameter.is_meta for parameter in model.parameters())
        return _source(twin_on_meta(model), type(model).__name__, live)
    if isinstance(model, str | Path):
        return _from_path(Path(model))
    if isinstance(model, Mapping):
        return _from_dict(dict(model))
    if inspect.isclass(model) or inspect.isfunction(model):
        with torch.device("meta"):
            made = model(**(model_kwargs or {}))
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"{model.__name__} makes a {type(made).__name__}; the plan needs a torch.nn.Module"
            )
        return _source(made, type(made).__name__)
    if hasattr(model, "model_type") and hasattr(model, "to_dict"):
        return _from_hugging_face(model)
    raise ValueError(
        f"cannot plan a {type(model).__name__}: give a module, a class with model_kwargs, a Hugging Face "
        "config, or the path of a folder with config.json"
    )


def _source(model: nn.Module, name: str, live: bool = False) -> Source:
    return Source(model, tuple(p.nbytes for p in model.parameters()), name, live)


def build_real(path: str | Path) -> nn.Module:
    """The model of a config file or folder with its own initial values, on the CPU."""
    return _make(_fields_of(Path(path)))


def _from_path(path: Path) -> Source:
    return _from_dict(_fields_of(path))


def _fields_of(path: Path) -> dict[str, Any]:
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


def _from_dict(fields: dict[str, Any]) -> Source:
    with torch.device("meta"):
        model = _make(fields)
    return _source(model, type(model).__name__)


def _make(fields: dict[str, Any]) -> nn.Module:
    """The model of a config, on the default device."""
    if "model_type" not in fields and fields and set(fields) <= _OURS:
        ours = importlib.import_module("thalweg.nn.transformer")
        with _errors_of_the_config():
            return ours.GPT(ours.GPTConfig(**fields))
    if "model_type" not in fields:
        raise ValueError(
            "the model's config has no model_type: a Hugging Face config.json has one, and the reference GPT "
            f"takes {', '.join(sorted(_OURS))} alone"
        )
    library = _transformers()
    rest = {key: value for key, value in fields.items() if key != "model_type" and not _is_flash(key, value)}
    kind, known = fields["model_type"], library.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        near = difflib.get_close_matches(str(kind), list(known), 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        own = "; its own code (auto_map) is not run: make the model on meta and give thalweg.plan() that"
        own = own if "auto_map" in fields and not near else ""
        raise ValueError(f"transformers {library.__version__} has no model_type {kind!r}{meant}{own}")
    with _errors_of_the_config():
        config = library.AutoConfig.for_model(kind, **rest)
    return _make_hugging_face(config)


def _is_flash(key: str, value: Any) -> bool:
    """A wish for a library that need not be here: torch's own attention takes the same memory."""
    return "attn_implementation" in key and isinstance(value, str) and "flash" in value


@contextmanager
def _errors_of_the_config() -> Iterator[None]:
    """Whatever a model's own code makes of wrong values is an error of its config."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"no model can be made of this config: {' '.join(str(error).split())}") from error


def _from_hugging_face(config: Any) -> Source:
    with torch.device("meta"):
        model = _make_hugging_face(config)
    return _source(model, type(model).__name__)


def _make_hugging_face(config: Any) -> nn.Module:
    library = _transformers()
    names = getattr(config, "architectures", None) or []
    found = (getattr(library, name, None) for name in names if isinstance(name, str))
    cls = next((one for one in found if inspect.isclass(one) and issubclass(one, nn.Module)), None)
    with _errors_of_the_config():
        model = _guess(library, config) if cls is None else cls(config)
    return model.float()  # a checkpoint in bf16 is loaded as fp32 masters


_DECODERS = ("AutoModelForCausalLM",)
_TWO_PARTS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def _guess(library: Any, config: Any) -> nn.Module:
    """The class that people train of a kind of model, where its config names none."""
    first = _TWO_PARTS if getattr(config, "is_encoder_decoder", False) else _DECODERS
    for name in (*first, *_DECODERS, *_TWO_PARTS, "AutoModelForMaskedLM", "AutoModel"):
        auto = getattr(library, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ValueError(f"no model class is known for model_type {config.model_type!r}")


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError("a Hugging Face config needs transformers: pip install 'thalweg[hf]'") from None
