"""``thalweg.pipeline``: an engine in this process, in MII's form, with no server."""

import importlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

from thalweg.infer.config import EngineConfig
from thalweg.infer.types import Request, RequestOutput, collect_results
from thalweg.serve.errors import ApiError
from thalweg.serve.mii.deployment import Response
from thalweg.serve.openai.requests import MiiRequest, mii_sampling_params, parse_body
from thalweg.serve.replicas.launcher import EngineSpec


def pipeline(model: Any, options: EngineConfig | None = None, **fields: Any) -> Any:
    """Load a model (a Hugging Face directory, or a live one) and return a :class:`Pipeline` that continues
    prompts, or an :class:`EmbeddingPipeline` for an encoder.

    A pipeline of diffusers (or the directory of one) stays one, with ``init_inference``'s options.

    ``fields`` are fields of :class:`thalweg.infer.EngineConfig` (``quantize="int8"``, ``max_length=2048``).
    """
    if options is not None and fields:
        raise ValueError(f"give options or {', '.join(fields)}, not both")
    diffusion = importlib.import_module("thalweg.infer.diffusion")
    if diffusion.is_pipeline(model):
        if options is not None:
            raise ValueError("EngineConfig is for language models: give a diffusion pipeline keywords")
        return importlib.import_module("thalweg.infer.init_inference").init_inference(model, **fields)
    engine: Any = EngineSpec(model, options or EngineConfig(**fields)).load()
    return EmbeddingPipeline(engine) if engine.metadata.kind == "encoder" else Pipeline(engine)


class _EnginePipeline:
    """What both kinds do with their engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def _encode(self, text: str) -> list[int]:
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer: give load_engine one")
        return self.engine.tokenizer.encode(text)

    def destroy(self) -> None:
        """Free the engine."""
        self.engine.close()


class EmbeddingPipeline(_EnginePipeline):
    """``pipe(["text"]) -> [[0.1, ...]]``: a vector for each text."""

    def __call__(self, texts: str | Sequence[str]) -> list[list[float]]:
        """Return the vectors; ValueError for a text that is empty or too long."""
        inputs = [texts] if isinstance(texts, str) else list(texts)
        return self.engine.embed([self._encode(text) for text in inputs]).tolist()


class Pipeline(_EnginePipeline):
    """``pipe(["prompt"], max_new_tokens=64) -> [Response]``; all prompts run in one batch."""

    _num_calls = 0

    def __call__(
        self, prompts: str | Sequence[str], streaming_fn: Callable[[list[Response]], None] | None = None, **options: Any
    ) -> list[Response]:
        """Return a response for each prompt.

        ``options`` are MII's: ``max_length``, ``max_new_tokens``, ``min_new_tokens``, ``do_sample``,
        ``top_p`` (0.9), ``top_k``, ``temperature``, ``stop``, ``ignore_eos``, ``return_full_text``, ``seed``.
        ``streaming_fn`` gets each piece of text as it comes.  Raises ValueError for what cannot be.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self._make_request(i, text, options) for i, text in enumerate(texts)]
        self._num_calls += 1
        results = collect_results(self._run(requests, streaming_fn), "the engine failed on a prompt")
        full, responses = options.get("return_full_text", False), []
        for request, text in zip(requests, texts, strict=True):
            done = results[request.request_id, 0]
            generated = text + done.text if full else done.text
            responses.append(Response(generated, len(request.prompt), done.num_tokens, done.finish_reason))
        return responses

    def _run(
        self, requests: list[Request], streaming_fn: Callable[[list[Response]], None] | None
    ) -> Generator[RequestOutput]:
        for output in self.engine.run_requests(requests):
            if streaming_fn is not None and output.text:
                about = output.num_prompt_tokens, output.num_generated_tokens, output.finish_reason
                streaming_fn([Response(output.text, *about)])
            yield output

    def _make_request(self, index: int, text: str, options: dict[str, Any]) -> Request:
        prompt = self._encode(text)
        try:
            mii_request = parse_body(MiiRequest, json.dumps({"prompts": text, **options}).encode())
            params = mii_sampling_params(mii_request, len(prompt), self.engine.metadata)
        except ApiError as error:
            raise ValueError(str(error)) from None
        return Request(f"call{self._num_calls}-{index}", prompt, params)
