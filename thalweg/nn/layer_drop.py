"""Progressive layer drop: layers left out by chance, more of them as training goes on (Zhang and He 2020).

At step t layer i of L is kept with probability

    p_i(t) = 1 - i / L (1 - theta(t))        theta(t) = (1 - theta) exp(-gamma t) + theta

so that nothing is dropped at first, and later the deep layers most.  A layer that is kept adds its residual 1 / p_i
times, which keeps the mean of what later layers see; evaluation runs all layers, once each.  What is drawn depends on
the seed, the step and the forward pass of the step alone: all ranks drop the same layers, so their collectives match,
and a run that is resumed drops what it would have dropped.

A model whose ``forward`` takes ``pld_theta`` is told theta, as DeepSpeed tells it, and drops by itself.  Of any other
the layers of its largest list of alike modules are dropped from outside; one without such a list is told, too, if its
``forward`` takes any keyword.
"""

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.config.schema.training import ProgressiveLayerDropConfig
from thalweg.ops.dynamic_subclass import original_class
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.zero.units import num_parameters


class ProgressiveLayerDrop:
    """The schedule, and which of ``num_layers`` layers the forward pass at hand keeps."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001, num_layers: int = 0, seed: int = 0) -> None:
        self.theta, self.gamma = theta, gamma
        self.keep_probabilities = [1.0] * num_layers
        self.kept = [True] * num_layers
        self._seed, self._step, self._num_forwards = seed, 0, 0

    def get_theta(self) -> float:
        """theta(t) of the step at hand."""
        return (1 - self.theta) * math.exp(-self.gamma * self._step) + self.theta

    def get_state(self) -> dict[str, Any]:
        """What a model that drops by itself is called with."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def update_state(self, global_step: int) -> None:
        """Be at step ``global_step``, counted from 0."""
        if global_step != self._step:
            self._step, self._num_forwards = global_step, 0

    def draw(self) -> None:
        """Choose the layers of one forward pass."""
        num_layers, theta = len(self.kept), self.get_theta()
        rng = random.Random(f"{self._seed} {self._step} {self._num_forwards}")
        self.keep_probabilities = [1 - (i + 1) / num_layers * (1 - theta) for i in range(num_layers)]
        self.kept = [rng.random() < p for p in self.keep_probabilities]
        self._num_forwards += 1


def apply_progressive_layer_drop(
    model: nn.Module, section: ProgressiveLayerDropConfig, seed: int | None, global_step: Callable[[], int]
) -> None:
    """Let training passes of ``model`` leave out layers; comes after activation checkpointing, before sharding.

    ``global_step`` tells how many updates there have been.

    Raises:
        ValueError: the model is an encoder-decoder, or has no list of layers.
    """
    if not section.enabled:
        return
    inner = type(model).forward
    parameters = inspect.signature(inner).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    if "pld_theta" in parameters or (takes_any and _find_layers(model) is None):
        told = ProgressiveLayerDrop(section.theta, section.gamma)

        def forward_with_theta(self: Any, *args: Any, **kwargs: Any) -> Any:
            told.update_state(global_step())
            return inner(self, *args, **({**told.get_state(), **kwargs} if self.training else kwargs))

        replace_forward(model, forward_with_theta)
        return
    layers = find_layers(
        model,
        "progressive_layer_drop",
        "let forward() take progressive_layer_drop and pld_theta and drop by itself, or ",
    )
    drop = ProgressiveLayerDrop(section.theta, section.gamma, len(layers), seed or 0)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            drop.update_state(global_step())
            drop.draw()
        return inner(self, *args, **kwargs)

    replace_forward(model, forward)
    shape = _OutputShape()
    for number, layer in enumerate(layers):
        replace_forward(layer, _dropping_forward(type(layer).forward, drop, number, shape))


def find_layers(model: nn.Module, feature: str, cure: str = "") -> nn.ModuleList:
    """The layers of a model: its largest list of alike modules.

    Raises:
        ValueError: the model is an encoder-decoder, or has none.
    """
    layers = _find_layers(model)
    if layers is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{feature} does not know the layers of {type(model).__name__}: it takes those of one ModuleList of alike "
            f"layers; {cure}set {feature}.enabled to false"
        )
    return layers


def _find_layers(model: nn.Module) -> nn.ModuleList | None:
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({original_class(m) for m in module}) == 1
    ]
    return max(lists, key=num_parameters, default=None)


class _OutputShape:
    """What a layer returns: the hidden states, or a tuple that begins with them."""

    num_items: int | None = None

    def learn(self, output: Any) -> None:
        self.num_items = len(output) if isinstance(output, tuple) else 0

    def wrap(self, hidden: Tensor) -> Any:
        return (hidden, *[None] * (self.num_items - 1)) if self.num_items else hidden


def _dropping_forward(
    inner: Callable[..., Any], drop: ProgressiveLayerDrop, number: int, shape: _OutputShape
) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return inner(self, *args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        if not drop.kept[number]:
            if shape.num_items is None:  # a resumed run may drop a layer before it has seen what one returns
                with torch.no_grad(), torch.random.fork_rng():
                    shape.learn(inner(self, *args, **kwargs))
            # A copy: what FSDP2 hands in is a view, which the next layer must not change in place.
            return shape.wrap(hidden.clone())
        output = inner(self, *args, **kwargs)
        shape.learn(output)
        if drop.keep_probabilities[number] == 1.0:
            return output
        first = output[0] if isinstance(output, tuple) else output
        scaled = torch.lerp(hidden, first, 1 / drop.keep_probabilities[number])
        return (scaled, *output[1:]) if isinstance(output, tuple) else scaled

    return forward
