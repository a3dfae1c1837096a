"""Tiled loss and tiled MLPs under the engine: every stage, tied and untied, as the untiled model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import ParityCase, bitwise_equal, full_tensors, run_engine
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True

TILED = {"tiling": {"loss": True, "loss_tokens": 5, "mlp": 3}}


def _pair(rank: int, world: int, cases: list[tuple[ParityCase, bool]]) -> list[tuple[float, float, bool]]:
    """For each case: the largest difference of losses and parameters to the untiled run; changed at all?"""
    found = []
    for case, tied in cases:
        model = tiny_gpt(tied=tied)
        plain = run_engine(model, case.with_(extra={}), rank, world)
        tiled = run_engine(model, case.with_(extra=case.extra or TILED), rank, world)
        worst = max(
            float((a.float() - b.float()).abs().max()) for a, b in zip(plain.parameters, tiled.parameters, strict=True)
        )
        found.append((plain.max_loss_difference(tiled), worst, bitwise_equal(plain.parameters, tiled.parameters)))
    return found


@pytest.mark.parametrize(("world", "stages"), [(2, [2]), nightly(2, range(4)), nightly(1, range(4))])
def test_stages_equal_the_untiled_run(world: int, stages: Iterable[int]) -> None:
    short = ParityCase(windows=(2,) * 4, accumulation=2, clip=1.0)
    cases = [(short.with_(stage=stage), tied) for stage in stages for tied in (True, False)]
    for results in run_ranks(_pair, world, cases):
        for (loss, parameter, same), case in zip(results, cases, strict=True):
            assert loss < 2e-6 and parameter < 1e-4, case
            assert not same, "the tiled run took the untiled path"


def test_half_precision_and_recomputation() -> None:
    short = ParityCase(windows=(1,) * 4)
    remat = {**TILED, "activation_checkpointing": {"policy": "full"}}
    cases = [
        (short.with_(stage=3, dtype="bf16"), True),
        (short.with_(stage=1, dtype="fp16"), False),
        (short.with_(stage=3, extra=remat), True),
    ]
    bounds = [2e-2, 5e-3, 2e-6]
    for results in run_ranks(_pair, 2, cases):
        for (loss, _, _), bound, case in zip(results, bounds, cases, strict=True):
            assert loss < bound, case


def _logits(rank: int, world: int, stage: int) -> dict[str, Any]:
    """What a user sees of the logits of a Hugging Face model, in training and in evaluation."""
    import transformers

    import thalweg

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config)
    settings = ParityCase(stage=stage, extra=TILED).config()
    engine = thalweg.initialize(model=copy.deepcopy(plain), config=settings)[0]
    tokens, labels = make_batch(rank, 2)
    found: dict[str, Any] = {}
    for mode in ("train", "eval"):
        getattr(engine, mode)()
        with torch.set_grad_enabled(mode == "train"):
            out = engine(input_ids=tokens, labels=labels)
            want = plain(input_ids=tokens, labels=labels)
        found[mode] = (
            abs(float(out.loss) - float(want.loss)) < 1e-6,
            type(out.logits).__name__,
            bool(torch.allclose(out.logits.float().cpu(), want.logits, atol=1e-5)),
        )
    engine.train()
    out = engine(input_ids=tokens, labels=labels)
    engine.backward(out.loss)
    engine.step()
    try:
        out.logits.sum()
    except RuntimeError as error:
        found["late"] = str(error)
    same = full_tensors(engine.module.parameters())
    found["moved"] = any(not torch.equal(a, b) for a, b in zip(same, plain.parameters(), strict=True))
    engine.close()
    return found


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_logits_come_out_where_they_are_asked_for(together: Any, world: int, stage: int) -> None:
    for found in together(_logits, world):
        for mode in ("train", "eval"):
            assert found[mode] == (True, "LazyLogits", True)
        assert "before step()" in found["late"] and found["moved"]
