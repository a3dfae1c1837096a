"""PowerSGD and top-k between hosts under the engine, against the papers' algorithms written down plainly here.

The simulation is one process, in fp64 on numpy, with torch's own optimizer; it knows nothing of the package.
"""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.models import make_batch
from tests.dist.parity import bitwise_equal, full_tensor, full_tensors, largest_difference, train
from tests.dist.test_optim_onebit import APART, IN_PAIRS, Net, Slopes, Wide, place
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm import CommsLog
from thalweg.comm.collectives.error_feedback import PowerSGDAllReduce, TopKAllReduce
from thalweg.comm.collectives.wire import AllReduceSum, SiteExchange

REUSE_RANKS = True

KINDS = ["powersgd", "topk"]
RANK, RATIO, START = 2, 0.05, 3
# Over PowerSGD, Net's steps carry half a rounding of its first parameters (6e-8 of each) to 1e-7 by step 25 and to 6e-6
# by step 50, in the simulation alone; Signals' stays at 6e-8.
STEPS = {"Net": 25, "Signals": 50, "Sometimes": 50}
HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}


class Signal(nn.Module):
    """A loss linear in its parameters, with slopes of two directions that stay and some noise that does not.

    Slopes of noise alone have no leading directions.  PowerSGD then turns from any two to any others, a difference of
    1e-8 grows by a third at each step, and after 50 steps fp32 and fp64 are 1e-3 apart.
    """

    def __init__(self, seed: int, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]
        self.tensors = nn.ParameterList([nn.Parameter(value) for value in values])
        sides = [(math.prod(shape[:1]), math.prod(shape[1:])) for shape in shapes]
        self.sides = [[torch.randn(size, 2, generator=generator) for size in pair] for pair in sides]

    def forward(self, seed: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        loss = torch.zeros((), device=self.tensors[0].device)
        for param, (left, right) in zip(self.tensors, self.sides, strict=True):
            strengths = torch.tensor([1.0, 0.5]) + 0.2 * torch.randn(2, generator=generator)
            noise = 0.05 * torch.randn(param.shape, generator=generator)
            slope = (left * strengths @ right.T).view_as(param) + noise
            loss = loss + (param * slope.to(param.device)).sum()
        return loss / 100


class Signals(Slopes):
    """See ``Signal``."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([Signal(0, [(61, 40), (37,)]), Signal(1, [(700, 3), (), (5, 6, 7)])])


class Sometimes(nn.Module):
    """The second layer has a gradient for some batches alone, the third for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Signal(i, [(24, 20), (20,)]) for i in range(3)])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        seed = tokens.sum()
        return self.layers[0](seed) + (self.layers[1](seed + 1) if seed % 2 else 0.0)


MODELS = {"Net": Net, "Signals": Signals, "Sometimes": Sometimes}

# ---- the papers' algorithms, one process, all sites ----


def powersgd(grads: list[np.ndarray], memory: dict[str, Any], feedback: bool) -> np.ndarray:
    """Algorithm 2 of 1905.13727 over algorithm 1, for one matrix."""
    columns = grads[0][0].size
    given = [g.reshape(-1, columns) + e for g, e in zip(grads, memory["errors"], strict=True)]
    if "q" not in memory:
        memory["q"] = torch.randn(columns, RANK, generator=torch.Generator().manual_seed(0)).double().numpy()
    p = np.linalg.qr(sum(m @ memory["q"] for m in given) / len(given))[0]
    qs = [m.T @ p for m in given]
    if feedback:
        memory["errors"] = [m - p @ q.T for m, q in zip(given, qs, strict=True)]
    memory["q"] = sum(qs) / len(qs)
    return (p @ memory["q"].T).reshape(grads[0].shape)


def topk(grads: list[np.ndarray], memory: dict[str, Any], feedback: bool) -> np.ndarray:
    """Algorithm 1 of 1809.07599 for several workers, the rate left to the optimizer."""
    given = [g.reshape(-1) + e for g, e in zip(grads, memory["errors"], strict=True)]
    sent = []
    for m in given:
        largest = np.argsort(-np.abs(m))[: max(1, round(RATIO * m.size))]
        sent.append(np.zeros_like(m))
        sent[-1][largest] = m[largest]
    if feedback:
        memory["errors"] = [m - s for m, s in zip(given, sent, strict=True)]
    return (sum(sent) / len(sent)).reshape(grads[0].shape)


