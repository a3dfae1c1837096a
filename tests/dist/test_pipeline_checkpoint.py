"""Checkpoints between layouts: any (pipeline, tensor, sequence, expert, data, stage, world) loads any other.

Two tiny models, a Llama with tied embeddings and a Mixtral, train in a layout A each and are saved.  Every
layout B loads that, saves it and goes on to the same loss; then it loads what the layout before it in the
table has saved, and saves that.  At the end A loads what each B has saved, and saves it.  The stored
tensors, parameters and moments, of every save are compared with those of the first, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import thalweg
from tests import inspect
from tests.dist.tensor_models import build_model, make_batch
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.checkpoint import Checkpoint

pytest.importorskip("transformers")
ROWS, MICROS, STEPS = 4, 2, 2


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis (what is left are data ranks), ZeRO's stage, the pipeline's schedule."""

    pp: int = 1
    tp: int = 1
    stage: int = 1
    schedule: str = "1f1b"
    sp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def name(self) -> str:
        """As a folder's."""
        axes = f"pp{self.pp}-tp{self.tp}-sp{self.sp}-cp{self.cp}-ep{self.ep}"
        return f"{axes}-stage{self.stage}-{self.schedule}"

    def config(self) -> dict[str, Any]:
        """The ds_config."""
        return {
            "train_batch_size": ROWS * MICROS,
            "gradient_accumulation_steps": MICROS,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
            "tensor_parallel": {"autotp_size": self.tp},
            "sequence_parallel_size": self.sp,
            "context_parallel_size": self.cp,
            "expert_parallel": {"enabled": self.ep > 1, "autoep_size": self.ep},
            "pipeline": {"stages": self.pp, "schedule": self.schedule},
            "cpu_kernels": "torch",
            "log_level": "error",
        }


Case = tuple[str, Layout]  # the model's name, and where it goes
FIRST = {"llama": Layout(2, 2, 2), "mixtral": Layout(1, 1, 3, ep=2)}
TABLE: dict[int, list[Case]] = {
    1: [("llama", Layout(1, 1, 0)), ("mixtral", Layout(1, 1, 1))],
    2: [
        ("llama", Layout(1, 1, 1)),
        ("llama", Layout(2, 1, 0)),
        ("llama", Layout(2, 1, 3)),
        ("llama", Layout(1, 2, 2)),
        ("llama", Layout(2, 1, 1, "zbv")),
        ("llama", Layout(1, 1, 1, sp=2)),
        ("llama", Layout(1, 1, 3, cp=2)),
        ("mixtral", Layout(1, 1, 3, ep=2)),
        ("mixtral", Layout(2, 1, 1)),
    ],
    4: [
        ("llama", Layout(1, 1, 3)),
        *(("llama", Layout(2, 1, stage)) for stage in (0, 3)),
        *(("llama", Layout(1, 2, stage)) for stage in (0, 3)),
        *(("llama", Layout(2, 2, stage)) for stage in (0, 1, 3)),
        ("llama", Layout(4, 1, 3)),
        ("llama", Layout(1, 4, 3)),
        *(("llama", Layout(2, 1, stage, "zbv")) for stage in (1, 3)),
        ("llama", Layout(2, 2, 2, "interleaved")),
        ("llama", Layout(2, 1, 2, "zb_h1")),
        ("llama", Layout(1, 2, 2, sp=2)),
        ("llama", Layout(1, 1, 3, sp=2, cp=2)),
        ("llama", Layout(2, 1, 2, sp=2)),
        ("llama", Layout(2, 1, 3, cp=2)),
        ("mixtral", Layout(1, 1, 0, ep=4)),
        ("mixtral", Layout(1, 2, 3, ep=2)),
        ("mixtral", Layout(1, 1, 1, sp=2, ep=4)),
        ("mixtral", Layout(2, 1, 2, ep=2)),
        ("mixtral", Layout(2, 2, 2)),
    ],
    8: [
        ("llama", Layout(2, 2, 3)),
        ("llama", Layout(4, 2, 1)),
        ("llama", Layout(2, 2, 1, sp=2)),
        ("mixtral", Layout(2, 2, 3, ep=2)),
    ],
}


def _model(kind: str) -> torch.nn.Module:
    import transformers

    if kind == "mixtral":
        return build_model(kind)
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=46, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


def _engine(case: Case, off: float = 0.0) -> Any:
    """An engine; its parameters are ``off`` those that training begins with."""
    kind, layout = case
    model = _model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(off)
    return thalweg.initialize(model=model, config=layout.config())[0]


def _data(engine: Any, first: int) -> Iterator[dict[str, torch.Tensor]]:
    mesh = inspect.data_mesh(engine)
    for step in range(first, first + 1000):
        tokens = make_batch(step, ROWS)[mesh.get_local_rank() :: mesh.size()]
        yield {"input_ids": tokens, "labels": tokens}


