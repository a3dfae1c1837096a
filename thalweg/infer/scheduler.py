"""Who takes part in the next step, with how many tokens, in which blocks.

Phases of :meth:`Scheduler.plan`: every decoding sequence gets its one token, growing by a block where it
must; prompts under way get pieces of what is left of the step's budget (Dynamic SplitFuse, Holmes et al.
2024); then waiting sequences are admitted while budget, slots and blocks last.  Where the model listens, a
sequence's source is computed in the step that admits it, whole, unless its blocks are found.

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
from thalweg.infer.speculate import ROWS, Guesser


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
    sources: list[Sequence] = field(default_factory=list)
    """Sequences whose sources are to be computed before the step."""


class Scheduler:
    """Queue and running set of one engine."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        *,
        max_batch: int,
        max_tokens: int,
        speculate: int = 0,
        guesser: Guesser | None = None,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._adapters = {name: number for number, name in enumerate(adapters)}
        self.pool, self._runner, self._speculate = pool, runner, speculate
        self._guesser = guesser if speculate else None
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
        sources: list[Sequence] = []
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
            budget = self._admit(budget, chosen, sources)
        return self._lay(chosen, budget, sources) if chosen else None

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
        self.pool.release(sequence.source_blocks)
        self._runner.release(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.source_blocks, sequence.slot, sequence.computed = [], [], -1, 0
        sequence.recorded, sequence.before, sequence.drafted = 0, sequence.root, 0

    def _assign(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._runner.tables[sequence.slot, len(sequence.blocks)] = block
            sequence.blocks.append(block)

    def _admit(self, budget: int, chosen: list[tuple[Sequence, int]], sources: list[Sequence]) -> int:
        """Let waiting sequences in; returns what is left of the budget.

        Sources have a budget of their own, which one that comes first may exceed.
        """
        listening = self._max_tokens
        while budget and self._slots and self.waiting:
            sequence = next((s for s in self.waiting if self._ready(s)), None)
            if sequence is None:
                return budget
            found, idle = self._prefix(sequence)
            heard, idle_too = self._heard(sequence)
            unheard = 0 if heard else -(-len(sequence.source) // self.pool.size)
            if unheard and sources and len(sequence.source) > listening:
                return budget
            fresh = -(-len(sequence.tokens) // self.pool.size) - len(found)
            wanted = fresh + unheard + idle + idle_too
            # One block for each that will still grow, lest it be put back a moment later.
            growing = sum(len(s.blocks) * self.pool.size < s.limit - 1 for s in self.running)
            if wanted + growing > self.pool.available and self.running:
                return budget
            assert wanted <= self.pool.available, "the engine refuses what can never fit"
            self.waiting.remove(sequence)
            sequence.slot = self._slots.pop()
            self._runner.adapter_of[sequence.slot] = self._adapters.get(sequence.request.adapter or "", -1)
            self.pool.share(found)
            self.pool.share(heard)
            self._assign(sequence, found)
            self._assign(sequence, (self.pool.take() for _ in range(fresh)))
            sequence.source_blocks = heard or [self.pool.take() for _ in range(unheard)]
            self._runner.source_lengths[sequence.slot] = len(sequence.source)
            if sequence.source:
                self._runner.sources[sequence.slot, : len(sequence.source_blocks)] = sequence.source_blocks
            if unheard:
                sources.append(sequence)
                listening -= len(sequence.source)
            sequence.computed = len(found) * self.pool.size
            if not sequence.admitted:
                cached = len(sequence.source) if heard else sequence.computed
                sequence.admitted, sequence.cached = True, min(cached, sequence.num_prompt)
            self.running.append(sequence)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            chosen.append((sequence, count))
            budget -= count
        return budget

    def _heard(self, sequence: Sequence) -> tuple[list[int], int]:
        """Return the blocks of a source that has been computed already, and how many of them nobody holds."""
        if not sequence.source or not self.pool.remember:
            return [], 0
        return self.pool.match(sequence.source, sequence.source_root, whole=True)

    def _guess(self, chosen: list[tuple[Sequence, int]], budget: int) -> dict[int, list[int]]:
        """Return guesses by sequence, with their blocks; nobody is put back for guesses."""
        if self._guesser is None:
            return {}
        asked = []
        rows = sum(count for _, count in chosen)
        for sequence, count in chosen:
            room = sequence.limit - len(sequence.tokens) - 1
            most = min(self._speculate, sequence.trust, room, budget, ROWS - rows)
            if count > 1 or not sequence.generated or most < 1:
                continue
            wanted = self._room(sequence, self._guesser.count(sequence, most))
            if wanted:
                asked.append((sequence, wanted))
                rows, budget = rows + wanted, budget - wanted
        if not asked:
            return {}
        found = self._guesser.guess(asked, self._runner.tables)
        return {id(sequence): guesses for (sequence, _), guesses in zip(asked, found, strict=True)}

    def _room(self, sequence: Sequence, count: int) -> int:
        """Return for how many of ``count`` guesses there are blocks, and assign these."""
        while count:
            missing = -(-(len(sequence.tokens) + count) // self.pool.size) - len(sequence.blocks)
            if missing <= 0:
                break
            if missing < self.pool.available:
                self._assign(sequence, [self.pool.take() for _ in range(missing)])
                break
            count -= 1
        return count

    def _prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        if not self.pool.remember or sequence.params.prompt_logprobs is not None:
            return [], 0
        return self.pool.match(sequence.tokens, sequence.root)

    def _ready(self, sequence: Sequence) -> bool:
        """Whether it need not wait any more for the first sample of its request to compute the prompt."""
        leader = sequence.leader
        return leader is None or leader.done or not self.pool.remember or leader.generated > 0

    def _lay(self, chosen: list[tuple[Sequence, int]], budget: int, sources: list[Sequence]) -> Plan:
        plan = Plan(Batch([], [], []), chosen, sources=sources)
        batch, first, last = plan.batch, [], []
        guessed = self._guess(chosen, budget)
        for sequence, count in chosen:
            start, at = sequence.computed, len(batch.tokens)
            guesses = guessed.get(id(sequence), [])
            batch.spans.append(Span(sequence.slot, start, count + len(guesses)))
            batch.tokens += sequence.tokens[start : start + count]
            batch.tokens += guesses
            if sequence.params.prompt_logprobs is not None:
                # What was scored before it was put back is not scored once more.
                begin = max(start, len(sequence.prompt_logprobs) - 1)
                end = min(start + count, sequence.num_prompt - 1)
                if begin < end:
                    plan.scored.append((sequence, begin, end - begin))
                    first += range(at + begin - start, at + end - start)
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
        for sequence in plan.sources:
            before = sequence.source_root
            for number, block in enumerate(sequence.source_blocks):
                before = self.pool.record(block, before, sequence.source[number * size : (number + 1) * size])
        for sequence, count in plan.parts:
            sequence.computed += count
            while (sequence.recorded + 1) * size <= sequence.computed:
                start = sequence.recorded * size
                sequence.before = self.pool.record(
                    sequence.blocks[sequence.recorded], sequence.before, sequence.tokens[start : start + size]
                )
                sequence.recorded += 1