def is_compressed(kind: str, shape: torch.Size, shards: int) -> bool:
    rows, columns = -(-shape[0] // shards), math.prod(shape[1:])
    return kind == "topk" or (kind == "powersgd" and RANK * (rows + columns) < rows * columns)


def simulate(
    kind: str,
    model: str,
    world: int,
    sites: int,
    steps: int,
    micros: int = 1,
    shards: int = 1,
    clip: float = 0.0,
    start: int = START,
    feedback: bool = True,
) -> list[Tensor]:
    """The parameters after ``steps`` of ``world`` ranks in ``sites``, each of which cuts a matrix into ``shards``."""
    net = MODELS[model]()
    optimizer = torch.optim.SGD(net.parameters(), **HYPER)
    memories: dict[tuple[str, int], dict[str, Any]] = {}
    per_site = world // sites
    for step in range(steps):
        by_site: list[dict[str, np.ndarray]] = []
        for site in range(sites):
            optimizer.zero_grad()
            for micro in range(micros):
                tokens, labels = make_batch(step * micros + micro, 2 * world)
                for rank in range(site * per_site, (site + 1) * per_site):
                    (net(tokens[rank::world], labels[rank::world]) / (micros * per_site)).backward()
            by_site.append({n: p.grad.double().numpy() for n, p in net.named_parameters() if p.grad is not None})
        for name, param in net.named_parameters():
            if not any(name in grads for grads in by_site):
                param.grad = None
                continue
            grads = [site.get(name, np.zeros(param.shape)) for site in by_site]
            if param.dim() == 0 or step < start or sites == 1 or not is_compressed(kind, param.shape, shards):
                mean = sum(grads) / sites
            else:
                pieces = []
                for i, piece in enumerate(zip(*(np.split(g, split_at(len(g), shards)) for g in grads), strict=True)):
                    shape = (len(piece[0]), -1) if kind == "powersgd" else (-1,)
                    zeros = [np.zeros_like(g).reshape(shape) for g in piece]
                    memory = memories.setdefault((name, i), {"errors": zeros})
                    pieces.append({"powersgd": powersgd, "topk": topk}[kind](list(piece), memory, feedback))
                mean = np.concatenate(pieces)
            param.grad = torch.tensor(mean).float()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def split_at(rows: int, shards: int) -> list[int]:
    """Where ``torch.chunk`` cuts."""
    return [i * -(-rows // shards) for i in range(1, shards)]


# ---- the engine ----


def make_engine(rank: int, kind: str | None, stage: int, hosts: str = APART, model: str = "Net", **more: Any) -> Any:
    import thalweg

    place(rank, hosts)
    section = {"type": kind, "matrix_approximation_rank": RANK, "compress_ratio": RATIO, "start_step": START}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": HYPER},
        "gradient_compression": None if kind is None else section | more.pop("section", {}),
        "zero_optimization": {"stage": stage},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }
    return thalweg.initialize(model=MODELS[model](), config=config)[0]


def _trajectory(
    rank: int, world: int, kind: str, model: str, stage: int, hosts: str, steps: int, micros: int, more: dict[str, Any]
) -> list[Tensor]:
    engine = make_engine(rank, kind, stage, hosts, model, gradient_accumulation_steps=micros, **more)
    params = train(engine, rank, world, 0, steps, micros)
    engine.close()
    return params


def follow(
    kind: str, model: str, world: int, stage: int, hosts: str = APART, micros: int = 1, clip: float = 0.0, **more: Any
) -> float:
    """How far the engine's ranks are from the simulation after the model's steps, at most."""
    per_site = 2 if hosts == IN_PAIRS else 1
    more["gradient_clipping"], device = clip, more.pop("device", None)
    steps = STEPS[model]
    ranks = run_ranks(_trajectory, world, kind, model, stage, hosts, steps, micros, more, device=device)
    shards = per_site if stage else 1
    expected = simulate(kind, model, world, world // per_site, steps, micros, shards, clip)
    return max(largest_difference(params, expected) for params in ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world", "stage", "hosts"),
    [nightly(2, 0, APART), nightly(2, 1, APART), (2, 2, APART)]
    + [nightly(world, stage, APART) for world in (3, 4) for stage in (0, 1, 2)]
    + [nightly(4, stage, IN_PAIRS) for stage in (0, 1, 2)],
)
def test_the_engine_follows_the_papers_algorithm(kind: str, world: int, stage: int, hosts: str) -> None:
    assert follow(kind, "Signals", world, stage, hosts) < 1e-6


@pytest.mark.parametrize("kind", ["powersgd", nightly("topk")])
@pytest.mark.parametrize(
    ("model", "stage", "micros", "clip"),
    [("Signals", 2, 2, 0.3), nightly("Net", 0, 1, 0.0), nightly("Net", 1, 2, 0.3)],
)
def test_models_accumulation_and_clipping(kind: str, model: str, stage: int, micros: int, clip: float) -> None:
    assert follow(kind, model, 2, stage, micros=micros, clip=clip) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}])
