"""Row 6 of PAIN_POINTS.md: ``generate()`` at stage 3 where ranks end at different tokens needs no flag.

The module's own method gathers for each token, so a rank that has ended goes on until all have; the hybrid engine
gathers once for a phase, and ends where it ends.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import thalweg
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import SamplingParams
from thalweg.rlhf.rollout import generate_rollout
from thalweg.rlhf.weight_sync import HybridEngine

REUSE_RANKS = True

NEW = 8
PROMPTS = [[5, 9, 2, 7], [3, 3, 30, 8]]
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


class Wrapped(nn.Module):
    """A language model inside of a user's own module."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.head = nn.Linear(4, 4)

    def forward(self, **inputs: Any) -> Any:
        return self.lm(**inputs)


def _make(kind: str) -> Any:
    model = tiny_decoder("llama").eval()
    if kind == "peft":
        import peft

        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, lora).eval()
    return Wrapped(model) if kind == "wrapped" else model


def _engine(model: Any, zero: dict[str, Any] | None = None, **config: Any) -> thalweg.Engine:
    config |= {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **(zero or {})}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine = thalweg.initialize(model=model, config=config)[0]
    engine.eval()
    return engine


def _generate(
    rank: int, world: int, kind: str, zero: dict[str, Any], more: dict[str, Any]
) -> tuple[list[int], list[int], int, int]:
    """This rank's text and the plain model's, the passes that it took, and the gathers that these made."""
    model = _make(kind)
    plain = copy.deepcopy(model)
    engine = _engine(model, zero)
    ids = torch.tensor([PROMPTS[rank]])

    def text(model: Any, eos: int, **more: Any) -> list[int]:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos}
        given = ids if model is plain else ids.to(engine.device)
        model = model.lm if kind == "wrapped" else model
        return model.generate(input_ids=given, attention_mask=torch.ones_like(given), **options, **more)[0].tolist()

    whole = text(plain, -1)
    eos = whole[len(PROMPTS[rank])] if rank == 1 else -1  # rank 1 ends at once
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = engine.module.get_submodule("lm" if kind == "wrapped" else "").register_forward_pre_hook(count)
    if kind == "peft":
        hook.remove()
        engine.module.get_base_model().register_forward_pre_hook(count)
    before = engine.ledger.total("all_gather").num_calls
    got = text(engine.module, eos, **more)
    found = got, text(plain, eos), passes, engine.ledger.total("all_gather").num_calls - before
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("plain", {}), ("peft", {}), ("wrapped", {}), nightly("plain", HOST), nightly("peft", HOST)],
)
def test_row06_ranks_that_end_at_different_tokens_need_no_flag(kind: str, zero: dict[str, Any]) -> None:
    results = run_ranks(_generate, 2, kind, zero, {}, timeout=20)
    lengths = []
    for rank, (got, want, passes, _) in enumerate(results):
        assert got == want and passes == NEW
        lengths.append(len(got) - len(PROMPTS[rank]))
    assert lengths == [NEW, 1]


@pytest.mark.nightly
def test_the_control_of_it_a_flag_that_says_no_does_not_end() -> None:
    """So the texts above are short enough to show it, and the limit of time is one that a hang meets."""
    with pytest.raises(AssertionError, match=r"did not finish|ranks failed"):
        run_ranks(_generate, 2, "plain", {}, {"synced_gpus": False}, timeout=10, reuse=False)


def _generate_alone(rank: int, world: int, stage: int) -> tuple[list[int], list[int]]:
    """What the first rank generates by itself between two steps, and what the same weights generate unsharded."""
    engine = _engine(_make("plain"), {"stage": stage})
    ids = torch.tensor([PROMPTS[0]]).to(engine.device)
    texts: tuple[list[int], list[int]] = [], []
    for _ in range(2):
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.eval()
        for model, text in zip((engine.module, copy.deepcopy(engine.module)), texts, strict=True):
            if rank == 0:
                options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
                given: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                text += model.generate(**given, **options)[0].tolist()  # type: ignore[operator]
    engine.close()
    return texts


@pytest.mark.parametrize("stage", [nightly(0), nightly(1), 2])
def test_whole_parameters_generate_on_one_rank_alone(stage: int) -> None:
    (alone, want), _ = run_ranks(_generate_alone, 2, stage, timeout=20)
    assert alone == want and len(alone) == 2 * (NEW + len(PROMPTS[0]))


def _count_gathers(rank: int, world: int) -> tuple[list[tuple[int, int, int]], int]:
    """(gathers, bytes gathered, gathers while it generated) of phases of the hybrid engine that differ in the tokens
    that they generate, and the bytes of the model."""
    engine = _engine(_make("plain"))
    hybrid, found = HybridEngine(engine), []
    total = lambda: engine.ledger.total("all_gather")
    for new in (1, 1, 4, 16 * rank + 4):  # the first builds the inference engine, and compares logits once
        begin = total()
        with hybrid.generation() as core:
            ready = total()
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            rollout = generate_rollout(core, [PROMPTS[rank]] * (1 + rank), params, seed=0, pad_id=0)
            assert [len(response) for response in rollout.responses()] == [new] * (1 + rank)
        end = total()
        gathered = end.num_calls - begin.num_calls, end.full_bytes - begin.full_bytes
        found.append((*gathered, end.num_calls - ready.num_calls))
    model_bytes = 4 * sum(p.numel() for p in engine.module.parameters())
    hybrid.close()
    engine.close()
    return found, model_bytes


def test_row06_the_hybrid_engine_gathers_each_weight_once_however_many_tokens() -> None:
    for phases, model_bytes in run_ranks(_count_gathers, 2, timeout=30):
        assert [during for _, _, during in phases] == [0] * 4
        assert phases[1] == phases[2] == phases[3], phases
        assert 0 < phases[1][1] <= 1.1 * model_bytes, (phases, model_bytes)
