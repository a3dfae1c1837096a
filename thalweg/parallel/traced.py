"""A model seen while it runs: its matrix products, what feeds them, and what else touches their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.parallel.sample import Sample
from thalweg.utils.trees import tensors_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_HARMLESS = ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "grad", "layout", "is_leaf")


def close(a: Any, b: Any) -> bool:
    """Whether two tensors agree up to rounding, or neither is there."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is None and b is None
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    a, b, tolerance = a.double(), b.double(), _TOLERANCE.get(a.dtype, 1e-4)
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-6))


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of a model's or a module's output."""
    return next(iter(tensors_of(tree)), None)


@dataclass
class Product:
    """A module that multiplies ``x`` (..., K) by its 2-D ``weight``: -> (..., N)."""

    name: str
    module: nn.Module
    out_dim: int  # the dim of the weight that is N
    x: Tensor

    @property
    def weight(self) -> Tensor:
        """Its matrix."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight


@dataclass
class Call:
    """What a module was called with, and the first tensor that it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None

    def repeat(self, module: nn.Module) -> Any:
        """Call ``module`` with the same again."""
        args, kwargs = _cloned((self.args, self.kwargs))
        return module(*args, **kwargs)


def _cloned(tree: Any) -> Any:
    """The same with tensors of its own: a model may change its inputs in place."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if type(tree) is dict:
        return {key: _cloned(value) for key, value in tree.items()}
    return type(tree)(_cloned(value) for value in tree) if type(tree) in (list, tuple) else tree


@dataclass
class Seen:
    """One run: products in order, and the calls of modules that were called once."""

    sample: Sample
    products: list[Product] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)

    def common_root(self, names: list[str]) -> str | None:
        """The innermost module around all of ``names`` whose call is known."""
        parts = [name.split(".")[:-1] for name in names]
        shared = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            shared.append(level[0])
        while ".".join(shared) not in self.calls and shared:
            shared.pop()
        root = ".".join(shared)
        return root if root in self.calls else None


def see(model: nn.Module, sample: Sample) -> Seen:
    """Run ``model`` once without gradients."""
    seen, counts = Seen(sample), {}
    names = {id(module): name for name, module in model.named_modules()}
    candidates = {id(m): n for n, m in model.named_modules() if _has_matrix(m)}
    calls: dict[str, Call] = {}
    foreign = _ForeignUses(model, candidates)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        name = names[id(module)]
        counts[name] = counts.get(name, 0) + 1
        calls[name] = Call(_cloned(args), _cloned(kwargs), None)
        if id(module) in candidates:
            foreign.active.append(name)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[id(module)]
        given = first_tensor(output)
        calls[name].output = None if given is None else given.clone()
        if id(module) in candidates:
            product = _product(name, module, args, output)
            foreign.active.pop()
            if product is not None:
                seen.products.append(product)

    with torch.no_grad(), foreign, _hooked(model.modules(), before, after):
        sample.call(model)
    seen.products = [p for p in seen.products if counts[p.name] == 1 and p.name not in foreign.found]
    seen.calls = {name: call for name, call in calls.items() if counts[name] == 1}
    return seen


@contextmanager
def _hooked(modules: Any, before: Any, after: Any) -> Iterator[None]:
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_matrix(module: nn.Module) -> bool:
    own = {key for key, parameter in module._parameters.items() if parameter is not None}
    weight = module._parameters.get("weight")
    leaf = not any(True for _ in module.children())
    return (
        leaf
        and own in ({"weight"}, {"weight", "bias"})
        and weight is not None
        and weight.ndim == 2
        and not isinstance(module, nn.Embedding)
    )