def _go_on(engine: Any) -> tuple[float, float]:
    """Losses of one more step and, after it, on other data."""
    after = float(engine.train_batch(_data(engine, STEPS * MICROS)))
    return after, float(engine.eval_batch(_data(engine, 50)))


@torch.no_grad()
def _forget(engine: Any) -> None:
    """Spoil parameters and moments, so that a load that brings nothing shows."""
    held = [value for entries in engine.optimizer.state.values() for value in entries.values()]
    for tensor in (*engine.module.parameters(), *held):
        if isinstance(tensor, torch.Tensor):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7.0)


def _stored(folder: str) -> dict[str, str]:
    """A digest of each stored tensor, and what is stored of names, groups, schedule and counters."""
    checkpoint = Checkpoint.open(Path(folder))
    found = {}
    for name in checkpoint.tensor_names():
        if name.startswith(("model/", "optim/")):
            raw = checkpoint.read(name).contiguous().reshape(-1).view(torch.uint8)
            found[name] = hashlib.sha256(raw.numpy()).hexdigest()
    own = checkpoint.state["engine"]
    members = [sorted(group["params"]) for group in checkpoint.state["thalweg"]["optim"]["groups"]]
    found["aliases"] = repr(sorted(checkpoint.manifest.aliases.items()))
    return {**found, "own": repr((own["global_steps"], own["lr_scheduler"], members))}


def _begin(rank: int, world: int, folder: str) -> dict[str, tuple[float, float]]:
    found = {}
    for kind, layout in FIRST.items():
        engine = _engine((kind, layout))
        data = _data(engine, 0)
        for _ in range(STEPS):
            engine.train_batch(data)
        engine.save_checkpoint(f"{folder}/{kind}")
        found[kind] = _go_on(engine)
        engine.save_checkpoint(f"{folder}/{kind}-later")
        engine.close()
    return found


Saved = tuple[str, str, tuple[float, float] | None]  # model, folder, and losses after it if it went on


def _through(rank: int, world: int, folder: str, cases: list[Case], before: dict[str, str]) -> list[Saved]:
    found: list[Saved] = []
    before = dict(before)
    for kind, layout in cases:
        engine = _engine((kind, layout), 0.01)
        assert engine.load_checkpoint(f"{folder}/{kind}")[0] is not None
        assert engine.global_steps == STEPS
        target = f"{folder}/{kind}-{world}-{layout.name}"
        engine.save_checkpoint(target)
        found.append((kind, target, _go_on(engine)))
        _forget(engine)
        engine.load_checkpoint(before[kind])
        engine.save_checkpoint(f"{target}-next")
        found.append((kind, f"{target}-next", None))
        before[kind] = target
        engine.close()
    return found


def _back(rank: int, world: int, sources: list[tuple[str, str]]) -> list[tuple[str, str]]:
    found = []
    for kind, layout in FIRST.items():
        engine = _engine((kind, layout), 0.02)
        for source in (source for own, source in sources if own == kind):
            engine.load_checkpoint(source)
            engine.save_checkpoint(f"{source}-back")
            found.append((kind, f"{source}-back"))
            _forget(engine)
        engine.close()
    return found


def test_the_table_has_thirty_layouts():
    assert len({(world, layout) for world, cases in TABLE.items() for _, layout in cases}) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("every", [nightly(16), nightly(1)])
def test_layouts_load_each_other(tmp_path, every):
    losses = run_ranks(_begin, 4, str(tmp_path))[0]
    wanted = {kind: _stored(f"{tmp_path}/{kind}") for kind in FIRST}
    for kind, expected in wanted.items():  # the comparison can fail: one more step, and nothing is equal
        later = _stored(f"{tmp_path}/{kind}-later")
        assert later.keys() == expected.keys() and any(name.startswith("optim/exp_avg_sq/") for name in later)
        same = [name for name in later if later[name] == expected[name] and name != "aliases"]
        assert not same
    results: list[Saved] = []
    before = {kind: f"{tmp_path}/{kind}" for kind in FIRST}
    for world, cases in ((world, cases) for world, cases in TABLE.items() if world < 8 or every == 1):
        results += run_ranks(_through, world, str(tmp_path), cases[::every], before, timeout=240.0)[0]
        before |= {kind: folder for kind, folder, after in results if after is not None}
    for kind, folder, after in results:
        assert _stored(folder) == wanted[kind], folder
        assert after is None or after == pytest.approx(losses[kind], rel=1e-5), folder
    sources = [(kind, folder) for kind, folder, after in results if after is not None]
    for kind, folder in run_ranks(_back, 4, sources, timeout=240.0)[0]:
        assert _stored(folder) == wanted[kind], folder
