"""``mii.pipeline``, ``mii.serve`` and ``mii.client`` over the same of Thalweg's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.compat.mii.constants import DeploymentNotFoundError, GenerationFinishReason, UnknownArgument
from thalweg.infer.config import EngineConfig
from thalweg.infer.loader.hf import load_tokenizer
from thalweg.infer.loader.load import load_engine
from thalweg.serve.mii import deployment as ours
from thalweg.serve.mii.pipeline import Pipeline
from thalweg.utils.formatting import did_you_mean
from thalweg.utils.log import enable_console, get_logger

_log = get_logger(__name__)
# What MII calls the options of `thalweg serve` that go by another name here, or by none.
_MODEL_OPTIONS = {"model_name_or_path", "tokenizer", "task", "tensor_parallel", "quantization_mode", "max_length"}
_SERVER_OPTIONS = {
    "deployment_name", "replica_num", "enable_restful_api", "restful_api_host", "restful_api_port",
}  # fmt: skip
_IGNORED = tomllib.loads(Path(__file__).with_name("ignored.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass
class MIIResponse:
    """What was generated for one prompt; lengths are in tokens."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: GenerationFinishReason

    @staticmethod
    def from_msg_dict(msg: Mapping[str, Any]) -> MIIResponse:
        """The response of a message's fields."""
        return MIIResponse(**msg)

    def to_msg_dict(self) -> dict[str, Any]:
        """The fields of a message."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return self.generated_text

    __str__ = __repr__


class MIIPipeline:
    """An engine in this process; on rank 0, where a launcher has started several."""

    def __init__(self, engine: Pipeline | None) -> None:
        self._pipeline = engine
        self.is_rank_0 = engine is not None
        self._destroyed = False

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return None if self._pipeline is None else self._pipeline.engine.tokenizer

    def __call__(self, prompts: str | Sequence[str], **options: Any) -> list[MIIResponse]:
        """One response for each prompt; none on ranks that only help."""
        if self._destroyed:
            raise RuntimeError("the pipeline was destroyed: make another one with mii.pipeline(model)")
        return [] if self._pipeline is None else _responses(self._pipeline(prompts, **options))

    def destroy(self) -> None:
        """Free the engine."""
        if self._pipeline is not None and not self._destroyed:
            self._pipeline.destroy()
        self._destroyed = True


class MIIClient:
    """Talks to one deployment."""

    def __init__(self, client: ours.Client) -> None:
        self._client = client

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[MIIResponse]], Any] | None = None,
        **options: Any,
    ) -> list[MIIResponse]:
        """One response for each prompt; ``streaming_fn`` gets the pieces of one prompt's as they come."""
        forward = None if streaming_fn is None else lambda pieces: streaming_fn(_responses(pieces))
        return _responses(self._client.generate(prompts, forward, **options))

    __call__ = generate

    def terminate_server(self) -> None:
        """End the server and wait until it is gone."""
        self._client.terminate_server()


def pipeline(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    all_rank_output: bool = False,
    **options: Any,
) -> MIIPipeline:
    """Load a model into this process.

    Under a launcher of several processes rank 0 loads the model, split among as many processes of its own.

    Raises:
        UnknownArgument: for a keyword that MII does not have.
    """
    fields = _merge(model_name_or_path, model_config, options, _MODEL_OPTIONS)
    if all_rank_output and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NotImplementedError("all_rank_output is not offered by Thalweg: broadcast rank 0's responses")
    if int(os.environ.get("RANK", "0")) > 0:
        return MIIPipeline(None)
    model, tokenizer = fields.pop("model_name_or_path"), fields.pop("tokenizer", None)
    config = EngineConfig(**_engine_options(fields))
    tokenizer = load_tokenizer(tokenizer, config) if isinstance(tokenizer, str) else tokenizer
    engine: Any = load_engine(model, config, tokenizer)
    return MIIPipeline(Pipeline(engine))


def serve(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> MIIClient:
    """Start a server that outlives this program; returns a client of it.

    Raises:
        UnknownArgument: for a keyword that MII does not have.
    """
    deployment = dict(mii_config or {})
    model_config = {**deployment.pop("model_config", {}), **(model_config or {})}
    fields = _merge(model_name_or_path, model_config, deployment | options, _MODEL_OPTIONS | _SERVER_OPTIONS)
    model, tokenizer = fields.pop("model_name_or_path"), fields.pop("tokenizer", None)
    if tokenizer not in (None, model):
        raise ValueError("a tokenizer of its own is not served: save it into the model's directory")
    server = {name: fields.pop(name) for name in _SERVER_OPTIONS & fields.keys()}
    server["deployment_name"] = server.get("deployment_name") or _default_name(model)
    engine = _engine_options(fields)
    arguments = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return MIIClient(ours.serve(model, **server, arguments=arguments))


def client(model_or_deployment_name: str) -> MIIClient:
    """A client of the deployment of that name, or of that model.

    Raises:
        DeploymentNotFoundError: where none runs.
    """
    for name in (model_or_deployment_name, _default_name(model_or_deployment_name)):
        with contextlib.suppress(ValueError):
            return MIIClient(ours.client(name))
    raise DeploymentNotFoundError(
        f"no deployment {model_or_deployment_name!r} runs for this user: start it with mii.serve(model, "
        f"deployment_name={model_or_deployment_name!r})"
    )


def _default_name(model: str) -> str:
    return f"{Path(model).name if os.path.exists(model) else model}-mii-deployment"


def _merge(model: str, config: Mapping[str, Any] | None, options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """All options as one dict, those that have no meaning here left out with a line in the log."""
    merged = {**(config or {}), **options}
    if model and merged.setdefault("model_name_or_path", model) != model:
        raise ValueError(f"two models are named, {model} and {merged['model_name_or_path']}: name one")
    for name in [name for name in merged if name not in known]:
        if name not in _IGNORED:
            raise UnknownArgument(f"{name} is no option of MII's{did_you_mean(name, known)}")
        enable_console()
        _log.info("%s is ignored: %s", name, _IGNORED[name])
        del merged[name]
    if not merged.get("model_name_or_path"):
        raise ValueError("no model: give the directory or the name of a Hugging Face model")
    return merged


def _engine_options(fields: dict[str, Any]) -> dict[str, Any]:
    """The engine's options for MII's of a model."""
    task = fields.pop("task", None)
    if task not in (None, "text-generation"):
        raise ValueError(f"the task {task} is not offered by Thalweg: transformers.pipeline({str(task)!r}) has it")
    mode = fields.pop("quantization_mode", None)
    if mode is not None:
        enable_console()
        _log.warning("quantization_mode %s is not offered: int8 is taken, which is the more exact", mode)
    fields.setdefault("tensor_parallel", int(os.environ.get("WORLD_SIZE", "1")))
    renamed = {"tensor_parallel_size": fields["tensor_parallel"], "max_model_len": fields.get("max_length")}
    return {name: value for name, value in (renamed | {"quantization": mode and "int8"}).items() if value is not None}


def _responses(responses: Sequence[ours.Response]) -> list[MIIResponse]:
    known = {reason.value: reason for reason in GenerationFinishReason}
    return [
        MIIResponse(r.generated_text, r.prompt_length, r.generated_length,
                 known.get(r.finish_reason or "none", GenerationFinishReason.NONE))
        for r in responses
    ]  # fmt: skip
