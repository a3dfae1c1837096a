"""Bottleneck adapters (Houlsby et al. 2019, section 2.1), which PEFT does not have.

Two in each layer: behind the projections that end attention and MLP, before their residual sum::

    y = base_layer(x);  y + up(act(down(y)))        2md + m + d parameters, with m the width, d that of the model

``up`` begins as zeros, so the model is at first what it was.  All else is frozen.  Which layers they are the inference
engine's description of the family says (``infer/models``); the model's config then says it too, so that what is saved
with it loads as the model that it was (:func:`with_bottleneck_adapters`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import MoESpec, UnsupportedModelError
from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass

_KEY = "bottleneck_adapters"  # in a model's config: their width, and the layers of the model without head


class BottleneckAdapter(nn.Module):
    """A frozen linear layer whose outputs (..., d) pass a bottleneck of ``width``."""

    def __init__(self, base_layer: nn.Module, d: int, width: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(d, width), nn.Linear(width, d)
        nn.init.normal_(self.down.weight, std=1e-2)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs and what the adapter adds."""
        y = self.base_layer(x)
        return y + self.up(F.gelu(self.down(y)))


def add_bottleneck_adapters(model: Any, width: int) -> list[str]:
    """Freeze a causal Hugging Face model (or its backbone) and put two adapters into each layer, unless it has been
    loaded with some; returns their names.

    Raises ValueError where the family is not described, a layer is a mixture of experts, or those that are there have
    another width.
    """
    if not has_bottleneck_adapters(model):
        setattr(model.config, _KEY, {"width": width, "modules": _find_ends(model)})
        _insert(model)
    elif (own := getattr(model.config, _KEY)["width"]) != width:
        raise ValueError(f"the model has bottleneck adapters of width {own}, not {width}: go on with that width")
    model.requires_grad_(False)
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, BottleneckAdapter)}
    for adapter in adapters.values():
        adapter.down.requires_grad_()
        adapter.up.requires_grad_()
    return list(adapters)


def has_bottleneck_adapters(model: nn.Module) -> bool:
    """Whether a model has such adapters."""
    return any(isinstance(module, BottleneckAdapter) for module in model.modules())


def with_bottleneck_adapters(auto_class: Any, config: Any) -> Any:
    """Whose ``from_pretrained`` loads a model of ``config``: that of ``auto_class`` (``AutoModelForCausalLM``, say), or
    where the config tells of adapters that of a class which has them."""
    if getattr(config, _KEY, None) is None:
        return auto_class
    with torch.device("meta"):  # for its class alone
        plain: Any = type(auto_class.from_config(config))

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        _insert(self)

    return make_subclass(plain, DynamicSubclass, __init__=__init__)


def _find_ends(model: Any) -> list[str]:
    """The layers that end attention and MLP, by their names in the model without head."""
    if model.base_model is model:  # a description needs the head
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model.config)
    try:
        layers = build_decoder_spec(model).layers
    except UnsupportedModelError as reason:
        raise ValueError(f"bottleneck adapters need to know the model's layers: {reason}") from None
    if any(isinstance(layer.mlp, MoESpec) for layer in layers):
        raise ValueError("bottleneck adapters: a mixture of experts has no projection that ends it; use LoRA")
    ends = [module for layer in layers for module in (layer.attention.out.modules[-1], layer.mlp.down.modules[-1])]  # type: ignore[union-attr]
    names = {id(module): name for name, module in model.base_model.named_modules()}
    return [names[id(module)] for module in ends]


def _insert(model: Any) -> None:
    adapters, hidden_size = getattr(model.config, _KEY), model.config.get_text_config().hidden_size
    for name in adapters["modules"]:
        adapter = BottleneckAdapter(model.base_model.get_submodule(name), hidden_size, adapters["width"])
        model.base_model.set_submodule(name, adapter)
