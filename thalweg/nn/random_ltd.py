"""Random-LTD: middle layers that see a random part of the tokens (Yao et al. 2022, arXiv 2211.11586).

Each chosen layer draws, of every sequence, the tokens that it works on; the others pass it by:

    hidden (B, T, D)  --gather-->  (B, K, D)  --layer-->  (B, K, D)  --scatter-->  hidden (B, T, D)

Tokens keep their order, so a causal layer stays causal, and masks and positions are gathered as the tokens are.  K
rises from step to step until nothing is left out.  What is drawn follows from the seed, the data rank, the step, the
forward pass in it and the layer alone: a run that is resumed draws what it would have drawn, and recomputed activations
see the same tokens.  Evaluation takes every token through every layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.config.schema.data import DataEfficiency, RandomLTD
from thalweg.device import copy_to_device
from thalweg.nn.curriculum import rising_value, token_dims
from thalweg.nn.layer_drop import find_layers
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.utils.trees import map_tensors


class TokenDraw:
    """Which tokens the layers see in the forward pass at hand."""

    def __init__(self, section: RandomLTD, seed: int, dp_rank: int, global_step: Callable[[], int]) -> None:
        self._schedule, self._global_step = section.random_ltd_schedule, global_step
        self._seed, self._dp_rank = seed, dp_rank
        self._step, self._num_forwards = -1, 0

    def begin_forward(self) -> None:
        """A forward pass of the whole model begins."""
        step = self._global_step()
        self._step, self._num_forwards = step, self._num_forwards + 1 if step == self._step else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence that a layer sees now."""
        schedule, pace = self._schedule, self._schedule.schedule_config
        assert schedule.min_value and schedule.max_value and pace.require_steps and pace.seq_per_step
        bounds = schedule.min_value, schedule.max_value
        return rising_value(self._global_step(), *bounds, pace.require_steps, pace.seq_per_step)

    def draw(self, layer: int, num_sequences: int, length: int) -> Tensor:
        """Ascending positions, int64 (B, K) on the CPU, so that they are the same whatever the device."""
        seed = hash((self._seed, self._dp_rank, self._step, self._num_forwards, layer)) % (1 << 63)
        scores = torch.rand(num_sequences, length, generator=torch.Generator().manual_seed(seed))
        return scores.topk(self.num_tokens, dim=1).indices.sort(dim=1).values


def take_tokens(tensor: Tensor, index_BK: Tensor, dim: int) -> Tensor:
    """The tokens ``index_BK`` along ``dim`` of a tensor whose first dim is B, or 1 for all sequences alike."""
    num_sequences, num_kept = index_BK.shape
    shape = [num_sequences, *tensor.shape[1:]]
    view = [num_sequences, *[1] * (tensor.ndim - 1)]
    view[dim] = num_kept
    index = index_BK.view(view).expand(*shape[:dim], num_kept, *shape[dim + 1 :])
    return tensor.expand(shape).gather(dim, index)


def apply_random_ltd(model: nn.Module, config: DataEfficiency, dp_rank: int, global_step: Callable[[], int]) -> None:
    """Let the layers that ``config.random_ltd`` names see a part of the tokens.

    Comes after activation checkpointing, before sharding.  ``global_step`` tells how many updates there have been.

    Raises:
        ValueError: the model has no list of layers, or not these.
    """
    section = config.random_ltd
    if section is None:
        return
    assert section.random_ltd_layer_num in (None, len(section.random_ltd_layer_id))
    layers = find_layers(model, "random_ltd")
    wrong = [number for number in section.random_ltd_layer_id if number >= len(layers)]
    if wrong or section.total_layer_num not in (None, len(layers)):
        raise ValueError(
            f"random_ltd: {type(model).__name__} has {len(layers)} layers, 0 to {len(layers) - 1}; the config has "
            f"total_layer_num {section.total_layer_num} and random_ltd_layer_id {list(section.random_ltd_layer_id)}"
        )
    draw = TokenDraw(section, config.seed, dp_rank, global_step)
    model.register_forward_pre_hook(lambda module, args: draw.begin_forward() if module.training else None)
    sequence_first = section.hidden_state_order == "seq_batch_dim"
    for number in section.random_ltd_layer_id:
        inner = type(layers[number]).forward
        replace_forward(layers[number], _route_tokens(inner, draw, number, sequence_first))


def _route_tokens(inner: Callable[..., Any], draw: TokenDraw, number: int, sequence_first: bool) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden_BTD = hidden.transpose(0, 1) if sequence_first else hidden
        num_sequences, length = hidden_BTD.shape[:2]
        if not self.training or draw.num_tokens >= length:
            return inner(self, *args, **kwargs)
        index_BK = copy_to_device(draw.draw(number, num_sequences, length), hidden.device)

        def select(tensor: Tensor) -> Tensor:
            if tensor is hidden:
                kept_BKD = take_tokens(hidden_BTD, index_BK, 1)
                return kept_BKD.transpose(0, 1) if sequence_first else kept_BKD
            if tensor.ndim > 1 and tensor.shape[0] in (1, num_sequences):
                for dim in token_dims(tensor.shape, num_sequences, length):
                    tensor = take_tokens(tensor, index_BK, dim)
            return tensor

        if (alibi := kwargs.get("alibi")) is not None and alibi.ndim == 3:  # BLOOM's (B x heads, 1, T)
            kwargs["alibi"] = take_tokens(alibi, index_BK.repeat_interleave(len(alibi) // num_sequences, 0), 2)
        args, kwargs = map_tensors((args, kwargs), select)
        output = inner(self, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        kept_BKD = first.transpose(0, 1) if sequence_first else first
        whole = hidden_BTD.to(first.dtype).scatter(1, index_BK[..., None].expand_as(kept_BKD), kept_BKD)
        whole = whole.transpose(0, 1) if sequence_first else whole
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return forward
