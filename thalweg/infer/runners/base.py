"""What one step computes, and which runner computes it.

A step is a flat row of tokens in spans: each span is a whole prompt of one sequence, a chunk of one, or its
latest token.  A sequence owns a slot, which a runner may key state of its own by, and KV blocks
that come with each step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from thalweg.device import copy_to_device, graph_module, resolve_device
from thalweg.infer.config import MEMORY_SHARES_VARIABLE, EngineConfig
from thalweg.infer.lora import LoraManager
from thalweg.infer.models.spec import DecoderSpec, EncoderSpec, list_linears
from thalweg.infer.precision import get_compute_dtype, get_kv_cache_dtype, get_weight_format
from thalweg.infer.runners.packed_weights import WeightStore
from thalweg.utils.procfs import available_host_memory

if TYPE_CHECKING:
    from thalweg.infer.parallel.communicator import StageCommunicator

SpecT = TypeVar("SpecT")


def arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of one dtype on a device: one copy out of pinned memory, which the host does not wait for; on the
    CPU the arrays themselves."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = copy_to_device(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class QuerySpan(NamedTuple):
    """``num_tokens`` tokens of the sequence in ``slot``, the first of them at position ``start``."""

    slot: int
    start: int
    num_tokens: int


class EncoderInput(NamedTuple):
    """The whole encoder prompt of the sequence in ``slot``, and the blocks for its keys and values."""

    slot: int
    tokens: Sequence[int]
    blocks: Sequence[int] = ()
    lora_id: int = -1


@dataclass
class ModelInput:
    """The tokens of all spans one after the other, and the rows whose logits are wanted.

    What belongs to a span stands in lists of its own, an entry for each span; a list is empty where no span needs it.
    """

    tokens: list[int]
    spans: list[QuerySpan]
    logit_indices: Sequence[int]
    # The KV blocks of each span's sequence, in order of their positions.
    block_tables: list[list[int]] = field(default_factory=list)
    # The same for its encoder prompt.
    encoder_block_tables: list[list[int]] = field(default_factory=list)
    # The lengths of the encoder prompts.
    encoder_seq_lens: list[int] = field(default_factory=list)
    # Which adapter each span's sequence has, -1 for none.
    lora_ids: list[int] = field(default_factory=list)
    # Whether the last hidden states are wanted in place of logits; of all rows then.
    wants_hidden_states: bool = False


@dataclass(frozen=True)
class RunnerRequest(Generic[SpecT]):
    """A model for which a runner is built, with all that has been decided about it."""

    # The live Hugging Face model; None where its description is enough.
    model: Any
    # Its description, or the shard of it that ``comm`` is about; None where none gives the model's own logits.
    spec: SpecT
    config: EngineConfig
    max_model_len: int
    num_slots: int = 0
    # KV blocks, or what counts them once the weights are where they stay.
    num_blocks: int | Callable[[], int] = 0
    lora: LoraManager | None = None
    # Where the packed weights are, unless in memory.
    weights: WeightStore | None = None
    # The ranks with which this one sums its partial results.
    comm: StageCommunicator | None = None

    @property
    def weight_format(self) -> str:
        """What weights become: fp32, bf16, fp16, int8 or int4."""
        return get_weight_format(self.config)

    @property
    def kv_cache_dtype(self) -> str:
        """What keys and values are stored as."""
        return get_kv_cache_dtype(self.config)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return resolve_device(self.config.device)

    @property
    def max_encoder_tokens(self) -> int:
        """Of one run of an encoder: a prompt is never cut."""
        return max(self.config.max_num_batched_tokens, self.max_model_len)


DecoderRequest = RunnerRequest[DecoderSpec]
EncoderRequest = RunnerRequest[EncoderSpec]


class BaseRunner:
    """A model that runs.  ``loader/load.py`` chooses among its classes: the first that supports a model is made.

    Errors while it is made, out of memory too, are errors: no other runner is tried.
    """

    name: ClassVar[str]

    def __init__(self, request: RunnerRequest) -> None: ...

    @staticmethod
    def supports(spec: Any, config: EngineConfig) -> str | None:
        """Return why such a runner cannot run a model as the config asks, or None where it can.

        ``spec``: the model's description, None where there is none.
        """
        return None

    def close(self) -> None:
        """Free the weights and the cache."""
        raise NotImplementedError


class EncoderRunner(BaseRunner):
    """An encoder."""

    # Of one run.
    max_num_batched_tokens: int

    def run(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the last states, fp32 (tokens, width), sequence by sequence; valid until the next run."""
        raise NotImplementedError


