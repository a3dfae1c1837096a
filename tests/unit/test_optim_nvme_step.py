"""The streamed update against the plain one, bit for bit in fp32: any shapes, options, placements, states."""

from __future__ import annotations

import copy
import errno
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thalweg.optim.algorithms import elementwise
from thalweg.optim.algorithms.adafactor import Adafactor
from thalweg.optim.algorithms.lamb import Lamb
from thalweg.optim.algorithms.lion import Lion
from thalweg.optim.algorithms.low_bit import LowBitAdam, LowBitLion
from thalweg.optim.algorithms.muon import Muon
from thalweg.optim.norms import compute_partial_norm, global_grad_norm
from thalweg.optim.offload.io_pipeline import (
    ALIGN_ELEMENTS,
    ParamStep,
    StepTensor,
    split_into_chunks,
    split_slices,
)
from thalweg.optim.offload.mmap_step import MmapStep
from thalweg.optim.offload.nvme_step import NvmeStep, optimizer_state_bytes
from thalweg.optim.step import InMemoryStep
from thalweg.storage_io.allocator import PAGE
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import SwapError, SwapFile

MIB = 1 << 20
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW fused": (elementwise.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "AdamW": (elementwise.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "torch AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adam uncorrected": (elementwise.Adam, {"lr": 1e-2, "bias_correction": False}),
    "SGD": (elementwise.SGD, {"lr": 1e-2}),
    "SGD momentum": (elementwise.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (elementwise.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.3}),
    "Adagrad fused": (elementwise.Adagrad, {"lr": 1e-2, "fused": True}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adadelta": (elementwise.Adadelta, {"lr": 1e-2}),
    "Adamax": (elementwise.Adamax, {"lr": 1e-2}),
    "ASGD": (elementwise.ASGD, {"lr": 1e-2}),
    "NAdam": (elementwise.NAdam, {"lr": 1e-2}),
    "RAdam": (elementwise.RAdam, {"lr": 1e-2}),
    "RMSprop": (elementwise.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Rprop": (elementwise.Rprop, {"lr": 1e-2}),
}
SHAPES = [
    (),
    (1,),
    (3,),
    (0,),
    (ALIGN_ELEMENTS,),
    (ALIGN_ELEMENTS - 1,),
    (ALIGN_ELEMENTS + 1,),
    (3 * ALIGN_ELEMENTS + 7,),
    (5, 4001),
    (2, 2, 2),
]
TINY = [(n % 17,) for n in range(120)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def free_bytes(swap: SwapFile) -> int:
    """Bytes that no region has taken."""
    return sum(stop - start for start, stop in swap._allocator._free_ranges)


@dataclass
class Where:
    """What lies in the swap file."""

    masters: bool = True
    grads: bool = True
    buffer_bytes: int = 6 * 4 * ALIGN_ELEMENTS
    num_buffers: int = 3
    batch: int = ALIGN_ELEMENTS


@dataclass
class Twin:
    """Two equal sets of parameters: one plain, one streamed."""

    plain: list[nn.Parameter]
    streamed: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    update: Any = None
    swap: SwapFile | None = None
    seed: int = 0

    def step(self, factor: float = 1.0, without: tuple[int, ...] = (), grads_in_swap: bool = True) -> None:
        self.seed += 1
        for i, (a, b) in enumerate(zip(self.plain, self.streamed, strict=True)):
            generator = torch.Generator().manual_seed(1000 * self.seed + i)
            a.grad = None if i in without else torch.randn(a.shape, generator=generator).to(a.dtype)
            b.grad = None
            if a.grad is not None:
                inside = self.swap is not None and grads_in_swap and b.numel() > 0
                b.grad = _into(self.swap, a.grad) if inside else a.grad.clone()
        InMemoryStep(self.optimizers[0]).apply(factor)
        self.update.apply(factor)

    def check(self) -> None:
        plain, streamed = self.optimizers
        for i, (a, b) in enumerate(zip(self.plain, self.streamed, strict=True)):
            assert torch.equal(a, b), f"parameter {i} of shape {tuple(a.shape)}"
            mine, theirs = streamed.state.get(b, {}), plain.state.get(a, {})
            assert set(mine) == set(theirs), (i, set(mine), set(theirs))
            for key, value in theirs.items():
                assert type(mine[key]) is type(value), key
                if isinstance(value, Tensor):
                    assert mine[key].dtype == value.dtype and mine[key].shape == value.shape, (i, key)
                    assert torch.equal(mine[key], value), (i, key)
                else:
                    assert mine[key] == value


def _into(swap: SwapFile | None, value: Tensor) -> Tensor:
    assert swap is not None
    view = swap.view(swap.allocate(value.nbytes), value.shape, value.dtype)
    return view.copy_(value)


def _twin(
    folder: Path,
    name: str,
    shapes: list[tuple[int, ...]],
    where: Where | None = None,
    groups: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Twin:
    where = where or Where()
    cls, hyper = CLASSES[name]
    torch.manual_seed(1)
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    swap = SwapFile(folder, 64 * MIB, num_threads=2)
    ring = BufferRing(where.num_buffers, where.buffer_bytes)
    plain = [nn.Parameter(v.clone()) for v in values]
    inside = where.masters
    streamed = [nn.Parameter(_into(swap, v) if inside and v.numel() else v.clone()) for v in values]
    twin = Twin(plain, streamed, swap=swap)
    for params in (plain, streamed):
        listed = [
            {"params": params[k::groups], "lr": hyper["lr"] * (k + 1)}
            | ({"weight_decay": 0.05 * k} if "weight_decay" in hyper else {})
            for k in range(groups)
        ]
        twin.optimizers.append(cls(listed, **hyper))
    twin.update = NvmeStep(
        twin.optimizers[1], swap, ring, chunk_elements=4 * ALIGN_ELEMENTS, batch_elements=where.batch
    )
    return twin


@pytest.mark.parametrize("name", CLASSES)
def test_every_elementwise_optimiser(tmp_path: Path, name: str) -> None:
    twin = _twin(tmp_path, name, SHAPES + TINY[:20])
    for turn in range(3):
        twin.step(factor=1.0 if turn != 1 else 0.3)
        twin.check()


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum", "Lion"])
@pytest.mark.parametrize(
    "where",
    [
        Where(masters=False, grads=False),
        Where(masters=True, grads=False, num_buffers=2),
        Where(masters=False, grads=True, buffer_bytes=50 * 4 * ALIGN_ELEMENTS, num_buffers=5),
    ],
    ids=["state alone", "masters too", "grads too"],
)
def test_every_placement(tmp_path: Path, name: str, where: Where) -> None:
    twin = _twin(tmp_path, name, SHAPES + TINY, where)
    for turn in range(3):
        twin.step(factor=0.7 if turn == 1 else 1.0, grads_in_swap=where.grads)
        twin.check()


def test_a_wrong_rate_would_be_noticed(tmp_path: Path) -> None:
    """Negative control."""
    twin = _twin(tmp_path, "AdamW fused", SHAPES)
    twin.optimizers[1].param_groups[1]["lr"] *= 1.001
    twin.step()
    with pytest.raises(AssertionError, match="parameter"):
        twin.check()


def test_options_may_change_between_steps(tmp_path: Path) -> None:
    twin = _twin(tmp_path, "AdamW fused", SHAPES, groups=3)
    for turn in range(4):
        for optimizer in twin.optimizers:
            optimizer.param_groups[turn % 3]["lr"] = 0.01 / (turn + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.2 * turn
        twin.step()
        twin.check()


def test_parameters_without_gradient_are_left_alone(tmp_path: Path) -> None:
    """Different parameters lack one in each step, so that counters and state differ among neighbours."""
    twin = _twin(tmp_path, "AdamW fused", SHAPES + TINY[:30])
    for turn in range(5):
        twin.step(without=tuple(i for i in range(40) if (i * 7 + turn) % 3 == 0))
        twin.check()
    twin.step(without=tuple(range(40)))
    twin.check()


@given(
    st.lists(
        st.sampled_from([0, 1, 2, 5, 16, 17, ALIGN_ELEMENTS - 1, ALIGN_ELEMENTS, ALIGN_ELEMENTS + 3, 20_011]),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from(["AdamW fused", "AdamW", "Adagrad fused", "RMSprop", "SGD momentum"]),
    st.integers(5, 30),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_any_shapes_and_buffers(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    name: str,
    grains: int,
    num_buffers: int,
    masters: bool,
    grads: bool,
    groups: int,
) -> None:
    where = Where(masters, grads, grains * 4 * ALIGN_ELEMENTS, num_buffers)
    twin = _twin(tmp_path_factory.mktemp("s"), name, [(n,) for n in sizes], where, groups)
    for turn in range(2):
        twin.step(factor=0.5 if turn else 1.0, without=(1,) if turn else (), grads_in_swap=grads)
        twin.check()


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum", "Lion"])
def test_sixteen_bit_parameters(tmp_path: Path, name: str) -> None:
    """State is fp32 and the update is rounded once, as without streaming."""
    twin = _twin(tmp_path, name, SHAPES + TINY[:10], dtype=torch.bfloat16)
    for _ in range(3):
        twin.step()
        twin.check()


@pytest.mark.parametrize("swapped", [True, False])
def test_bf16_gradients_and_copies(tmp_path: Path, swapped: bool) -> None:
    """16-bit gradients are widened batch by batch, and the bf16 copy is the rounded master."""
    torch.manual_seed(0)
    shapes = [(3 * ALIGN_ELEMENTS + 7,), (5, 4001), (3,), (17,)]
    values = [torch.randn(s) for s in shapes]
    grads = [torch.randn(s).to(torch.bfloat16) for s in shapes]
    plain = [nn.Parameter(v.clone()) for v in values]
    with closing(SwapFile(tmp_path, 8 * MIB)) as swap:
        params = [nn.Parameter(_into(swap, v) if swapped else v.clone()) for v in values]
        make = lambda ps: elementwise.AdamW(ps, lr=1e-2, fused=True)
        copies = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
        if swapped:
            copies = [_into(swap, c) for c in copies[:2]] + copies[2:]
        optimizer, reference = make(params), make(plain)
        update = NvmeStep(
            optimizer,
            swap,
            BufferRing(3, 40 * ALIGN_ELEMENTS),
            compute_copies=dict(zip(params, copies, strict=True)),
            batch_elements=ALIGN_ELEMENTS,
        )
        for _ in range(2):
            for a, b, g in zip(plain, params, grads, strict=True):
                a.grad = g.float()
                b.grad_dtype = None
                b.grad = _into(swap, g) if swapped else g
            reference.step()
            update.apply()
        for a, b, copied in zip(plain, params, copies, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(copied, a.to(torch.bfloat16))


def test_state_is_loaded_into_the_swap_file(tmp_path: Path) -> None:
    twin = _twin(tmp_path, "AdamW fused", SHAPES)
    twin.step()
    saved = copy.deepcopy(twin.optimizers[1].state_dict())
    again = _twin(tmp_path, "AdamW fused", SHAPES)
    for a, b in zip(again.plain + again.streamed, twin.plain + twin.streamed, strict=True):
        a.data.copy_(b)
    again.optimizers[0].load_state_dict(copy.deepcopy(twin.optimizers[0].state_dict()))
    again.optimizers[1].load_state_dict(saved)
    again.update.offload_state()
    again.check()
    assert again.swap is not None
    moments = [s["exp_avg"] for p, s in again.optimizers[1].state.items() if p.ndim and p.numel()]
    assert moments and all(again.swap.locate(m) is not None for m in moments)
    again.seed = twin.seed
    for either in (twin, again):
        either.step()
        either.check()
    assert all(torch.equal(a, b) for a, b in zip(twin.streamed, again.streamed, strict=True))


def test_state_is_a_view_of_the_file_and_counted_beforehand(tmp_path: Path) -> None:
    for name in ("AdamW fused", "Adagrad", "SGD", "Lion", "AdamW"):
        twin = _twin(tmp_path, name, [(3, 5), (9 * ALIGN_ELEMENTS,), (7,)])
        assert twin.swap is not None
        free = free_bytes(twin.swap)
        wanted = optimizer_state_bytes(twin.optimizers[0])
        twin.step(grads_in_swap=False)
        taken = 0 if name == "Adagrad" else free - free_bytes(twin.swap)  # made at the start
        assert name == "Adagrad" or taken == wanted, name
        for state in twin.optimizers[1].state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    assert twin.swap.locate(value) is not None, key


def test_the_norm_of_swapped_gradients_has_the_same_bits(tmp_path: Path) -> None:
    twin = _twin(
        tmp_path,
        "SGD",
        SHAPES[3:] + TINY + [(11 * ALIGN_ELEMENTS + 5,), (2 * ALIGN_ELEMENTS,), (2 * ALIGN_ELEMENTS - 1,)],
    )
    twin.step()
    wanted = float(global_grad_norm(twin.plain))
    assert twin.update.grad_norm(twin.streamed, None) == wanted
    assert twin.swap is not None
    read = twin.swap.reads.nbytes
    known = {p: compute_partial_norm(p.grad) for p in twin.streamed}
    assert twin.update.grad_norm(twin.streamed, None, known) == wanted
    assert twin.swap.reads.nbytes == read, "what was measured before is not read again"
    twin.streamed[-1].grad[77] += 1e-3
    assert twin.update.grad_norm(twin.streamed, None) != wanted
    twin.streamed[-1].grad[77] = float("nan")
    assert not twin.update.grad_norm(twin.streamed, None) < float("inf")


# Trouble


class _Breaks(Disk):
    """Every transfer fails from number ``after`` on."""

    def __init__(self, after: int, cause: int) -> None:
        self.after, self.cause, self.count = after, cause, 0

    def _step(self) -> None:
        self.count += 1
        if self.count > self.after:
            raise OSError(self.cause, "made to fail")

    def preadv(self, handle, buffers, offset) -> int:
        self._step()
        return super().preadv(handle, buffers, offset)

    def pwritev(self, handle, buffers, offset) -> int:
        self._step()
        return super().pwritev(handle, buffers, offset)


@pytest.mark.parametrize("after", [1, 2, 5, 9])
@pytest.mark.parametrize("cause", [errno.EIO, errno.ENOSPC])
def test_row24_a_failing_disk_is_one_clear_error(tmp_path: Path, after: int, cause: int) -> None:
    param = nn.Parameter(torch.randn(20 * ALIGN_ELEMENTS))
    optimizer = elementwise.AdamW([param], lr=0.1, fused=True)
    with closing(SwapFile(tmp_path, 8 * MIB, disk=_Breaks(after, cause))) as swap:
        update = NvmeStep(optimizer, swap, BufferRing(3, 8 * 4 * ALIGN_ELEMENTS))

        def train() -> None:
            for _ in range(3):
                param.grad = torch.ones_like(param)
                update.apply()

        with pytest.raises(SwapError, match="made to fail"):
            train()


def test_row24_a_tensor_larger_than_the_buffer(tmp_path: Path) -> None:
    """PAIN_POINTS 24: buffers that are too small are named; a tensor of many buffers is updated to the last element."""
    with closing(SwapFile(tmp_path, 8 * MIB)) as swap:
        start, grad = torch.randn(2, 50 * ALIGN_ELEMENTS + 1)
        param, expected = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        param.grad, expected.grad = grad.clone(), grad.clone()
        optimizer = elementwise.AdamW([param], lr=0.1, fused=True)
        with pytest.raises(ValueError, match="raise buffer_size"):
            NvmeStep(optimizer, swap, BufferRing(2, PAGE)).apply()
        NvmeStep(optimizer, swap, BufferRing(2, 2 * 4 * ALIGN_ELEMENTS)).apply()
        torch.optim.AdamW([expected], lr=0.1, fused=True).step()
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=1e-6)
        assert (param != start).all()


@pytest.mark.alone
def test_a_slow_disk_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Disk):
        def preadv(self, handle, buffers, offset) -> int:
            import time

            done = super().preadv(handle, buffers, offset)
            time.sleep(done / 60e6)
            return done

    logging.getLogger("thalweg").propagate = True
    param = nn.Parameter(torch.randn(6 << 20))
    optimizer = elementwise.AdamW([param], lr=0.1, fused=True)
    with closing(SwapFile(tmp_path, 64 * MIB, num_threads=1, disk=Slow())) as swap:
        update = NvmeStep(optimizer, swap, BufferRing(3, 4 * MIB))
        for _ in range(3):
            param.grad = torch.ones_like(param)
            update.apply()
    said = [r.message for r in caplog.records if "MB/s" in r.message]
    assert len(said) == 1 and str(tmp_path) in said[0] and "nvme_path" in said[0]


# Cutting


@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=12), st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_chunks_cover_everything_once(sizes: list[tuple[int, bool]], grains: int) -> None:
    items, at = [], 0
    for count, swapped in sizes:
        operands = {}
        for name in ("master", "m"):
            operands[name] = StepTensor(torch.empty(count), at if swapped else None, write=True)
            at += -(-count * 4 // PAGE) * PAGE
        items.append(ParamStep({}, torch.empty(0), count, operands, ("m",), {}, False))
    budget = grains * 4 * ALIGN_ELEMENTS
    seen: dict[int, int] = {id(item): 0 for item in items}
    pages: set[int] = set()
    for chunk in split_into_chunks(items, budget, 8 * ALIGN_ELEMENTS):
        assert sum(s.nbytes for s in chunk.reads) <= budget
        touched = {p for s in chunk.writes for p in range(s.file_offset, s.file_offset + s.nbytes, PAGE)}
        assert not touched & pages
        pages |= touched
        assert sum(p.stop - p.start for p in chunk.slices) <= 8 * ALIGN_ELEMENTS
        for batch in split_slices(chunk.slices, ALIGN_ELEMENTS):
            for piece in batch:
                assert piece.start == seen[id(piece.param_step)] and piece.start % ALIGN_ELEMENTS == 0
                seen[id(piece.param_step)] = piece.stop
    assert all(seen[id(item)] == item.numel for item in items)


# Optimisers that are not elementwise


@pytest.mark.parametrize("cls", [Lamb, Adafactor, Muon, partial(LowBitAdam, state_dtype="bf16"), LowBitLion])
def test_the_mapped_step_equals_the_plain_one(tmp_path: Path, cls: Any) -> None:
    torch.manual_seed(3)
    shapes = [(40, 30), (300, 70)] if cls is Muon else [(40, 30), (17,), (300, 70)]
    values = [torch.randn(s) for s in shapes]
    plain = [nn.Parameter(v.clone()) for v in values]
    with closing(SwapFile(tmp_path, 4 * MIB)) as swap:
        params = [nn.Parameter(_into(swap, v)) for v in values]
        reference, optimizer = cls(plain, lr=1e-2), cls(params, lr=1e-2)
        copies = {params[0]: torch.zeros(shapes[0], dtype=torch.bfloat16)}
        update = MmapStep(optimizer, swap, compute_copies=copies)
        for turn in range(3):
            for a, b in zip(plain, params, strict=True):
                a.grad = torch.randn(a.shape)
                b.grad = a.grad.clone()
            norm = float(global_grad_norm(plain))
            assert update.grad_norm(params, None) == norm
            factor = 0.5 if turn else 1.0
            InMemoryStep(reference).apply(factor)
            update.apply(factor)
            assert all(torch.equal(a, b) for a, b in zip(plain, params, strict=True))
            assert all(b.grad is not None for b in params)
        large = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        large = [v for v in large if v.shape in [tuple(s) for s in shapes]]
        assert all(swap.locate(v) is not None for v in large)
        assert torch.equal(copies[params[0]], params[0].to(torch.bfloat16))
