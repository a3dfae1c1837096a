"""Row 45: a frozen base in few bits, small trained layers beside it, every stage and tier, and thawing.

The base is fp32, bf16, int8 with a scale a row, int4 packed in pairs with a scale a group, or a wrapper: a
tensor class of a quantiser's own, of which ZeRO knows nothing but that plain tensors are inside.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.parity import bitwise_equal, full_named
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.zero.whole_parameter import get_shard

REUSE_RANKS = True

WIDTH, GROUP, RANKS, STEPS, THAW = 24, 8, 2, 5, 3
PLACES = [
    (0, "none", "none"),
    (1, "none", "none"),
    (2, "none", "nvme"),
    (3, "none", "none"),
    (3, "none", "cpu"),
    (3, "none", "nvme"),
    (3, "nvme", "none"),
    (3, "nvme", "nvme"),
]


class Codes(torch.Tensor):
    """A wrapper as quantisers make them: shows fp32, holds int8 codes and a wrapper of their scales."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Any) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return (["codes", "scale"] if isinstance(self.scale, Codes) else ["codes"]), self.scale

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Codes(inner["codes"], inner.get("scale", context))

    def values(self) -> Tensor:
        scale = self.scale.values() if isinstance(self.scale, Codes) else self.scale
        return self.codes.float() * scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("detach", "alias"):
            return Codes(args[0].codes, args[0].scale)
        raise NotImplementedError(f"nobody may do {name} with codes")


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales): two values of 4 bits a byte, a scale for each group of a row."""
    groups = weight.view(WIDTH, -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = ((groups / scale).round() + 8).to(torch.uint8).view(WIDTH, -1)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scale


def unpacked(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight that :func:`packed` stands for."""
    pairs = torch.stack([codes & 15, codes >> 4], 2).view(WIDTH, -1, GROUP)
    return ((pairs.to(scale.dtype) - 8) * scale).view(WIDTH, WIDTH)


class Layer(nn.Module):
    """A linear layer with a frozen base and, but for the last layer, a low-rank one beside it."""

    def __init__(self, kind: str, adapted: bool) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.kind = kind
        if kind == "int8":
            weight = (weight / scale).round().to(torch.int8)
        elif kind == "int4":
            weight, scale = packed(weight)
        elif kind == "wrapper":
            codes = (weight / scale).round().to(torch.int8)
            weight = Codes(codes, Codes(scale.bfloat16(), torch.tensor(1.0)))
        elif kind == "bf16":
            weight = weight.to(torch.bfloat16)
        if kind.startswith("int"):
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.base = nn.Parameter(weight, requires_grad=False)
        if adapted:
            self.down = nn.Parameter(torch.randn(4, WIDTH) / WIDTH**0.5)
            self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.values() if self.kind == "wrapper" else self.base
        if self.kind == "int4":
            base = unpacked(base, self.scale)
        base = base.to(x.dtype)
        if self.kind == "int8":
            base = base * self.scale.to(x.dtype)
        y = F.linear(x, base)
        return y + F.linear(F.linear(x, self.down), self.up) if hasattr(self, "down") else y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(kind, adapted=index < 2) for index in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - y).float().square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * 4, WIDTH, generator=generator)
    return x, x.roll(1, 1)


def settings(folder: str, stage: int, param: str, state: str, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if param != "none":
        zero["offload_param"] = {"device": param, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
    if state != "none":
        zero["offload_optimizer"] = {"device": state, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.5}},
        "zero_optimization": zero,
        "memory": {"preflight": "off"},
        "log_level": "error",
        **more,
    }


def thaw(model: nn.Module) -> list[nn.Parameter]:
    thawed = [p for name, p in model.named_parameters() if name.endswith("base")]
    for parameter in thawed:
        parameter.requires_grad_(True)
    return thawed


def plain(kind: str) -> tuple[list[float], list[Tensor]]:
    """One process, plain PyTorch."""
    model = Model(kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.3, momentum=0.5), []
    for step in range(STEPS):
        if step == THAW and kind in ("fp32", "bf16"):
            optimizer.add_param_group({"params": thaw(model)})
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters() if not isinstance(p, Codes)]


def train(rank: int, kind: str, config: dict[str, Any]) -> tuple[list[float], list[Tensor], list[str]]:
    """Losses, parameters at the end, and what is wrong with dtypes or with what has moved."""
    import thalweg

    model, wrong = Model(kind), []
    engine, *_ = thalweg.initialize(model=model, config=config)
    before = full_named(engine.module.named_parameters())
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
    for name, value in before.items():
        if name.endswith("base") and value.dtype != expected[kind]:
            wrong.append(f"{name} has become {value.dtype}")
    losses, thaws = [], kind in ("fp32", "bf16")
    for step in range(STEPS):
        if step == THAW and thaws:
            engine.optimizer.add_param_group({"params": thaw(engine.module)})
        x, y = (part[rank * 4 : rank * 4 + 4] for part in batch(step))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    after = full_named(engine.module.named_parameters())
    for name, value in after.items():
        moves = name.endswith(("up", "down")) or (thaws and name.endswith("base"))
        if moves == torch.equal(value, before[name]):
            wrong.append(f"{name} has {'not ' if moves else ''}moved")
    engine.close()
    return losses, [value for name, value in after.items() if "parametrizations" not in name], wrong


