"""Pipelines against one process: every schedule, values of any kind between stages, ties."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.parallel.pipeline.module import LayerSpec, LocalLayers, PipelineModule
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.schedule_executor import ScheduleExecutor, StageCallbacks
from thalweg.parallel.pipeline.schedules.builders import SCHEDULE_NAMES, assign_stages, build_schedule
from thalweg.parallel.pipeline.schedules.schedule import PipelineSchedule

WIDTH = 6


class Mix(nn.Module):
    """Two tensors and a number in, the same out, changed: stages pass on more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, extra = value if isinstance(value, tuple) else (value, {"y": torch.ones(()), "times": 1})
        y = torch.tanh(self.b(x)) * extra["y"]
        return torch.relu(self.a(x)) + y, {"y": y.mean(), "times": extra["times"] + 1}


def last(value):
    """A plain function as a layer."""
    x, extra = value
    return x * extra["times"]


def layers(num: int):
    return [*(LayerSpec(Mix) for _ in range(num)), last]


def micro_batches(num: int, seed: int = 0):
    """Unequal micro-batches: other numbers of rows each time."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 + i % 3 for i in range(num)]
    return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in sizes]


def reference(num_layers: int, num_micro: int, factor: float = 1.0):
    """Losses and gradients of one process."""
    model = PipelineModule(layers(num_layers), loss_fn=F.mse_loss, base_seed=1234)
    whole = LocalLayers(model.specs, model.build_layers(range(num_layers + 1)))
    losses = []
    for x, y in micro_batches(num_micro):
        loss = F.mse_loss(whole(x), y)
        (factor * loss / num_micro).backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in whole.named_parameters()}


def _run(rank, world, name, num_layers, num_micro, chunks):
    schedule: PipelineSchedule = build_schedule(name, world, num_micro, num_virtual_stages=chunks)
    model = PipelineModule(layers(num_layers), loss_fn=F.mse_loss, base_seed=1234)
    cuts = model.partition_layers(schedule.num_stages)
    mine = {s: LocalLayers(model.specs, model.build_layers(list(cuts[s]))) for s in schedule.stages_on_rank(rank)}

    losses = []

    def run(stage, value, batch):
        value = mine[stage](batch[0] if stage == 0 else value)
        if stage + 1 < schedule.num_stages:
            return value
        losses.append(F.mse_loss(value, batch[1]))
        return losses[-1]

    calls = StageCallbacks(run, lambda s: list(mine[s].parameters()), lambda loss: loss / num_micro)
    back = dist.new_group(list(range(world)))  # as on CUDA
    runner = ScheduleExecutor(
        schedule, rank, P2PChannel(dist.group.WORLD, torch.device("cpu"), reverse_group=back), calls
    )
    runner.train(micro_batches(num_micro))
    trained = [loss.item() for loss in losses]
    losses.clear()
    runner.evaluate(micro_batches(num_micro))
    assert [loss.item() for loss in losses] == trained
    # As lists: a tensor in a queue lives in its sender's memory, and the sender ends here.
    grads = {n: p.grad for stage in mine.values() for n, p in stage.named_parameters()}
    return trained, {n: None if g is None else g.tolist() for n, g in grads.items()}


@pytest.mark.parametrize(("world", "num_micro"), [nightly(2, 4), nightly(2, 5), (3, 6), nightly(4, 8)])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_each_schedule_gives_the_gradients_of_one_process(name, world, num_micro):
    if name == "dualpipev" and num_micro < 2 * world:
        with pytest.raises(ValueError, match="at least as many micro-batches"):
            build_schedule(name, world, num_micro)
        return
    num_layers = len(assign_stages(name, world)) + 1
    losses, grads = reference(num_layers, num_micro)
    results = run_ranks(_run, world, name, num_layers, num_micro, 2)
    found = {n: None if g is None else torch.tensor(g) for _, part in results for n, g in part.items()}
    assert next(part for part, _ in results if part) == pytest.approx(losses, rel=1e-6)
    assert found.keys() == grads.keys()
    for n, grad in grads.items():
        if grad is None:
            assert found[n] is None
        else:
            torch.testing.assert_close(found[n], grad, rtol=1e-5, atol=1e-7)
    wrong = reference(num_layers, num_micro, factor=1.01)[1]
    assert any(not torch.allclose(found[n], g, rtol=1e-5) for n, g in wrong.items() if g is not None)


def test_a_stage_without_parameters_and_more_stages_than_layers():
    losses, grads = reference(1, 3)
    results = run_ranks(_run, 3, "1f1b", 1, 3, 1)
    assert results[2][0] == pytest.approx(losses, rel=1e-6)
    found = {n: None if g is None else torch.tensor(g) for _, part in results for n, g in part.items()}
    torch.testing.assert_close(found["layers.0.a.weight"], grads["layers.0.a.weight"])
