"""A runner for any Hugging Face model that generates: its own modelling code, a cache of its own for each
sequence.

No blocks are shared and nothing is batched; what it gives is exactly the model's own result, for families
that ``models/`` does not describe.  The model sees what ``generate`` would show it: a prompt in one piece,
whatever chunks the scheduler makes of it (rotations that change with the length, and states that take a
prompt only at their beginning, depend on it), then token by token.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from thalweg.device import attention_of_many_shapes
from thalweg.infer.config import EngineConfig, limit_length
from thalweg.infer.models.spec import DecoderSpec, stretch_length
from thalweg.infer.precision import eval_mode
from thalweg.infer.quantization.modules import copy_to
from thalweg.infer.runners.base import EncoderInput, EncoderRunner, ModelInput, ModelRunner, RunnerRequest
from thalweg.utils.dtypes import parse_dtype

_DEFAULT_MAX_LENGTH = 2048  # the longest sequence of a model that names none, unless asked otherwise
_MAX_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_decoder_position_embeddings",
)  # fmt: skip
_CACHE_KEYS = ("past_key_values", "cache_params", "state")  # as what models take and return their memory


@dataclass
class _SlotState:
    """A slot's tokens so far, how many of them the model has seen, and what it remembers of these."""

    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache: dict[str, Any] = field(default_factory=dict)


class TransformersRunner(ModelRunner):
    """Runs a live model, its linear layers packed in a copy where the config asks."""

    name: ClassVar[str] = "transformers"
    block_size = 16

    @staticmethod
    def supports(spec: DecoderSpec | None, config: EngineConfig) -> str | None:
        """Return why the model's own code cannot do what the config asks, or None."""
        for name in ("weight_offload", "lora_adapters", "kv_cache_bytes"):  # its cache grows as the model lets it
            if getattr(config, name):
                return f"{name} needs a described model"
        if config.kv_cache_dtype in ("int8", "fp8"):
            return f"a cache in {config.kv_cache_dtype} needs a described model"
        return None

    def __init__(self, request: RunnerRequest) -> None:
        blocks_per_slot = -(-request.max_model_len // self.block_size)
        self.num_slots = request.num_slots
        self.num_blocks = self.num_slots * blocks_per_slot  # a count for the scheduler: no memory stands behind them
        self._request = request
        self._model: Any = _placed(request)  # None while the runner sleeps
        model = self._model
        self._is_recurrent = bool(getattr(model, "_is_stateful", False))
        parameters = inspect.signature(model.forward).parameters
        self._takes_position_ids = "position_ids" in parameters
        has_var_kwargs = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        self._accepted_args = None if has_var_kwargs else set(parameters)
        self._rope_switch_length = _rope_switch_length(model.config)
        self._slot_states: dict[int, _SlotState] = {}
        self._encoder_outputs: dict[int, Any] = {}

    @torch.inference_mode()
    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Let the model's encoder compute encoder prompts."""
        for encoder_input in inputs:
            self._encoder_outputs[encoder_input.slot] = _run_encoder(self._model, encoder_input.tokens)

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab), or the last hidden states (tokens, width)."""
        of_states, outputs, offset, requested = batch.wants_hidden_states, {}, 0, set(batch.logit_indices)
        for slot, start, count in batch.spans:
            if start == 0:
                self._slot_states[slot] = _SlotState()
            state = self._slot_states[slot]
            state.tokens += batch.tokens[offset : offset + count]
            indices = [row for row in range(offset, offset + count) if row in requested]
            if indices:  # without, the tokens wait for those after them
                parts = self._advance(slot, state, of_states)
                rows = torch.cat([(out["hidden_states"][-1] if of_states else out["logits"])[0] for out in parts])
                # The rows of tokens that waited come first and are not wanted.
                outputs |= {row: rows[row - offset - count].float() for row in indices}
            offset += count
        return torch.stack([outputs[row] for row in batch.logit_indices]) if outputs else torch.empty(0, 0)

    def _advance(self, slot: int, state: _SlotState, output_hidden_states: bool) -> list[Any]:
        """Show the model what it has not seen; returns its outputs."""
        if not state.cache or state.num_computed <= self._rope_switch_length < len(state.tokens):
            state.cache, state.num_computed = {}, 0
        outputs = []
        while state.num_computed < len(state.tokens):
            # A state can be begun with many tokens, and goes on with one at a time.
            stop = state.num_computed + 1 if self._is_recurrent and state.num_computed else len(state.tokens)
            outputs.append(self._call_model(slot, state, stop, output_hidden_states))
            state.num_computed = stop
        return outputs

    def _call_model(self, slot: int, state: _SlotState, stop: int, output_hidden_states: bool) -> Any:
        device = next(self._model.parameters()).device
        tokens = torch.tensor([state.tokens[state.num_computed : stop]], device=device)
        model_inputs: dict[str, Any] = {"input_ids": tokens}
        if slot in self._encoder_outputs:
            model_inputs = {"encoder_outputs": self._encoder_outputs[slot], "decoder_input_ids": tokens}
        elif not self._is_recurrent:
            model_inputs["attention_mask"] = torch.ones(1, stop, dtype=torch.int64, device=device)
        if self._takes_position_ids and slot not in self._encoder_outputs:  # not every model counts what it remembers
            model_inputs["position_ids"] = torch.arange(state.num_computed, stop, device=device)[None]
        if output_hidden_states:
            model_inputs["output_hidden_states"] = True
        model_inputs |= {"use_cache": True, **state.cache}
        if self._accepted_args is not None:  # custom modelling code that takes fewer arguments
            model_inputs = {name: value for name, value in model_inputs.items() if name in self._accepted_args}
        with eval_mode(self._model), attention_of_many_shapes():
            out = self._model(**model_inputs)
        if isinstance(out, tuple):  # no names, so no cache: it computes all tokens each time
            out = {"logits": out[0]}
        state.cache = {name: out[name] for name in _CACHE_KEYS if out.get(name) is not None}
        return out

    def free_slot(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._slot_states.pop(slot, None)
        self._encoder_outputs.pop(slot, None)

    def sleep(self) -> None:
        """Drop the caches, and the model where it is a copy."""
        self._slot_states.clear()
        self._encoder_outputs.clear()
        self._model = None

    def wake_up(self, spec: DecoderSpec | None) -> None:
        """Take the live model as it is now."""
        self._model = _placed(self._request)

    def close(self) -> None:
        """Drop the model and the caches."""
        self.sleep()
        self.__dict__.pop("_request", None)


class TransformersEncoder(EncoderRunner):
    """Runs a live encoder by its own code, one sequence at a time."""

    name: ClassVar[str] = "transformers"

    def __init__(self, request: RunnerRequest) -> None:
        self._model, self.max_num_batched_tokens = _placed(request), request.max_encoder_tokens

    def run(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the last states."""
        return torch.cat([compute_hidden_states(self._model, x.tokens) for x in inputs])

    def close(self) -> None:
        """Drop the model."""
        self._model = None


