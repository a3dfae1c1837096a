"""A model seen while it runs: its matrix products, what feeds them, and what else touches their weights."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from thalweg.parallel.tensor.dummy_inputs import DummyInputs
from thalweg.utils.trees import iter_tensors

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_METADATA_NAMES = ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "grad", "layout", "is_leaf")
_GETTERS = {getattr(Tensor, name).__get__ for name in _METADATA_NAMES}


def is_close(a: Any, b: Any, tolerances: Mapping[torch.dtype, float] = _TOLERANCE) -> bool:
    """Whether two tensors agree up to rounding (against the largest element of ``b``), or neither is there."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is None and b is None
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    a, b, tolerance = a.double(), b.double(), tolerances.get(a.dtype, tolerances[torch.float32])
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-6))


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of a model's or a module's output."""
    return next(iter(iter_tensors(tree)), None)


@dataclass
class LinearOp:
    """A module that multiplies ``x`` (..., K) by its 2-D ``weight``: -> (..., N)."""

    name: str
    module: nn.Module
    out_dim: int  # the dim of the weight that is N
    x: Tensor

    @property
    def weight(self) -> Tensor:
        """Its matrix."""
        return self.module.get_parameter("weight")


@dataclass
class ModuleCall:
    """What a module was called with, and the first tensor that it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None

    def replay(self, module: nn.Module) -> Any:
        """Call ``module`` with the same again."""
        args, kwargs = _clone_tensors((self.args, self.kwargs))
        return module(*args, **kwargs)


# The same tree with tensors of its own: a model may change its inputs in place.
_clone_tensors = partial(_pytree.tree_map_only, Tensor, Tensor.clone)


@dataclass
class ModuleTrace:
    """One run: products in order, and the calls of modules that were called once."""

    inputs: DummyInputs
    linear_ops: list[LinearOp] = field(default_factory=list)
    calls: dict[str, ModuleCall] = field(default_factory=dict)

    def common_root(self, names: list[str]) -> str | None:
        """The innermost module around all of ``names`` whose call is known."""
        path = names[0].split(".")[:-1]
        roots = (".".join(path[:depth]) for depth in range(len(path), -1, -1))
        around_all = (root for root in roots if all(name.startswith(f"{root}." if root else "") for name in names))
        return next((root for root in around_all if root in self.calls), None)


def trace_modules(model: nn.Module, inputs: DummyInputs) -> ModuleTrace:
    """Run ``model`` once without gradients."""
    trace, num_calls = ModuleTrace(inputs), {}
    names = {id(module): name for name, module in model.named_modules()}
    candidates = {id(m): n for n, m in model.named_modules() if _has_only_matrix(m)}
    calls: dict[str, ModuleCall] = {}
    external_uses = _ExternalWeightUses(model, candidates)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        name = names[id(module)]
        num_calls[name] = num_calls.get(name, 0) + 1
        calls[name] = ModuleCall(_clone_tensors(args), _clone_tensors(kwargs), None)
        if id(module) in candidates:
            external_uses.running.append(name)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[id(module)]
        output_tensor = first_tensor(output)
        calls[name].output = None if output_tensor is None else output_tensor.clone()
        if id(module) in candidates:
            op = _match_linear_op(name, module, args, output)
            external_uses.running.pop()
            if op is not None:
                trace.linear_ops.append(op)

    with torch.no_grad(), external_uses, ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
        args, kwargs = inputs
        model(*args, **kwargs)
    trace.linear_ops = [p for p in trace.linear_ops if num_calls[p.name] == 1 and p.name not in external_uses.names]
    trace.calls = {name: call for name, call in calls.items() if num_calls[name] == 1}
    return trace


def _has_only_matrix(module: nn.Module) -> bool:
    params = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    is_leaf = not any(True for _ in module.children()) and not isinstance(module, nn.Embedding)
    return is_leaf and params.keys() in ({"weight"}, {"weight", "bias"}) and params["weight"].ndim == 2


