"""Rows 21, 22 and 45 of PAIN_POINTS.md together: the bytes of LoRA on a base in few bits are those of the plan.

What is compared is what tensors hold, storage by storage, as operators make and drop them: it is the same in every run.
The resident memory of a process has the holes of glibc's heap besides, which ``test_plan.py`` bounds.  On a device it
is what its allocator handed out at the peak (FSDP2 gives storages their bytes and takes them, which no operator shows),
and what tensors hold on the host beside it.
"""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.test_adapters import LR, PLACES, make_model
from tests.harness import run_ranks
from tests.marks import nightly

SHAPES = {
    "narrow": ({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}, 4, 128),
    "wide": ({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}, 2, 64),
}


class _LiveTensors(TorchDispatchMode):
    """The most bytes of storages alive at once: of those there when it is made, but for ``others``, and of all that
    operators make."""

    def __init__(self, others: set[int]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()
        self._resting: list[tuple[int, int]] = []
        end, places = 0, []
        for key, storage in (pair for each in _tensors() for pair in _storages(each)):
            if key not in others:
                places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            self._known.add(key)
            weakref.finalize(storage, self._known.discard, key).atexit = False
        for start, stop in sorted(places):
            # Views of memory that ranks share are storages of their own, over the same bytes.
            self.bytes += max(0, stop - max(start, end))
            end = max(stop, end)
            self._resting.append((start, stop))

    def _see(self, tensor: Any) -> None:
        for key, storage in _storages(tensor):
            place = storage.data_ptr()
            if key not in self._known and not any(start <= place < stop for start, stop in self._resting):
                self._known.add(key)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._drop, key, storage.nbytes()).atexit = False

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.bytes -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.bytes)
        return result


def _tensors() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def _storages(tensor: Any) -> list[tuple[int, Any]]:
    """(key, storage) of each plain tensor inside that has memory of the host."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [pair for each in inside if isinstance(each, Tensor) for pair in _storages(each)]  # a DTensor has a mesh
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        return []
    storage = tensor.untyped_storage()
    return [(storage._cdata, storage)]


def _measure(rank: int, world: int, cases: list[tuple[str, str | None, int]], shape: str) -> list[tuple[int, int, int]]:
    """For each case (place, format of the base, tensor ranks) the bytes at the peak of a step: found, planned, and what
    a plan would say that takes the base for numbers."""
    return [_measure_one(rank, world, case, *SHAPES[shape]) for case in cases]


def _measure_one(
    rank: int, world: int, case: tuple[str, str | None, int], sizes: dict[str, int], batch_size: int, length: int
) -> tuple[int, int, int]:
    import thalweg

    place, weight_format, tensor = case
    config = {
        "train_micro_batch_size_per_gpu": batch_size, "zero_optimization": PLACES[place], "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": LR}}, "bf16": {"enabled": weight_format is None},
        "tensor_parallel": {"autotp_size": tensor},
    }  # fmt: skip
    on_device = torch.accelerator.is_available()
    if on_device:  # what a library keeps for its products is there before
        weight = torch.ones(8, 8, device=torch.accelerator.current_accelerator(), requires_grad=True)
        torch.nn.functional.linear(weight, weight).sum().backward()
        del weight
    gc.collect()
    before = torch.accelerator.memory_allocated() if on_device else 0
    others = {key for each in _tensors() for key, _ in _storages(each)}
    model = make_model(weight_format, sizes)
    ids = torch.randint(2, 131, (batch_size, length), generator=torch.Generator().manual_seed(rank // tensor))
    others |= dict(_storages(ids)).keys()
    kept = sum(storage.nbytes() for each in model.parameters() for _, storage in _storages(each))
    as_numbers = sum(each.nbytes for each in model.parameters())
    machine: dict[str, Any] = {"devices_per_node": world, "process_bytes": 0, "suggest": False}
    machine["device"] = "h100" if on_device else "cpu"
    plan = thalweg.plan(model, config, batch={"input_ids": ids, "labels": ids}, **machine)
    planned = max(sum(sample.live_bytes.values()) for sample in plan.timeline) + plan.tiers["host"]
    engine, *_ = thalweg.initialize(model=model, config=config)
    del model
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()  # the first one makes what stays
    gc.collect()
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
    with _LiveTensors(others) as live:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    held = live.peak + (torch.accelerator.max_memory_allocated() - before if on_device else 0)
    engine.close()
    return held, planned, planned + (as_numbers - kept) // tensor


CASES = list(product(["stage 3", "host"], ["nf4", "int8", None], [1, 2]))
BOUND = 0.05


@pytest.mark.parametrize(
    ("shape", "cases"),
    [("narrow", [("host", "nf4", 2)]), nightly("narrow", CASES), nightly("wide", CASES)],
    ids=["one", "narrow", "wide"],
)
def test_rows_21_22_45_lora_holds_the_bytes_that_its_plan_says(shape: str, cases: list[Any]) -> None:
    for results in run_ranks(_measure, 2, cases, shape, timeout=60 + 20 * len(cases)):
        found = dict(zip(cases, results, strict=True))
        for (_, weight_format, _), (held, planned, control) in found.items():
            assert abs(held - planned) <= BOUND * planned, found
            assert weight_format is None or abs(held - control) > BOUND * control, found
