"""MII's calls before 0.1: ``deploy``, ``mii_query_handle``, ``terminate``, for text generation.

They ran transformers' pipelines, whose defaults they keep: the prompt is part of the text, no sampling.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.compat.mii import deployments
from thalweg.compat.mii.constants import DeploymentNotFoundError, DeploymentType
from thalweg.serve.openai.requests import LEGACY_MII_DEFAULTS
from thalweg.utils.log import enable_console, get_logger

_log = get_logger(__name__)
_IN_THIS_PROCESS: dict[str, deployments.MIIPipeline] = {}
_RENAMED = {"max_tokens": "max_length"}
_KEPT = {"tensor_parallel", "replica_num", "max_length", "enable_restful_api", "restful_api_port"}


@dataclass
class LegacyReply:
    """The texts of a query, and its seconds."""

    response: list[str]
    time_taken: float
    model_time_taken: float


class QueryHandle:
    """Asks one deployment."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def query(self, request_dict: Mapping[str, Any], **options: Any) -> LegacyReply:
        """The continuation of ``request_dict["query"]``, a text or several."""
        if "query" not in request_dict:
            raise ValueError('text generation needs the key "query": query({"query": ["a prompt"]})')
        start = time.perf_counter()
        responses = self._target(request_dict["query"], **{**LEGACY_MII_DEFAULTS, **options})
        seconds = time.perf_counter() - start
        return LegacyReply([response.generated_text for response in responses], seconds, seconds)

    def terminate(self) -> None:
        """End the deployment."""
        if isinstance(self._target, deployments.MIIPipeline):
            self._target.destroy()
        else:
            self._target.terminate_server()


def deploy(
    task: str = "text-generation",
    model: str = "",
    deployment_name: str = "",
    deployment_type: str = DeploymentType.LOCAL,
    model_path: str | None = None,
    enable_deepspeed: bool = True,
    enable_zero: bool = False,
    ds_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    version: int = 1,
    **_: Any,
) -> None:
    """Start a deployment, which :func:`mii_query_handle` finds by its name."""
    if model_config is not None:  # of the later legacy calls: the same fields in a dict
        return deploy(**{"deployment_name": deployment_name, "deployment_type": deployment_type,
                         "mii_config": mii_config, **model_config})  # fmt: skip
    if deployment_type == DeploymentType.AML:
        raise NotImplementedError("AML deployments are not offered by Thalweg: `thalweg serve MODEL` in a container")
    given = {_RENAMED.get(name, name): value for name, value in (mii_config or {}).items()}
    ignored = sorted(given.keys() - _KEPT)
    if ignored:
        enable_console()
        _log.info("of mii_config these are ignored: %s", ", ".join(ignored))
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in _KEPT} | {"task": task}
    if enable_zero or ds_config:
        raise NotImplementedError(
            "ds_config is not offered here by Thalweg: thalweg.pipeline(model, weight_offload='cpu') or `thalweg serve "
            "MODEL --weight-offload cpu` reads weights layer by layer (ZeRO-Inference)"
        )
    if deployment_type == DeploymentType.NON_PERSISTENT:
        fields = {name: value for name, value in fields.items() if name in ("tensor_parallel", "max_length", "task")}
        _IN_THIS_PROCESS[deployment_name] = deployments.pipeline(model_path or model, **fields)
    else:
        deployments.serve(model_path or model, deployment_name=deployment_name, **fields)
    return None


def mii_query_handle(deployment_name: str) -> QueryHandle:
    """What asks the deployment of that name."""
    target = _IN_THIS_PROCESS.get(deployment_name)
    return QueryHandle(target if target is not None else deployments.client(deployment_name))


def terminate(deployment_name: str) -> None:
    """End the deployment of that name; nothing where none runs."""
    try:
        mii_query_handle(deployment_name).terminate()
    except DeploymentNotFoundError:
        _log.warning("no deployment %s runs", deployment_name)
    _IN_THIS_PROCESS.pop(deployment_name, None)
