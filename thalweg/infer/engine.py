"""The engine: requests in, tokens out.

The picture: ``scheduler.py`` chooses the tokens of a step and their KV blocks (``blocks.py``), a runner
(``native.py``, ``eager.py``, ``foreign.py``) computes their logits, ``sampler.py`` turns these into tokens,
and the engine tells each sequence's caller.  :meth:`Engine.step` is just that, in this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.api import EngineStats, FinishReason, ModelFacts, Request, RequestOutput
from thalweg.infer.batch import Batch, Runner, Source, Span, token_list
from thalweg.infer.blocks import BlockPool
from thalweg.infer.sampler import Choice, choose_one, find_best, score
from thalweg.infer.scheduler import Plan, Scheduler
from thalweg.infer.sequence import Sequence
from thalweg.infer.speculate import Guesser, Lookups
from thalweg.infer.text import TextStream


class Engine:
    """An :class:`~thalweg.infer.api.EngineCore` around a runner.

    ``start``: what a model that listens begins to speak with.  ``speculate``: guesses in a step for each
    sequence, by ``guesser``, or looked up in what it has said.
    """

    def __init__(
        self,
        runner: Runner,
        facts: ModelFacts,
        tokenizer: Any = None,
        *,
        max_batch: int,
        max_step_tokens: int,
        prefix_cache: bool = True,
        guides: Any = None,
        speculate: int = 0,
        start: tuple[int, ...] = (),
        guesser: Guesser | None = None,
    ) -> None:
        self.facts, self.tokenizer, self.runner = facts, tokenizer, runner
        self._guesser = guesser or Lookups()
        self._pool = BlockPool(runner.num_blocks, runner.block_size, prefix_cache)
        self._scheduler = Scheduler(
            runner,
            self._pool,
            max_batch=max_batch,
            max_tokens=max_step_tokens,
            speculate=speculate,
            guesser=self._guesser,
            adapters=facts.adapters,
        )
        self._max_step_tokens = max_step_tokens
        self._guides, self.start = guides, start
        self._requests: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def step(self) -> list[RequestOutput]:
        """Run the model once and return what every sequence got."""
        plan = self._scheduler.plan()
        if plan is None:
            return []
        if plan.sources:
            self.runner.encode([Source(s.slot, s.source) for s in plan.sources])
        logits = self.runner.run(plan.batch)
        self._scheduler.advance(plan)
        return self._deliver(plan, logits)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError when it can never run."""
        request = replace(request, prompt=token_list(request.prompt))
        self._check(request)
        params = request.params
        begun = len(self.start) or len(request.prompt)
        room = min(self.facts.max_length, self._room(request))
        limit = min(room, begun + (params.max_tokens or room))
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.facts.eos_token_ids)
        guide = self._guides.compile(params.structure) if params.structure is not None else None
        self._arrivals += 1
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(request, index, self._arrivals, limit, ends, start=self.start)
            sequence.leader = sequences[0] if sequences else None
            sequence.guide = None if guide is None else guide.start(ends)
            if self.tokenizer is not None:
                sequence.stream = TextStream(
                    self.tokenizer, params.stop, include_stop=params.include_stop,
                    skip_special=params.skip_special_tokens, before=() if self.start else request.prompt,
                )  # fmt: skip
            sequences.append(sequence)
        self._requests[request.request_id] = list(sequences)
        for sequence in sequences:
            self._scheduler.add(sequence)

    def preparation(self, request: Request) -> Callable[[], object] | None:
        """Return what would take long in :meth:`add`, for another thread to call beforehand, amid steps.

        None where there is no such thing.  It raises ValueError where ``add`` would for the same cause.
        """
        structure, guides = request.params.structure, self._guides
        if structure is None or guides is None or structure in guides:
            return None
        return lambda: guides.compile(structure)

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt, request.params
        if request.request_id in self._requests:
            raise ValueError(f"there is already a request named {request.request_id!r}")
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self.facts.vocab_size:
            raise ValueError(f"the prompt has tokens outside of 0 to {self.facts.vocab_size - 1}")
        named = [*params.logit_bias, *params.stop_token_ids]
        if not all(0 <= t < self.facts.vocab_size for t in named):
            raise ValueError(
                f"logit_bias or stop_token_ids name tokens outside of 0 to {self.facts.vocab_size - 1}"
            )
        self._check_length(request)
        if self.start and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: this model listens to its prompt and does not score it")
        if request.adapter is not None and request.adapter not in self.facts.adapters:
            known = ", ".join(self.facts.adapters) or "none"
            raise ValueError(f"there is no adapter {request.adapter!r}: the engine holds {known}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids, or give the engine one")
        if params.structure is not None and self._guides is None:
            raise ValueError("structured output needs the package llguidance and a tokenizer")

    def _check_length(self, request: Request) -> None:
        length, most = len(request.prompt), self.facts.max_length
        if self.start and length > most:
            raise ValueError(f"the prompt has {length} tokens; this model takes {most}")
        if not self.start and length >= most:
            raise ValueError(f"the prompt has {length} tokens; prompt and output together may have {most}")
        room = self._room(request)
        if room <= (len(self.start) or length):
            total = self._pool.num_blocks * self._pool.size
            raise ValueError(
                f"the prompt has {length} tokens and the KV cache room for {total}: give kv_memory more"
            )

    def _room(self, request: Request) -> int:
        """Return how many tokens the KV cache holds of a request that runs alone, sources not counted."""
        heard = -(-len(request.prompt) // self._pool.size) if self.start else 0
        return (self._pool.num_blocks - heard) * self._pool.size

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown names are ignored."""
        for sequence in self._requests.pop(request_id, []):
            self._scheduler.drop(sequence)
            sequence.done = True
            self._finished["abort"] += 1

    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def lost(self) -> str:
        """Why no step can succeed any more: a rank of the engine is gone.  May be asked by any thread."""
        return getattr(self.runner, "lost", "")

    @property
    def pending(self) -> AbstractSet[str]:
        """Names of the requests that have not ended."""
        return self._requests.keys()

    def _score(self, plan: Plan, logits: Tensor) -> int:
        """Score prompts by the rows at the front of the logits; returns how many these are."""
        at = 0
        for sequence, start, count in plan.scored:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)
            for offset in range(count):
                token = sequence.tokens[start + offset + 1]
                wanted = sequence.params.prompt_logprobs or 0
                sequence.prompt_logprobs.append(score(logits[at + offset], token, wanted))
            at += count
        return at

    def _deliver(self, plan: Plan, logits: Tensor) -> list[RequestOutput]:
        self._counts["steps"] += 1
        outputs: list[RequestOutput] = []
        row = self._score(plan, logits)
        if not plan.sampled:
            return outputs
        tokens, values = self.runner.best() or find_best(logits)
        for place, sequence in enumerate(plan.sampled):
            guesses = plan.guesses.get(place, ())
            for number in range(1 + len(guesses)):
                at = row + number
                choice = choose_one(logits[at], tokens[at], values[at], sequence)
                outputs.append(self._tell(sequence, choice))
                right = number < len(guesses) and outputs[-1].token_ids == (guesses[number],)
                if not right or sequence.done:
                    break
                sequence.computed += 1  # the guess was computed as what it turned out to be
            if guesses:
                sequence.trust = number + 1
                self._counts["guessed"] += len(guesses)
                self._counts["right"] += number
            row += 1 + len(guesses)
        return outputs

    def _tell(self, sequence: Sequence, choice: Choice) -> RequestOutput:
        """Append a token to its sequence, end the sequence where it must, and say so."""
        if sequence.generated == 0:
            self._counts["prompt"] += sequence.num_prompt
            self._counts["cached"] += sequence.cached
        reason: FinishReason | None = "error" if choice.error else None
        text, stop, tokens = "", None, ()
        if reason is None:
            token = choice.token
            sequence.tokens.append(token)
            self._counts["generated"] += 1
            tokens = (token,)
            reason, stop, text = self._after(sequence, token)
        if reason is not None:
            self._end(sequence, reason)
        told = sequence.told_prompt or sequence.params.prompt_logprobs is None
        sequence.told_prompt = True
        return RequestOutput(
            sequence.request.request_id,
            sequence.index,
            token_ids=tokens,
            text=text,
            logprobs=None if choice.logprob is None else (choice.logprob,),
            prompt_logprobs=None if told else tuple(sequence.prompt_logprobs or [None]),
            finish_reason=reason,
            stop_reason=stop,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.cached,
            num_generated_tokens=sequence.generated,
            error=choice.error,
        )

    def _after(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | str | None, str]:
        """Return why the sequence ends with this token, if it does, what stopped it, and the new text."""
        ends = token in sequence.ends and sequence.generated > sequence.params.min_tokens
        text, stop = "", None
        if sequence.stream is not None and (not ends or sequence.params.include_stop):
            text, stop = sequence.stream.push(token, look=sequence.generated >= sequence.params.min_tokens)
        reason: FinishReason | None = None
        if stop is not None:
            return "stop", stop, text
        if ends:
            reason = "stop"
        elif len(sequence.tokens) >= sequence.limit:
            reason = "length"
        elif sequence.guide is not None and sequence.guide.finished:
            reason = "stop"
        if reason is not None and sequence.stream is not None:
            text += sequence.stream.finish()
        return reason, token if ends else None, text

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.drop(sequence)
        sequence.done = True
        self._finished[reason] += 1
        family = self._requests[sequence.request.request_id]
        family.remove(sequence)
        if not family:
            del self._requests[sequence.request.request_id]

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        s = self._scheduler
        return EngineStats(
            running=len(s.running),
            waiting=len(s.waiting),
            kv_blocks=self._pool.num_blocks,
            kv_blocks_used=self._pool.used,
            kv_blocks_cached=self._pool.cached,
            steps=self._counts["steps"],
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=s.preemptions,
            guessed_tokens=self._counts["guessed"],
            guessed_right=self._counts["right"],
            finished=dict(self._finished),
        )

    def embed(self, prompts: AbstractSequence[AbstractSequence[int]]) -> Tensor:
        """Return the mean over tokens of the last hidden states, fp32 (len(prompts), width)."""
        return torch.stack([self._embed(token_list(prompt)) for prompt in prompts])

    def _embed(self, tokens: list[int]) -> Tensor:
        if self.start:
            raise ValueError("this model has no embeddings: it listens and speaks")
        self._check(Request("", tokens))
        pool, scheduler = self._pool, self._scheduler
        wanted = -(-len(tokens) // pool.size)
        if wanted > pool.available or len(scheduler.running) >= len(self.runner.tables):
            raise ValueError("the KV cache is full of running requests: embed when fewer run")
        blocks = [pool.take() for _ in range(wanted)]
        slot = scheduler.borrow()
        self.runner.adapter_of[slot] = -1
        try:
            self.runner.tables[slot, :wanted] = blocks
            total: Any = 0
            for start in range(0, len(tokens), self._max_step_tokens):
                part = tokens[start : start + self._max_step_tokens]
                states = self.runner.hidden(Batch(part, [Span(slot, start, len(part))], []))
                total = total + states.sum(0)
            return total / len(tokens)
        finally:
            scheduler.give_back(slot)
            pool.release(blocks)

    def close(self) -> None:
        """Drop everything that is queued, and free the weights and the cache."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._guesser.close()
        self.runner.close()