class ModelRunner(BaseRunner):
    """A model that generates, with its KV cache."""

    # Blocks of the cache; 0 where each slot has a cache of its own kind, without blocks.
    num_blocks: int
    block_size: int
    # Sequences that may have a slot at the same time.
    num_slots: int

    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Compute encoder prompts and store the keys and values of cross attention in their blocks."""
        raise NotImplementedError

    def run(self, batch: ModelInput) -> Tensor:
        """Compute, store keys and values; return fp32 logits (len(logit_indices), vocab), or the last hidden states
        (tokens, width), valid until the next run."""
        raise NotImplementedError

    def argmax(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely token of each row of the last run and its logit, or None: the sampler does it.

        Of several equal ones the first; a logit that is NaN stands for a row that holds one.
        """
        return None

    def free_slot(self, slot: int) -> None:
        """Drop what the slot's sequence keeps outside of the blocks."""

    def sleep(self) -> None:
        """Give back the memory of the weights and the cache, and keep everything else until :meth:`wake_up`."""
        self.close()

    def wake_up(self, spec: DecoderSpec | None) -> None:
        """Take new weights, from a description of the same structure (None: those of the live model that the request
        had); the cache is empty."""
        raise NotImplementedError


UNDESCRIBED = "the model is not described"
BLOCK_SIZE = 16  # positions of a KV block
# Of what is free, at most, for the KV cache where nobody says how much.
_HOST_MEMORY_FRACTION, _DEVICE_MEMORY_FRACTION = 0.25, 0.9


def count_kv_blocks(
    decoder: DecoderSpec,
    options: EngineConfig,
    max_length: int,
    draft_spec: DecoderSpec | None = None,
    num_processes: int = 1,
) -> int:
    """Return how many KV blocks the requested memory, or a fraction of what is free, holds.

    ``draft_spec``: a draft model, whose keys and values take part of the same memory.  ``num_processes``: the
    processes of this engine that share what is free, each with as many blocks; a server's other replicas share it too.
    """
    kv_cache_dtype, device = get_kv_cache_dtype(options), resolve_device(options.device)
    element_size = {"fp32": 4, "int8": 1, "fp8": 1}.get(kv_cache_dtype, 2)
    scale_bytes = 4 if kv_cache_dtype == "int8" else 0
    layers = [*decoder.layers, *(() if draft_spec is None else draft_spec.layers)]
    shapes = [(x.attention.num_kv_heads, x.attention.head_dim) for x in layers]
    per_block = BLOCK_SIZE * sum(2 * heads * (dim * element_size + scale_bytes) for heads, dim in shapes)
    blocks_per_seq = -(-max_length // BLOCK_SIZE) * (1 if decoder.encoder is None else 2)
    if options.kv_cache_bytes is not None:
        blocks = options.kv_cache_bytes // per_block
        if blocks < 1:
            raise ValueError(f"kv_cache_bytes of {options.kv_cache_bytes} bytes does not hold a block ({per_block})")
        return blocks
    if device.type == "cpu":
        usable = _HOST_MEMORY_FRACTION * (available_host_memory() or 2**32)
    else:
        free = torch.accelerator.get_memory_info(device)[0]
        # A step gathers one layer's keys and values, padded to twice their size at most; one that is a graph, whose
        # memory is its own, as many as there are at most.
        compute_size, num_copies = get_compute_dtype(options).itemsize, 2
        if graph_module(device) is not None and not options.enforce_eager:
            num_copies = 3
        per_block += BLOCK_SIZE * max(2 * num_copies * heads * dim * compute_size for heads, dim in shapes)
        if draft_spec is not None:  # whose weights come after the cache
            linears = sum(x.out_features * x.in_features for x in list_linears(draft_spec))
            free -= compute_size * (draft_spec.embed.numel() + linears)
        usable = _DEVICE_MEMORY_FRACTION * free
    num_processes *= int(os.environ.get(MEMORY_SHARES_VARIABLE, 1))
    free_blocks = int(usable) // max(num_processes * per_block, 1)  # a rank with experts alone has none
    return max(blocks_per_seq, min(blocks_per_seq * options.max_num_seqs, free_blocks))
