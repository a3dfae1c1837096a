"""Inference: an engine that works off requests (``types.py`` says what it promises)."""

from typing import TYPE_CHECKING, Any

from thalweg.infer.config import EngineConfig
from thalweg.infer.types import (
    EngineCore,
    EngineStats,
    ModelMetadata,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)

if TYPE_CHECKING:
    from thalweg.infer.loader.load import load_engine

__all__ = [
    "EngineConfig", "EngineCore", "EngineStats", "ModelMetadata", "Request", "RequestOutput", "SamplingParams",
    "StructuredOutput", "TokenLogprob", "load_engine",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch with the engine, not with the words for requests: a server's front needs these alone."""
    if name != "load_engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thalweg.infer.loader.load import load_engine

    return load_engine
