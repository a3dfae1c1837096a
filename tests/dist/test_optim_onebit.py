"""1-bit Adam, 1-bit LAMB and 0/1 Adam under the engine, against the papers' algorithms written down plainly here.

The simulation is one process with a copy of the model for each worker, and knows nothing of the package: a dict of
tensors for each parameter, loops over workers and blocks.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.models import VOCAB_SIZE, make_batch
from tests.dist.parity import full_tensor, full_tensors, largest_difference, train
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.config import ConfigError, load_config
from thalweg.optim.build import build_optimizer
from thalweg.optim.dtensor_local import to_local

REUSE_RANKS = True

FREEZE = 10
HYPER: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 2e-3, "weight_decay": 0.05, "freeze_step": FREEZE},
    "OneBitLamb": {"lr": 2e-3, "weight_decay": 0.05, "freeze_step": FREEZE, "coeff_beta": 0.8},
    "ZeroOneAdam": {
        "lr": 2e-3,
        "weight_decay": 0.05,
        "var_freeze_step": 22,
        "var_update_scaler": 8,
        "local_step_scaler": 8,
        "local_step_clipper": 4,
    },
}
# Workers of a job of so many ranks: each on a host of its own, or two to a host.
APART, IN_PAIRS = "apart", "in pairs"


class Net(nn.Module):
    """Several blocks to a matrix, blocks that are not full, a scalar; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, 40)
        self.embed.weight.data *= 0.1  # what is rounded is then smaller than what is asked for
        self.layers = nn.ModuleList([nn.Linear(40, 37), nn.Linear(37, VOCAB_SIZE)])
        self.norm = nn.LayerNorm(37)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layers[0](self.embed(tokens))))
        logits = self.layers[1](x) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Slope(nn.Module):
    """Parameters of some shapes, and a loss that is linear in them."""

    def __init__(self, seed: int, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]
        self.tensors = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, seed: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        slopes = [(torch.randn(p.shape, generator=generator) + 0.3).to(p.device) for p in self.tensors]
        return sum((p * slope).sum() for p, slope in zip(self.tensors, slopes, strict=True)) / 100


class Slopes(nn.Module):
    """Gradients that depend on the batch alone.

    A number next to zero may round to either sign; in a model this is another gradient at the next step, and soon
    another trajectory.  Here it is what it is, so that algorithms can be compared over many steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Slope(0, [(61, 40), (37,)]), Slope(1, [(700, 3), (), (5, 6, 7)])])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        tokens = tokens.cpu()  # a seed is the host's
        seed = (tokens * torch.arange(1, tokens.numel() + 1).view_as(tokens)).sum()
        return self.layers[0](seed) + self.layers[1](seed + 1)


MODELS = {"Net": Net, "Slopes": Slopes}

# ---- the papers' algorithms, one process, all workers ----


def bits(x: Tensor, pieces: int = 1) -> Tensor:
    """C[x]: the sign times the mean magnitude, in blocks of 1024, which begin anew with each rank's piece of rows."""
    blocks = [block for piece in x.chunk(pieces) for block in piece.flatten().split(1024)]
    return torch.cat([torch.where(torch.signbit(b), -b.abs().mean(), b.abs().mean()) for b in blocks]).view_as(x)


class Workers:
    """The models of all workers, and what the algorithms keep for them."""

    def __init__(self, model: str, count: int, hyper: dict[str, Any], feedback: bool = True, pieces: int = 1) -> None:
        self.model, self.models, self.pieces = model, [MODELS[model]() for _ in range(count)], pieces
        self.hyper, self.feedback = {"betas": (0.9, 0.999), "eps": 1e-8, **hyper}, feedback
        self.names = [name for name, _ in self.models[0].named_parameters()]
        zeros = {name: torch.zeros_like(p) for name, p in self.models[0].named_parameters()}
        self.m = [copy.deepcopy(zeros) for _ in self.models]
        self.v = copy.deepcopy(zeros)
        self.error = [copy.deepcopy(zeros) for _ in self.models]
        self.server = copy.deepcopy(zeros)

    def params(self, worker: int) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.models[worker].named_parameters()}

    def mean_in_bits(self, name: str, values: list[Tensor]) -> Tensor:
        if values[0].dim() == 0:  # a scalar's gradient is reduced as it is
            return values[0]
        if len(values) == 1:  # nothing is sent; what a job of several owed is paid
            owed, self.error[0][name] = self.error[0][name], torch.zeros_like(values[0])
            return values[0] + owed
        sent = []
        for value, error in zip(values, self.error, strict=True):
            owed = value + error[name] if self.feedback else value
            sent.append(bits(owed, self.pieces))
            error[name] = owed - sent[-1]
        total = sum(sent[1:], sent[0]) / len(sent) + (self.server[name] if self.feedback else 0.0)
        result = bits(total, self.pieces)
        self.server[name] = total - result
        return result

    def grads(self, step: int, micros: int, ranks_per_worker: int, clip: float) -> list[dict[str, Tensor]]:
        """Each worker's gradient, a mean over its ranks and micro-batches; clipped by the root mean square of norms."""
        world = len(self.models) * ranks_per_worker
        result = []
        for worker, model in enumerate(self.models):
            model.zero_grad()
            for micro in range(micros):
                tokens, labels = make_batch(step * micros + micro, 2 * world)
                for rank in range(worker * ranks_per_worker, (worker + 1) * ranks_per_worker):
                    (model(tokens[rank::world], labels[rank::world]) / (micros * ranks_per_worker)).backward()
            result.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for scalar in (name for name, grad in result[0].items() if grad.dim() == 0):
            mean = sum(grads[scalar] for grads in result) / len(result)
            for grads in result:
                grads[scalar] = mean.clone()
        if clip:
            squares = [sum(float(g.double().square().sum()) for g in grads.values()) for grads in result]
            norm = math.sqrt(sum(squares) / len(squares))
            for grads in result:
                for grad in grads.values():
                    grad *= min(1.0, clip / (norm + 1e-6))
        return result


