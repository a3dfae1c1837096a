"""Trees of tuples, lists and dicts, as models take and return them; models' configs, and models without values."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def iter_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from iter_tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from iter_tensors(value)


def map_tensors(tree: Any, transform: Callable[[Tensor], Tensor], in_place: bool = False) -> Any:
    """The same tree with ``transform`` of each tensor; mappings become dicts, or stay what they are (``in_place``)."""
    if isinstance(tree, Tensor):
        return transform(tree)
    if isinstance(tree, Mapping):
        mapped: Any = tree if in_place else dict(tree)
        for key, value in tree.items():
            mapped[key] = map_tensors(value, transform, in_place)
        return mapped
    if isinstance(tree, tuple | list):
        values = [map_tensors(value, transform, in_place) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Call ``model`` with a batch: a mapping as keywords, a tuple or list as positions, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def get_loss(output: Any) -> Tensor:
    """The loss in a model's output: the output itself, its ``loss``, or its first element.

    Raises:
        ValueError: there is none.
    """
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise ValueError("the model must return a loss, or an object with a loss, to be trained by batches")
    return loss


def first_positive_int(config: Any, *names: str) -> int | None:
    """The first of these attributes of a model's config that is a whole number above 0, or None."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device; nothing of its values is copied on the way."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
    return copy.deepcopy(model, memo)