def _match_linear_op(name: str, module: nn.Module, args: Any, output: Any) -> LinearOp | None:
    """What the module did, if it was a product of its one argument with its weight, in either layout."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return None
    x, weight, bias = args[0], module.get_parameter("weight"), module._parameters.get("bias")
    if not x.is_floating_point() or x.dtype != weight.dtype or x.ndim < 2 or x.shape[:-1] != output.shape[:-1]:
        return None
    out_dim = 0 if isinstance(module, nn.Linear) else 1
    matrix = weight if out_dim == 0 else weight.t()
    if (output.shape[-1], x.shape[-1]) != matrix.shape:
        return None
    if bias is not None and bias.shape != output.shape[-1:]:
        return None
    fits = is_close(output, F.linear(x, matrix, bias))
    return LinearOp(name, module, out_dim, x.clone()) if fits else None


class _ExternalWeightUses(TorchFunctionMode):
    """Finds weights of the candidates that something else than their own module computes with."""

    def __init__(self, model: nn.Module, candidates: dict[int, str]) -> None:
        super().__init__()
        self.running: list[str] = []
        self.names: set[str] = set()
        self._users: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False) if id(module) in candidates else ():
                self._users.setdefault(id(parameter), set()).add(name)
        for module in model.modules():  # tied to something of another kind, such as an embedding
            for parameter in module.parameters(recurse=False) if id(module) not in candidates else ():
                self.names |= self._users.get(id(parameter), set())
        self.names |= {name for users in self._users.values() if len(users) > 1 for name in users}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _GETTERS:
            for tensor in iter_tensors((args, kwargs)):
                users = self._users.get(id(tensor))
                if users is not None and not (self.running and self.running[-1] in users):
                    self.names |= users
        return func(*args, **kwargs)


# The second run


@dataclass
class LinearGraph:
    """Who feeds whom: ``leaves`` by product, ``inputs`` computed from them, and who consumes what."""

    leaves: dict[str, Tensor]
    inputs: dict[str, Tensor]
    linear_ops: dict[str, LinearOp]
    sources: dict[str, set[str]]  # of each product's input, and of "" the model's output: products, parameters
    consumers: dict[str, set[str]]
    param_modules: dict[str, str]  # the module of each other parameter

    def exclusive_sources(self, op: LinearOp) -> list[LinearOp]:
        """The products that feed ``op`` and nothing else, if no others feed it."""
        sources = [name for name in self.sources.get(op.name, ()) if name in self.leaves]
        if any(self.consumers[name] != {op.name} for name in sources):
            return []
        return [product for name, product in self.linear_ops.items() if name in sources]

    def modules_between(self, op: LinearOp) -> list[str] | None:
        """Modules whose parameters act on the way to ``op``; None if they act elsewhere too."""
        names = [name for name in self.sources[op.name] if name in self.param_modules]
        if any(self.consumers[name] != {op.name} for name in names):
            return None
        return sorted({self.param_modules[name] for name in names})


def build_graph(model: nn.Module, trace: ModuleTrace) -> LinearGraph:
    """Run again with gradients, every product's output exchanged for random numbers of its size."""
    ops = {product.name: product for product in trace.linear_ops}
    leaves: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(11)

    def before(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0]

    def after(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = float(output.detach().float().std())
        noise = torch.randn(output.shape, generator=generator, device=output.device).abs_()
        # Signs alternate from token to token, so that no channel is below zero for all of them.
        tokens = torch.arange(noise.numel() // noise.shape[-1], device=noise.device).view(*noise.shape[:-1], 1)
        signs = 1.0 - 2.0 * ((tokens + torch.arange(noise.shape[-1], device=noise.device)) % 2)
        leaves[name] = leaf = (scale * noise * signs).to(output.dtype).requires_grad_()
        return leaf.clone()  # which may be changed in place, as a leaf may not

    with torch.enable_grad(), ExitStack() as hooks:
        for name, product in ops.items():
            hooks.enter_context(product.module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(product.module.register_forward_hook(partial(after, name)))
        args, kwargs = trace.inputs
        output = model(*args, **kwargs)
    op_params = {f"{name}.{key}" for name in ops for key in ("weight", "bias")}
    other_params = {n: p for n, p in model.named_parameters() if n not in op_params and p.requires_grad}
    tracked = {**leaves, **{f"{name} (parameter)": p for name, p in other_params.items()}}
    sources = {name: _find_sources(x, tracked) for name, x in inputs.items()}
    outputs = [tensor for tensor in iter_tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
    sources[""] = set().union(*(_find_sources(tensor, tracked) for tensor in outputs))
    consumers: dict[str, set[str]] = {name: set() for name in tracked}
    for name, source_names in sources.items():
        for source in source_names:
            consumers[source].add(name)
    param_modules = {f"{name} (parameter)": name.rpartition(".")[0] for name in other_params}
    return LinearGraph(leaves, inputs, ops, sources, consumers, param_modules)


def _find_sources(x: Tensor, tracked: dict[str, Tensor]) -> set[str]:
    if x.grad_fn is None:
        return {name for name, tensor in tracked.items() if tensor is x}
    start = torch.ones_like(x)
    grads = torch.autograd.grad(x, list(tracked.values()), start, retain_graph=True, allow_unused=True)
    return {name for name, grad in zip(tracked, grads, strict=True) if grad is not None}