def _product(name: str, module: nn.Module, args: Any, output: Any) -> Product | None:
    """What the module did, if it was a product of its one argument with its weight, in either layout."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return None
    x, weight, bias = args[0], module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    if (
        not x.is_floating_point()
        or x.dtype != weight.dtype
        or x.ndim < 2
        or x.shape[:-1] != output.shape[:-1]
    ):
        return None
    out_dim = 0 if isinstance(module, nn.Linear) else 1
    matrix = weight if out_dim == 0 else weight.t()
    if (output.shape[-1], x.shape[-1]) != matrix.shape:
        return None
    if bias is not None and bias.shape != output.shape[-1:]:
        return None
    fits = close(output, F.linear(x, matrix, bias))
    return Product(name, module, out_dim, x.clone()) if fits else None


class _ForeignUses(TorchFunctionMode):
    """Finds weights of the candidates that something else than their own module computes with."""

    def __init__(self, model: nn.Module, candidates: dict[int, str]) -> None:
        super().__init__()
        self.active: list[str] = []
        self.found: set[str] = set()
        self._owners: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            if id(module) not in candidates:
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), set()).add(name)
        for module in model.modules():  # tied to something of another kind, such as an embedding
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in self._owners and id(module) not in candidates:
                    self.found |= self._owners[id(parameter)]
        self.found |= {name for owners in self._owners.values() if len(owners) > 1 for name in owners}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        getter = getattr(func, "__name__", "") == "__get__"
        named = getattr(getattr(func, "__self__", None), "__name__", "")
        if not (getter and named in _HARMLESS):
            for tensor in tensors_of((args, kwargs)):
                owners = self._owners.get(id(tensor))
                if owners is not None and not (self.active and self.active[-1] in owners):
                    self.found |= owners
        return func(*args, **kwargs)


# The second run


@dataclass
class Graph:
    """Who feeds whom: ``leaves`` by product, ``inputs`` computed from them, and who consumes what."""

    leaves: dict[str, Tensor]
    inputs: dict[str, Tensor]
    products: dict[str, Product]
    sources: dict[
        str, set[str]
    ]  # of each product's input, and of "" the model's output: products, parameters
    consumers: dict[str, set[str]]
    owners: dict[str, str]  # the module of each other parameter

    def exclusive(self, second: Product) -> list[Product]:
        """The products that feed ``second`` and nothing else, if no others feed it."""
        sources = [name for name in self.sources.get(second.name, ()) if name in self.leaves]
        if any(self.consumers[name] != {second.name} for name in sources):
            return []
        return [product for name, product in self.products.items() if name in sources]

    def parameters_between(self, second: Product) -> list[str] | None:
        """Modules whose parameters act on the way to ``second``; None if they act elsewhere too."""
        names = [name for name in self.sources[second.name] if name in self.owners]
        if any(self.consumers[name] != {second.name} for name in names):
            return None
        return sorted({self.owners[name] for name in names})


def leaves_of(model: nn.Module, seen: Seen) -> Graph:
    """Run again with gradients, every product's output exchanged for random numbers of its size."""
    products = {product.name: product for product in seen.products}
    leaves: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(11)

    def before(product: Product) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[product.name] = args[0]

        return hook

    def after(product: Product) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            scale = float(output.detach().float().std())
            noise = torch.randn(output.shape, generator=generator, device=output.device).abs_()
            leaves[product.name] = leaf = (scale * noise * _signs(noise)).to(output.dtype).requires_grad_()
            return leaf.clone()  # which may be changed in place, as a leaf may not

        return hook

    handles = []
    for product in products.values():
        handles.append(product.module.register_forward_pre_hook(before(product)))
        handles.append(product.module.register_forward_hook(after(product)))
    try:
        with torch.enable_grad():
            output = seen.sample.call(model)
    finally:
        for handle in handles:
            handle.remove()
    own = {f"{name}.{key}" for name in products for key in ("weight", "bias")}
    others = {n: p for n, p in model.named_parameters() if n not in own and p.requires_grad}
    asked = {**leaves, **{f"{name} (parameter)": p for name, p in others.items()}}
    sources = {name: _sources(x, asked) for name, x in inputs.items()}
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad and tensor.is_floating_point()]
    sources[""] = set().union(*(_sources(tensor, asked) for tensor in ends))
    consumers: dict[str, set[str]] = {name: set() for name in asked}
    for name, feeding in sources.items():
        for one in feeding:
            consumers[one].add(name)
    owners = {f"{name} (parameter)": name.rpartition(".")[0] for name in others}
    return Graph(leaves, inputs, products, sources, consumers, owners)


def _signs(like: Tensor) -> Tensor:
    """Signs that alternate from token to token, so that no channel is below zero for all of them."""
    tokens = torch.arange(like.numel() // like.shape[-1], device=like.device).view(*like.shape[:-1], 1)
    channels = torch.arange(like.shape[-1], device=like.device)
    return 1.0 - 2.0 * ((tokens + channels) % 2)


def _sources(x: Tensor, asked: dict[str, Tensor]) -> set[str]:
    if x.grad_fn is None:
        return {name for name, tensor in asked.items() if tensor is x}
    start = torch.ones_like(x)
    grads = torch.autograd.grad(x, list(asked.values()), start, retain_graph=True, allow_unused=True)
    return {name for name, grad in zip(asked, grads, strict=True) if grad is not None}