def regroup(old: Workers, count: int, pieces: int) -> Workers:
    """Other workers with what ``old`` have: as many go on with their errors, others owe the mean of all each."""
    new = Workers(old.model, count, old.hyper, old.feedback, pieces)
    kept = copy.deepcopy({key: value for key, value in old.__dict__.items() if key in ("kept", "keep")})
    if "keep" in kept:
        keep = kept["keep"]
        assert not any(bool(u[name].any()) for u in keep["u"] for name in old.names), "they are apart"
        keep["u"] = [copy.deepcopy(keep["u"][0]) for _ in range(count)]
        keep["anchor"] = [copy.deepcopy(old.params(0)) for _ in range(count)]
    new.__dict__.update(kept)
    new.v = copy.deepcopy(old.v)
    for i in range(count):
        for name in old.names:
            new.params(i)[name].copy_(old.params(0)[name])
            new.m[i][name] = old.m[0][name].clone()
            if count == len(old.error):
                new.error[i][name], new.server[name] = old.error[i][name].clone(), old.server[name].clone()
            else:
                new.error[i][name] = sum(error[name] for error in old.error) / len(old.error) + old.server[name]
    return new


def mean_grad(grads: list[dict[str, Tensor]], name: str) -> Tensor:
    return (
        sum(g[name] for g in grads[1:]) / len(grads) + grads[0][name] / len(grads) if len(grads) > 1 else grads[0][name]
    )


def fill_zeros(v: Tensor) -> Tensor:
    """What has had no gradient takes the mean variance."""
    return torch.where(v == 0, v.mean(), v)


def onebit_adam(w: Workers, step: int, grads: list[dict[str, Tensor]]) -> None:
    """Algorithm 1 of 2102.02888, with AdamW's decay."""
    (b1, b2), eps, lr, decay = w.hyper["betas"], w.hyper["eps"], w.hyper["lr"], w.hyper["weight_decay"]
    frozen = step > w.hyper["freeze_step"]
    for name in w.names:
        if frozen:
            moments = [w.m[i][name] + (1 - b1) * (g[name] - w.m[i][name]) for i, g in enumerate(grads)]
            moment, count = w.mean_in_bits(name, moments), w.hyper["freeze_step"]
        else:
            grad, count = mean_grad(grads, name), step
            moment = w.m[0][name] + (1 - b1) * (grad - w.m[0][name])
            w.v[name] = b2 * w.v[name] + (1 - b2) * grad * grad
        v = fill_zeros(w.v[name]) if frozen else w.v[name]
        denominator = (v / (1 - b2**count)).sqrt() + eps
        for i in range(len(grads)):
            w.m[i][name] = moment
            w.params(i)[name].mul_(1 - lr * decay).sub_(lr / (1 - b1**step) * moment / denominator)


