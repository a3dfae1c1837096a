"""Which sequences run in the next step, with how many tokens, in which blocks.

Phases of :meth:`Scheduler.schedule`: every decoding sequence gets its one token, and a new block where it needs
one; started prompts get chunks of what is left of the step's budget (Dynamic SplitFuse, Holmes et al. 2024);
then waiting sequences are admitted while budget, slots and blocks last.  The encoder prompt of an
encoder-decoder model is computed whole, in the step that admits its sequence, unless its blocks are cached.

Invariants: a sequence is admitted only when there are blocks for everything it has to compute, and it holds
them from then on, so a started prompt never stops halfway; only decoding can run out of blocks.  It then
preempts the sequence of the lowest priority, which goes back to the queue and is computed again later (most of
it from the prefix cache).  The sequence of the highest priority is never preempted, so something always
advances.

The KV cache's blocks are a :class:`BlockPool`.  A block is held by some sequences (a reference count), or free; a free
block may still hold a full block of a prefix, which can be found until the block is evicted, the least recently used
first.  A prefix is found block by block: the key of a block is the identity of the block before it and its own tokens,
compared exactly, never by a hash alone; the first block's predecessor is the request's salt.
"""

from __future__ import annotations

import bisect
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thalweg.infer.runners.base import EncoderInput, ModelInput, QuerySpan
from thalweg.infer.types import Request, TokenLogprob

MAX_STEP_ROWS = 12  # of a step, draft tokens included: as many cost what one costs


@dataclass(eq=False)
class Sequence:
    """Sample ``index`` of a request.  ``tokens``: prompt (or decoder start) and output; the first
    ``num_computed_tokens`` are in the cache."""

    request: Request
    index: int
    arrival: int
    # Length at which it ends.
    max_length: int
    # Tokens that end it.
    stop_ids: frozenset[int]
    # Of an encoder-decoder model: the first decoder tokens; the prompt is the ``encoder_prompt`` then.
    decoder_start_ids: tuple[int, ...] = ()
    # The :class:`.detokenizer.IncrementalDetokenizer` of its output, where the engine has a tokenizer.
    detokenizer: Any = None
    # The request's first sample, whose prompt this one waits for in order to share it.
    prefix_owner: Sequence | None = None
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    encoder_blocks: list[int] = field(default_factory=list)
    slot: int = -1
    # Prompt tokens that were found in the prefix cache when it was first admitted.
    num_cached_tokens: int = 0
    admitted: bool = False
    num_cached_blocks: int = 0
    # Where a penalty needs it: (vocab,) whether a token is in prompt or output, (vocab,) how often it was generated,
    # and for how many tokens that holds.
    token_history: tuple[Tensor, Tensor, int] | None = None
    grammar: Any = None
    # The :class:`~thalweg.infer.spec_decode.ngram.NgramIndex` of its tokens, with prompt lookup.
    ngram_index: Any = None
    # Tokens that a draft model has in its cache.
    num_draft_computed: int = 0
    # Draft tokens worth computing: one more than were accepted last time.
    draft_budget: int = 1 << 30
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    sent_prompt_logprobs: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        # Asked for at each token, and never changed: how to sample, the prompt's length, and how many tokens were
        # there before the first generated one.
        self.params, self.num_prompt_tokens = self.request.params, len(self.request.prompt)
        self.tokens = list(self.decoder_start_ids or self.request.prompt)
        self.num_initial_tokens = len(self.tokens)
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        # Identity of its last block in the prefix cache.
        self.last_block_id: Hashable = self.prefix_root

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_initial_tokens

    @property
    def encoder_prompt(self) -> AbstractSequence[int]:
        """The tokens of the encoder; empty without one."""
        return self.request.prompt if self.decoder_start_ids else ()

    @property
    def prefix_root(self) -> Hashable:
        """What the first block's identity follows: prefixes are shared among equals only."""
        return (self.request.cache_salt, self.request.adapter, tuple(self.encoder_prompt))

    @property
    def encoder_prefix_root(self) -> Hashable:
        """The same for the encoder's blocks, which are shared whole or not at all."""
        return ("source", self.prefix_root)

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return (self.request.priority, self.arrival, self.index)


