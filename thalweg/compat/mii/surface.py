"""The names of DeepSpeed-MII 0.3 and of its legacy calls; :mod:`thalweg.compat.finder` says how to read the table."""

from __future__ import annotations

from thalweg.compat.finder import PROGRAM, Names, NotOffered, Package, names_in, with_parents

MII_VERSION = "0.3.4"

_HERE = "thalweg.compat.mii"
_SERVER: Names = {PROGRAM: "thalweg.cli.other_programs"}
_CONFIG = NotOffered("mii.serve and mii.pipeline take its fields as keywords, or as a dict")
_CALLS = names_in(f"{_HERE}.deployments", "pipeline serve client")
_CLIENT = names_in(f"{_HERE}.deployments", "MIIClient")
_TYPES = names_in(f"{_HERE}.constants", "DeploymentType TaskType GenerationFinishReason")
_LEGACY: Names = {
    **names_in(f"{_HERE}.legacy", "deploy mii_query_handle terminate"),
    **_TYPES,
    "MIIConfig": _CONFIG,
    "ModelConfig": _CONFIG,
    "MIIServer": NotOffered("`thalweg serve MODEL` is the server"),
    "aml_output_path": NotOffered("`thalweg serve MODEL` runs in any container"),
    "get_supported_models": NotOffered("thalweg.pipeline takes any language model of transformers"),
}

SURFACE: dict[str, Names] = with_parents({
    "mii": {**_LEGACY, **_CALLS, **_CLIENT, "__version__": f"{_HERE}.surface:MII_VERSION"},
    "mii.api": _CALLS,
    "mii.backend": _CLIENT,
    "mii.backend.client": _CLIENT,
    "mii.batching": names_in(f"{_HERE}.deployments", "MIIPipeline"),
    "mii.batching.data_classes": {"Response": f"{_HERE}.deployments:MIIResponse"},
    "mii.config": {"ModelConfig": _CONFIG, "MIIConfig": _CONFIG, "GenerateParamsConfig": _CONFIG},
    "mii.constants": _TYPES,
    "mii.entrypoints.api_server": _SERVER,
    "mii.entrypoints.openai_api_server": _SERVER,
    "mii.errors": names_in(f"{_HERE}.constants", "DeploymentNotFoundError UnknownArgument"),
    "mii.legacy": _LEGACY,
})  # fmt: skip
PACKAGE = Package("mii", "DeepSpeed-MII", "deepspeed-mii", MII_VERSION, SURFACE)