def onebit_lamb(w: Workers, step: int, grads: list[dict[str, Tensor]]) -> None:
    """Algorithm 1 of 2104.06069: LAMB, then a fixed mean ratio times a bounded factor."""
    (b1, b2), eps, lr, decay = w.hyper["betas"], w.hyper["eps"], w.hyper["lr"], w.hyper["weight_decay"]
    frozen, count = step > w.hyper["freeze_step"], min(step, w.hyper["freeze_step"])
    kept = w.__dict__.setdefault("kept", {name: {"ratio": None, "factor": 1.0, "fresh": None} for name in w.names})
    for name in w.names:
        param, state = w.params(0)[name].clone(), kept[name]
        old = w.m[0][name]
        if frozen:
            if state["fresh"] is None:
                w.v[name] = fill_zeros(w.v[name])
                state["fresh"] = w.v[name].clone()
            moment = w.mean_in_bits(name, [old + (1 - b1) * (g[name] - old) for g in grads])
            seen = (moment - b1 * old) / (1 - b1)
            state["fresh"] = b2 * state["fresh"] + (1 - b2) * seen * seen
        else:
            grad = mean_grad(grads, name)
            moment = old + (1 - b1) * (grad - old)
            w.v[name] = b2 * w.v[name] + (1 - b2) * grad * grad
        denominator = (w.v[name] / (1 - b2**count)).sqrt() + eps
        direction = moment / (1 - b1**step) / denominator
        update = direction + decay * param
        if frozen:
            largest = float((denominator / ((state["fresh"] / (1 - b2**step)).sqrt() + eps)).max())
            share = min(1.0, float(direction.norm() / update.norm()))
            factor = min(max(largest * share + 1 - share, 0.5), 4.0)
            state["factor"] = min(max(factor, state["factor"] * 0.9), state["factor"] * 1.1)
            ratio = state["ratio"] * state["factor"]
        else:
            norms = float(param.double().norm()), float(update.double().norm())
            ratio = min(max(norms[0] / norms[1], 0.01), 10.0) if min(norms) > 0 else 1.0
            beta = w.hyper["coeff_beta"]
            state["ratio"] = ratio if state["ratio"] is None else beta * state["ratio"] + (1 - beta) * ratio
        for i in range(len(grads)):
            w.m[i][name] = moment
            w.params(i)[name].sub_(lr * ratio * update)


