"""Names for what a tape is laid from: kernels by what they do, buffers of rows, calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from thalweg.ops.native import attend, gemm, lora, meeting, panels, pointwise
from thalweg.ops.native.ir import Library
from thalweg.ops.native.kept import Heads
from thalweg.ops.native.tape import Tape, pointer


class Rows:
    """A buffer of rows that are ready for packed weights: ``width`` columns, padded, of a kind.

    ``y`` (rows, width) takes the fp32 values; for the kind ``fp32`` it is the operand itself where its rows
    need no padding.
    """

    def __init__(self, rows: int, width: int, kind: str, y: Tensor) -> None:
        self.width, self.kind, self.y = width, kind, y
        columns = panels.padded(width)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[kind]
        plain = kind == "fp32" and y.stride(0) >= columns
        self.ready = y if plain else row_buffer(rows, columns, dtype)
        self.stride = self.ready.stride(0) * self.ready.element_size()
        self.scale = torch.zeros(rows)
        self.sums = torch.zeros(rows, columns // panels.GROUP)
        self.total = torch.zeros(rows, dtype=torch.int32)

    def arguments(self) -> list[Any]:
        """Return the arguments that :data:`pointwise.OUTPUTS` names."""
        sums = self.sums.stride(0) * 4
        y = self.y.stride(0) * 4
        return [self.y, y, self.ready, self.stride, self.scale, self.sums, sums, self.total]

    def sums_for(self, form: str) -> list[Any]:
        """Return the sums that a product with weights of a form asks for, and their stride."""
        return [self.sums, self.sums.stride(0) * 4] if form == "int4" else [self.total, 4]


def row_buffer(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros (rows, columns) whose rows do not all start in the same set of the first cache."""
    per_line = 64 // dtype.itemsize
    stride = panels.padded(columns)
    if stride * dtype.itemsize % 1024 == 0:
        stride += per_line
    return torch.zeros(rows, stride, dtype=dtype)[:, :columns]


@dataclass(frozen=True)
class Call:
    """A kernel by name and its arguments: tensors stand for their addresses."""

    kernel: str
    arguments: Sequence[Any]


class Kernels:
    """The kernels that a tape needs, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], str] = {}
        self._modules: dict[str, Any] = {}

    def _kernel(self, make: Callable[..., str], *args: Any) -> str:
        key = (make, *args)
        if key not in self._made:
            module = ir.Module("kernels")
            self._made[key] = make(module, *args)
            self._modules[self._made[key]] = module
        return self._made[key]

    def norm(self, style: str, kind: str) -> str:
        """Normalise rows (``rms``, ``layer``, ``none``) and make them ready as a kind."""
        return self._kernel(pointwise.norm, style, kind)

    def activate(self, function: str, gated: bool, kind: str) -> str:
        """Apply an activation and make rows ready as a kind."""
        return self._kernel(pointwise.activate, function, gated, kind)

    def add(self) -> str:
        """Add rows to rows."""
        return self._kernel(pointwise.add)

    def pick(self) -> str:
        """Copy chosen rows."""
        return self._kernel(pointwise.pick)

    def best(self) -> str:
        """Find each row's largest number."""
        return self._kernel(pointwise.best)

    def product(self, form: str) -> str:
        """Multiply rows with a packed weight."""
        return self._kernel(gemm.product, form)

    def rotate(self, heads: Heads) -> str:
        """Rotate queries and keys, store keys and values."""
        return self._kernel(attend.rotate, heads)

    def attend(self, heads: Heads) -> str:
        """Attend to the paged cache."""
        return self._kernel(attend.attend, heads)

    def meet(self) -> str:
        """Wait for the other ranks."""
        return self._kernel(meeting.meet)

    def join(self) -> str:
        """Add up the ranks' rows."""
        return self._kernel(meeting.join)

    def shrink(self) -> str:
        """Multiply rows with their adapters' first matrices."""
        return self._kernel(lora.shrink)

    def expand(self) -> str:
        """Add the product with their adapters' second matrices."""
        return self._kernel(lora.expand)

    def compile(self) -> Compiled:
        """Turn everything into machine code; what another engine has needed is at hand."""
        return Compiled({name: _compiled(str(module)) for name, module in self._modules.items()})


class Compiled:
    """Machine code by kernel, alive as long as this object is."""

    def __init__(self, libraries: dict[str, Library]) -> None:
        self._libraries = libraries

    def address(self, name: str) -> int:
        """Return where a kernel lies."""
        return self._libraries[name].address(name)


@lru_cache(128)
def _compiled(text: str) -> Library:
    return Library(text)


def lay(calls: Sequence[Call], library: Compiled, keep: Sequence[Any], threads: int = 0) -> Tape:
    """Make a tape of calls; ``keep`` lives as long as it does, ``threads`` is 0 for as many as torch has."""
    rows = []
    for call in calls:
        values = [pointer(x) if isinstance(x, Tensor) else int(x) for x in call.arguments]
        rows.append((library.address(call.kernel), values))
    tensors = [x for call in calls for x in call.arguments if isinstance(x, Tensor)]
    return Tape(rows, [library, *keep, *tensors], threads)
