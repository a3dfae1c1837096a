"""A small engine behind the true protocol: tokens are bytes, texts follow from the prompt by a hash.

It batches, holds KV blocks, preempts nothing, and keeps the promises of ``infer/api.py``; so the server can
be tested by the thousand requests in a second, and a test knows what each request must give (``expected``).
Prompts that begin with ``CRASH``, ``HANG``, ``EXIT`` break it in the way they say; ``FAULT`` fails alone, by the
engine's fault, ``UNFIT`` by its own.

``model`` is ``toy`` with settings, as in ``toy:delay=0.01,blocks=64,batch=8,length=512``; the file name
``encoder`` in it makes an encoder.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from thalweg.infer.config import EngineConfig
from thalweg.infer.types import (
    EngineStats,
    ModelMetadata,
    Request,
    RequestOutput,
    TokenLogprob,
)

EOS = 256
WORDS = ["water ", "tiefe Flüsse ", "深い川 ", "🌊🏞️ ", "ý", "stone, ", "0x1F ", "\n", "and ", "Tal "]
BLOCK_SIZE = 16


def continuation_bytes(prompt: Sequence[int], seed: int, index: int, count: int) -> bytes:
    """The bytes that a prompt is continued with."""
    output, state = bytearray(), f"{list(prompt)}|{seed}|{index}".encode()
    while len(output) < count:
        state = hashlib.blake2b(state, digest_size=8).digest()
        output += WORDS[state[0] % len(WORDS)].encode()
    return bytes(output[:count])


def expected_text(prompt: str | Sequence[int], max_tokens: int, seed: int = 0, index: int = 0) -> str:
    """The text that the server must give; an incomplete character at the end is dropped."""
    tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return continuation_bytes(tokens, seed, index, max_tokens).decode(errors="ignore")


class ToyTokenizer:
    """Bytes as tokens."""

    chat_template = None
    backend_tokenizer = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | {"<eos>": EOS}

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>" if token < 256 else "<eos>"


class _ToySequence:
    def __init__(self, request: Request, index: int, length: int) -> None:
        params = request.params
        seed = 0 if params.greedy or params.seed is None else params.seed
        self.request, self.index = request, index
        self.max_new_tokens = min(params.max_tokens or length, length - len(request.prompt))
        self.output_bytes = continuation_bytes(request.prompt, seed, index, self.max_new_tokens)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_generated, self.pending_text, self.sent = 0, "", ""
        self.num_blocks = math.ceil((len(request.prompt) + self.max_new_tokens) / BLOCK_SIZE)

    def advance(self) -> RequestOutput:
        token = self.output_bytes[self.num_generated]
        self.num_generated += 1
        self.pending_text += self.decoder.decode(bytes([token]))
        params, reason, stop_reason = self.request.params, None, None
        new_text = self.pending_text
        for stop in params.stop:
            if (at := self.pending_text.find(stop)) >= 0:
                new_text, reason, stop_reason = (
                    self.pending_text[: at + len(stop) * params.include_stop],
                    "stop",
                    stop,
                )
        if reason is None and self.num_generated == self.max_new_tokens:
            reason = "length"
        if reason is None:
            num_withheld = max(
                (n for stop in params.stop for n in range(1, len(stop)) if new_text.endswith(stop[:n])),
                default=0,
            )
            new_text = new_text[: len(new_text) - num_withheld]
        self.pending_text = self.pending_text[len(new_text) :]
        logprobs = None
        if params.logprobs is not None:
            top = tuple((k, -1.0 - k) for k in range(params.logprobs))
            logprobs = (TokenLogprob(token, -math.inf if token == 10 else -0.5, top),)
        return RequestOutput(
            self.request.request_id,
            self.index,
            (token,),
            new_text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self.request.prompt),
            num_generated_tokens=self.num_generated,
        )

    def fail(self, invalid_request: bool) -> RequestOutput:
        error = "no further text is allowed" if invalid_request else "the structure of the weights is broken"
        return RequestOutput(
            self.request.request_id, self.index, finish_reason="error", error=error, invalid_request=invalid_request
        )


class ToyEngine:
    """First come, first served, whole prompts in one step."""

    def __init__(self, model: str = "toy", options: EngineConfig | None = None) -> None:
        settings = dict(part.split("=") for part in model.partition(":")[2].split(",") if part)
        self.delay = float(settings.get("delay", 0))
        self.batch = int(settings.get("batch", 64))
        self.blocks = int(settings.get("blocks", 4096))
        length = int(settings.get("length", 2048))
        kind = "encoder" if "encoder" in model else "causal"
        self.metadata = ModelMetadata("toy", kind, length, 257, "fp32", eos_token_ids=(EOS,), adapters=("tuned",))
        self.tokenizer = ToyTokenizer()
        self.used = self.steps = self.generated = 0
        self.waiting: list[_ToySequence] = []
        self.running: list[_ToySequence] = []
        self.closed = False

    def add(self, request: Request) -> None:
        names = {sequence.request.request_id for sequence in self.waiting + self.running}
        if request.request_id in names:
            raise ValueError(f"{request.request_id} is in use")
        if not 0 < len(request.prompt) < self.metadata.max_length:
            raise ValueError("the prompt is empty or too long")
        structure = request.params.structure
        if structure is not None and not (structure.regex or "").startswith("slow "):
            raise ValueError("this engine has no structured output: leave response_format out")
        sequences = [_ToySequence(request, i, self.metadata.max_length) for i in range(request.params.n)]
        if sequences[0].num_blocks > self.blocks:
            raise ValueError(f"the request needs {sequences[0].num_blocks} KV blocks of {self.blocks}: shorten it")
        self.waiting += sequences

    def get_prepare_fn(self, request: Request) -> Any:
        """A regex ``slow N`` takes N seconds to prepare; another one cannot be prepared."""
        structure = request.params.structure
        if structure is None or structure.regex is None:
            return None
        kind, _, seconds = structure.regex.partition(" ")
        if kind != "slow":
            return lambda: _raise_value_error("the structure is not understood")
        return lambda: time.sleep(float(seconds))

    def abort(self, request_id: str) -> None:
        self.waiting = [s for s in self.waiting if s.request.request_id != request_id]
        for sequence in [s for s in self.running if s.request.request_id == request_id]:
            self._free(sequence)

    def _free(self, sequence: _ToySequence) -> None:
        self.running.remove(sequence)
        self.used -= sequence.num_blocks

    def step(self) -> list[RequestOutput]:
        while self.waiting and len(self.running) < self.batch and (
            self.used + self.waiting[0].num_blocks <= self.blocks
        ):  # fmt: skip
            sequence = self.waiting.pop(0)
            self.used += sequence.num_blocks
            self.running.append(sequence)
        self.steps += 1
        time.sleep(self.delay)
        outputs = []
        for sequence in list(self.running):
            head = bytes(sequence.request.prompt[:5])
            after = sequence.num_generated >= 3  # in the middle of the answer
            if head.startswith(b"CRASH") and (after or sequence.request.prompt[-1:] == [ord("!")]):
                raise RuntimeError("the toy engine broke")
            if head.startswith(b"HANG") and after:
                time.sleep(3600)
            if head in (b"FAULT", b"UNFIT"):
                outputs.append(sequence.fail(invalid_request=head == b"UNFIT"))
                self._free(sequence)
                continue
            if head.startswith(b"EXIT") and (after or sequence.request.prompt[-1:] == [ord("!")]):
                os._exit(9)
            outputs.append(sequence.advance())
            self.generated += 1
            if outputs[-1].finished:
                self._free(sequence)
        return outputs

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks=self.blocks,
            kv_blocks_used=self.used,
            steps=self.steps,
            generated_tokens=self.generated,
        )

    def embed(self, prompts: Sequence[Sequence[int]]) -> Any:
        if self.metadata.kind != "encoder":
            raise ValueError("this model is no encoder")
        import torch  # a replica with this engine starts in a moment without it

        return torch.tensor([[float(len(p)), float(sum(p)), 1.0] for p in prompts])

    def close(self) -> None:
        self.closed = True


def _raise_value_error(reason: str) -> None:
    raise ValueError(reason)


def load_engine(model: str, options: EngineConfig | None = None) -> ToyEngine:
    """What the server's replicas call."""
    if "missing" in model:
        raise FileNotFoundError(f"{model} is not there")
    return ToyEngine(model, options)


def load_tokenizer(model: str) -> ToyTokenizer:
    """What the server itself calls."""
    return ToyTokenizer()
