"""What an inference engine promises: requests in, tokens out, one step at a time.

The picture: a caller (the server, ``generate``, a rollout) puts :class:`Request` objects into an
:class:`EngineCore` with ``add`` and calls ``step`` for as long as ``has_work`` is true.  Each step runs the
model once over a batch that mixes decoding requests with pieces of prompts, and returns a
:class:`RequestOutput` for every sequence that got tokens or ended.  A request with ``n`` samples has ``n``
sequences, told apart by ``RequestOutput.index``; each of them ends exactly once, with a ``finish_reason``.

The invariants:

- What a request generates depends on its prompt, its parameters and its seed, never on what else runs.
- An engine belongs to one thread: no method may be called while another is running.
- ``step`` reports the end of every request that was added, whatever happens, unless it was aborted.
"""

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

# ``stop``: an end token or a stop string; ``length``: ``max_tokens`` or the model's length is reached.
FinishReason = Literal["stop", "length", "abort", "error"]


class InvalidParameter(ValueError):
    """A value that a field of :class:`SamplingParams` cannot have; ``param`` is the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


@dataclass(frozen=True)
class StructuredOutput:
    """What the generated text must look like: exactly one of the fields is set."""

    # A JSON schema, as JSON text; ``"{}"`` for any JSON value.
    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        set_fields = [x for x in (self.json_schema, self.regex, self.choices) if x is not None]
        if len(set_fields) != 1:
            raise ValueError("a StructuredOutput needs exactly one of json_schema, regex, choices")
        if self.choices is not None and not self.choices:
            raise ValueError("choices is empty: name at least one text")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.  Raises ValueError that names the field and its range.

    The order of processing: penalties and ``logit_bias``, end tokens masked before ``min_tokens``,
    temperature, ``top_k``, ``top_p``, ``min_p``, as in Hugging Face's ``generate``.
    """

    # Tokens to generate at most; None: until the model's length is full.
    max_tokens: int | None = None
    # End tokens and ``stop_token_ids`` are masked until so many tokens are there; stop strings ignored.
    min_tokens: int = 0
    # Independent samples of the same prompt (which is computed once).
    n: int = 1
    # 0 chooses the most likely token.
    temperature: float = 1.0
    # Keep the k most likely tokens; 0 keeps all.
    top_k: int = 0
    # Keep the smallest set whose probability reaches top_p (Holtzman et al. 2020).
    top_p: float = 1.0
    # Drop tokens less likely than min_p times the most likely one.
    min_p: float = 0.0
    # Divide positive and multiply negative logits of tokens in prompt or output (Keskar et al. 2019).
    repetition_penalty: float = 1.0
    # Subtracted once from the logits of tokens that were generated.
    presence_penalty: float = 0.0
    # Subtracted for each time a token was generated.
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Texts that end the sequence; the text from there on is not returned.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # Return the stop string or end token's text as well.
    include_stop: bool = False
    # Go on after the model's own end tokens.
    ignore_eos: bool = False
    # Makes the samples reproducible, whatever else is in the batch; sample i draws from (seed, i).
    seed: int | None = None
    # Log-probabilities of the chosen token and of so many most likely ones; None: none, 0: the chosen one.
    # Of the raw distribution, before penalties and temperature.
    logprobs: int | None = None
    # The same for the tokens of the prompt, in the sequence's first output; turns prefix hits off.
    prompt_logprobs: int | None = None
    # Leave special tokens out of the text.
    skip_special_tokens: bool = True
    structure: StructuredOutput | None = None
    # What an encoder-decoder model says first, as the language of a translation (NLLB); it counts for none of the above
    # and is not returned.
    forced_bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _FIELD_RANGES.items():
            value = getattr(self, name)
            if value is None and name in _NULLABLE_FIELDS:
                continue
            must_be_int = name in _INTEGER_FIELDS
            is_valid = _is_number(value) and (isinstance(value, int) or not must_be_int)
            if not is_valid or value is None or not low <= value <= high:
                kind = "a whole number" if must_be_int else "a number"
                raise InvalidParameter(name, f"is {value!r}; it must be {kind} from {low} to {high}")
        if self.repetition_penalty <= 0:
            raise InvalidParameter("repetition_penalty", "must be above 0; 1 leaves the logits as they are")
        if self.top_p <= 0:
            raise InvalidParameter("top_p", "must be above 0; 1 keeps every token")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidParameter("stop", "must be a tuple of texts, none of them empty")
        stop_ids = self.stop_token_ids
        if not isinstance(stop_ids, list | tuple | set | frozenset) or not all(map(_is_token_id, stop_ids)):
            raise InvalidParameter("stop_token_ids", "must be a tuple of token ids, whole numbers")
        biases = self.logit_bias
        if not isinstance(biases, Mapping) or not all(
            _is_token_id(token) and _is_number(x) and abs(x) <= 100 for token, x in biases.items()
        ):
            raise InvalidParameter("logit_bias", "maps token ids to numbers from -100 to 100")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.temperature == 0 or self.top_k == 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_INT32_MAX = 2**31 - 1
_NULLABLE_FIELDS = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "forced_bos_token_id")
_INTEGER_FIELDS = ("min_tokens", "n", "top_k", *_NULLABLE_FIELDS)
_FIELD_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, _INT32_MAX), "min_tokens": (0, _INT32_MAX), "n": (1, 1024), "temperature": (0, 100),
    "top_k": (0, _INT32_MAX), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100), "frequency_penalty": (-100, 100), "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 1000), "prompt_logprobs": (0, 1000), "forced_bos_token_id": (0, _INT32_MAX),
}  # fmt: skip


