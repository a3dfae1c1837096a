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

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree

from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass, restore_class
from thalweg.ops.linear.functional import must_use_plain_ops


@dataclass(frozen=True)
class _TiledArgs:
    """How a call's arguments are cut: which leaves are tiled, along which dim, into how many tiles."""

    tree_spec: Any
    leaves: tuple[Any, ...]
    tiled: tuple[int, ...]
    untiled: tuple[int, ...]
    dim: int
    num_tiles: int
    leading_shape: tuple[int, ...]
    length: int

    def tile_bounds(self) -> Iterator[tuple[int, int]]:
        size = -(-self.length // self.num_tiles)
        for start in range(0, self.length, size):
            yield start, min(size, self.length - start)

    def call(self, forward: Any, tiled: Sequence[Tensor], untiled: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for index, value in zip((*self.tiled, *self.untiled), (*tiled, *untiled), strict=True):
            leaves[index] = value
        args, kwargs = _pytree.tree_unflatten(leaves, self.tree_spec)
        return forward(*args, **kwargs)


def _split_args(args: Any, kwargs: Any, dim: int, num_tiles: int) -> _TiledArgs | None:
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() < 2:
        return None
    dim = dim % first.dim()
    length = first.shape[dim]
    leading_shape = first.shape[: dim + 1]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tiled = tuple(i for i in tensors if leaves[i].dim() == first.dim() and leaves[i].shape[: dim + 1] == leading_shape)
    untiled = tuple(i for i in tensors if i not in tiled)
    if length < 2 or num_tiles < 2:
        return None
    non_tensors = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return _TiledArgs(spec, non_tensors, tiled, untiled, dim, min(num_tiles, length), tuple(leading_shape[:-1]), length)


def _capture_state(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What gives a second run what the first one found: random state and autocast."""
    cuda_devices = [device] if device.type == "cuda" else []
    cpu_state, cuda_states = torch.get_rng_state(), [torch.cuda.get_rng_state(one) for one in cuda_devices]
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    autocast = partial(torch.autocast, device.type, dtype, enabled, torch.is_autocast_cache_enabled())

    @contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng(devices=cuda_devices), autocast():
            torch.set_rng_state(cpu_state)
            for one, state in zip(cuda_devices, cuda_states, strict=True):
                torch.cuda.set_rng_state(state, one)
            yield

    return restored


class _TiledForward(torch.autograd.Function):
    """(module, its plain forward, cut, a list for the outputs' structure, *tiled, *whole, *parameters)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, module: nn.Module, forward: Any, tiled_args: _TiledArgs, out_specs: list[Any], *tensors: Tensor
    ) -> Any:
        inputs = tensors[: len(tiled_args.tiled) + len(tiled_args.untiled)]
        ctx.restored_state = _capture_state(inputs[0].device)
        outputs, spec = _forward_in_tiles(forward, tiled_args, inputs)
        out_specs.append(spec)
        ctx.save_for_backward(*inputs)
        ctx.module, ctx.plain_forward, ctx.tiled_args = module, forward, tiled_args
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tiled_args: _TiledArgs = ctx.tiled_args
        # The module's own parameters, not saved ones: hooks on saved tensors may have made copies of those.
        tensors = [*ctx.saved_tensors, *_trainable_params(ctx.module)]
        needs_grad = ctx.needs_input_grad[4:]
        num = len(tiled_args.tiled)
        sums: list[Tensor | None] = [
            None if not want else torch.zeros_like(t, dtype=t.dtype if i < num else _accumulation_dtype(t.dtype))
            for i, (t, want) in enumerate(zip(tensors, needs_grad, strict=True))
        ]
        with ctx.restored_state():
            for start, size in tiled_args.tile_bounds():
                _backward_tile(ctx.plain_forward, tiled_args, tensors, needs_grad, grads, sums, start, size)
        grads_out = (None if total is None else total.to(t.dtype) for total, t in zip(sums, tensors, strict=True))
        return (None, None, None, None, *grads_out)


def _trainable_params(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _forward_in_tiles(forward: Any, tiled_args: _TiledArgs, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """The flat outputs put together from the tiles, and their structure."""
    tiled, untiled = inputs[: len(tiled_args.tiled)], inputs[len(tiled_args.tiled) :]
    outputs: list[Tensor] = []
    spec: Any = None
    for start, size in tiled_args.tile_bounds():
        tile_inputs = [t.narrow(tiled_args.dim, start, size).contiguous() for t in tiled]  # as modules expect them
        flat, spec = _pytree.tree_flatten(tiled_args.call(forward, tile_inputs, untiled))
        if not outputs:
            outputs = [_alloc_output(out, tiled_args, size) for out in flat]
        for output, out in zip(outputs, flat, strict=True):
            output.narrow(tiled_args.dim, start, size).copy_(out)
    return outputs, spec


def _backward_tile(
    forward: Any,
    tiled_args: _TiledArgs,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    grads: Sequence[Tensor | None],
    sums: Sequence[Tensor | None],
    start: int,
    size: int,
) -> None:
    """Run one tile again and add its gradients to ``sums``."""
    num, inputs = len(tiled_args.tiled), len(tiled_args.tiled) + len(tiled_args.untiled)
    tile_inputs = [t.narrow(tiled_args.dim, start, size).contiguous() for t in tensors[:num]] + list(tensors[num:])
    tile_inputs[:inputs] = [
        t.detach().requires_grad_(want) for t, want in zip(tile_inputs[:inputs], needs_grad, strict=False)
    ]
    with torch.enable_grad():
        flat = _pytree.tree_leaves(tiled_args.call(forward, tile_inputs[:num], tile_inputs[num:inputs]))
    pairs = [
        (out, grad.narrow(tiled_args.dim, start, size))
        for out, grad in zip(flat, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    wanted = [i for i, want in enumerate(needs_grad) if want]
    if not pairs or not wanted:
        return
    outs, out_grads = zip(*pairs, strict=True)
    tile_grads = torch.autograd.grad(outs, [tile_inputs[i] for i in wanted], out_grads, allow_unused=True)
    for i, grad in zip(wanted, tile_grads, strict=True):
        total = sums[i]
        if grad is None or total is None:
            continue
        if i < num:
            total.narrow(tiled_args.dim, start, size).copy_(grad)
        else:
            total += grad


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _alloc_output(out: Any, tiled_args: _TiledArgs, size: int) -> Tensor:
    fits = isinstance(out, Tensor) and out.shape[: tiled_args.dim + 1] == (*tiled_args.leading_shape, size)
    if not fits:
        description = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"a tiled module must return tensors with {size} positions in dim {tiled_args.dim} for {size} given; it "
            f"returned {description}: it is not position-wise, take it out of the tiled modules"
        )
    shape = list(out.shape)
    shape[tiled_args.dim] = tiled_args.length
    return out.new_empty(shape)


class _TiledModule(DynamicSubclass):
    _thalweg_tiles: int
    _thalweg_tile_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original_forward: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        tiled_args = _split_args(args, kwargs, self._thalweg_tile_dim, self._thalweg_tiles)
        if tiled_args is None or must_use_plain_ops():
            return original_forward(*args, **kwargs)
        leaves = _pytree.tree_leaves((args, kwargs))
        inputs = [leaves[i] for i in (*tiled_args.tiled, *tiled_args.untiled)]
        if not torch.is_grad_enabled():
            return _pytree.tree_unflatten(*_forward_in_tiles(original_forward, tiled_args, inputs))
        module: Any = self
        out_specs: list[Any] = []
        flat: Any = _TiledForward.apply(
            module, original_forward, tiled_args, out_specs, *inputs, *_trainable_params(module)
        )
        return _pytree.tree_unflatten(list(flat), out_specs[0])


@cache
def _tiled_class(original_class: type, tiles: int, dim: int) -> type:
    return make_subclass(original_class, _TiledModule, _thalweg_tiles=tiles, _thalweg_tile_dim=dim)


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
        module.__class__ = _tiled_class(type(module), tiles, dim)
    return module


def untile(model: nn.Module) -> int:
    """Undo :func:`tiled` for every module of ``model``; returns how many there were."""
    return restore_class(model, _TiledModule)


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


class TiledMLP(nn.Module):
    """``module`` run over tiles of the sequence, as a module of its own; see :func:`tiled`.

    The wrapped module is ``self.module``, so parameter names gain ``module.``; :func:`tiled` keeps them.
    """

    def __init__(self, module: nn.Module, tiles: int, *, dim: int = -2) -> None:
        super().__init__()
        self.module = tiled(module, tiles, dim=dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        return self.module(*args, **kwargs)
