"""A Hugging Face model from its directory: loaded, or left in its files with only its structure made."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from thalweg.infer.api import EngineOptions
from thalweg.utils.dtypes import parse_dtype


def load_tokenizer(model: str | Path, options: EngineOptions) -> Any:
    """Return the directory's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with contextlib.suppress(OSError, ValueError, KeyError):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=options.trust_remote_code)
    return None


def load_model(model: str | Path, options: EngineOptions) -> Any:
    """Load a causal model in the dtype and onto the device of the options."""
    from transformers import AutoModelForCausalLM

    dtype: Any = "auto" if options.dtype == "auto" else parse_dtype(options.dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, trust_remote_code=options.trust_remote_code
    )
    return loaded.to(options.device).eval()


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