BlockKey = tuple[Hashable, tuple[int, ...]]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._block_by_key: dict[BlockKey, tuple[int, int]] = {}
        self._key_by_block: dict[int, BlockKey] = {}
        self._last_id = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate_many(self, count: int) -> list[int]:
        """Hand out blocks; the caller has seen that they are available."""
        return [self.allocate() for _ in range(count)]

    def allocate(self) -> int:
        """Hand out a block; the caller has seen that one is available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_by_key[self._key_by_block.pop(block)]
        self._ref_counts[block] = 1
        return block

    def incref(self, blocks: AbstractSequence[int]) -> None:
        """Hold blocks that :meth:`find_prefix` returned."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def release(self, blocks: AbstractSequence[int]) -> None:
        """Let go of a sequence's blocks; the last ones are the first to be reused."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released more often than allocated"
            if self._ref_counts[block] == 0:
                if block in self._key_by_block:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Nothing is held, and no block holds a prefix any more."""
        assert self.num_used == 0, "blocks are held"
        self._free += self._evictable
        for table in (self._evictable, self._block_by_key, self._key_by_block):
            table.clear()

    def find_prefix(
        self, tokens: AbstractSequence[int], root_key: Hashable, require_full: bool = False
    ) -> tuple[list[int], int]:
        """Return the blocks that hold a prefix of ``tokens``, and how many of them nobody holds; none without caching.

        At least one token is left over, as there must be something to compute.  ``require_full``: all of them
        or none, the last block maybe not full.
        """
        blocks: list[int] = []
        num_evictable, parent = 0, root_key
        end = len(tokens) if require_full else (len(tokens) - 1) // self.block_size * self.block_size
        for start in range(0, end, self.block_size):
            entry = self._block_by_key.get((parent, tuple(tokens[start : start + self.block_size])))
            if entry is None:
                return ([], 0) if require_full else (blocks, num_evictable)
            block, parent = entry
            blocks.append(block)
            num_evictable += self._ref_counts[block] == 0
        return blocks, num_evictable

    def cache_block(self, block: int, parent: Hashable, tokens: AbstractSequence[int]) -> Hashable:
        """Record that a held block is full of these tokens; returns the identity that the next one follows."""
        if not self.prefix_caching:
            return None
        key = (parent, tuple(tokens))
        entry = self._block_by_key.get(key)
        if entry is not None:  # computed twice at the same time, or taken over from the cache
            return entry[1]
        self._last_id += 1
        self._block_by_key[key] = (block, self._last_id)
        self._key_by_block[block] = key
        return self._last_id


class Proposer:
    """Proposes draft tokens for decoding sequences; wrong ones cost time alone."""

    def num_proposals(self, sequence: Sequence, limit: int) -> int:
        """Return how many draft tokens there will be for a sequence, up to ``limit`` (at least 1)."""
        return limit

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return as many draft tokens as requested; the sequences hold blocks for them."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what it holds."""


@dataclass
class SchedulerOutput:
    """A step: what a runner computes (tokens, KV blocks, adapters), and whose logits the rows are."""

    model_input: ModelInput
    # Each span's sequence and its number of tokens, draft tokens not counted.
    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    # Sequences that get a token; theirs are the last rows of the logits, in order.
    sampled: list[Sequence] = field(default_factory=list)
    # By index in ``sampled``: the draft tokens, each with a row after the sequence's own.
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)
    # Sequences whose prompt tokens are scored: first position and count; their rows come first.
    prompt_scoring: list[tuple[Sequence, int, int]] = field(default_factory=list)
    # Sequences whose encoder prompts are computed before the step.
    encoder_sequences: list[Sequence] = field(default_factory=list)
    # What is computed of them.
    encoder_inputs: list[EncoderInput] = field(default_factory=list)


