"""Small inputs for a model that nobody has described, so that it can be run once and looked at."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.device import get_rng_state, set_rng_state

DummyInputs = tuple[tuple[Any, ...], dict[str, Any]]  # positions and keywords of a forward


def make_dummy_inputs(model: nn.Module) -> DummyInputs | None:
    """Inputs that ``model`` takes, alike in every process: token ids, features, images; None if none fits."""
    for args, kwargs in _candidates(model):
        with torch.no_grad(), eval_mode(model):
            try:
                model(*args, **kwargs)
            except Exception:  # whatever a model says to inputs that are not its own
                continue
        return args, kwargs
    return None


def _candidates(model: nn.Module) -> Iterator[DummyInputs]:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    vocabulary = getattr(text() if callable(text) else config, "vocab_size", None)
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabulary = vocabulary if isinstance(vocabulary, int) else min(sizes, default=2)
    device = next(model.parameters()).device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(2026)
    tokens = torch.randint(0, vocabulary, (2, 8), generator=generator).to(device)
    if getattr(model, "main_input_name", None) == "pixel_values":
        channels, side = getattr(config, "num_channels", 3), getattr(config, "image_size", 32)
        shape = (2, channels, *((side, side) if isinstance(side, int) else side))
        yield (), {"pixel_values": torch.randn(shape, generator=generator).to(device, dtype)}
        return
    if hasattr(model, "main_input_name"):
        hf_kwargs = {"input_ids": tokens, "use_cache": False}
        if getattr(config, "is_encoder_decoder", False):
            hf_kwargs["decoder_input_ids"] = tokens.flip(0)
        yield (), hf_kwargs
        yield (), {key: value for key, value in hf_kwargs.items() if key != "use_cache"}
        return
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.default is inspect.Parameter.empty and p.kind in kinds for p in parameters)
    for first in (tokens, *_float_candidates(model, dtype, device, generator)):
        yield (first,) * max(1, required), {}
        if required > 1:
            classes = torch.zeros(first.shape[0], dtype=torch.long, device=device)
            for rest in (tokens, classes):
                yield (first, *(rest,) * (required - 1)), {}


def _float_candidates(
    model: nn.Module, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Iterator[Tensor]:
    """Floating-point inputs as wide as the model's first layers take them."""
    widths = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Conv2d):
            for side in (32, 28, 64, 224):
                size = (2, weight.shape[1] * module.groups, side, side)
                yield torch.randn(size, generator=generator).to(device, dtype)
        elif weight.ndim in (1, 2):
            widths += [width for width in reversed(weight.shape) if width not in widths]
        if len(widths) > 3:
            break
    for width in widths:
        rows = [(2, other, width) for other in widths]
        for shape in ((16, width), (2, 8, width), *rows):
            yield torch.randn(shape, generator=generator).to(device, dtype)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with the random numbers of after as of before."""
    training = [module for module in model.modules() if module.training]
    state = get_rng_state()
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        set_rng_state(state)
