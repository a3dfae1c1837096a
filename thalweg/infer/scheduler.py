"""Who takes part in the next step, with how many tokens, in which blocks.

Phases of :meth:`Scheduler.plan`: every decoding sequence gets its one token, growing by a block where it
must; prompts under way get pieces of what is left of the step's budget (Dynamic SplitFuse, Holmes et al.
2024); then waiting sequences are admitted while budget, slots and blocks last.

Invariants: a sequence is admitted only when the blocks of everything it has to compute are there, and are its
own from then on, so a prompt under way never stops halfway; only decoding can run out of blocks.  It then
takes those of the sequence that ranks last, which goes back to the queue and is computed again later (most of
it from the prefix cache).  The sequence that ranks first is never put back for another, so something always
advances.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from thalweg.infer.batch import Batch, Runner, Span
from thalweg.infer.blocks import BlockPool
from thalweg.infer.sequence import Sequence
from thalweg.infer.speculate import propose


@dataclass
class Plan:
    """A step: what to compute, and whose logits the rows are."""

    batch: Batch
    parts: list[tuple[Sequence, int]] = field(default_factory=list)
    """Each span's sequence and its number of tokens, guesses not counted."""
    sampled: list[Sequence] = field(default_factory=list)
    """Sequences that get a token; their rows are the last ones of the logits, in order."""
    guesses: dict[int, list[int]] = field(default_factory=dict)
    """By place in ``sampled``: tokens that may follow, with a row each behind the sequence's own."""
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """Sequences whose prompt tokens are scored: first position and count; their rows come first."""


class Scheduler:
    """Queue and running set of one engine."""

    def __init__(
        self, runner: Runner, pool: BlockPool, *, max_batch: int, max_tokens: int, speculate: int = 0
    ) -> None:
        self.pool, self._runner, self._speculate = pool, runner, speculate
        self._max_batch, self._max_tokens = max_batch, max_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._slots = list(range(max_batch - 1, -1, -1))
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by rank."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def borrow(self) -> int:
        """Hand out a slot to somebody who computes by himself; there is one while not all are running."""
        return self._slots.pop()

    def give_back(self, slot: int) -> None:
        """Take a borrowed slot back."""
        self._runner.release(slot)
        self._slots.append(slot)

    def plan(self) -> Plan | None:
        """Choose the next step's tokens; None when there is nothing to run."""
        chosen: list[tuple[Sequence, int]] = []
        budget = self._max_tokens
        preempted = self.preemptions
        for sequence in list(self.running):
            if budget and sequence.slot >= 0 and len(sequence.tokens) - sequence.computed == 1:
                if not self._grow(sequence, chosen):
                    continue
                chosen.append((sequence, 1))
                budget -= 1
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if budget and left > 1:
                count = min(left, budget)
                chosen.append((sequence, count))
                budget -= count
        if preempted == self.preemptions:
            budget = self._admit(budget, chosen)
        return self._lay(chosen, budget) if chosen else None

    def _grow(self, sequence: Sequence, chosen: list[tuple[Sequence, int]]) -> bool:
        """Make room for the sequence's next token; False when it had to be put back itself."""
        wanted = -(-len(sequence.tokens) // self.pool.size)
        while len(sequence.blocks) < wanted:
            if not self.pool.available:
                busy = {id(s) for s, _ in chosen}
                victim = max((s for s in self.running if id(s) not in busy), key=lambda s: s.rank)
                self._put_back(victim)
                if victim is sequence:
                    return False
                continue
            self._assign(sequence, [self.pool.take()])
        return True

    def _put_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.preemptions += 1
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._runner.release(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot, sequence.computed = [], -1, 0
        sequence.recorded, sequence.before = 0, sequence.root

    def _assign(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._runner.tables[sequence.slot, len(sequence.blocks)] = block
            sequence.blocks.append(block)

    def _admit(self, budget: int, chosen: list[tuple[Sequence, int]]) -> int:
        """Let waiting sequences in; returns what is left of the budget."""
        while budget and self._slots and self.waiting:
            sequence = next((s for s in self.waiting if self._ready(s)), None)
            if sequence is None:
                return budget
            found, idle = self._prefix(sequence)
            wanted = -(-len(sequence.tokens) // self.pool.size) - len(found)
            # One block for each that decodes already, lest it be put back a moment later.
            if wanted + idle + len(self.running) > self.pool.available and self.running:
                return budget
            assert wanted + idle <= self.pool.available, "the engine refuses what can never fit"
            self.waiting.remove(sequence)
            sequence.slot = self._slots.pop()
            self.pool.share(found)
            self._assign(sequence, found)
            self._assign(sequence, (self.pool.take() for _ in range(wanted)))
            sequence.computed = len(found) * self.pool.size
            if not sequence.admitted:
                sequence.admitted, sequence.cached = True, sequence.computed
            self.running.append(sequence)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            chosen.append((sequence, count))
            budget -= count
        return budget

    def _guess(self, sequence: Sequence, rows: int, budget: int) -> list[int]:
        """Return guesses for a decoding sequence, with their blocks; nobody is put back for guesses."""
        found = propose(sequence, min(self._speculate, budget), rows)
        while found:
            missing = -(-(len(sequence.tokens) + len(found)) // self.pool.size) - len(sequence.blocks)
            if missing <= 0:
                return found
            if missing < self.pool.available:
                self._assign(sequence, [self.pool.take() for _ in range(missing)])
                return found
            found.pop()
        return found

    def _prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        if not self.pool.remember or sequence.params.prompt_logprobs is not None:
            return [], 0
        return self.pool.match(sequence.tokens, sequence.root)

    def _ready(self, sequence: Sequence) -> bool:
        """Whether it need not wait any more for the first sample of its request to compute the prompt."""
        leader = sequence.leader
        return leader is None or leader.done or not self.pool.remember or leader.generated > 0

    def _lay(self, chosen: list[tuple[Sequence, int]], budget: int = 0) -> Plan:
        plan = Plan(Batch([], [], []), chosen)
        batch, first, last = plan.batch, [], []
        for sequence, count in chosen:
            start, at = sequence.computed, len(batch.tokens)
            guesses: list[int] = []
            if self._speculate and count == 1 and sequence.generated:
                guesses = self._guess(sequence, at + len(chosen), budget)
                budget -= len(guesses)
            batch.spans.append(Span(sequence.slot, start, count + len(guesses)))
            batch.tokens += sequence.tokens[start : start + count]
            batch.tokens += guesses
            if sequence.params.prompt_logprobs is not None and start < sequence.num_prompt - 1:
                scored = min(start + count, sequence.num_prompt - 1) - start
                if start >= len(sequence.prompt_logprobs) - 1:  # not once more after it was put back
                    plan.scored.append((sequence, start, scored))
                    first += range(at, at + scored)
            if start + count == len(sequence.tokens):
                if guesses:
                    plan.guesses[len(plan.sampled)] = guesses
                plan.sampled.append(sequence)
                last += range(at + count - 1, at + count + len(guesses))
        batch.rows = first + last
        return plan

    def advance(self, plan: Plan) -> None:
        """Note that a step has been computed: its blocks can be found from now on."""
        size = self.pool.size
        for sequence, count in plan.parts:
            sequence.computed += count
            while (sequence.recorded + 1) * size <= sequence.computed:
                start = sequence.recorded * size
                sequence.before = self.pool.record(
                    sequence.blocks[sequence.recorded], sequence.before, sequence.tokens[start : start + size]
                )
                sequence.recorded += 1
