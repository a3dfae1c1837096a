"""Weights of any modules that pass by: each part has its own only while it computes.

The picture.  Modules are cut into parts (blocks, or what is left over) that are called one after the other.
A part's parameters lie in a file or in the host's memory; a hook before its forward brings them, one behind
drops them.  Who came after whom the last time is remembered, and what comes next is fetched meanwhile, as
much as the memory allows: a denoiser's parts come in the same order at every step.

Where the host computes and the weights stay on the host, they are views of the mapped file: nothing is moved,
and the system may drop what it needs room for.

Numbers are not touched: results have the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.ops.table import get_cache_dir
from thalweg.plan.cluster import available_host_memory
from thalweg.store.io import IoFuture
from thalweg.store.nvme import SwapFile
from thalweg.store.regions import PAGE, round_up

_LINE = 64
_SHARE = 0.25  # of the free memory, where nobody says how much
_FRACTION = 4  # parts in memory at a time, at least: one computes, others are on their way


class Place(NamedTuple):
    """A parameter of a module, and where it lies among its part's bytes."""

    owner: nn.Module
    name: str
    at: int
    shape: torch.Size
    dtype: torch.dtype
    trained: bool

    def view(self, flat: Tensor) -> Tensor:
        """Return it out of its part's bytes."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        return flat[self.at : self.at + nbytes].view(self.dtype).view(self.shape)

    def fill(self, value: Tensor) -> None:
        """Let the module have a value."""
        setattr(self.owner, self.name, nn.Parameter(value, requires_grad=self.trained))


@dataclass(eq=False)
class Part:
    """A module, and where its parameters lie; they become other objects each time they come."""

    module: nn.Module
    places: list[Place]
    nbytes: int
    offset: int = 0
    """Where its bytes begin in the file."""
    host: Tensor | None = None
    depth: int = 0
    """How many calls of it are under way."""


@dataclass
class _Coming:
    """A part's bytes on their way."""

    flat: Tensor
    ticket: IoFuture | None = None
    event: Any = None

    def wait(self, device: torch.device) -> Tensor:
        """Return them on the device."""
        if self.ticket is not None:
            self.ticket.wait()
        if self.event is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.event)
            self.flat.record_stream(stream)
        return self.flat.to(device)