def zero_one_adam(w: Workers, step: int, grads: list[dict[str, Tensor]]) -> None:
    """Algorithm 1 of 2202.06009, with its policies; momentum takes the exact gradient where that is sent."""
    (b1, b2), eps, lr, decay = w.hyper["betas"], w.hyper["eps"], w.hyper["lr"], w.hyper["weight_decay"]
    limits, keep = w.hyper, w.__dict__.setdefault("keep", {"looks": 0, "next_look": 1, "meet": 1, "sum": 0.0})
    if step == 1:
        keep["u"] = [{name: torch.zeros_like(p) for name, p in w.params(0).items()} for _ in grads]
        keep["anchor"] = [copy.deepcopy(w.params(i)) for i in range(len(grads))]
    looks, meets = step == keep["next_look"], step == keep["meet"]
    if looks:
        for name in w.names:
            grad = mean_grad(grads, name)
            w.v[name] = b2 * w.v[name] + (1 - b2) * grad * grad
        keep["looks"] += 1
        following = step + 2 ** ((keep["looks"] - 1) // limits["var_update_scaler"])
        keep["next_look"] = following if following <= limits["var_freeze_step"] else -1
        exact = {name: mean_grad(grads, name) for name in w.names}
        grads = [exact for _ in grads]  # it has been sent, so momentum takes it
    weight = lr / (1 - b1**step)
    keep["sum"] += weight
    for name in w.names:
        denominator = (fill_zeros(w.v[name]) / (1 - b2 ** keep["looks"])).sqrt() + eps
        for i, grad in enumerate(grads):
            w.m[i][name] = w.m[i][name] + (1 - b1) * (grad[name] - w.m[i][name])
            keep["u"][i][name] += weight * w.m[i][name]
            keep["anchor"][i][name] *= 1 - lr * decay
            w.params(i)[name].mul_(1 - lr * decay).sub_(weight * w.m[i][name] / denominator)
        if meets and looks:
            for i in range(len(grads)):
                keep["anchor"][i][name] = w.params(i)[name].clone()
                keep["u"][i][name].zero_()
        elif meets:
            total = w.mean_in_bits(name, [u[name] for u in keep["u"]])
            for i in range(len(grads)):
                w.m[i][name] = total / keep["sum"]
                w.params(i)[name].copy_(keep["anchor"][i][name] - total / denominator)
                keep["anchor"][i][name] = w.params(i)[name].clone()
                keep["u"][i][name].zero_()
    if meets:
        past = step - limits["var_freeze_step"]
        interval = 1 if past < 0 else min(limits["local_step_clipper"], 2 ** (past // limits["local_step_scaler"]))
        keep["sum"], keep["meet"] = 0.0, step + interval


ALGORITHMS = {"OneBitAdam": onebit_adam, "OneBitLamb": onebit_lamb, "ZeroOneAdam": zero_one_adam}


def simulate(
    model: str,
    name: str,
    workers: int,
    steps: int,
    micros: int = 1,
    ranks: int = 1,
    clip: float = 0.0,
    feedback: bool = True,
    pieces: int = 1,
    **changes: Any,
) -> list[Tensor]:
    """The parameters of worker 0 after ``steps``, each worker being so many ``ranks`` that have ``pieces`` of it."""
    all_workers = Workers(model, workers, {**HYPER[name], **changes}, feedback, pieces)
    go_on(all_workers, name, range(1, steps + 1), micros, ranks, clip)
    return list(all_workers.params(0).values())


def go_on(all_workers: Workers, name: str, steps: range, micros: int = 1, ranks: int = 1, clip: float = 0.0) -> None:
    """Make these steps, counted from 1."""
    for step in steps:
        # Before the freeze gradients are means over all workers already, and so is their norm.
        grads = all_workers.grads(
            step - 1, micros, ranks, 0.0 if step <= all_workers.hyper.get("freeze_step", 0) else clip
        )
        if clip and step <= all_workers.hyper.get("freeze_step", 0):
            mean = {key: mean_grad(grads, key) for key in all_workers.names}
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
            grads = [{key: g * min(1.0, clip / (norm + 1e-6)) for key, g in mean.items()} for _ in grads]
        with torch.no_grad():
            ALGORITHMS[name](all_workers, step, grads)


# ---- the engine ----


def place(rank: int, hosts: str) -> None:
    os.environ["THALWEG_HOST"] = f"host {rank // 2 if hosts == IN_PAIRS else rank}"


def make_engine(name: str, stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    import thalweg

    changes = more.pop("hyper", {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": name, "params": {**HYPER.get(name, {}), **changes}},
        "zero_optimization": {"stage": stage},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }
    return thalweg.initialize(model=model or Net(), config=config)[0]


def _trajectory(
    rank: int,
    world: int,
    model: str,
    name: str,
    stage: int,
    hosts: str,
    steps: int,
    micros: int,
    clip: float,
    more: dict[str, Any],
) -> list[Tensor]:
    place(rank, hosts)
    options = {"gradient_accumulation_steps": micros, "gradient_clipping": clip, **more}
    engine = make_engine(name, stage, MODELS[model](), **options)
    train(engine, rank, world, 0, steps, micros)
    engine.optimizer.consolidate_state_dict()
    params = full_tensors(engine.module.parameters())
    engine.close()
    return params


def follow(
    model: str,
    name: str,
    world: int,
    stage: int,
    hosts: str,
    steps: int,
    micros: int = 1,
    clip: float = 0.0,
    device: str | None = None,
    **more: Any,
) -> float:
    """How far the engine's ranks are from the simulation, at most; ``more``: of the config."""
    per_worker = 2 if hosts == IN_PAIRS else 1
    arguments = (model, name, stage, hosts, steps, micros, clip, more)
    ranks = run_ranks(_trajectory, world, *arguments, device=device)
    pieces = per_worker if stage > 0 else 1
    expected = simulate(model, name, world // per_worker, steps, micros, per_worker, clip, pieces=pieces)
    return max(largest_difference(params, expected) for params in ranks)


GATE_STAGES = {"OneBitAdam": 0, "OneBitLamb": 1, "ZeroOneAdam": 2}
AT_EACH_STAGE = [
    (name, stage) if GATE_STAGES[name] == stage else nightly(name, stage) for name in HYPER for stage in (0, 1, 2)
]


@pytest.mark.parametrize(("name", "stage"), AT_EACH_STAGE)
@pytest.mark.parametrize(("world", "hosts"), [(2, APART), nightly(3, APART), nightly(4, APART), nightly(4, IN_PAIRS)])
def test_the_engine_follows_the_papers_algorithm(name: str, world: int, stage: int, hosts: str) -> None:
    assert follow("Slopes", name, world, stage, hosts, 50) < 1e-6


@pytest.mark.parametrize(("name", "steps"), [("OneBitAdam", 15), nightly("OneBitLamb", 20), ("ZeroOneAdam", 10)])
def test_a_model_follows_it_until_something_rounds_to_another_sign(name: str, steps: int) -> None:
    assert follow("Net", name, 2, 0, APART, steps) < 1e-6


@pytest.mark.parametrize(("micros", "clip"), [(2, 0.0), (1, 0.3), nightly(2, 0.3)])
@pytest.mark.parametrize("name", ["OneBitAdam", nightly("OneBitLamb"), nightly("ZeroOneAdam")])
def test_accumulated_and_clipped_as_the_simulation(name: str, micros: int, clip: float) -> None:
    """Clipped after the freeze by the root mean square of the workers' norms, which all of them know."""
    assert follow("Slopes", name, 2, 0, APART, steps=20, micros=micros, clip=clip) < 1e-6


def test_what_the_simulation_would_notice() -> None:
    """Without error feedback, with another freeze, with another rate: none of them passes for the algorithm."""
    plain = simulate("Slopes", "OneBitAdam", 2, 30)
    assert largest_difference(plain, simulate("Slopes", "OneBitAdam", 2, 30, feedback=False)) > 1e-4
    assert largest_difference(plain, simulate("Slopes", "OneBitAdam", 2, 30, freeze_step=FREEZE + 1)) > 1e-4
    assert (
        largest_difference(plain, simulate("Slopes", "OneBitAdam", 2, 30, lr=HYPER["OneBitAdam"]["lr"] * 1.001)) > 1e-5
    )


def offloaded(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("name", "stage", "world", "hosts"),
    [("OneBitAdam", 1, 2, APART)]
    + [nightly(name, stage, 2, APART) for name in HYPER for stage in (1, 2)]
    + [nightly(name, stage, 4, IN_PAIRS) for name in HYPER for stage in (1, 2)],
)
def test_row44_offloaded_states_follow_the_papers_algorithm(name: str, stage: int, world: int, hosts: str) -> None:
    assert follow("Slopes", name, world, stage, hosts, 50, **offloaded(stage)) < 1e-6


@pytest.mark.parametrize(
    ("name", "stage", "on_host"),
    [("OneBitAdam", 0, False), nightly("OneBitAdam", 2, True)]
    + [
        nightly(name, stage, on_host)
        for name in ("OneBitLamb", "ZeroOneAdam")
        for stage, on_host in ((1, True), (2, False))
    ],
)
def test_an_accelerator_follows_it_too(name: str, stage: int, on_host: bool) -> None:
    """A simulated one, where bits are packed by torch's operators and states may rest on the host."""
    options = offloaded(stage) if on_host else {}
    assert follow("Slopes", name, 2, stage, APART, 30, device="sim", **options) < 1e-6


def _bits_off(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    """Of 0/1 Adam whose variance takes every gradient: whether it is Adam, and whether it still is with bits."""
    place(rank, APART)
    shared = {"lr": 2e-3, "weight_decay": 0.05}
    zero = {"stage": stage, **({"mics_shard_size": 1} if stage else {})}  # the same pieces: kernels round by them
    theirs = train(make_engine("Adam", stage, hyper=shared, zero_optimization=zero), rank, world, 0, 12)
    off, on = {"var_freeze_step": 100, "var_update_scaler": 100}, {"var_freeze_step": 100, "var_update_scaler": 8}
    ours, bits = (train(make_engine("ZeroOneAdam", stage, hyper=shared | x), rank, world, 0, 12) for x in (off, on))
    return all(map(torch.equal, ours, theirs)), all(map(torch.equal, bits, theirs))


@pytest.mark.parametrize(("world", "stage"), [(2, 0), nightly(2, 1), nightly(2, 2), nightly(4, 0)])
def test_zero_one_adam_without_bits_is_adam_to_the_bit(world: int, stage: int) -> None:
    assert run_ranks(_bits_off, world, stage) == [(True, False)] * world


def _before_the_freeze(rank: int, world: int, name: str, plain: str, stage: int) -> tuple[bool, bool]:
    place(rank, APART)
    late = {"freeze_step": 100, "coeff_beta": 0.9} if name == "OneBitLamb" else {"freeze_step": 100}
    shared = {"lr": 2e-3, "weight_decay": 0.05}
    ours = train(make_engine(name, stage, hyper=late | shared), rank, world, 0, 8)
    zero = {"stage": stage, **({"mics_shard_size": 1} if stage else {})}  # the same pieces: kernels round by them
    theirs = train(make_engine(plain, stage, hyper=shared, zero_optimization=zero), rank, world, 0, 8)
    frozen = train(make_engine(name, stage, hyper={**shared, "freeze_step": 7}), rank, world, 0, 8)
    return all(map(torch.equal, ours, theirs)), all(map(torch.equal, ours, frozen))


@pytest.mark.parametrize(
    ("name", "plain", "stage"),
    [("OneBitLamb", "Lamb", 2)]
    + [nightly("OneBitAdam", "Adam", stage) for stage in (0, 1, 2)]
    + [nightly("OneBitLamb", "Lamb", stage) for stage in (0, 1)],
)
def test_before_the_freeze_every_bit_is_the_plain_optimisers(name: str, plain: str, stage: int) -> None:
    assert run_ranks(_before_the_freeze, 2, name, plain, stage) == [(True, False)] * 2


# ---- what travels ----


class Wide(nn.Module):
    """420,000 parameters: what is sent beside them does not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, 384)
        self.layers = nn.ModuleList([nn.Linear(384, 512), nn.Linear(512, 384), nn.Linear(384, VOCAB_SIZE)])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def _bytes_of_a_step(
    rank: int, world: int, name: str, stage: int, more: dict[str, Any] | None = None
) -> tuple[int, set[str], int]:
    """Bytes to other hosts, kinds and modules in the ledger, of a step after the freeze."""
    place(rank, APART)
    hyper = {"freeze_step": 2} if name.startswith("OneBit") else {"var_freeze_step": 2, "var_update_scaler": 4}
    engine = make_engine(name, stage, Wide(), hyper=hyper if name != "AdamW" else {}, **(more or {}))
    train(engine, rank, world, 0, 3)
    engine.ledger.reset()
    train(engine, rank, world, 3, 4)
    entries = [entry for entry in engine.ledger.entries() if entry.inter_bytes]
    numel = sum(p.numel() for p in engine.module.parameters())
    return sum(entry.inter_bytes for entry in entries), {f"{e.kind} {e.transport}" for e in entries}, numel


@pytest.mark.parametrize(("name", "stage"), AT_EACH_STAGE)
def test_after_the_freeze_only_bits_travel(name: str, stage: int) -> None:
    for sent, kinds, numel in run_ranks(_bytes_of_a_step, 2, name, stage):
        assert kinds == {"all_reduce onebit"}
        assert sent <= 4 * numel / 28  # two halves, there and back: fp32 sends 4 bytes a number


def _bytes_of_errors(rank: int, world: int, name: str, stage: int) -> tuple[int, int, set[str]]:
    """Bytes that this rank keeps of what it owes, the parameters that it has, and where the errors are."""
    place(rank, IN_PAIRS if world == 4 else APART)
    engine = make_engine(
        name, stage, Wide(), hyper={"freeze_step": 2} if name.startswith("OneBit") else {}, **offloaded(stage)
    )
    train(engine, rank, world, 0, 12)
    pairs = [(to_local(engine.optimizer.state[p]["worker_error"]), to_local(p)) for p in engine.module.parameters()]
    return sum(e.nbytes for e, _ in pairs), sum(p.numel() for _, p in pairs), {e.device.type for e, _ in pairs}


@pytest.mark.parametrize("name", ["OneBitAdam", nightly("OneBitLamb"), nightly("ZeroOneAdam")])
def test_row44_offloaded_bytes_are_counted(name: str) -> None:
    """On the wire as without offload; of errors 4 bytes for each number that a rank has."""
    for sent, kinds, numel in run_ranks(_bytes_of_a_step, 2, name, 1, offloaded(1)):
        assert kinds == {"all_reduce onebit"} and sent <= 4 * numel / 28
    whole = sum(p.numel() for p in Wide().parameters())
    assert run_ranks(_bytes_of_errors, 2, name, 1) == [(4 * whole, whole, {"cpu"})] * 2


def test_without_compression_the_ledger_counts_fp32() -> None:
    for sent, kinds, numel in run_ranks(_bytes_of_a_step, 2, "AdamW", 0):
        assert kinds == {"all_reduce wire"} and sent >= 4 * numel


def _reductions_of_a_window(rank: int, world: int, name: str, stage: int) -> set[int]:
    """How often each module's gradients (and the momentum) are reduced in a window of three micro-batches."""
    place(rank, APART)
    engine = make_engine(name, stage, gradient_accumulation_steps=3)
    train(engine, rank, world, 0, FREEZE + 1, 3)
    engine.ledger.reset()
    train(engine, rank, world, FREEZE + 1, FREEZE + 2, 3)
    return {entry.num_calls for entry in engine.ledger.entries() if entry.kind in ("all_reduce", "reduce_scatter")}


@pytest.mark.parametrize(
    ("name", "stage", "calls"),
    [
        ("AdamW", 1, 1),
        ("AdamW", 2, 3),
        ("OneBitAdam", 2, 1),
        nightly("AdamW", 0, 1),
        nightly("AdamW", 3, 3),
        nightly("OneBitAdam", 0, 1),
    ],
)
def test_a_window_reduces_once_where_the_stage_allows_it(name: str, stage: int, calls: int) -> None:
    """Stages 2 and 3 keep gradients in shards, so each micro-batch is reduced; momentum never is before the step."""
    assert run_ranks(_reductions_of_a_window, 2, name, stage) == [{calls}] * 2


def _on_one_host(rank: int, world: int, stage: int) -> tuple[bool, int]:
    """Among the ranks of one host nothing travels, so nothing is rounded: Adam with its variance held."""
    os.environ["THALWEG_HOST"] = "one"
    engine = make_engine("OneBitAdam", stage)
    params = train(engine, rank, world, 0, 20)
    return largest_difference(params, simulate("Net", "OneBitAdam", 1, 20, ranks=2)) < 1e-6, len(params)


@pytest.mark.parametrize("stage", [nightly(0), nightly(1), 2])
def test_ranks_of_one_host_are_one_worker(stage: int) -> None:
    assert all(same for same, _ in run_ranks(_on_one_host, 2, stage))


# ---- checkpoints ----


def _resume(rank: int, world: int, name: str, stage: int, at: int, folder: str) -> tuple[bool, bool]:
    place(rank, APART)
    first = make_engine(name, stage)
    train(first, rank, world, 0, at)
    first.save_checkpoint(folder, tag="here")
    whole = train(first, rank, world, at, at + 6)
    second = make_engine(name, stage)
    second.load_checkpoint(folder, tag="here")
    gone_on = train(second, rank, world, at, at + 6)
    forgets = make_engine(name, stage)
    forgets.load_checkpoint(folder, tag="here")
    for param in forgets.optimizer.inner.state.values():
        param.pop("worker_error", None)
    other = train(forgets, rank, world, at, at + 6)
    return all(map(torch.equal, whole, gone_on)), all(map(torch.equal, whole, other))


@pytest.mark.parametrize(
    ("name", "stage", "at"),
    [("ZeroOneAdam", 0, 30), *(nightly("OneBitAdam", stage, 14) for stage in (0, 2)), nightly("OneBitLamb", 1, 14)]
    + [nightly("ZeroOneAdam", stage, at) for stage in (0, 2) for at in (5, 31, 43)],
)
def test_a_run_that_stopped_goes_on_to_the_bit(name: str, stage: int, at: int) -> None:
    """At step 43 the workers of 0/1 Adam are apart; the save makes them meet.  Until step 9 it has sent no bits."""
    owes_nothing = name == "ZeroOneAdam" and at < HYPER[name]["var_update_scaler"]
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_resume, 2, name, stage, at, folder) == [(True, owes_nothing)] * 2


def _owed(engine: Any) -> dict[str, Tensor]:
    """For each parameter, what has been given to the exchange and has not come out."""
    optimizer, owed = engine.optimizer.inner, {}
    optimizer.consolidate_state_dict()
    for name, param in engine.module.named_parameters():
        state = engine.optimizer.state[param]
        if "worker_error" in state:
            owed[name] = full_tensor(state["worker_error"]).mean(0)
            owed[name] = owed[name] + full_tensor(state["server_error"]) if "server_error" in state else owed[name]
    return owed


AT, UNTIL = 16, 36


def _save_owed(rank: int, world: int, hosts: str, stage: int, name: str, folder: str) -> dict[str, Tensor]:
    place(rank, hosts)
    engine = make_engine(name, stage, Slopes())
    train(engine, rank, world, 0, AT)
    engine.save_checkpoint(folder, tag="here")
    return _owed(engine)


def _load_owed(
    rank: int, world: int, hosts: str, stage: int, name: str, folder: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    place(rank, hosts)
    engine = make_engine(name, stage, Slopes())
    engine.load_checkpoint(folder, tag="here")
    owed = _owed(engine)
    train(engine, rank, world, AT, UNTIL)
    engine.optimizer.consolidate_state_dict()
    return owed, full_tensors(engine.module.parameters())


def _workers(world: int, hosts: str, stage: int) -> tuple[int, int, int]:
    """Workers of a job, ranks of each, and the pieces that they have."""
    per_worker = 2 if hosts == IN_PAIRS else 1
    return world // per_worker, per_worker, per_worker if stage else 1


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("OneBitAdam", (2, APART, 0), (3, APART, 1))]
    + [nightly(name, (2, APART, 0), (3, APART, 1)) for name in ("ZeroOneAdam", "OneBitLamb")]
    + [
        nightly(name, before, after)
        for name in HYPER
        for before, after in [
            ((2, APART, 0), (1, APART, 0)),
            ((4, APART, 0), (4, IN_PAIRS, 2)),
            ((4, IN_PAIRS, 1), (2, APART, 0)),
            ((4, IN_PAIRS, 0), (2, APART, 1)),
        ]
    ],
)
def test_other_workers_owe_what_these_owed(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """And they go on as the simulation does with it, through the freeze of 0/1 Adam's variance and its local steps."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_save_owed, before[0], *before[1:], name, folder)[0]
        loaded = run_ranks(_load_owed, after[0], *after[1:], name, folder)
    assert len(saved) == 4, "of all but the scalar"
    assert all(float(error.abs().max()) > 1e-7 for error in saved.values()), "there is nothing to lose"
    count, ranks, pieces = _workers(*before)
    old = Workers("Slopes", count, HYPER[name], pieces=pieces)
    go_on(old, name, range(1, AT + 1), ranks=ranks)
    count, ranks, pieces = _workers(*after)
    new, forgetful = regroup(old, count, pieces), regroup(old, count, pieces)
    for errors in (*forgetful.error, forgetful.server):
        for error in errors.values():
            error.zero_()
    for workers in (new, forgetful):
        go_on(workers, name, range(AT + 1, UNTIL + 1), ranks=ranks)
    expected, without = (list(workers.params(0).values()) for workers in (new, forgetful))
    for owed, params in loaded:
        assert owed.keys() == saved.keys()
        assert max(float((owed[key] - saved[key]).abs().max()) for key in saved) < 1e-7
        assert largest_difference(params, expected) < 1e-6 < largest_difference(params, without)


# ---- precision, offload, refusals ----


def _precision(rank: int, world: int, name: str, stage: int, more: dict[str, Any]) -> tuple[list[Tensor], float, float]:
    place(rank, APART)
    engine = make_engine(name, stage, **more)
    losses = []
    for step in range(30):
        tokens, labels = make_batch(step % 3, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.optimizer.consolidate_state_dict()
    return full_tensors(engine.module.parameters()), losses[0], losses[-1]


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
PURE_BF16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
ON_HOST = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [("ZeroOneAdam", 0, FP16)]
    + [nightly(name, 2, BF16) for name in HYPER]
    + [nightly(name, 0, FP16) for name in ("OneBitAdam", "OneBitLamb")]
    + [nightly(name, 1, more) for name in HYPER for more in (PURE_BF16, ON_HOST)],
)
def test_replicas_stay_replicas_in_every_precision(name: str, stage: int, more: dict[str, Any]) -> None:
    """In fp16 the first steps overflow, some of them on one worker alone: all skip."""
    (first, before, after), (second, _, _) = run_ranks(_precision, 2, name, stage, more)
    assert all(map(torch.equal, first, second)) and after < before - 0.05


@pytest.mark.parametrize("name", list(HYPER))
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"zero_optimization": {"stage": 3}}, "0, 1 or 2"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "exchanged at once",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "data-parallel ranks"),
        ({"sequence_parallel_size": 2}, "data-parallel ranks"),
        ({"pipeline": {"stages": 2}}, "data-parallel ranks"),
    ],
)
def test_what_does_not_go_with_bits_is_refused_by_name(name: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config({"optimizer": {"type": name, "params": {"lr": 1e-3}}, **more}, world_size=2)


def test_what_had_no_gradient_before_the_freeze_does_not_run_away() -> None:
    """Momentum over a variance of nothing is momentum / eps: a step of a million."""
    some, none = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
    optimizer = build_optimizer("OneBitAdam", [some, none], {"freeze_step": 2, "lr": 1e-2})
    for step in range(4):
        late = float(step >= 2)
        some.grad, none.grad = torch.tensor([1.0, 1.0, 1.0, late]), torch.full((3,), late)
        optimizer.step()
    assert 0.9 < some[3].item() < 1.0 and torch.equal(none, torch.ones(3))


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_a_group_that_joins_later_is_trained_or_refused(name: str) -> None:
    first, late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = build_optimizer(name, [first], {"lr": 1e-2, **({} if name == "ZeroOneAdam" else {"freeze_step": 5})})
    for step in range(8):
        if step == 3:
            optimizer.add_param_group({"params": [late]})
        for param in (first, late):
            param.grad = torch.full((4,), 0.5)
        before = late.detach().clone()
        optimizer.step()
        if step > 3:
            assert 0 < (before - late.detach()).abs().max() < 0.1, step
    if name != "ZeroOneAdam":
        with pytest.raises(ValueError, match="no parameters can join after freeze_step"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})


# ---- when the variance is stable ----


def _auto_freeze(rank: int, world: int) -> tuple[int, int]:
    place(rank, APART)
    hyper = {"freeze_step": "auto", "betas": [0.9, 0.95]}
    frozen = []
    for scale in (1.0, 0.0):  # a loss that moves on, and one whose gradients shrink by a tenth at each step
        engine = make_engine("OneBitAdam", 0, hyper={**hyper, "lr": 1e-5})
        for step in range(60):
            tokens, labels = make_batch(step % 2, 2 * world)
            factor = scale or 0.9**step
            engine.backward(engine(tokens[rank::world], labels[rank::world]) * factor)
            engine.step()
        frozen.append(engine.optimizer.param_groups[0]["frozen_at"])
    return tuple(frozen)


@pytest.mark.nightly
def test_auto_freezes_when_the_variance_stands_still() -> None:
    """1 / (1 - b2) is 20 steps: not before the norm of 20 steps ago is known, and never while gradients shrink."""
    for steady, shrinking in run_ranks(_auto_freeze, 2):
        assert steady is not None and 20 <= steady <= 60
        assert shrinking is None
