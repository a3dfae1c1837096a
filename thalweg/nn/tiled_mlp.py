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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree

from thalweg.ops.linear import plain_only
from thalweg.ops.subclass import Disguised, subclass_of, undisguise


@dataclass(frozen=True)
class _Cut:
    """How a call's arguments are cut: which leaves are tiled, along which dim, into how many tiles."""

    spec: Any
    leaves: tuple[Any, ...]
    tiled: tuple[int, ...]
    whole: tuple[int, ...]
    dim: int
    tiles: int
    lead: tuple[int, ...]
    length: int

    def bounds(self) -> Iterator[tuple[int, int]]:
        size = -(-self.length // self.tiles)
        for start in range(0, self.length, size):
            yield start, min(size, self.length - start)

    def call(self, forward: Any, tiled: Sequence[Tensor], whole: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for index, value in zip((*self.tiled, *self.whole), (*tiled, *whole), strict=True):
            leaves[index] = value
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return forward(*args, **kwargs)


def _cut(args: Any, kwargs: Any, dim: int, tiles: int) -> _Cut | None:
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() < 2:
        return None
    dim = dim % first.dim()
    length = first.shape[dim]
    lead = first.shape[: dim + 1]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tiled = tuple(i for i in tensors if leaves[i].dim() == first.dim() and leaves[i].shape[: dim + 1] == lead)
    whole = tuple(i for i in tensors if i not in tiled)
    if length < 2 or tiles < 2:
        return None
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return _Cut(spec, plain, tiled, whole, dim, min(tiles, length), tuple(lead[:-1]), length)


@dataclass
class _Surroundings:
    """What a second run must find as the first did: random state and autocast."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None
    autocast: tuple[bool, torch.dtype, bool]

    @classmethod
    def now(cls, device: torch.device) -> _Surroundings:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = device.type
        autocast = (
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )
        return cls(torch.get_rng_state(), device, cuda, autocast)

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            devices = [self.device] if self.cuda is not None else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            enabled, dtype, caching = self.autocast
            stack.enter_context(
                torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=caching)
            )
            yield


class _Tiles(torch.autograd.Function):
    """(module, its plain forward, cut, a list for the outputs' structure, *tiled, *whole, *parameters)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, module: nn.Module, forward: Any, cut: _Cut, keep: list[Any], *tensors: Tensor
    ) -> Any:
        inputs = tensors[: len(cut.tiled) + len(cut.whole)]
        ctx.around = _Surroundings.now(inputs[0].device)
        outputs, spec = _in_tiles(forward, cut, inputs)
        keep.append(spec)
        ctx.save_for_backward(*inputs)
        ctx.module, ctx.plain_forward, ctx.cut = module, forward, cut
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        cut: _Cut = ctx.cut
        # The module's own parameters, not saved ones: hooks on saved tensors may have made copies of those.
        tensors = [*ctx.saved_tensors, *_trained(ctx.module)]
        wanted = ctx.needs_input_grad[4:]
        num = len(cut.tiled)
        sums: list[Tensor | None] = [
            None if not want else torch.zeros_like(t, dtype=t.dtype if i < num else _wide(t.dtype))
            for i, (t, want) in enumerate(zip(tensors, wanted, strict=True))
        ]
        with ctx.around.again():
            for start, size in cut.bounds():
                _add_tile(ctx.plain_forward, cut, tensors, wanted, grads, sums, start, size)
        found = (None if total is None else total.to(t.dtype) for total, t in zip(sums, tensors, strict=True))
        return (None, None, None, None, *found)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _in_tiles(forward: Any, cut: _Cut, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """The flat outputs put together from the tiles, and their structure."""
    tiled, whole = inputs[: len(cut.tiled)], inputs[len(cut.tiled) :]
    outputs: list[Tensor] = []
    spec: Any = None
    for start, size in cut.bounds():
        parts = [t.narrow(cut.dim, start, size).contiguous() for t in tiled]  # as modules expect them
        flat, spec = _pytree.tree_flatten(cut.call(forward, parts, whole))
        if not outputs:
            outputs = [_room(out, cut, size) for out in flat]
        for room, out in zip(outputs, flat, strict=True):
            room.narrow(cut.dim, start, size).copy_(out)
    return outputs, spec


def _add_tile(
    forward: Any,
    cut: _Cut,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
    sums: Sequence[Tensor | None],
    start: int,
    size: int,
) -> None:
    """Run one tile again and add its gradients to ``sums``."""
    num, inputs = len(cut.tiled), len(cut.tiled) + len(cut.whole)
    here = [t.narrow(cut.dim, start, size).contiguous() for t in tensors[:num]] + list(tensors[num:])
    here[:inputs] = [t.detach().requires_grad_(want) for t, want in zip(here[:inputs], wanted, strict=False)]
    with torch.enable_grad():
        flat = _pytree.tree_leaves(cut.call(forward, here[:num], here[num:inputs]))
    pairs = [
        (out, grad.narrow(cut.dim, start, size))
        for out, grad in zip(flat, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    sources = [t for t, want in zip(here, wanted, strict=True) if want]
    if not pairs or not sources:
        return
    outs, out_grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, sources, out_grads, allow_unused=True))
    for i, (total, want) in enumerate(zip(sums, wanted, strict=True)):
        grad = next(found) if want else None
        if grad is None or total is None:
            continue
        if i < num:
            total.narrow(cut.dim, start, size).copy_(grad)
        else:
            total += grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _room(out: Any, cut: _Cut, size: int) -> Tensor:
    fits = isinstance(out, Tensor) and out.shape[: cut.dim + 1] == (*cut.lead, size)
    if not fits:
        what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"a tiled module must return tensors with {size} positions in dim {cut.dim} for {size} given; it "
            f"returned {what}: it is not position-wise, take it out of the tiled modules"
        )
    shape = list(out.shape)
    shape[cut.dim] = cut.length
    return out.new_empty(shape)


class _Tiled(Disguised):
    _thalweg_tiles: int
    _thalweg_tile_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        cut = _cut(args, kwargs, self._thalweg_tile_dim, self._thalweg_tiles)
        if cut is None or plain_only():
            return plain(*args, **kwargs)
        leaves = _pytree.tree_leaves((args, kwargs))
        inputs = [leaves[i] for i in (*cut.tiled, *cut.whole)]
        if not torch.is_grad_enabled():
            return _pytree.tree_unflatten(*_in_tiles(plain, cut, inputs))
        module: Any = self
        keep: list[Any] = []
        flat: Any = _Tiles.apply(module, plain, cut, keep, *inputs, *_trained(module))
        return _pytree.tree_unflatten(list(flat), keep[0])


@cache
def _tiled_class(plain: type, tiles: int, dim: int) -> type:
    return subclass_of(plain, _Tiled, _thalweg_tiles=tiles, _thalweg_tile_dim=dim)


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
        raise ValueError(
            f"{type(module).__name__} has a forward that cannot be tiled; tile before replacing it"
        )
    if isinstance(module, _Tiled):
        raise ValueError(f"{type(module).__name__} is tiled already")
    if tiles > 1:
        module.__class__ = _tiled_class(type(module), tiles, dim)
    return module


def untile(model: nn.Module) -> int:
    """Undo :func:`tiled` for every module of ``model``; returns how many there were."""
    return undisguise(model, _Tiled)


_NAMES = ("mlp", "feed_forward", "ffn", "ff", "DenseReluDense")


def find_mlps(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The outermost modules called like an MLP, by name; or those whose name is or ends in one of ``names``.

    Raises ValueError where a wanted name is not there.
    """
    wanted = tuple(names or _NAMES)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        hit = next((one for one in wanted if name == one or name.endswith(f".{one}")), None)
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if hit and not inside and any(True for _ in module.parameters()):
            found[name] = module
    missing = [one for one in wanted if not any(name == one or name.endswith(f".{one}") for name in found)]
    if not found or (names and missing):
        raise ValueError(
            f"tiling.mlp found no module called {', '.join(missing)} in {type(model).__name__}: name the "
            "MLPs in tiling.mlp_modules, or set tiling.mlp to 1"
        )
    return found


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
