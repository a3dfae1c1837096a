"""Fewer layers: a student with some of a teacher's, and the loss by which it learns from it (XTC, Wu et al. 2022)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.utils.log import get_logger

_log = get_logger(__name__)


@torch.no_grad()
def init_student(student: nn.Module, teacher: nn.Module | None, section: Any) -> None:
    """Fill a student from a teacher, as ``layer_reduction`` says; in place.

    ``section``: ``keep_number_layer``, ``module_name_prefix`` (the list of layers), ``teacher_layer`` (one index for
    each layer that is kept), ``other_module_name``.  A student with more layers than are kept loses the rest.
    Without a teacher the student is its own.

    Raises:
        ValueError: names or numbers that do not fit the two models.
    """
    prefix, chosen = section.module_name_prefix, [int(index) for index in section.teacher_layer]
    count = len(chosen) if section.keep_number_layer is None else section.keep_number_layer
    if not prefix or not chosen or count != len(chosen):
        raise ValueError(
            f"compression_training.layer_reduction: keep_number_layer is {section.keep_number_layer}, "
            f"module_name_prefix {prefix!r}, teacher_layer {chosen}: name the list of layers, and a teacher's "
            "layer for each that is kept"
        )
    layers = _get_layers(student, prefix)
    if teacher is None:
        if len(layers) == count:
            return  # done by an earlier call
        _check_indices(chosen, len(layers))
        kept = [layers[index] for index in chosen]
    else:
        source = _get_layers(teacher, prefix)
        _check_indices(chosen, len(source))
        if len(layers) < count:
            raise ValueError(f"the student has {len(layers)} layers under {prefix}, and {count} are to be kept")
        kept = list(layers)[:count]
        for layer, index in zip(kept, chosen, strict=True):
            _copy(layer, source[index], f"{prefix}.{index}")
        for name in section.other_module_name:
            _copy(student.get_submodule(name), teacher.get_submodule(name), name)
    _keep_layers(student, layers, kept)


def _get_layers(model: nn.Module, prefix: str) -> nn.ModuleList:
    try:
        layers = model.get_submodule(prefix)
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no list of layers called {prefix!r} (module_name_prefix)")
    return layers


def _check_indices(chosen: Sequence[int], count: int) -> None:
    if max(chosen) >= count:
        raise ValueError(f"teacher_layer {list(chosen)}: the teacher has {count} layers, counted from 0")


def _copy(target: nn.Module, source: nn.Module, name: str) -> None:
    try:
        target.load_state_dict(source.state_dict())
    except RuntimeError as error:
        raise ValueError(f"layer_reduction: {name} of the teacher does not fit the student: {error}") from None


def _keep_layers(model: nn.Module, layers: nn.ModuleList, kept: list[nn.Module]) -> None:
    count, places = len(layers), [list(layers).index(layer) for layer in kept]
    layers._modules.clear()
    layers.extend(kept)
    for index, layer in enumerate(kept):
        numbered: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
        for module in numbered:
            module.layer_idx = index  # a KV cache asks for it
    config: Any = getattr(model, "config", None)
    if getattr(config, "num_hidden_layers", None) == count:
        config.num_hidden_layers = len(kept)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[place] for place in places]


def distillation_loss(
    student: Any, teacher: Any, *, temperature: float = 1.0, hidden_weight: float = 1.0, attention_weight: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How far a student's outputs are from its teacher's: a scalar to add to the task's own loss.

    The cross entropy of the softened logits (times the temperature squared; Hinton et al. 2015), the mean squared
    error of hidden states, and of attention probabilities, where both models return them (``output_hidden_states``,
    ``output_attentions``).  A student's layer is compared with the teacher's at the same share of the depth.  Outputs
    are Hugging Face's, or logits (..., classes); the teacher's are not differentiated.  ``mask``, bool (B, T): the
    tokens whose outputs count, as those that are no padding; by default all.
    """

    def select(x: Tensor) -> Tensor:  # of attentions, (B, heads, T, T), the queries
        return (x if mask is None else (x.transpose(1, 2) if x.dim() == 4 else x)[mask]).float()

    logits, target = (select(out if isinstance(out, Tensor) else out.logits) for out in (student, teacher))
    soft = F.softmax(target.detach() / temperature, -1).flatten(0, -2)
    loss = F.cross_entropy(logits.flatten(0, -2) / temperature, soft) * temperature**2
    for name, weight in (("hidden_states", hidden_weight), ("attentions", attention_weight)):
        ours, theirs = (getattr(out, name, None) for out in (student, teacher))
        if weight and ours and theirs:
            pairs = [(x, theirs[(i + 1) * len(theirs) // len(ours) - 1]) for i, x in enumerate(ours)]
            if name == "hidden_states":  # the first is the embeddings'
                depth, inner = len(theirs) - 1, max(1, len(ours) - 1)
                pairs = [(x, theirs[i * depth // inner]) for i, x in enumerate(ours)]
            loss = loss + weight * sum(F.mse_loss(select(x), select(y).detach()) for x, y in pairs) / len(pairs)
    return loss
