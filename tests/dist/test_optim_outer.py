"""Sites that train by themselves and an outer optimizer that joins them, against the paper's algorithm written plainly.

The simulation is one process with a copy of the model and an AdamW for each site, and knows nothing of the package.
"""

from __future__ import annotations

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

REUSE_RANKS = True

OUTER = {"sync_every": 5, "lr": 0.7, "momentum": 0.9}
HYPER = {"lr": 1e-3, "weight_decay": 0.05}


class Net(nn.Module):
    """Matrices, vectors, a number; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 37), nn.Linear(37, VOCAB_SIZE)])
        self.norm = nn.LayerNorm(37)
        self.norm.weight.data *= 0.4  # a rounding of numbers about 1 is a tenth of what is asked for
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layers[0](self.embed(tokens))))
        logits = self.layers[1](x) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def simulate(world: int, sites: int, steps: int, micros: int = 1, joins: bool = True, **changes: Any) -> list[Tensor]:
    """The parameters of site 0 after ``steps``; algorithm 1 of 2311.08105.  The scalar has the mean gradient of all."""
    outer = OUTER | changes
    models = [Net() for _ in range(sites)]
    inner = [torch.optim.AdamW(model.parameters(), fused=True, **HYPER) for model in models]
    start = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in start]
    per_site = world // sites
    for step in range(steps):
        for site, model in enumerate(models):
            inner[site].zero_grad()
            for micro in range(micros):
                tokens, labels = make_batch(step * micros + micro, 2 * world)
                for rank in range(site * per_site, (site + 1) * per_site):
                    (model(tokens[rank::world], labels[rank::world]) / (micros * per_site)).backward()
        mean = sum(model.scale.grad for model in models) / sites
        for site, model in enumerate(models):
            model.scale.grad = mean.clone()
            inner[site].step()
        if (step + 1) % outer["sync_every"] == 0 and joins:
            with torch.no_grad():
                for i, params in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                    if params[0].dim() == 0:
                        continue
                    delta = sum(start[i] - p for p in params) / sites
                    momentum[i] = outer["momentum"] * momentum[i] + delta
                    start[i] = start[i] - outer["lr"] * (delta + outer["momentum"] * momentum[i])
                    for p in params:
                        p.copy_(start[i])
    return [p.detach().clone() for p in models[0].parameters()]


def make_engine(rank: int, site_size: int = 1, stage: int = 0, **more: Any) -> Any:
    """Ranks are on hosts of ``site_size``, so that "auto" finds the sites."""
    import thalweg

    os.environ["THALWEG_HOST"] = f"host {rank // site_size}"
    outer = {**OUTER, **more.pop("outer", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "outer_optimizer": outer,
        "zero_optimization": {"stage": stage},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }
    return thalweg.initialize(model=Net(), config=config)[0]


def _trajectory(rank: int, world: int, site_size: int, stage: int, micros: int, more: dict[str, Any]) -> list[Tensor]:
    engine = make_engine(rank, site_size, stage, gradient_accumulation_steps=micros, **more)
    params = train(engine, rank, world, 0, 50, micros)
    engine.close()
    return params


def follow(world: int, site_size: int, stage: int, micros: int = 1, **more: Any) -> float:
    """How far the engine's ranks are from the simulation after 50 steps, at most."""
    expected = simulate(world, world // site_size, 50, micros)
    ranks = run_ranks(_trajectory, world, site_size, stage, micros, more)
    return max(largest_difference(params, expected) for params in ranks)


@pytest.mark.parametrize(
    ("world", "site_size", "stage", "micros"),
    [(2, 1, 2, 1), (2, 2, 1, 1), nightly(2, 1, 0, 1), nightly(2, 1, 1, 2), nightly(2, 2, 0, 1)]
    + [nightly(4, size, stage, micros) for size in (1, 2, 4) for stage, micros in ((0, 1), (1, 2), (2, 2))],
)
def test_the_engine_follows_the_papers_algorithm(world: int, site_size: int, stage: int, micros: int) -> None:
    assert follow(world, site_size, stage, micros) < 1e-6


@pytest.mark.parametrize("site_size", [1, nightly(2)])
def test_states_on_the_host_change_nothing(site_size: int) -> None:
    """Updates then wait for the step, as sites remember before it where they began."""
    offloaded = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert follow(2 * site_size, site_size, 1, zero_optimization=offloaded) < 1e-6


def test_sites_agree_in_bf16() -> None:
    first, second = run_ranks(_trajectory, 2, 1, 1, 1, {"bf16": {"enabled": True}})
    assert all(map(torch.equal, first, second))
    assert 1e-6 < largest_difference(first, simulate(2, 2, 50)) < 0.1


def test_a_number_that_sites_would_clip_differently_is_refused() -> None:
    with pytest.raises(Exception, match="scale has no dimensions"):
        run_ranks(_trajectory, 2, 1, 0, 1, {"gradient_clipping": 0.1})


def test_what_the_simulation_would_notice() -> None:
    """No momentum, another period or rate, sites that never meet, one site: none passes for the algorithm."""
    plain = simulate(2, 2, 50)
    for changes in ({"momentum": 0.0}, {"sync_every": 6}, {"lr": 0.701}, {"joins": False}):
        assert largest_difference(plain, simulate(2, 2, 50, **changes)) > 1e-5, changes
    assert largest_difference(plain, simulate(2, 1, 50)) > 1e-3


# ---- what travels ----


def _bytes_to_other_hosts(rank: int, world: int, site_size: int, stage: int, outer: dict[str, Any]) -> list[int]:
    """After steps 1 to 4, and after the fifth, which ends with a meeting; the parameters of sites at last."""
    engine = make_engine(rank, site_size, stage, outer=outer)
    sent = []
    for first, last in ((0, 4), (4, 5)):
        engine.ledger.reset()
        train(engine, rank, world, first, last)
        sent.append(sum(entry.inter_bytes for entry in engine.ledger.entries()))
    return [*sent, sum(p.numel() for p in engine.module.parameters() if p.ndim)]  # a scalar is one at each step


@pytest.mark.parametrize(
    ("world", "site_size", "stage", "quantized"),
    [(2, 1, 0, False), (2, 1, 2, True)] + [nightly(4, 2, stage, False) for stage in (0, 1, 2)],
)
def test_sites_exchange_nothing_but_their_mean_step(world: int, site_size: int, stage: int, quantized: bool) -> None:
    """fp32 there and back, 4 bytes for each number of two sites, over the ranks of a site; 5 times less in few bits."""
    outer = {"quantized_deltas": quantized}
    ranks = run_ranks(_bytes_to_other_hosts, world, site_size, stage, outer)
    expected = (0.77 if quantized else 4) * ranks[0][2] / site_size
    assert not any(apart for apart, _, _ in ranks)
    # A mean over ranks, whose shards of an odd number of rows are not of one size.
    assert expected <= sum(meeting for _, meeting, _ in ranks) / world <= 1.1 * expected


def test_few_bits_come_close_and_sites_agree_to_the_bit() -> None:
    exact = simulate(2, 2, 50)
    first, second = run_ranks(_trajectory, 2, 1, 0, 1, {"outer": {"quantized_deltas": True}})
    assert all(map(torch.equal, first, second))
    assert 1e-6 < largest_difference(first, exact) < 0.05 < largest_difference(exact, list(Net().parameters()))


# ---- checkpoints ----


def _resume(rank: int, world: int, site_size: int, stage: int, at: int, folder: str) -> tuple[bool, bool, bool]:
    first = make_engine(rank, site_size, stage)
    train(first, rank, world, 0, at)
    first.save_checkpoint(folder, tag="here")
    whole = train(first, rank, world, at, at + 9)
    second = make_engine(rank, site_size, stage)
    second.load_checkpoint(folder, tag="here")
    gone_on = train(second, rank, world, at, at + 9)
    forgets = make_engine(rank, site_size, stage)
    forgets.load_checkpoint(folder, tag="here")
    forgets.optimizer._site_sync._momentum.clear()
    other = train(forgets, rank, world, at, at + 9)
    swapped = make_engine(rank, site_size, stage)
    swapped.load_checkpoint(folder, tag="here")
    for state in swapped.optimizer.inner.state.values():
        state["exp_avg"].zero_()
    return tuple(
        all(map(torch.equal, whole, found)) for found in (gone_on, other, train(swapped, rank, world, at, at + 9))
    )


@pytest.mark.parametrize(
    ("world", "site_size", "stage", "at"),
    [nightly(2, 1, 0, 10), (2, 1, 2, 12), nightly(4, 2, 0, 12), nightly(4, 2, 2, 12), nightly(4, 2, 1, 10)],
)
def test_a_run_that_stopped_goes_on_to_the_bit(world: int, site_size: int, stage: int, at: int) -> None:
    """At step 12 sites are apart, and the save makes them meet.  Without momentum, or each site's moments, it is
    another run."""
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_resume, world, site_size, stage, at, folder) == [(True, False, False)] * world