def test_gradients_on_a_device(kind: str, zero: dict[str, Any]) -> None:
    """And on the host, from where they travel by way of the device."""
    assert follow(kind, "Net", 2, zero["stage"], device="sim", zero_optimization=zero) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_site_has_no_gradient_of_is_zero_there(kind: str) -> None:
    """And what no site has a gradient of is left alone, weight decay too."""
    assert follow(kind, "Sometimes", 2, 0) < 1e-6


@pytest.mark.parametrize("kind", ["powersgd", nightly("topk")])
def test_what_the_simulation_would_notice(kind: str) -> None:
    """No feedback, another start, shards, the other algorithm, none: none of them passes for the algorithm."""
    plain = simulate(kind, "Signals", 2, 2, 20)
    others = [
        simulate(kind, "Signals", 2, 2, 20, feedback=False),
        simulate(kind, "Signals", 2, 2, 20, start=START + 1),
        simulate(kind, "Signals", 2, 2, 20, shards=2),
        simulate(KINDS[kind == KINDS[0]], "Signals", 2, 2, 20),
        simulate(kind, "Signals", 2, 1, 20),
    ]
    assert all(largest_difference(plain, other) > 1e-4 for other in others)


def _before_the_start(rank: int, world: int, kind: str, stage: int) -> tuple[bool, bool]:
    late = train(make_engine(rank, kind, stage, section={"start_step": 100}), rank, world, 0, 8)
    zero = {"stage": stage, **({"mics_shard_size": 1} if stage else {})}  # the same pieces: kernels round by them
    plain = train(make_engine(rank, None, stage, zero_optimization=zero), rank, world, 0, 8)
    early = train(make_engine(rank, kind, stage, section={"start_step": 7}), rank, world, 0, 8)
    return bitwise_equal(late, plain), bitwise_equal(early, plain)


@pytest.mark.parametrize(("kind", "stage"), [("powersgd", 0), nightly("topk", 2), nightly("powersgd", 1)])
def test_before_the_start_every_bit_is_that_of_a_plain_job(kind: str, stage: int) -> None:
    assert run_ranks(_before_the_start, 2, kind, stage) == [(True, False)] * 2


def _on_one_host(rank: int, world: int, kind: str, stage: int) -> tuple[bool, bool, int]:
    os.environ["THALWEG_HOST"] = "one"
    engines = [make_engine(0, each, stage) for each in (kind, None)]
    params = [train(engine, rank, world, 0, 8) for engine in engines]
    inter_bytes = sum(entry.inter_bytes for entry in engines[0].ledger.entries())
    return bitwise_equal(*params), "idle" in engines[0].config.describe(), inter_bytes


@pytest.mark.parametrize(("kind", "stage"), [nightly("powersgd", 1), nightly("topk", 0), nightly("topk", 2)])
def test_on_one_host_nothing_is_compressed(kind: str, stage: int) -> None:
    assert run_ranks(_on_one_host, 2, kind, stage) == [(True, True, 0)] * 2


# ---- what travels ----

SHAPES = [(17, 30), (40,), (9, 4, 6), (1, 5), (64, 8)]