class Scheduler:
    """Queue and running set of one engine; ``free_slot`` is called with each slot whose sequence has left it."""

    def __init__(
        self,
        block_pool: BlockPool,
        free_slot: Callable[[int], None],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        proposer: Proposer | None = None,
        adapter_names: tuple[str, ...] = (),
    ) -> None:
        self._adapter_ids = {name: number for number, name in enumerate(adapter_names)}
        self.block_pool, self._free_slot = block_pool, free_slot
        self._num_speculative_tokens = num_speculative_tokens
        self._proposer = proposer if num_speculative_tokens else None
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by rank."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.sort_key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free_resources(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def acquire_slot(self) -> int:
        """Lend a slot to a caller that runs the model itself; one is free while not all run."""
        return self._free_slots.pop()

    def release_slot(self, slot: int) -> None:
        """Take a lent slot back."""
        self._free_slot(slot)
        self._free_slots.append(slot)

    def schedule(self) -> SchedulerOutput | None:
        """Choose the next step's tokens; None when there is nothing to run."""
        scheduled: list[tuple[Sequence, int]] = []
        encoder_sequences: list[Sequence] = []
        budget = self.max_num_batched_tokens
        num_preempted_before = self.num_preemptions
        running = sorted(self.running, key=lambda s: s.sort_key)  # so that a victim is never the more urgent one
        for sequence in running:
            if budget and sequence.slot >= 0 and len(sequence.tokens) - sequence.num_computed_tokens == 1:
                if not self._allocate_decode(sequence, scheduled):
                    continue
                scheduled.append((sequence, 1))
                budget -= 1
        for sequence in running:
            remaining = len(sequence.tokens) - sequence.num_computed_tokens
            if budget and remaining > 1 and sequence.slot >= 0:
                count = min(remaining, budget)
                scheduled.append((sequence, count))
                budget -= count
        if num_preempted_before == self.num_preemptions:
            budget = self._admit(budget, scheduled, encoder_sequences)
        return self._build_output(scheduled, budget, encoder_sequences) if scheduled else None

    def _allocate_decode(self, sequence: Sequence, scheduled: list[tuple[Sequence, int]]) -> bool:
        """Make room for the sequence's next token; False when it was itself preempted."""
        while len(sequence.blocks) < self.block_pool.num_blocks_for(len(sequence.tokens)):
            if not self.block_pool.num_free:
                scheduled_ids = {id(s) for s, _ in scheduled}
                victim = max((s for s in self.running if id(s) not in scheduled_ids), key=lambda s: s.sort_key)
                self._preempt(victim)
                if victim is sequence:
                    return False
                continue
            sequence.blocks.append(self.block_pool.allocate())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_resources(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def _free_resources(self, sequence: Sequence) -> None:
        self.block_pool.release(sequence.blocks)
        self.block_pool.release(sequence.encoder_blocks)
        self.release_slot(sequence.slot)
        sequence.blocks, sequence.encoder_blocks, sequence.slot, sequence.num_computed_tokens = [], [], -1, 0
        sequence.num_cached_blocks, sequence.last_block_id, sequence.num_draft_computed = 0, sequence.prefix_root, 0

    def _admit(self, budget: int, scheduled: list[tuple[Sequence, int]], encoder_sequences: list[Sequence]) -> int:
        """Let waiting sequences in; returns what is left of the budget.

        Encoder prompts have a budget of their own, which the first of a step may exceed.
        """
        encoder_budget = self.max_num_batched_tokens
        while budget and self._free_slots and self.waiting:
            sequence = next((s for s in self.waiting if self._prefix_is_ready(s)), None)
            if sequence is None:
                return budget
            pool, encoder_prompt = self.block_pool, sequence.encoder_prompt
            prefix_blocks, num_evictable = [], 0
            if sequence.params.prompt_logprobs is None:
                prefix_blocks, num_evictable = pool.find_prefix(sequence.tokens, sequence.prefix_root)
            root = sequence.encoder_prefix_root
            encoder_blocks, num_encoder_evictable = pool.find_prefix(encoder_prompt, root, require_full=True)
            num_new_encoder_blocks = 0 if encoder_blocks else pool.num_blocks_for(len(encoder_prompt))
            if num_new_encoder_blocks and encoder_sequences and len(encoder_prompt) > encoder_budget:
                return budget
            num_new_blocks = pool.num_blocks_for(len(sequence.tokens)) - len(prefix_blocks)
            num_blocks_needed = num_new_blocks + num_new_encoder_blocks + num_evictable + num_encoder_evictable
            # One block for each that will still grow, or the new one would be preempted a moment later.
            num_growing = sum(len(s.blocks) * pool.block_size < s.max_length - 1 for s in self.running)
            if num_blocks_needed + num_growing > pool.num_free and self.running:
                return budget
            assert num_blocks_needed <= pool.num_free, "the engine refuses what can never fit"
            self.waiting.remove(sequence)
            sequence.slot = self._free_slots.pop()
            pool.incref([*prefix_blocks, *encoder_blocks])
            sequence.blocks = prefix_blocks + pool.allocate_many(num_new_blocks)
            sequence.encoder_blocks = encoder_blocks or pool.allocate_many(num_new_encoder_blocks)
            if num_new_encoder_blocks:
                encoder_sequences.append(sequence)
                encoder_budget -= len(encoder_prompt)
            sequence.num_computed_tokens = len(prefix_blocks) * pool.block_size
            if not sequence.admitted:
                num_cached_tokens = len(encoder_prompt) if encoder_blocks else sequence.num_computed_tokens
                sequence.admitted = True
                sequence.num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
            self.running.append(sequence)
            count = min(len(sequence.tokens) - sequence.num_computed_tokens, budget)
            scheduled.append((sequence, count))
            budget -= count
        return budget

    def _propose(self, scheduled: list[tuple[Sequence, int]], budget: int) -> dict[int, list[int]]:
        """Return draft tokens by sequence, with blocks for them; nothing is preempted for drafts."""
        if self._proposer is None:
            return {}
        requests = []
        num_rows = sum(count for _, count in scheduled)
        for sequence, count in scheduled:
            remaining = sequence.max_length - len(sequence.tokens) - 1
            most = self._num_speculative_tokens
            max_draft = min(most, sequence.draft_budget, remaining, budget, MAX_STEP_ROWS - num_rows)
            if count > 1 or not sequence.num_generated_tokens or max_draft < 1:
                continue
            num_draft = self._reserve_blocks(sequence, self._proposer.num_proposals(sequence, max_draft))
            if num_draft:
                requests.append((sequence, num_draft))
                num_rows, budget = num_rows + num_draft, budget - num_draft
        if not requests:
            return {}
        proposals = self._proposer.propose(requests)
        return {id(sequence): guesses for (sequence, _), guesses in zip(requests, proposals, strict=True)}

    def _reserve_blocks(self, sequence: Sequence, count: int) -> int:
        """Return for how many of ``count`` draft tokens there are blocks, and assign these."""
        while count:
            num_missing = self.block_pool.num_blocks_for(len(sequence.tokens) + count) - len(sequence.blocks)
            if num_missing <= 0 or num_missing < self.block_pool.num_free:
                sequence.blocks += self.block_pool.allocate_many(num_missing)
                break
            count -= 1
        return count

    def _prefix_is_ready(self, sequence: Sequence) -> bool:
        """Whether it need not wait any more for the first sample of its request to compute the prompt."""
        owner = sequence.prefix_owner
        return owner is None or owner.done or not self.block_pool.prefix_caching or owner.num_generated_tokens > 0

    def _build_output(
        self, scheduled: list[tuple[Sequence, int]], budget: int, encoder_sequences: list[Sequence]
    ) -> SchedulerOutput:
        output = SchedulerOutput(ModelInput([], [], []), scheduled, encoder_sequences=encoder_sequences)
        output.encoder_inputs = [
            EncoderInput(s.slot, s.encoder_prompt, s.encoder_blocks, self._lora_id(s)) for s in encoder_sequences
        ]
        model_input, prompt_rows, sample_rows = output.model_input, [], []
        proposals = self._propose(scheduled, budget)
        for sequence, count in scheduled:
            start, offset = sequence.num_computed_tokens, len(model_input.tokens)
            draft_tokens = proposals.get(id(sequence), [])
            model_input.spans.append(QuerySpan(sequence.slot, start, count + len(draft_tokens)))
            model_input.block_tables.append(sequence.blocks)
            if sequence.encoder_prompt:
                model_input.encoder_block_tables.append(sequence.encoder_blocks)
                model_input.encoder_seq_lens.append(len(sequence.encoder_prompt))
            if self._adapter_ids:
                model_input.lora_ids.append(self._lora_id(sequence))
            model_input.tokens += sequence.tokens[start : start + count]
            model_input.tokens += draft_tokens
            if sequence.params.prompt_logprobs is not None:
                # What was scored before a preemption is not scored again.
                begin = max(start, len(sequence.prompt_logprobs) - 1)
                end = min(start + count, sequence.num_prompt_tokens - 1)
                if begin < end:
                    output.prompt_scoring.append((sequence, begin, end - begin))
                    prompt_rows += range(offset + begin - start, offset + end - start)
            if start + count == len(sequence.tokens):
                if draft_tokens:
                    output.draft_tokens[len(output.sampled)] = draft_tokens
                output.sampled.append(sequence)
                sample_rows += range(offset + count - 1, offset + count + len(draft_tokens))
        model_input.logit_indices = prompt_rows + sample_rows
        return output

    def _lora_id(self, sequence: Sequence) -> int:
        return self._adapter_ids.get(sequence.request.adapter or "", -1)

    def commit(self, output: SchedulerOutput) -> None:
        """Record that a step has been computed: its full blocks enter the prefix cache."""
        pool, size = self.block_pool, self.block_pool.block_size
        for sequence in output.encoder_sequences:
            parent = sequence.encoder_prefix_root
            for number, block in enumerate(sequence.encoder_blocks):
                parent = pool.cache_block(block, parent, sequence.encoder_prompt[number * size : (number + 1) * size])
        for sequence, count in output.scheduled:
            sequence.num_computed_tokens += count
            while (sequence.num_cached_blocks + 1) * size <= sequence.num_computed_tokens:
                number, parent = sequence.num_cached_blocks, sequence.last_block_id
                tokens = sequence.tokens[number * size : (number + 1) * size]
                sequence.last_block_id = pool.cache_block(sequence.blocks[number], parent, tokens)
                sequence.num_cached_blocks += 1
