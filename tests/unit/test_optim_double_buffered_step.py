"""Updates that can be taken back: committed they are the plain ones, discarded they never were."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_optim_nvme_step import free_bytes
from thalweg.optim.algorithms import elementwise
from thalweg.optim.algorithms.lion import Lion
from thalweg.optim.offload.io_pipeline import ALIGN_ELEMENTS
from thalweg.optim.offload.nvme_step import NvmeStep
from thalweg.optim.offload.step_in_backward import DoubleBufferedStep, double_buffer_bytes
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapError, SwapFile

SHAPES = [(3,), (2 * ALIGN_ELEMENTS + 5,), (ALIGN_ELEMENTS,), (5, 1001)]
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (elementwise.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "SGD": (elementwise.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "plain SGD": (elementwise.SGD, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3}),
}


class Twins:
    """The same parameters in memory and in a swap file, each with its optimiser."""

    def __init__(self, folder: Path, name: str) -> None:
        make, options = CLASSES[name]
        torch.manual_seed(0)
        self.plain = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.swap = SwapFile(folder, 4 << 20, num_threads=2)
        self.paged = [nn.Parameter(self._place(p.detach())) for p in self.plain]
        self.copies = {p: self._place(p.detach().bfloat16()) for p in self.paged[1:]}
        self.reference = make(self.plain, **options)
        self.optimizer = make(self.paged, **options)
        self.update = NvmeStep(
            self.optimizer, self.swap, BufferRing(3, 40 * ALIGN_ELEMENTS), compute_copies=self.copies
        )
        self.swap_bytes = double_buffer_bytes(self.update)
        self.tentative = DoubleBufferedStep(self.update)

    def _place(self, value: Tensor) -> Tensor:
        view = self.swap.view(self.swap.allocate(value.nbytes), value.shape, value.dtype)
        return view.copy_(value)

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for plain, paged in zip(self.plain, self.paged, strict=True):
            plain.grad = torch.randn(plain.shape, generator=generator)
            paged.grad = plain.grad.clone()

    def snapshot(self) -> list[Any]:
        states = [dict(self.optimizer.state.get(p, {})) for p in self.paged]
        return copy.deepcopy([[p.detach() for p in self.paged], list(self.copies.values()), states])

    def agree(self) -> bool:
        same = [torch.equal(a, b) for a, b in zip(self.plain, self.paged, strict=True)]
        for plain, paged in zip(self.plain, self.paged, strict=True):
            here, there = self.reference.state[plain], self.optimizer.state[paged]
            same += [list(here) == list(there)]
            same += [torch.equal(here[key], there[key]) for key in here if torch.is_tensor(here[key])]
            if paged in self.copies:
                same.append(torch.equal(plain.detach().bfloat16(), self.copies[paged]))
        return all(same)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.parametrize("name", CLASSES)
def test_steps_that_stand_are_the_plain_ones_and_others_never_were(tmp_path: Path, name: str) -> None:
    """Lost steps come first, in between and last; units are taken one after the other."""
    twins = Twins(tmp_path, name)
    for step, stands in enumerate([False, True, False, False, True, True, False]):
        twins.gradients(step)
        before = twins.snapshot()
        for unit in (twins.paged[2:], twins.paged[:2]):
            assert all(map(twins.tentative.can_step, unit))
            twins.tentative.apply(set(unit))
        assert _same(before, twins.snapshot())  # nothing shows before the step stands
        if stands:
            twins.reference.step()
            twins.tentative.commit()
            assert twins.agree(), step
        else:
            twins.tentative.discard()
            assert _same(before, twins.snapshot())
    twins.swap.close()


def test_the_second_places_are_counted_beforehand_and_taken_once(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "AdamW")
    left = []
    for step in range(5):
        twins.gradients(step)
        twins.tentative.apply(set(twins.paged))
        twins.tentative.commit()
        left.append(free_bytes(twins.swap))
    assert left[1] == left[2] == left[4]
    states = sum(-(-p.nbytes // 4096) * 4096 * 2 for p in twins.paged)
    assert left[0] - left[1] == states  # moments: their first place came into being, then their second
    assert twins.swap_bytes >= left[0] - left[1]
    twins.swap.close()


def test_hints_change_nothing_but_when_bytes_are_read(tmp_path: Path) -> None:
    """Right, wrong and idle ones; a right one costs no byte, and masters may change once it is taken back."""
    twins = Twins(tmp_path, "AdamW")
    units = (twins.paged[2:], twins.paged[:2])
    read = []
    for step in range(8):
        twins.gradients(step)
        before = twins.swap.reads.nbytes
        for unit in units:
            twins.tentative.apply(set(unit))
            if step >= 3:
                other = units[0] if unit is units[1] else units[1]
                guess = unit if unit is units[1] or step % 2 else other
                twins.tentative.readahead(set(guess))
        twins.reference.step()
        twins.tentative.commit()
        twins.tentative.discard()
        read.append(twins.swap.reads.nbytes - before)
        assert twins.agree(), step
        with torch.no_grad():
            for plain, paged in zip(twins.plain, twins.paged, strict=True):
                plain.mul_(0.5)
                paged.mul_(0.5)
    twins.swap.close()
    assert read[2] == read[1]
    assert sum(read[3:]) > 5 * read[2]  # what was read in vain


def test_what_lies_in_memory_is_not_taken(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "AdamW")
    assert not twins.tentative.can_step(nn.Parameter(torch.zeros(7)))
    twins.update.compute_copies[twins.paged[0]] = torch.zeros(3)
    assert not twins.tentative.can_step(twins.paged[0])
    twins.swap.close()


def test_an_update_in_place_would_be_noticed(tmp_path: Path) -> None:
    """Negative control: the stream itself, without second places."""
    twins = Twins(tmp_path, "AdamW")
    twins.gradients(0)
    before = twins.snapshot()
    twins.update.apply(1.0)
    assert not _same(before, twins.snapshot())
    twins.swap.close()


def test_the_disk_does_not_pause_between_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit's writes may be under way while the next is updated, and are over before the step stands."""
    twins = Twins(tmp_path, "AdamW")
    units, may_write, write_block = (twins.paged[2:], twins.paged[:2]), threading.Event(), twins.swap._file.transfer
    held: list[str] = []

    def transfer(verb: str, *args: Any) -> None:
        """The first write waits."""
        if verb == "write" and not held:
            held.append(verb)
            assert may_write.wait(60)
        write_block(verb, *args)

    def finish_held(call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and held
        may_write.set()
        thread.join()

    for step in range(2):
        twins.gradients(step)
        twins.tentative.apply(set(twins.paged))
        twins.tentative.commit()
        twins.reference.step()
    monkeypatch.setattr(twins.swap._file, "transfer", transfer)
    twins.gradients(2)
    for unit in units:
        twins.tentative.apply(set(unit))
    finish_held(twins.tentative.commit)
    twins.reference.step()
    assert twins.agree()
    # The control: an update in place returns when it is written.
    may_write.clear()
    held.clear()
    twins.gradients(3)
    finish_held(twins.update.apply)
    twins.reference.step()
    assert twins.agree()
    twins.swap.close()


@pytest.mark.parametrize("end", ["commit", "discard", "next unit"])
def test_a_write_that_fails_late_leaves_the_step_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    twins = Twins(tmp_path, "AdamW")
    for step in range(2):
        twins.gradients(step)
        twins.tentative.apply(set(twins.paged))
        twins.tentative.commit()
        twins.reference.step()
    before, transfer = twins.snapshot(), twins.swap._file.transfer

    def fail(verb: str, *args: Any) -> None:
        if verb == "write":
            raise OSError(errno.ENOSPC, "no room")
        transfer(verb, *args)

    def take_all_buffers() -> None:
        for _ in range(4):
            twins.tentative.apply(set(twins.paged[2:3]))

    twins.gradients(2)
    with monkeypatch.context() as broken:
        broken.setattr(twins.swap._file, "transfer", fail)
        twins.tentative.apply(set(twins.paged[3:]))
        if end == "commit":
            with pytest.raises(SwapError, match="cannot write"):
                twins.tentative.commit()
        if end == "next unit":
            with pytest.raises(SwapError, match="cannot write"):
                take_all_buffers()
        twins.tentative.discard()
    assert _same(before, twins.snapshot())
    twins.gradients(2)
    twins.tentative.apply(set(twins.paged))
    twins.tentative.commit()
    twins.reference.step()
    assert twins.agree()
    twins.swap.close()