def _no_mass_is_lost(rank: int, world: int, kind: str, site_size: int, steps: int) -> tuple[list[Tensor], float, float]:
    """The last results; how far the sum of means is from results + errors; how far from the results alone."""
    mesh = init_device_mesh("cpu", (world // site_size, site_size), mesh_dim_names=("site", "rank"))
    exchange = SiteExchange(AllReduceSum(mesh.get_group(0)), mesh.get_group(1), torch.device("cpu"), CommsLog())
    reducer = PowerSGDAllReduce(exchange, RANK) if kind == "powersgd" else TopKAllReduce(exchange, RATIO)
    fits = [is_compressed(kind, torch.Size(shape), 1) for shape in SHAPES]
    states: list[dict[str, Tensor]] = [{} for fit in fits if fit]
    sums = [torch.zeros(2, *shape, dtype=torch.float64) for shape in SHAPES]
    given: list[Tensor] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank // site_size)
        given = [torch.randn(shape, generator=generator) * 10.0 ** (i - 2) for i, shape in enumerate(SHAPES)]
        means = [tensor.clone() for tensor in given]
        exchange.mean_(means, "exact")
        compressed = [tensor for tensor, fit in zip(given, fits, strict=True) if fit]
        reducer(compressed, states, [tensor for tensor, fit in zip(given, fits, strict=True) if not fit])
        for total, mean, result in zip(sums, means, given, strict=True):
            total += torch.stack([mean, result])
    errors = iter([state["error"].clone() for state in states])
    owed = [next(errors).view(shape) if fit else torch.zeros(shape) for fit, shape in zip(fits, SHAPES, strict=True)]
    exchange.mean_(owed, "errors")
    kept = [float((s[0] - s[1] - e).abs().max() / s[0].abs().max()) for s, e in zip(sums, owed, strict=True)]
    without = [float((s[0] - s[1]).abs().max() / s[0].abs().max()) for s in sums]
    return given, max(kept), max(without)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "site_size", "steps"), [(2, 1, 12), nightly(3, 1, 60), nightly(4, 2, 12)])
def test_what_is_given_comes_out_or_is_owed(kind: str, world: int, site_size: int, steps: int) -> None:
    ranks = run_ranks(_no_mass_is_lost, world, kind, site_size, steps)
    for given, kept, without in ranks:
        assert kept < 1e-5 < 1e-2 < without  # without the errors the sum is another one
        assert bitwise_equal(given, ranks[0][0])  # every rank has the same bits


def _few_directions(rank: int, world: int) -> list[tuple[float, float, bool]]:
    """Of matrices of rank 0, 1 and 2: how far the result of one exchange, and the second's, is from the mean given."""
    exchange = SiteExchange(AllReduceSum(dist.group.WORLD), None, torch.device("cpu"), CommsLog())
    found = []
    for directions in (0, 1, 2):
        generator = torch.Generator().manual_seed(directions)
        matrix = torch.randn(30, directions, generator=generator) @ torch.randn(directions, 20, generator=generator)
        state: dict[str, Tensor] = {}
        differences = []
        for _ in range(2):
            given = matrix * (1 + rank)
            PowerSGDAllReduce(exchange, 3)([given], [state], [])
            differences.append(float((given - 1.5 * matrix).abs().max()))
        found.append((*differences, bool(state["error"].abs().max() < 1e-4)))
    return found


def test_gradients_of_few_directions_are_sent_whole() -> None:
    """Where ``P`` has fewer directions than columns these must not come out twice, as by a single Gram-Schmidt pass."""
    for found in run_ranks(_few_directions, 2):
        assert all(first < 1e-4 and second < 1e-4 and small for first, second, small in found), found


def _traffic(
    rank: int, world: int, kind: str, stage: int, hosts: str, micros: int
) -> tuple[int, dict[str, int], list[torch.Size]]:
    """Bytes to other hosts in a window after the start, and its calls by kind and transport; shapes."""
    MODELS["Wide"] = Wide
    engine = make_engine(rank, kind, stage, hosts, "Wide", gradient_accumulation_steps=micros)
    train(engine, rank, world, 0, START, micros)
    engine.ledger.reset()
    train(engine, rank, world, START, START + 1, micros)
    entries = [entry for entry in engine.ledger.entries() if entry.inter_bytes]
    calls = {f"{e.kind} {e.transport}": e.num_calls for e in entries}
    return sum(e.inter_bytes for e in entries), calls, [p.shape for p in engine.module.parameters()]


