"""The engine: requests in, tokens out.

The picture: ``scheduler.py`` chooses the tokens of a step and their KV blocks, a runner
(``runners/``) computes their logits, ``sampler.py`` turns these into tokens, and the engine returns them as
request outputs.  :meth:`LLMEngine.step` is just that, in this order.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.infer import types as infer_types
from thalweg.infer.engine.detokenizer import IncrementalDetokenizer
from thalweg.infer.engine.sampler import NotFiniteError, SampledRow, sample, sample_token, token_logprobs
from thalweg.infer.engine.scheduler import BlockPool, Proposer, Scheduler, SchedulerOutput, Sequence
from thalweg.infer.engine.structured_output import GrammarError
from thalweg.infer.models.spec import DecoderSpec
from thalweg.infer.runners.base import ModelInput, ModelRunner, QuerySpan
from thalweg.infer.spec_decode.ngram import NgramProposer
from thalweg.infer.types import EngineStats, FinishReason, ModelMetadata, Request, RequestOutput, TokenLogprob
from thalweg.utils.log import get_logger

log = get_logger(__name__)


class LLMEngine(infer_types.EngineCore):
    """An :class:`~thalweg.infer.types.EngineCore` around a runner.

    ``decoder_start_ids``: the first decoder tokens of an encoder-decoder model.  ``banned_token_ids``: what no request
    says unless its ``logit_bias`` names it.  ``proposer``: where draft tokens come from, by default prompt lookup
    (:class:`NgramProposer`).  ``limits``: the :class:`.scheduler.Scheduler`'s, how many sequences, tokens and draft
    tokens of each sequence make up a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        metadata: ModelMetadata,
        tokenizer: Any = None,
        *,
        prefix_cache: bool = True,
        grammar_compiler: Any = None,
        decoder_start_ids: tuple[int, ...] = (),
        banned_token_ids: Iterable[int] = (),
        proposer: Proposer | None = None,
        **limits: int,
    ) -> None:
        self.metadata, self.tokenizer, self.runner = metadata, tokenizer, runner
        self._proposer = proposer or NgramProposer()
        self._block_pool = BlockPool(runner.num_blocks, runner.block_size, prefix_cache)
        self._scheduler = Scheduler(
            self._block_pool, runner.free_slot, proposer=self._proposer, adapter_names=metadata.adapters, **limits
        )
        self._grammar_compiler, self.decoder_start_ids = grammar_compiler, decoder_start_ids
        self._bans = dict.fromkeys(banned_token_ids, -100.0)
        self._requests: dict[str, list[Sequence]] = {}
        self._num_arrivals = 0
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._kept_outputs: list[RequestOutput] = []

    def step(self) -> list[RequestOutput]:
        """Run the model once and return what every sequence got, and what :meth:`run_requests` has kept for us."""
        kept, self._kept_outputs = self._kept_outputs, []
        return kept + self._run_step()

    def run_requests(self, requests: Iterable[Request]) -> Generator[RequestOutput]:
        """Queue requests, run steps until they have ended, and yield their outputs; closing it drops what still runs.

        Outputs of other requests are kept for the next :meth:`step`.
        """
        own_ids: set[str] = set()
        try:
            for request in requests:
                self.add(request)
                own_ids.add(request.request_id)
            while own_ids & self._requests.keys():
                own: list[RequestOutput] = []
                for output in self._run_step():
                    (own if output.request_id in own_ids else self._kept_outputs).append(output)
                yield from own
        finally:
            for request_id in own_ids:
                self.abort(request_id)  # what has ended is unknown by now

    def _run_step(self) -> list[RequestOutput]:
        scheduler_output = self._scheduler.schedule()
        if scheduler_output is None:
            return []
        if scheduler_output.encoder_inputs:
            self.runner.run_encoder(scheduler_output.encoder_inputs)
        logits = self.runner.run(scheduler_output.model_input)
        self._scheduler.commit(scheduler_output)
        return self._process_outputs(scheduler_output, logits)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError when it can never run."""
        request = replace(request, prompt=infer_types.to_token_ids(request.prompt))
        self._check_request(request)
        params = request.params
        if self._bans:
            params = replace(params, logit_bias={**self._bans, **params.logit_bias})
            request = replace(request, params=params)
        forced = infer_types.to_token_tuple(params.forced_bos_token_id)
        start_ids = (self.decoder_start_ids[0], *forced) if forced else self.decoder_start_ids
        num_initial_tokens = len(start_ids) or len(request.prompt)
        capacity = min(self.metadata.max_length, self._kv_token_capacity(request))
        max_length = min(capacity, num_initial_tokens + (params.max_tokens or capacity))
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.metadata.eos_token_ids)
        grammar = self._grammar_compiler.compile(params.structure) if params.structure is not None else None
        self._num_arrivals += 1
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(request, index, self._num_arrivals, max_length, stop_ids, start_ids)
            sequence.prefix_owner = sequences[0] if sequences else None
            sequence.grammar = None if grammar is None else self._grammar_compiler.new_state(grammar, stop_ids)
            if self.tokenizer is not None:
                sequence.detokenizer = IncrementalDetokenizer(
                    self.tokenizer, params.stop, include_stop=params.include_stop,
                    skip_special_tokens=params.skip_special_tokens,
                    prompt_tokens=() if self.decoder_start_ids else request.prompt,
                )  # fmt: skip
            sequences.append(sequence)
        self._requests[request.request_id] = list(sequences)
        for sequence in sequences:
            self._scheduler.add(sequence)

    def get_prepare_fn(self, request: Request) -> Callable[[], object] | None:
        """Return the slow part of :meth:`add`, for another thread to call first while steps go on.

        None where nothing is slow.  It raises ValueError where ``add`` would for the same cause.
        """
        structure, compiler = request.params.structure, self._grammar_compiler
        if structure is None or compiler is None or structure in compiler:
            return None
        return lambda: compiler.compile(structure)

    def _check_request(self, request: Request) -> None:
        prompt, params = request.prompt, request.params
        if request.request_id in self._requests:
            raise ValueError(f"there is already a request named {request.request_id!r}")
        infer_types.check_prompt(prompt, self.metadata.vocab_size)
        forced, vocab_size = infer_types.to_token_tuple(params.forced_bos_token_id), self.metadata.vocab_size
        if not all(0 <= t < vocab_size for t in (*params.logit_bias, *params.stop_token_ids, *forced)):
            raise ValueError(f"logit_bias, stop_token_ids or forced_bos_token_id: a token not in 0 to {vocab_size - 1}")
        if forced and not self.decoder_start_ids:
            raise ValueError("forced_bos_token_id: for encoder-decoder models; end the prompt with this token instead")
        self._check_length(request)
        if self.decoder_start_ids and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: an encoder-decoder model encodes its prompt and does not score it")
        if request.adapter is not None and request.adapter not in self.metadata.adapters:
            known = ", ".join(self.metadata.adapters) or "none"
            raise ValueError(f"there is no adapter {request.adapter!r}: the engine holds {known}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids, or give the engine one")
        if params.structure is not None and self._grammar_compiler is None:
            raise ValueError("structured output needs the package llguidance and a tokenizer")

    def _check_length(self, request: Request) -> None:
        length, max_length = len(request.prompt), self.metadata.max_length
        if self.decoder_start_ids and length > max_length:
            raise ValueError(f"the prompt has {length} tokens; this model takes {max_length}")
        if not self.decoder_start_ids and length >= max_length:
            raise ValueError(f"the prompt has {length} tokens; prompt and output together may have {max_length}")
        capacity = self._kv_token_capacity(request)
        if capacity <= (len(self.decoder_start_ids) or length):
            total = self._block_pool.num_blocks * self._block_pool.block_size
            raise ValueError(
                f"the prompt has {length} tokens and the KV cache room for {total}: give kv_cache_bytes more"
            )

    def _kv_token_capacity(self, request: Request) -> int:
        """Return how many tokens the KV cache holds of a request that runs alone, without its encoder blocks."""
        num_encoder_blocks = self._block_pool.num_blocks_for(len(request.prompt)) if self.decoder_start_ids else 0
        return (self._block_pool.num_blocks - num_encoder_blocks) * self._block_pool.block_size

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown names are ignored."""
        for sequence in self._requests.pop(request_id, []):
            self._scheduler.remove(sequence)
            sequence.done = True
            self._finished["abort"] += 1
        self._kept_outputs = [x for x in self._kept_outputs if x.request_id != request_id]

    def has_work(self) -> bool:
        """Whether a request is queued or running, or an output has not been returned."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._kept_outputs)

    @property
    def failure(self) -> str:
        """Why no step can succeed any more (a worker is gone), or an empty text.  Any thread may read it."""
        return getattr(self.runner, "failure", "")

    def _process_outputs(self, scheduler_output: SchedulerOutput, logits: Tensor) -> list[RequestOutput]:
        """Score prompts and sample tokens, each sequence for itself: one that fails ends, the others go on."""
        self._counters["steps"] += 1
        outputs: list[RequestOutput] = []
        row = 0
        for sequence, start, count in scheduler_output.prompt_scoring:
            try:
                _score_prompt(sequence, start, logits, range(row, row + count))
            except BaseException as error:
                self._fail_sequence(sequence, error, outputs)
            row += count
        if not scheduler_output.sampled:
            return outputs
        rows, first_rows = [], []
        for index, sequence in enumerate(scheduler_output.sampled):
            draft_tokens = scheduler_output.draft_tokens.get(index, [])
            first_rows.append(row)
            if not sequence.done:  # else its prompt could not be scored
                rows += [SampledRow(row + n, sequence, draft_tokens[:n]) for n in range(len(draft_tokens) + 1)]
            row += 1 + len(draft_tokens)
        sampler_output = sample(logits, rows, self.runner.argmax())
        for index, sequence in enumerate(scheduler_output.sampled):
            draft_tokens = scheduler_output.draft_tokens.get(index, ())
            if not sequence.done:
                try:
                    # Appends the next token, and those after it as long as the draft tokens are what is sampled.
                    for number in range(len(draft_tokens) + 1):
                        token, logprob = sample_token(sampler_output, first_rows[index] + number, sequence)
                        outputs.append(self._append_token(sequence, token, logprob))
                        if sequence.done or number == len(draft_tokens) or token != draft_tokens[number]:
                            break
                        sequence.num_computed_tokens += 1  # the draft token was right, so its keys and values are
                    if draft_tokens:
                        sequence.draft_budget = number + 1
                        self._counters["draft_tokens"] += len(draft_tokens)
                        self._counters["accepted_tokens"] += number
                except BaseException as error:
                    self._fail_sequence(sequence, error, outputs)
        return outputs

    def _fail_sequence(self, sequence: Sequence, error: BaseException, outputs: list[RequestOutput]) -> None:
        """End one sequence with ``finish_reason`` ``error``; the engine goes on, but for a Ctrl-C or an exit.

        A panic of compiled code (a grammar's, say) is no Exception, and a failure of one request all the same.
        """
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        text, is_invalid = str(error), isinstance(error, GrammarError)
        if not is_invalid and not isinstance(error, NotFiniteError):
            log.error("request %s failed", sequence.request.request_id, exc_info=error)
            text = f"{type(error).__name__}: {error}"
        if not sequence.done:
            self._finish_sequence(sequence, "error")
            outputs.append(_make_output(sequence, finish_reason="error", error=text, invalid_request=is_invalid))

    def _append_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Append a token to its sequence, end the sequence where it must, and return the output."""
        if sequence.num_generated_tokens == 0:
            self._counters["prompt_tokens"] += sequence.num_prompt_tokens
            self._counters["cached_tokens"] += sequence.num_cached_tokens
        sequence.tokens.append(token)
        self._counters["generated_tokens"] += 1
        reason, stop, text = self._check_stop(sequence, token)
        if reason is not None:
            self._finish_sequence(sequence, reason)
        logprobs = None if logprob is None else (logprob,)
        return _make_output(sequence, (token,), text, logprobs, finish_reason=reason, stop_reason=stop)

    def _check_stop(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | str | None, str]:
        """Return why the sequence ends with this token, if it does, what stopped it, and the new text."""
        params, detokenizer, count = sequence.params, sequence.detokenizer, sequence.num_generated_tokens
        is_stop_token = token in sequence.stop_ids and count > params.min_tokens
        text = ""
        if detokenizer is not None and (not is_stop_token or params.include_stop):
            text, stop = detokenizer.append(token, check_stop=count >= params.min_tokens)
            if stop is not None:
                return "stop", stop, text
        reason: FinishReason | None = None
        if is_stop_token:
            reason = "stop"
        elif len(sequence.tokens) >= sequence.max_length:
            reason = "length"
        elif sequence.grammar is not None and sequence.grammar.finished:
            reason = "stop"
        if reason is not None and detokenizer is not None:
            text += detokenizer.flush()
        return reason, token if is_stop_token else None, text

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.remove(sequence)
        sequence.done = True
        self._finished[reason] += 1
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        scheduler, pool = self._scheduler, self._block_pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
            **self._counters,
        )

    def embed(self, prompts: AbstractSequence[AbstractSequence[int]]) -> Tensor:
        """Return the mean over tokens of the last hidden states, fp32 (len(prompts), width)."""
        return torch.stack([self._embed(infer_types.to_token_ids(prompt)) for prompt in prompts])

    def _embed(self, tokens: list[int]) -> Tensor:
        if self.decoder_start_ids:
            raise ValueError("this model has no embeddings: it is an encoder-decoder model")
        self._check_request(Request("", tokens))
        pool, scheduler = self._block_pool, self._scheduler
        num_blocks = pool.num_blocks_for(len(tokens))
        if num_blocks > pool.num_free or len(scheduler.running) >= self.runner.num_slots:
            raise ValueError("the KV cache is full of running requests: embed when fewer run")
        blocks = pool.allocate_many(num_blocks)
        slot = scheduler.acquire_slot()
        try:
            total: Any = 0
            step = scheduler.max_num_batched_tokens
            for start in range(0, len(tokens), step):
                chunk = tokens[start : start + step]
                span = QuerySpan(slot, start, len(chunk))
                batch = ModelInput(chunk, [span], range(len(chunk)), [blocks], wants_hidden_states=True)
                total = total + self.runner.run(batch).sum(0)
            return total / len(tokens)
        finally:
            scheduler.release_slot(slot)
            pool.release(blocks)

    def sleep(self) -> None:
        """Drop everything that is queued and cached, and give back the memory of the weights and the cache."""
        self._abort_all()
        self._block_pool.forget()
        self.runner.sleep()

    def wake_up(self, spec: DecoderSpec | None = None) -> None:
        """Go on after :meth:`sleep` with new weights: a like description's, or without one the live model's."""
        self.runner.wake_up(spec)

    def _abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self._kept_outputs = []

    def close(self) -> None:
        """Drop everything that is queued, and free the weights and the cache."""
        self._abort_all()
        self._proposer.close()
        self.runner.close()


def _score_prompt(sequence: Sequence, start: int, logits: Tensor, rows: range) -> None:
    """Add the log-probabilities of the prompt's tokens from ``start`` + 1 on, one for each of these rows."""
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    tokens, num_top = sequence.tokens[start + 1 : start + 1 + len(rows)], sequence.params.prompt_logprobs or 0
    sequence.prompt_logprobs += token_logprobs(logits, rows, tokens, [num_top] * len(rows))


def _make_output(
    sequence: Sequence,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    logprobs: tuple[TokenLogprob, ...] | None = None,
    **end: Any,
) -> RequestOutput:
    """Return an output of a sequence, with what is said of its end; its first one has the scores of the prompt."""
    already_sent = sequence.sent_prompt_logprobs or sequence.params.prompt_logprobs is None
    sequence.sent_prompt_logprobs = True
    return RequestOutput(
        sequence.request.request_id,
        sequence.index,
        token_ids,
        text,
        logprobs,
        prompt_logprobs=None if already_sent else tuple(sequence.prompt_logprobs or [None]),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        **end,
    )
