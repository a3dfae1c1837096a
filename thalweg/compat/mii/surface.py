"""The names of DeepSpeed-MII 0.3 and of its legacy calls; :mod:`thalweg.compat.finder` says how to read the table."""

from __future__ import annotations

from thalweg.compat.finder import PROGRAM, Names, NotOffered, Package

MII_VERSION = "0.3.4"

_HERE = "thalweg.compat.mii"
_SERVER: Names = {PROGRAM: "thalweg.cli.other_programs"}
_CONFIG = NotOffered("mii.serve and mii.pipeline take its fields as keywords, or as a dict")
_CALLS: Names = {name: f"{_HERE}.deployments:{name}" for name in ("pipeline", "serve", "client")}
_RESPONSE: Names = {"Response": f"{_HERE}.deployments:MIIResponse"}
_CLIENT: Names = {"MIIClient": f"{_HERE}.deployments:MIIClient"}
_TYPES: Names = {name: f"{_HERE}.constants:{name}" for name in ("DeploymentType", "TaskType", "GenerationFinishReason")}
_LEGACY: Names = {
    **{name: f"{_HERE}.legacy:{name}" for name in ("deploy", "mii_query_handle", "terminate")},
    **_TYPES,
    "MIIConfig": _CONFIG,
    "ModelConfig": _CONFIG,
    "MIIServer": NotOffered("`thalweg serve MODEL` is the server"),
    "aml_output_path": NotOffered("`thalweg serve MODEL` runs in any container"),
    "get_supported_models": NotOffered("thalweg.pipeline takes any language model of transformers"),
}

SURFACE: dict[str, Names] = {
    "mii": {**_LEGACY, **_CALLS, **_CLIENT, "__version__": f"{_HERE}.surface:MII_VERSION"},
    "mii.api": _CALLS,
    "mii.backend": _CLIENT,
    "mii.backend.client": _CLIENT,
    "mii.batching": {"MIIPipeline": f"{_HERE}.deployments:MIIPipeline"},
    "mii.batching.data_classes": _RESPONSE,
    "mii.config": {"ModelConfig": _CONFIG, "MIIConfig": _CONFIG, "GenerateParamsConfig": _CONFIG},
    "mii.constants": _TYPES,
    "mii.entrypoints": {},
    "mii.entrypoints.api_server": _SERVER,
    "mii.entrypoints.openai_api_server": _SERVER,
    "mii.errors": {name: f"{_HERE}.constants:{name}" for name in ("DeploymentNotFoundError", "UnknownArgument")},
    "mii.legacy": _LEGACY,
}
PACKAGE = Package("mii", "DeepSpeed-MII", "deepspeed-mii", MII_VERSION, SURFACE)