@pytest.mark.parametrize(
    ("kind", "world", "stage", "hosts", "micros"),
    [("powersgd", 2, 2, APART, 3), ("topk", 2, 0, APART, 1), nightly("powersgd", 2, 1, APART, 1)]
    + [nightly(kind, 4, stage, IN_PAIRS, 1 + stage) for kind in KINDS for stage in (0, 1, 2)],
)
def test_the_ledger_counts_what_crosses_once_a_window(
    kind: str, world: int, stage: int, hosts: str, micros: int
) -> None:
    """Two hosts: an all-reduce sends 4 bytes a number there and back, the all-gather of top-k 8 for a number and its
    place.  The ranks of a host send a part each, or their shards."""
    ranks = run_ranks(_traffic, world, kind, stage, hosts, micros)
    shards = 2 if hosts == IN_PAIRS and stage else 1
    numbers = 0
    for shape in ranks[0][2]:
        rows, columns = shape[0], math.prod(shape[1:])
        if kind == "topk":
            numbers += 2 * shards * round(RATIO * rows * columns / shards)
        else:
            numbers += RANK * (rows + shards * columns) if is_compressed(kind, shape, shards) else rows * columns
    expected = {"all_reduce powersgd": 2} if kind == "powersgd" else {"all_gather topk": 1}
    assert all(calls == expected for _, calls, _ in ranks)
    per_host = sum(sent for sent, _, _ in ranks) / 2
    assert per_host == pytest.approx(4 * numbers, rel=0.01)  # halves, parts and shards are rounded up
    assert 7 * numbers < sum(math.prod(shape) for shape in ranks[0][2])  # fp32 would send them all


# ---- checkpoints ----


def _resume(rank: int, world: int, kind: str, stage: int, hosts: str, folder: str) -> tuple[bool, ...]:
    def resumed(forget: str | None = None) -> list[Tensor]:
        engine = make_engine(rank, kind, stage, hosts)
        engine.load_checkpoint(folder, tag="here")
        for kept in engine.optimizer._site_sync._state.values():
            kept.pop(forget, None)
        return train(engine, rank, world, 8, 14)

    first = make_engine(rank, kind, stage, hosts)
    train(first, rank, world, 0, 8)
    first.save_checkpoint(folder, tag="here")
    whole = train(first, rank, world, 8, 14)
    return tuple(bitwise_equal(whole, resumed(forget)) for forget in (None, "error", "q"))


@pytest.mark.parametrize(
    ("kind", "world", "stage", "hosts"),
    [("powersgd", 2, 0, APART), nightly("powersgd", 2, 2, APART), nightly("topk", 2, 1, APART)]
    + [nightly(kind, 4, stage, IN_PAIRS) for kind in KINDS for stage in (0, 1, 2)],
)
def test_a_run_that_stopped_goes_on_to_the_bit(kind: str, world: int, stage: int, hosts: str) -> None:
    """Without the errors, or PowerSGD's factor, it is another run."""
    expected = (True, False, kind == "topk")
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_resume, world, kind, stage, hosts, folder) == [expected] * world


def _owed(engine: Any) -> dict[str, Tensor]:
    """For each parameter, what has been given to the exchange and has not come out."""
    engine.optimizer.consolidate_state_dict()
    owed = {}
    for name, param in engine.module.named_parameters():
        state = engine.optimizer.state[param]
        if "sites.grad_error" in state:
            owed[name] = full_tensor(state["sites.grad_error"]).mean(0)
        elif "grad_error" in state:
            owed[name] = full_tensor(state["grad_error"])
    return owed


def _save_owed(rank: int, world: int, kind: str, stage: int, hosts: str, folder: str) -> dict[str, Tensor]:
    engine = make_engine(rank, kind, stage, hosts)
    train(engine, rank, world, 0, 8)
    engine.save_checkpoint(folder, tag="here")
    return _owed(engine)


