"""Random programs over tensors: recorded and replayed, they give what running them gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.zero_init_support import build_plain_and_recorded, matches_plain, materialized_values
from thalweg.deferred_init.deferred_tensor import DeferredTensor, peek_value
from thalweg.deferred_init.op_graph import storage_records
from thalweg.deferred_init.record_mode import RecordMode

torch.set_num_threads(1)


KINDS = ["normal", "uniform", "mul", "add", "fill", "copy", "rows", "column", "mask", "index", "clamp"]
KINDS += ["zero", "bernoulli", "transpose", "swap", "trunc", "branch", "data", "exponential", "flip"]
KINDS += ["where", "turn"]


def _in_place(draw: random.Random, x: Tensor, y: Tensor) -> None:
    """One operation that changes ``x`` and may read ``y``, of the same shape."""
    name = draw.choice(KINDS)
    row = draw.randrange(x.shape[0])
    if name == "normal":
        x.normal_(0.5, 2)
    elif name == "uniform":
        x[row:].uniform_(-1, 1)
    elif name == "mul":
        x.mul_(y)
    elif name == "add":
        x.add_(y, alpha=0.5)
    elif name == "fill":
        x[row].fill_(draw.random())
    elif name == "copy":
        x.copy_(y)
    elif name == "rows":
        x[[row, 0]] = 1.5
    elif name == "column":
        x[:, -1] = y[:, 0]
    elif name == "mask":
        x[y > 0.3] = -1.0
    elif name == "index":
        x.index_copy_(0, torch.randperm(x.shape[0]), y)
    elif name == "clamp":
        x.clamp_(-0.7, 0.7)
    elif name == "zero":
        x.zero_()
    elif name == "bernoulli":
        x.bernoulli_(0.4)
    elif name == "transpose":
        x.t().copy_(y.t().contiguous() * 2)
    elif name == "swap":
        x.copy_(torch.cat([y[row:], x[:row]]))
    elif name == "trunc":
        nn.init.trunc_normal_(x)
    elif name == "branch":
        x.sub_(1.0) if y.mean() > 0 else x.add_(torch.rand(()))
    elif name == "data":
        x.data[:, ::2].normal_()
    elif name == "exponential":
        x.exponential_()
    elif name == "flip":
        x.copy_(x.flip(0))
    elif name == "turn":
        x.t_()[0].mul_(3)
        x.t_().unsqueeze_(0).squeeze_(0)
    elif name == "where":
        x.copy_(torch.where(torch.rand_like(y) > 0.5, x, y))


class Program(nn.Module):
    """Parameters, one of them a view of another's memory, after a random program."""

    def __init__(self, seed: int, length: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        draw = random.Random(seed)
        made = [torch.zeros(shape, dtype=dtype), torch.randn(shape, dtype=dtype), torch.rand(shape).to(dtype)]
        both = torch.empty(2 * shape[0], shape[1], dtype=dtype).normal_()
        made += [both[: shape[0]], both[shape[0] :], both[::2]]
        with torch.no_grad():
            for _ in range(length):
                x, y = draw.sample(made, 2)
                _in_place(draw, x, y)
                if draw.random() < 0.1:
                    made[draw.randrange(3)] = x * y - x.mean(0)
        self.tensors = nn.ParameterList(nn.Parameter(x, requires_grad=draw.random() < 0.5) for x in made)
        self.register_buffer("last", made[0] + 1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(0, 60),
    shape=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    small=st.sampled_from([0, 20, 10**6]),
)
def test_random_programs(seed: int, length: int, shape: tuple[int, int], dtype: torch.dtype, small: int) -> None:
    assert matches_plain(*build_plain_and_recorded(lambda: Program(seed, length, shape, dtype), small))


@settings(deadline=None, max_examples=40)
@given(
    numel=st.one_of(st.integers(1, 40), st.integers(65520, 65600), st.integers(131050, 131110)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    name=st.sampled_from(["normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_"]),
)
def test_the_generator_is_moved_on_as_by_the_operation(numel: int, dtype: torch.dtype, name: str) -> None:
    def draw() -> list[Any]:
        x = torch.empty(numel, dtype=dtype)
        getattr(x, name)()
        return [x, torch.rand(3), torch.get_rng_state()]

    torch.manual_seed(numel)
    x, after, state = draw()
    torch.manual_seed(numel)
    with RecordMode(max_real_numel=0):
        y, later, end = draw()
        assert isinstance(y, DeferredTensor)
        assert torch.equal(peek_value(later), after)
    assert torch.equal(peek_value(y), x) and torch.equal(state, end)


def test_a_remembered_value_is_not_taken_for_an_earlier_version() -> None:
    def build() -> nn.Module:
        x = torch.randn(6, 5)
        before = x * 2  # needs x as it is now, but is looked at later
        x.mul_(3)
        module = nn.Module()
        module.sign = nn.Parameter(torch.tensor(1.0 if x.mean() > 0 else -1.0))
        assert bool(x.sum() > 0) == (module.sign.item() > 0)
        assert torch.equal(before * 1.5, x)
        module.x, module.before = nn.Parameter(x), nn.Parameter(before)
        return module

    for _ in range(3):
        assert matches_plain(*build_plain_and_recorded(build, 0))


def test_a_lost_operation_is_noticed() -> None:  # negative control of the comparison
    plain, model = build_plain_and_recorded(lambda: Program(1, 20, (5, 6), torch.float32), 0)
    plain.tensors[1].data[0, 0] += 1e-6
    assert not matches_plain(plain, model)


class TwoPasses(nn.Module):
    """Initialises everything, then rescales everything: program order keeps all alive."""

    def __init__(self, count: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        for index, layer in enumerate(self.layers):
            layer.weight.data.div_((2.0 * (index + 1)) ** 0.5)


def test_replay_holds_one_parameter_at_a_time() -> None:
    from thalweg.deferred_init import replay

    _, model = build_plain_and_recorded(TwoPasses, 0)
    held: list[int] = []
    original = replay._Executor.run

    class Watched(replay._Executor):
        def _run_op(self, op: Any) -> None:
            super()._run_op(op)
            held.append(len(self.storages))

    replay_real, replay._Executor = replay._Executor, Watched  # type: ignore[misc]
    try:
        assert matches_plain(*build_plain_and_recorded(TwoPasses, 0))
    finally:
        replay._Executor = replay_real  # type: ignore[misc]
    assert original is replay_real.run and held and max(held) == 1
    del model


def test_dead_operations_are_forgotten_and_cells_are_cleaned() -> None:
    with RecordMode(max_real_numel=0):
        weight = torch.empty(50, 50)
        for _ in range(300):
            weight.normal_()
            weight.mul_(2)
        from thalweg.deferred_init.deferred_tensor import make_view_ref

        chain, op = 0, make_view_ref(weight).version
        while op is not None:
            chain, op = chain + 1, next(op.input_refs()).version
        assert chain == 2
    count = len(storage_records)
    del weight
    assert len(storage_records) == count - 1


def test_a_long_chain_is_replayed_and_freed_without_recursion() -> None:
    with RecordMode(max_real_numel=0):
        model = nn.Linear(3, 3)
        with torch.no_grad():
            for _ in range(5_000):
                model.weight[0].add_(1.0)
    found = materialized_values(model)["weight"]
    assert found[0].min() > 4_900 and found[1:].abs().max() < 1


@pytest.mark.parametrize("small", [0, 4096])
def test_wrong_programs_raise_what_they_always_raise(small: int) -> None:
    with RecordMode(small):
        x = torch.randn(20, 30)
        with pytest.raises(RuntimeError, match=r"must match|expand|broadcast"):
            x.copy_(torch.ones(7, 7))
        with pytest.raises(IndexError):
            x[25]
        leaf = nn.Parameter(x)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            leaf.mul_(2)