def _everywhere(rank: int, world: int, kind: str, low: bool) -> tuple[Any, list[str]]:
    torch.set_num_threads(1)
    failures: list[str] = []
    first: Any = None
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for place in PLACES if kind in ("fp32", "bf16") else PLACES[::3] + PLACES[-1:]:
            more = {"bf16": {"enabled": True}} if low else {}
            losses, values, wrong = train(rank, kind, settings(folder, *place, **more))
            failures += [f"{place}: {one}" for one in wrong]
            first = first or (losses, values)
            if losses != first[0] or not bitwise_equal(values, first[1]):
                failures.append(f"{place} gives other numbers than stage 0: {losses} for {first[0]}")
    return (first[0], [value.float().tolist() for value in first[1]]), failures


@pytest.mark.parametrize("kind", [nightly("fp32"), "bf16", nightly("int8"), "int4", "wrapper"])
def test_row45_a_frozen_base_in_few_bits_trains_its_adapters_and_thaws(kind):
    losses, expected = plain(kind)
    ranks = run_ranks(_everywhere, RANKS, kind, False)
    assert [failures for _, failures in ranks] == [[], []]
    mean = torch.tensor([found[0] for found, _ in ranks]).mean(0)
    # A gradient in bf16 is rounded once a rank's part here, and once in all there.
    close = {"rtol": 1e-5, "atol": 1e-5} if kind != "bf16" else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(mean, torch.tensor(losses), **close)
    for value, wanted in zip(ranks[0][0][1], expected, strict=True):
        torch.testing.assert_close(torch.tensor(value), wanted.float(), **close)


@pytest.mark.parametrize("kind", [nightly("bf16"), "int4", nightly("wrapper")])
def test_row45_the_same_under_bf16(kind):
    for _, failures in run_ranks(_everywhere, RANKS, kind, True):
        assert failures == []


def _hosts(rank: int, world: int, kind: str) -> list[float]:
    """Two ranks that take each other for other hosts: FSDP2's own gathers."""
    import os

    os.environ["THALWEG_HOST"] = f"host {rank}"
    losses, _, wrong = train(rank, kind, settings(".", 3, "none", "none"))
    assert wrong == []
    return losses


@pytest.mark.parametrize("kind", [nightly("bf16"), "int4", nightly("wrapper")])
def test_row45_over_two_hosts(together, kind):
    losses = torch.tensor(together(_hosts, RANKS)).mean(0)
    torch.testing.assert_close(losses, torch.tensor(plain(kind)[0]), rtol=2e-2, atol=2e-3)


def _edited(rank: int, world: int) -> list[list[float]]:
    """Every way of writing to frozen weights is seen (a teacher's moving average); where masters of another
    dtype lie on a disk, all but ``p.data``, which no counter counts."""
    import thalweg

    ways: list[Any] = [lambda p: p.mul_(2.0), lambda p: p.data.mul_(2.0), lambda p: get_shard(p).to_local().mul_(2.0)]
    found = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for place in ((3, "none", "none"), (0, "none", "none"), (3, "nvme", "nvme")):
            for way in (None, *(ways if place[1] == "none" else ways[::2])):
                config = settings(folder, *place, bf16={"enabled": True})
                engine, *_ = thalweg.initialize(model=Model("fp32"), config=config)
                losses = []
                for step in range(3):
                    if step == 2 and way is not None:
                        with torch.no_grad():
                            for name, parameter in engine.module.named_parameters():
                                if name.endswith("base"):
                                    way(parameter)
                    x, y = (part[rank * 4 : rank * 4 + 4] for part in batch(step))
                    engine.backward(loss := engine(x, y))
                    engine.step()
                    losses.append(loss.item())
                engine.close()
                found.append(losses)
    return found


def test_writes_to_frozen_weights_are_seen():
    for found in run_ranks(_edited, RANKS):
        untouched = found[::4]
        assert untouched == [untouched[0]] * 3
        edited = [losses for index, losses in enumerate(found) if index % 4]
        assert edited == [edited[0]] * 8
        assert edited[0][:2] == untouched[0][:2] and edited[0][2] != untouched[0][2]


def _wrong(rank: int, world: int) -> bool:
    good, other = (settings(".", 3, "none", "none", seed=seed) for seed in (1, 2))
    other["optimizer"] = {"type": "SGD", "params": {"lr": 0.30001, "momentum": 0.5}}
    return bitwise_equal(train(rank, "int4", good)[1], train(rank, "int4", other)[1])


def test_negative_control_another_rate_is_noticed():
    assert run_ranks(_wrong, 1) == [False]


def _refusals(rank: int, world: int) -> None:
    import thalweg

    config = settings(".", 3, "none", "none")
    engine, *_ = thalweg.initialize(model=Model("int8"), config=config)
    with pytest.raises(RuntimeError, match="floating point"):  # torch's own
        thaw(engine.module)
    engine.close()
    for change, words in ((_trained, "freeze it"), (_shared, "shared with layers.1.base")):
        model = Model("wrapper")
        change(model)
        with pytest.raises(ValueError, match=words):
            thalweg.initialize(model=model, config=config)


def _trained(model: Model) -> None:
    model.layers[0].base.requires_grad_(True)


def _shared(model: Model) -> None:
    model.layers[1].base = model.layers[0].base


def test_row45_what_cannot_be_is_refused_with_a_reason():
    run_ranks(_refusals, 1)
