"""Inference: an engine that works off requests (``api.py`` says what it promises)."""

from __future__ import annotations

from thalweg.infer.api import (
    EngineCore,
    EngineOptions,
    EngineStats,
    ModelFacts,
    Request,
    RequestOutput,
    SamplingParams,
    Structure,
    TokenLogprob,
)
from thalweg.infer.load import load_engine

__all__ = [
    "EngineCore",
    "EngineOptions",
    "EngineStats",
    "ModelFacts",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Structure",
    "TokenLogprob",
    "load_engine",
]
