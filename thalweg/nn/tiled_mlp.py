"""Run a position-wise module over tiles of the sequence, so that its inner activations exist for one tile.

The picture: an MLP widens D to 4 D and back, position by position.  Over a long sequence the wide part is the
largest activation of a layer.  Here the sequence is cut into tiles; *forward* runs each without recording and
keeps the inputs alone; *backward* runs each again, with the random state and autocast of the first time,
takes its gradients and lets it go.  After Arctic Long Sequence Training (Bekman et al. 2025, section 3.2).

Invariants: outputs equal the module's own, position by position; each parameter gets one gradient by
autograd, the tiles' gradients added up in fp32, so a sharded parameter is reduced once; names, hooks and
state dict are those of the plain module.  A module that mixes positions (attention, batch norm) must not be
tiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree

from thalweg.config.schema.training import Tiling
from thalweg.device import get_rng_state, set_rng_state
from thalweg.nn.losses.lazy_logits import LossTiling
from thalweg.nn.losses.lm_head import make_logits_lazy
from thalweg.ops.dynamic_subclass import DynamicSubclass, cached_subclass
from thalweg.ops.linear.functional import must_use_plain_ops

_TENSOR_SLOT: Any = object()


@dataclass(frozen=True)
class _TiledCall:
    """A call whose tensor arguments (slots among ``leaves``) are cut along ``dim`` where ``is_tiled`` says so."""

    forward: Any
    tree_spec: Any
    leaves: list[Any]
    is_tiled: list[bool]
    dim: int
    leading_shape: torch.Size  # of what is cut, up to ``dim``
    num_tiles: int

    def tile_bounds(self) -> Iterator[tuple[int, int]]:
        """(start, length) of each tile."""
        length = self.leading_shape[-1]
        size = -(-length // self.num_tiles)
        for start in range(0, length, size):
            yield start, min(size, length - start)

    def tile(self, tensors: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
        """One tile of the tensor arguments, contiguous as modules expect them."""
        pairs = zip(tensors, self.is_tiled, strict=True)
        return [t.narrow(self.dim, start, size).contiguous() if tiled else t for t, tiled in pairs]

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """The flat results for these tensor arguments, and their structure."""
        values = iter(tensors)
        leaves = [next(values) if leaf is _TENSOR_SLOT else leaf for leaf in self.leaves]
        args, kwargs = _pytree.tree_unflatten(leaves, self.tree_spec)
        return _pytree.tree_flatten(self.forward(*args, **kwargs))

    def run_in_tiles(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The flat results put together from the tiles, and their structure."""
        outputs: list[Tensor] = []
        spec: Any = None
        for start, size in self.tile_bounds():
            flat, spec = self.run(self.tile(tensors, start, size))
            if not outputs:
                outputs = [self._new_output(out, size) for out in flat]
            for output, out in zip(outputs, flat, strict=True):
                output.narrow(self.dim, start, size).copy_(out)
        return outputs, spec

    def _new_output(self, out: Any, size: int) -> Tensor:
        if not isinstance(out, Tensor) or out.shape[: self.dim + 1] != (*self.leading_shape[:-1], size):
            description = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"a tiled module must return tensors with {size} positions in dim {self.dim} for {size} given; it "
                f"returned {description}: it is not position-wise, take it out of the tiled modules"
            )
        return out.new_empty((*self.leading_shape, *out.shape[self.dim + 1 :]))


