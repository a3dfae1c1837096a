"""Tiers drawn at random, on models of every shape: the bits of none, and one process within 2e-6.

What a draw has: model, stage, placements with their keys, accumulation, clipping, optimiser, recomputation
with its inputs somewhere, buckets, and a checkpoint in mid-run that goes on there or in memory.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist import tensor_models
from tests.dist.models import OddShapesModel, make_batch, tiny_gpt
from tests.dist.parity import full_named
from tests.harness import run_ranks
from tests.marks import nightly

STEPS = 3


class Weird(nn.Module):
    """Unused, frozen, tied and 0-dim parameters, one without elements, a layer used twice, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 6)
        self.shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6)) for _ in range(3))
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.scale, self.gate = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(1, 1, 6))
        self.empty, self.never = nn.Parameter(torch.zeros(0, 3)), nn.Linear(5, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 61, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 6))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) + self.offset
        x = x + self.shared(torch.tanh(self.shared(x))) * self.scale
        for layer in self.layers:
            x = x + layer(x) * torch.exp(self.gate)
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2) + self.frozen(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": tiny_gpt, "odd": OddShapesModel, "weird": Weird}
FAMILIES = ("llama, 6 heads on 3, tied", "bert", "t5", "opt", "mixtral")
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "AdamW": ({"lr": 1e-2}, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0)),
    "Adam": (
        {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.05},
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.05),
    ),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adagrad": ({"lr": 1e-2}, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
}
Draw = dict[str, Any]


def draw(seed: int) -> Draw:
    """One case, the same for a seed always."""
    r = random.Random(seed)
    stage = r.choice((1, 2, 3, 3, 3))
    state = {"device": r.choice(("cpu", "nvme", "nvme")), "buffer_count": r.choice((1, 2, 7))}
    state |= {"buffer_size": r.choice((1, 100, 10**9)), "ratio": r.choice((0.0, 0.3, 1.0))}
    paged = {"device": r.choice(("cpu", "nvme", "nvme")), "buffer_count": r.choice((2, 3))}
    paged["max_in_cpu"] = r.choice((0, 500, 5000))
    return {
        "model": r.choice((*MODELS, *FAMILIES)),
        "zero": {"stage": stage, "offload_optimizer": state} | ({"offload_param": paged} if stage == 3 else {}),
        "bucket": r.choice((100, 5000, 10**8)),
        "accumulation": r.choice((1, 2, 3)),
        "clip": r.choice((0.0, 0.05)),
        "optimizer": r.choice(tuple(OPTIMIZERS)),
        "inputs": r.choice((None, "none", "cpu", "nvme")),
        "save": r.choice((None, "same", "in memory")),
    }


def _model(one: Draw) -> nn.Module:
    return MODELS[one["model"]]() if one["model"] in MODELS else tensor_models.build_model(one["model"])


def _loss(model: Any, one: Draw, step: int, own: slice, rows: int) -> Tensor:
    if one["model"] in MODELS:
        return model(*(part[own] for part in make_batch(step, rows)))
    tokens = tensor_models.make_batch(step, rows)[own].contiguous()
    return model(input_ids=tokens, labels=tokens).loss


def _engine(one: Draw, folder: str, tiers: bool) -> Any:
    import thalweg

    zero = dict(one["zero"]) if tiers else {"stage": one["zero"]["stage"]}
    for key in zero.keys() & {"offload_optimizer", "offload_param"}:
        zero[key] = {**zero[key], "nvme_path": folder}
    zero |= {"reduce_bucket_size": one["bucket"], "stage3_prefetch_bucket_size": one["bucket"]}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": one["accumulation"],
        "gradient_clipping": one["clip"],
        "optimizer": {"type": one["optimizer"], "params": OPTIMIZERS[one["optimizer"]][0]},
        "zero_optimization": zero,
        "memory": {"nvme_path": folder},
        "cpu_kernels": "torch",
        "log_level": "error",
    }
    if one["inputs"] is not None:
        offload = one["inputs"] if tiers else "none"
        config["activation_checkpointing"] = {"policy": "full", "offload": offload}
    return thalweg.initialize(model=_model(one), config=config)[0]


def _train(one: Draw, rank: int, world: int, folder: str, tiers: bool) -> tuple[list[float], dict[str, Tensor]]:
    engine, losses, micro = _engine(one, f"{folder}/swap", tiers), [], 0
    for step in range(STEPS):
        if tiers and one["save"] is not None and step == 1:
            engine.save_checkpoint(f"{folder}/saved", tag="here")
            engine.close()
            engine = _engine(one, f"{folder}/swap", one["save"] == "same")
            engine.load_checkpoint(f"{folder}/saved", tag="here")
        total = torch.zeros(())
        for _ in range(one["accumulation"]):
            loss = _loss(engine, one, micro, slice(rank, None, world), 2 * world)
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu()
            micro += 1
        dist.all_reduce(total)
        losses.append(float(total) / world / one["accumulation"])
    found = full_named(engine.module.named_parameters())
    engine.close()
    return losses, found


def _plain(one: Draw, world: int) -> list[float]:
    model, losses, micro = _model(one).train(), [], 0
    optimizer = OPTIMIZERS[one["optimizer"]][1]([p for p in model.parameters() if p.requires_grad])
    for _ in range(STEPS):
        total = 0.0
        for _ in range(one["accumulation"]):
            # The mean over ranks of each rank's own mean.
            for rank in range(world):
                loss = _loss(model, one, micro, slice(rank, None, world), 2 * world)
                (loss / world / one["accumulation"]).backward()
                total += loss.item() / world / one["accumulation"]
            micro += 1
        if one["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), one["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _draws(rank: int, world: int, seeds: list[int], folder: str) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for seed in seeds:
        one = draw(seed)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            shared = [own]
            dist.broadcast_object_list(shared, src=0)
            os.makedirs(f"{shared[0]}/swap", exist_ok=True)
            dist.barrier()
            losses, found = _train(one, rank, world, shared[0], True)
            if left := os.listdir(f"{shared[0]}/swap"):
                wrong.append(f"{one}: {left} is left")
            known, expected = _train(one, rank, world, shared[0], False)
            dist.barrier()
        if losses != known or not all(torch.equal(found[name], value) for name, value in expected.items()):
            wrong.append(f"{one}: not the bits of none")
        worst = max(abs(a - b) for a, b in zip(losses, _plain(one, world), strict=True))
        if not worst <= 2e-6:
            wrong.append(f"{one}: off by {worst:.1e} from one process")
    return wrong


@pytest.mark.parametrize(
    ("world", "seeds"),
    [
        (1, range(2)),
        (2, range(10, 11)),
        nightly(1, range(2, 5)),
        nightly(2, range(11, 15)),
        nightly(3, range(20, 23)),
        nightly(2, random.SystemRandom().sample(range(100, 10**6), 5)),
    ],
    ids=["1", "2", "1-more", "2-more", "3", "2-random"],
)
def test_draws_give_the_bits_of_none_and_the_losses_of_one_process(world, seeds, tmp_path):
    pytest.importorskip("transformers")
    for wrong in run_ranks(_draws, world, list(seeds), str(tmp_path), timeout=240):
        assert not wrong, "\n".join(wrong)