def _load_owed(
    rank: int, world: int, kind: str | None, stage: int, hosts: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """What is owed after loading; what a first step makes of it (by how much it goes further than one without errors,
    over the rate); names of parameters."""
    engine = make_engine(rank, kind, stage, hosts)
    engine.load_checkpoint(folder, tag="here")
    owed = _owed(engine)
    params = train(engine, rank, world, 8, 9)
    assert all(bool(p.isfinite().all()) for p in params)
    assert not any("grad_error" in key or "powersgd" in key for s in engine.optimizer.inner.state.values() for key in s)
    forgets = make_engine(rank, kind, stage, hosts)
    forgets.load_checkpoint(folder, tag="here")
    if kind is not None:
        forgets.optimizer._site_sync._state.clear()
    others, names = train(forgets, rank, world, 8, 9), [name for name, _ in engine.module.named_parameters()]
    further = {n: (b - a) / HYPER["lr"] for n, a, b in zip(names, params, others, strict=True)}
    return owed, further, names


@pytest.mark.parametrize("kind", [nightly("powersgd"), "topk"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 0, APART), (1, 0, APART)),
        nightly((2, 0, APART), (3, 1, APART)),
        nightly((4, 0, APART), (4, 2, IN_PAIRS)),
        nightly((4, 1, IN_PAIRS), (2, 0, APART)),
        nightly((4, 2, IN_PAIRS), (1, 2, APART)),
    ],
)
def test_other_sites_owe_what_these_owed(kind: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """A lone site adds it to its first gradient."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_save_owed, before[0], kind, *before[1:], folder)[0]
        loaded = run_ranks(_load_owed, after[0], kind, *after[1:], folder)
        unaware = run_ranks(_load_owed, 1, None, 0, APART, folder)
    assert len(saved) >= 3 and all(float(error.abs().max()) > 1e-5 for error in saved.values())
    for owed, further, names in loaded:
        assert owed.keys() == saved.keys() and largest_difference(list(owed.values()), list(saved.values())) < 1e-7
        if after[0] == 1:
            expected = [saved.get(name, torch.zeros(())) for name in names]
            assert max(float((further[n] - e).abs().max()) for n, e in zip(names, expected, strict=True)) < 1e-5
    assert not unaware[0][0]  # a job without the option drops them


# ---- precision, offload, what is not finite ----


def _skips(rank: int, world: int, kind: str, stage: int) -> tuple[bool, bool]:
    """Whether a step whose gradient is not finite on one rank alone leaves no trace; whether a finite one does."""
    outcomes = []
    for spoiled in (None, math.inf, 1.0):
        engine = make_engine(rank, kind, stage)
        train(engine, rank, world, 0, 6)
        if spoiled is not None:
            tokens, labels = make_batch(99, 2 * world)
            engine.backward(engine(tokens[rank::world], labels[rank::world]) * (spoiled if rank else 1.0))
            engine.step()
            assert engine.optimizer.overflow == (spoiled == math.inf)
        outcomes.append(train(engine, rank, world, 6, 9))
    return bitwise_equal(outcomes[0], outcomes[1]), bitwise_equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize(("kind", "stage"), [("powersgd", 2), nightly("topk", 0)])
def test_a_skipped_step_costs_no_error(kind: str, stage: int) -> None:
    assert run_ranks(_skips, 2, kind, stage) == [(True, False)] * 2


def _precision(rank: int, world: int, kind: str, stage: int, hosts: str, more: dict[str, Any]) -> tuple[Any, ...]:
    engine = make_engine(rank, kind, stage, hosts, **more)
    losses = []
    for step in range(30):
        tokens, labels = make_batch(step % 3, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return full_tensors(engine.module.parameters()), losses[0], losses[-1], engine.skipped_steps


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"bf16": {"enabled": True}}),
        (0, {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}),
        (1, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        (1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_replicas_stay_replicas_in_every_precision(kind: str, stage: int, more: dict[str, Any]) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}
    (first, before, after, skipped), (second, *_) = run_ranks(_precision, 2, kind, stage, APART, {**adam, **more})
    assert bitwise_equal(first, second) and after < before - 0.05
    assert (skipped > 0) == ("fp16" in more)


@pytest.mark.nightly
def test_tokens_weigh_alike() -> None:
    """The last factor of a window is known before the exchange, so errors are in the units of a mean."""
    more = {"token_weighted_loss": True}
    assert (
        follow("powersgd", "Net", 2, 0, micros=2, **more) < 1e-6
    )  # batches of equal size: the mean over micro-batches