def _make_tiled_call(
    forward: Any, args: Any, kwargs: Any, dim: int, num_tiles: int
) -> tuple[_TiledCall, list[Tensor]] | None:
    """The call without its tensors, which autograd saves as it likes, and these; None where nothing is cut."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or (ndim := tensors[0].dim()) < 2:
        return None
    leading_shape = tensors[0].shape[: dim % ndim + 1]
    is_tiled = [t.dim() == ndim and t.shape[: dim % ndim + 1] == leading_shape for t in tensors]
    if leading_shape[-1] < 2 or num_tiles < 2:
        return None
    leaves = [_TENSOR_SLOT if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    num_tiles = min(num_tiles, leading_shape[-1])
    return _TiledCall(forward, spec, leaves, is_tiled, dim % ndim, leading_shape, num_tiles), tensors


class _TiledForward(torch.autograd.Function):
    """(module, call, a list for the outputs' structure, *tensor arguments, *parameters)."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, call: _TiledCall, out_specs: list[Any], *tensors: Tensor) -> Any:  # type: ignore[override]
        inputs = tensors[: len(call.is_tiled)]
        kind = inputs[0].device.type
        autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        ctx.autocast, ctx.rng_state = partial(torch.autocast, kind, *autocast), get_rng_state()
        outputs, spec = call.run_in_tiles(inputs)
        out_specs.append(spec)
        ctx.save_for_backward(*inputs)
        ctx.module, ctx.call = module, call
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: _TiledCall = ctx.call
        # The module's own parameters, not saved ones: hooks on saved tensors may have made copies of those.
        inputs, params = ctx.saved_tensors, _trainable_params(ctx.module)
        needs_grad, is_tiled = ctx.needs_input_grad[3:], [*call.is_tiled, *(False for _ in params)]
        sums: list[Tensor | None] = [
            None
            if not want
            else torch.zeros_like(t, dtype=t.dtype if tiled else torch.promote_types(t.dtype, torch.float32))
            for t, want, tiled in zip((*inputs, *params), needs_grad, is_tiled, strict=True)
        ]
        # The second run finds what the first one found: random state and autocast.
        with ctx.autocast(), ExitStack() as stack:
            stack.callback(set_rng_state, get_rng_state())
            set_rng_state(ctx.rng_state)
            for start, size in call.tile_bounds():
                tile_inputs = [
                    t.detach().requires_grad_(want)
                    for t, want in zip(call.tile(inputs, start, size), needs_grad, strict=False)
                ]
                with torch.enable_grad():
                    outputs, _ = call.run(tile_inputs)
                pairs = [
                    (out, grad.narrow(call.dim, start, size))
                    for out, grad in zip(outputs, grads, strict=True)
                    if grad is not None and out.requires_grad
                ]
                wanted = [(t, i) for i, t in enumerate((*tile_inputs, *params)) if needs_grad[i]]
                if not pairs or not wanted:
                    continue
                (outs, out_grads), (sources, indices) = zip(*pairs, strict=True), zip(*wanted, strict=True)
                tile_grads = torch.autograd.grad(outs, sources, out_grads, allow_unused=True)
                for i, grad in zip(indices, tile_grads, strict=True):
                    total = sums[i]
                    if grad is not None and total is not None:
                        total = total.narrow(call.dim, start, size) if is_tiled[i] else total
                        total += grad
        grads_out = (None if g is None else g.to(t.dtype) for g, t in zip(sums, (*inputs, *params), strict=True))
        return (None, None, None, *grads_out)


def _trainable_params(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class _TiledModule(DynamicSubclass):
    _thalweg_tiles: int
    _thalweg_tile_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original_forward: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        tiled_call = _make_tiled_call(original_forward, args, kwargs, self._thalweg_tile_dim, self._thalweg_tiles)
        if tiled_call is None or must_use_plain_ops():
            return original_forward(*args, **kwargs)
        call, inputs = tiled_call
        if not torch.is_grad_enabled():
            return _pytree.tree_unflatten(*call.run_in_tiles(inputs))
        module: Any = self
        out_specs: list[Any] = []
        flat: Any = _TiledForward.apply(module, call, out_specs, *inputs, *_trainable_params(module))
        return _pytree.tree_unflatten(list(flat), out_specs[0])


def tiled(module: nn.Module, tiles: int, *, dim: int = -2) -> nn.Module:
    """Let ``module`` run over ``tiles`` tiles of its inputs' dim ``dim`` (the sequence); returns ``module``.

    Every tensor argument that agrees with the first one up to that dim is cut along it, others are passed
    whole.  Results are tensors, or a tuple, list or dict of them, with the positions in the same dim.  Comes
    before sharding.  Dropout draws tile by tile, so its masks differ from the untiled module's.

    Raises ValueError for a count below 1 or a module whose forward was replaced; at the first call, for a
    module that does not return one position for each.
    """
    if type(tiles) is not int or tiles < 1:
        raise ValueError(f"tiles is {tiles!r}; it must be a whole number from 1 up")
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{type(module).__name__} has a forward that cannot be tiled; tile before replacing it")
    if isinstance(module, _TiledModule):
        raise ValueError(f"{type(module).__name__} is tiled already")
    if tiles > 1:
        options = {"_thalweg_tiles": tiles, "_thalweg_tile_dim": dim}
        module.__class__ = cached_subclass(type(module), _TiledModule, **options)
    return module


_MLP_NAMES = ("mlp", "feed_forward", "ffn", "ff", "DenseReluDense")


def find_mlps(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The outermost modules called like an MLP, by name; or those whose name is or ends in one of ``names``.

    Raises ValueError where a wanted name is not there.
    """
    suffixes = tuple(names or _MLP_NAMES)
    mlps: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        matched = next((one for one in suffixes if name == one or name.endswith(f".{one}")), None)
        inside = any(name.startswith(f"{outer}.") for outer in mlps)
        if matched and not inside and any(True for _ in module.parameters()):
            mlps[name] = module
    missing = [one for one in suffixes if not any(name == one or name.endswith(f".{one}") for name in mlps)]
    if not mlps or (names and missing):
        raise ValueError(
            f"tiling.mlp found no module called {', '.join(missing)} in {type(model).__name__}: name the "
            "MLPs in tiling.mlp_modules, or set tiling.mlp to 1"
        )
    return mlps


def apply_tiling(model: nn.Module, section: Tiling) -> LossTiling | None:
    """Tile the MLPs and the loss of ``model`` as ``section`` says; comes before sharding.

    Raises:
        ValueError: a layer that the section names or needs is not there, or cannot be tiled.
    """
    if section.mlp > 1:
        for module in find_mlps(model, section.mlp_modules).values():
            tiled(module, section.mlp)
    if not section.loss:
        return None
    if section.head is not None and section.head not in dict(model.named_modules()):
        raise ValueError(f"tiling.head is {section.head!r}, and the model has no module of that name")
    head = None if section.head is None else model.get_submodule(section.head)
    return make_logits_lazy(model, head, section.loss_tokens)