def _save(rank: int, world: int, folder: str) -> list[Tensor]:
    engine = make_engine(rank)
    train(engine, rank, world, 0, 12)
    engine.save_checkpoint(folder, tag="here")
    states = [engine.optimizer.state[p] for p in engine.module.parameters()]
    moments = full_tensors(state.get("sites.exp_avg", state.get("exp_avg")) for state in states)
    return full_tensors(engine.module.parameters()) + moments


def _load_elsewhere(rank: int, world: int, site_size: int, more: dict[str, Any], folder: str) -> list[Tensor]:
    engine = make_engine(rank, site_size, **more)
    engine.load_checkpoint(folder, tag="here")
    params = full_tensors(engine.module.parameters())
    moments = full_tensors(engine.optimizer.state[p]["exp_avg"] for p in engine.module.parameters())
    assert all(bool(p.isfinite().all()) for p in train(engine, rank, world, 12, 18))
    assert more.get("outer_optimizer", True) or not any(
        "outer" in key for s in engine.optimizer.state.values() for key in s
    )
    return params + moments


@pytest.mark.parametrize(
    ("world", "site_size", "more"),
    [(1, 1, {}), (2, 2, {"outer_optimizer": None, "stage": 2}), nightly(3, 1, {}), nightly(4, 2, {"stage": 1})],
)
def test_other_sites_go_on_with_the_mean_of_what_these_had(world: int, site_size: int, more: dict[str, Any]) -> None:
    """Also a job that has no outer optimizer at all."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_save, 2, folder)[0]
        for loaded in run_ranks(_load_elsewhere, world, site_size, more, folder):
            for before, after in zip(saved, loaded, strict=True):
                is_apart = before.shape != after.shape
                expected = before.mean(0) if is_apart and (world, site_size) != (4, 2) else before
                if is_apart and (world, site_size) == (4, 2):
                    assert any(torch.equal(after, row) for row in before)
                else:
                    assert torch.allclose(after, expected, atol=1e-8)


def _load_weights_midway(rank: int, world: int) -> bool:
    """Weights that are loaded between meetings are where sites start: not a step of theirs."""
    engine = make_engine(rank, outer={"sync_every": 3})
    train(engine, rank, world, 0, 2)
    zeros = {name: torch.zeros_like(full_tensor(p)) for name, p in engine.module.named_parameters()}
    engine.load_state_dict(zeros)
    before = train(engine, rank, world, 2, 3)
    return max(float(p.abs().max()) for p in before) < 10 * HYPER["lr"]


def test_weights_loaded_midway_are_a_new_start() -> None:
    assert run_ranks(_load_weights_midway, 2) == [True, True]


def test_a_site_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(Exception, match=r"outer_optimizer.site_size = 2 does not divide the 3 .* \[1, 3\]"):
        run_ranks(_trajectory, 3, 1, 0, 1, {"outer": {"site_size": 2}})