@torch.inference_mode()
def compute_hidden_states(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the last states, fp32 (tokens, width), that a live model gives in eval mode."""
    return _run_encoder(model, tokens).last_hidden_state[0].float()


def _run_encoder(model: Any, tokens: Sequence[int]) -> Any:
    encoder = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.base_model
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with eval_mode(encoder):
        return encoder(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)


def _placed(request: RunnerRequest) -> Any:
    """Return the live model, or a copy on the request's device, in another dtype or with packed linear layers."""
    config, first = request.config, next(request.model.parameters())
    keeps_dtype = config.dtype == "auto" or config.quantization is not None
    dtype = first.dtype if keeps_dtype else parse_dtype(config.dtype)
    if config.quantization is None and (first.device, first.dtype) == (request.device, dtype):
        return request.model
    return copy_to(request.model, request.device, config.quantization, dtype)


def get_max_length(config: Any, requested: int | None) -> int:
    """Return the longest sequence that a model's config lets it have: the tokens asked for, or all."""
    sizes = [getattr(config, name, None) for name in _MAX_LENGTH_KEYS]
    model_max = next((size for size in sizes if size is not None and size > 0), None)
    if model_max is None:  # a state, or relative positions: nothing ends
        return requested or _DEFAULT_MAX_LENGTH
    return limit_length(stretch_length(config, model_max), requested)


def _rope_switch_length(config: Any) -> int:
    """Return the length behind which a model of the kind of Phi 3 rotates all positions otherwise.

    Its ``generate`` then drops the cache once (``prepare_inputs_for_generation``).
    """
    if config.model_type not in ("phi3", "phimoe", "phi4_multimodal"):
        return -1
    return getattr(config, "original_max_position_embeddings", None) or -1