def to_token_ids(prompt: Any) -> list[int]:
    """Return a prompt as numbers, whatever kind of them it is made of; ValueError where it is not."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(
            f"the prompt must be token ids, whole numbers ({error}): encode text by the tokenizer first"
        ) from None


def to_token_tuple(ids: Any) -> tuple[int, ...]:
    """Return the tokens of a setting that may be None, a token, or several."""
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a prompt that is empty or has tokens that the model has not."""
    if not prompt:
        raise ValueError("the prompt is empty: it needs at least one token")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"the prompt has tokens outside of 0 to {vocab_size - 1}")


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and what to make of it."""

    # The caller's name for it; unique among the requests that have not ended.
    request_id: str
    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()
    # Lower goes first, and is preempted last; among equals, first come, first served.
    priority: int = 0
    # Name of a LoRA adapter that the engine holds.
    adapter: str | None = None
    # Prefixes are shared only among requests with the same salt.
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token, and the most likely ones in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one sequence.  The deltas of all steps make up the whole."""

    request_id: str
    # Which of the ``n`` samples.
    index: int
    # New tokens, an end token included.
    token_ids: tuple[int, ...] = ()
    # New text; lags behind the tokens while a character is incomplete or a stop string may be on its way.
    # Empty in an engine without a tokenizer.
    text: str = ""
    # One for each new token, where asked for.
    logprobs: tuple[TokenLogprob, ...] | None = None
    # In the first output, where asked for; None for the first token, which nothing precedes.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    # Set in the last output of the sequence, and only there.
    finish_reason: FinishReason | None = None
    # The end token or stop string, where ``finish_reason`` is ``stop``.
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    # Prompt tokens that a cached prefix saved.
    num_cached_tokens: int = 0
    # So far, in this sequence.
    num_generated_tokens: int = 0
    # What went wrong, where ``finish_reason`` is ``error``.
    error: str | None = None
    # Whether that is the request's own fault (a structure too complex to follow), not the engine's.
    invalid_request: bool = False

    @property
    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass
class SequenceResult:
    """What came of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Append what a step gave."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.num_tokens = output.num_generated_tokens
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    def to_output(self, index: int) -> RequestOutput:
        """Return all that sample ``index`` of a request generated as one output."""
        prompt_logprobs, reason = self.prompt_logprobs or None, self.finish_reason
        return RequestOutput("", index, (), self.text, tuple(self.logprobs), prompt_logprobs, reason, self.stop_reason)


def collect_results(outputs: Generator[RequestOutput], failure: str) -> dict[tuple[str, int], SequenceResult]:
    """Return what came of each sequence, by request and index; RuntimeError, which begins with ``failure``, where a
    request fails."""
    results: defaultdict[tuple[str, int], SequenceResult] = defaultdict(SequenceResult)
    with closing(outputs):
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"{failure}: {output.error}")
            results[output.request_id, output.index].add(output)
    return results


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment, and counters since the engine was made."""

    # Sequences that hold KV blocks and take part in steps.
    running: int = 0
    # Sequences that are queued, preempted ones included.
    waiting: int = 0
    kv_blocks: int = 0
    # Blocks that a running sequence holds; blocks kept only for prefix hits count as free.
    kv_blocks_used: int = 0
    steps: int = 0
    # Prompt tokens of admitted requests, cached ones included.
    prompt_tokens: int = 0
    # Prompt tokens that came from the prefix cache.
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    # Tokens that were computed as drafts (speculative decoding).
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # Sequences that ended, by finish reason.
    finished: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0


@dataclass(frozen=True)
class ModelMetadata:
    """What a caller needs to know of the model."""

    name: str
    kind: Literal["causal", "encoder", "seq2seq"]
    # Prompt and generated tokens together, at most; of a ``seq2seq`` model either of them.
    max_length: int
    vocab_size: int
    # ``fp32``, ``bf16`` or ``fp16``: what the activations are in.
    dtype: str
    # ``int8`` or ``int4`` where the weights are quantised.
    quantize: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    # LoRA adapters that requests may name.
    adapters: tuple[str, ...] = ()
    # Fields of :class:`SamplingParams` that the model's generation config sets, for requests that leave them open.
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)


class EngineCore:
    """A model that works off requests; as it stands here, an encoder, which takes none.  Belongs to one thread."""

    metadata: ModelMetadata
    # A Hugging Face tokenizer (``encode``, ``decode``, ``apply_chat_template``), or None.
    tokenizer: Any

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError, and leaves the engine as it was, when the request can never run: an empty prompt,
        one that leaves no room to generate, a token outside the vocabulary, a name in use, no such adapter.
        """
        raise ValueError(f"{self.metadata.name} is an encoder and generates nothing: use embed")

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; no further outputs come.  Unknown names are ignored."""

    def step(self) -> list[RequestOutput]:
        """Run the model once and return what every sequence got; empty when there is no work.

        A failure that concerns one request is that request's output with ``finish_reason`` ``error``; an
        exception means that the engine is broken.
        """
        return []

    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return False

    def stats(self) -> EngineStats:
        """Return the gauges and counters; cheap."""
        raise NotImplementedError

    def embed(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Return embeddings, fp32 (len(prompts), width): the mean over tokens of the last hidden states.

        Raises ValueError where the model offers none.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything; what is still queued is dropped."""
