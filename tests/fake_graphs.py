"""CUDA graphs where there is no CUDA: what a captured call has dispatched is dispatched again on the same tensors.

As with real ones nothing of Python runs in a replay, inputs and results lie where they lay at the capture, what is
computed on another device than the capture's stream has is done at once and not captured, and what would wait for the
device, or copy from the host, is refused.  :func:`module` stands for ``torch.cuda``; on the CPU the
refusals cannot be told from what is allowed.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

counts: Counter[str] = Counter()


class CUDAGraph:
    """Its calls, and what each of them returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def pool(self) -> object:
        return counts

    def replay(self) -> None:
        """Run the calls again; every result is written to where it was."""
        counts["replays"] += 1
        for call, args, kwargs, results in self.calls:
            for old, new in zip(tree_leaves(results), tree_leaves(call(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.layout == torch.strided]


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph, device: torch.device) -> None:
        super().__init__()
        self._graph, self._device, self._outer = graph, device, set[int]()
        # By where they are: what the capture has allocated.
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        devices = {x.device for x in _tensors((args, kwargs, results))}
        if len(devices) > 1 or (func.__name__.startswith("_local_scalar") and devices != {torch.device("cpu")}):
            raise RuntimeError(f"{func} is not permitted when the stream is capturing")
        if devices and devices != {self._device}:
            return results
        self._outer |= {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))} - self.made.keys()
        for x in _tensors(results):
            if x.untyped_storage().data_ptr() not in self._outer:
                self.made.setdefault(x.untyped_storage().data_ptr(), x)
        self._graph.calls.append((func, args, kwargs, results))
        return results


class Stream:
    """A stream of a device, by default of the current one."""

    def __init__(self, device: torch.device | None = None) -> None:
        if device is None:
            kind = torch.accelerator.current_accelerator(check_available=True)
            index = 0 if kind is None else torch.accelerator.current_device_index()
            device = torch.device("cpu") if kind is None else torch.device(kind.type, index)
        self.device = device


@contextlib.contextmanager
def graph(
    graph: CUDAGraph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture; what it has allocated holds nothing after it, as nothing runs."""
    counts["captures"] += 1
    assert pool is None or pool is counts
    with _Recorder(graph, (stream or Stream()).device) as recorder:
        yield
    for tensor in recorder.made.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def module() -> types.SimpleNamespace:
    """What stands for ``torch.cuda``."""
    counts.clear()
    return types.SimpleNamespace(CUDAGraph=CUDAGraph, Stream=Stream, graph=graph)