class Passing:
    """Takes the parameters of ``roots`` out of memory until :meth:`close`.

    ``tier``: ``cpu`` or ``nvme``, where they are kept; ``folder``: below which the file is; ``memory``: bytes
    of weights on ``device`` at a time, besides the largest part.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        *,
        tier: str,
        device: torch.device | str = "cpu",
        folder: str | Path | None = None,
        memory: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.memory = memory or int(_SHARE * (available_host_memory() or 2**32))
        self.parts = [part for root in roots for part in _cut(root, self.memory // _FRACTION)]
        self.held = self.most_held = 0
        self._hooks: list[Any] = []
        self._after: dict[Part, Part] = {}
        self._last: Part | None = None
        self._ahead: dict[Part, _Coming] = {}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        on_host = self.device.type == "cpu"
        self._mapped = tier == "cpu" and on_host
        self._file: SwapFile | None = None
        if tier == "nvme" or on_host:
            total = sum(round_up(part.nbytes) for part in self.parts)
            self._file = SwapFile(_folder(folder), max(total, PAGE))
        for part in self.parts:
            self._put(part)
        if not self._mapped:
            ours: weakref.ref[Passing] = weakref.ref(self)
            for part in self.parts:
                self._hooks += [
                    part.module.register_forward_pre_hook(_before(ours, part)),
                    part.module.register_forward_hook(_behind(ours, part), always_call=True),
                ]

    def _put(self, part: Part) -> None:
        """Move a part's parameters to where they are kept."""
        flat = _aligned(part.nbytes)
        for place in part.places:
            place.view(flat).copy_(getattr(place.owner, place.name).detach())
        if self._file is None:
            part.host = flat.pin_memory()
            return self._empty(part)
        part.offset = self._file.allocate(part.nbytes)
        self._file.write(part.offset, flat).wait()
        if not self._mapped:
            return self._empty(part)
        mapped = self._file.view(part.offset, (part.nbytes,), torch.uint8)
        return _attach(part, mapped)

    def _empty(self, part: Part) -> None:
        for place in part.places:  # shape, dtype and device stay: code asks for them
            place.fill(torch.empty(1, dtype=place.dtype, device=self.device).expand(place.shape))

    # Calls

    def bring(self, part: Part) -> None:
        """Let a part have its parameters."""
        part.depth += 1
        if part.depth > 1:
            return
        if self._last is not None:
            self._after[self._last] = part
        self._last = part
        if part not in self._ahead:
            self._forget()
            self._ahead[part] = self._begin(part)
        _attach(part, self._ahead.pop(part).wait(self.device))
        following = self._after.get(part)
        while following is not None and following.depth == 0 and following not in self._ahead:
            if self.held + following.nbytes > self.memory:
                break
            self._ahead[following] = self._begin(following)
            following = self._after.get(following)

    def drop(self, part: Part) -> None:
        """Take them away again."""
        part.depth -= 1
        if part.depth == 0:
            self._empty(part)
            self.held -= part.nbytes

    def _begin(self, part: Part) -> _Coming:
        self.held += part.nbytes
        self.most_held = max(self.most_held, self.held)
        if part.host is not None:
            assert self._stream is not None, "only a GPU has its weights on the host"
            with torch.cuda.stream(self._stream):
                flat = part.host.to(self.device, non_blocking=True)
                return _Coming(flat, event=self._stream.record_event())
        assert self._file is not None, "what is not on the host is in the file"
        flat = _aligned(part.nbytes)
        return _Coming(flat, ticket=self._file.read(part.offset, flat))

    def _forget(self) -> None:
        """Something else came than last time: drop what is on its way."""
        for part, coming in self._ahead.items():
            coming.wait(self.device)
            self.held -= part.nbytes
        self._ahead.clear()

    def close(self) -> None:
        """Put all parameters back into memory."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        for part in self.parts:
            if self._mapped:
                for place in part.places:
                    place.fill(getattr(place.owner, place.name).detach().clone())
            else:
                _attach(part, self._begin(part).wait(self.device))
        self.parts = []
        if self._file is not None:
            self._file.close()


def _folder(given: str | Path | None) -> str | Path:
    """Return a folder on a disk, which that for temporary files often is not."""
    if given is not None:
        return given
    base = get_cache_dir()
    if base is None:
        raise ValueError("there is no cache directory for streamed weights: set stream_folder")
    made = base / "weights"
    made.mkdir(parents=True, exist_ok=True)
    return made


def _before(owner: weakref.ref[Passing], part: Part) -> Any:
    def hook(module: nn.Module, arguments: Any) -> None:
        passing = owner()
        assert passing is not None, "the engine whose weights these are has been dropped: keep it"
        passing.bring(part)

    return hook


def _behind(owner: weakref.ref[Passing], part: Part) -> Any:
    def hook(module: nn.Module, arguments: Any, result: Any) -> None:
        passing = owner()
        if passing is not None:
            passing.drop(part)

    return hook


def _cut(root: nn.Module, most: int) -> list[Part]:
    """Return the parts of a module: the largest modules in it of up to ``most`` bytes that are called.

    The root is never one, as it may be used by other methods than ``forward``.
    """
    found: list[nn.Module] = []
    kept = {id(p) for p in root.parameters(recurse=False)}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            size = sum(p.nbytes for p in child.parameters())
            if size == 0:
                continue
            container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            whole = isinstance(child, nn.MultiheadAttention) or not any(
                p.nbytes for grandchild in child.children() for p in grandchild.parameters()
            )  # the first reaches into its own children
            if not container and (size <= most or whole):
                found.append(child)
            else:
                kept.update(id(p) for p in child.parameters(recurse=False))
                visit(child)

    visit(root)
    users: dict[int, int] = dict.fromkeys(kept, 2)  # one that somebody else has too stays in memory
    for module in found:
        for parameter in module.parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    parts = (Part(module, *_places(module, users)) for module in found)
    return [part for part in parts if part.places]


def _places(module: nn.Module, users: dict[int, int]) -> tuple[list[Place], int]:
    """Return where a module's own parameters are to lie, and the bytes of all."""
    places: list[Place] = []
    starts: dict[int, int] = {}
    total = 0
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if users[id(parameter)] > 1:
                continue
            if id(parameter) not in starts:
                starts[id(parameter)] = total
                total += -(-parameter.nbytes // _LINE) * _LINE
            at = starts[id(parameter)]
            kept = parameter.shape, parameter.dtype, parameter.requires_grad
            places.append(Place(owner, name, at, *kept))
    return places, total


def _aligned(nbytes: int) -> Tensor:
    """Return uint8 memory that begins at a page, so that reading may bypass the page cache."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes]


def _attach(part: Part, flat: Tensor) -> None:
    for place in part.places:
        place.fill(place.view(flat))
