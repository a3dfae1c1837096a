"""Encoders: the vectors are those of the model's own code, whatever is embedded beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.marks import nightly
from tests.unit.infer_models import ENCODER_CONFIGS, tiny_encoder
from thalweg.infer import EngineConfig, Request, load_engine
from thalweg.infer.engine.embedding import EmbeddingEngine
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = EngineConfig(dtype="fp32", max_model_len=96, max_num_batched_tokens=100)
RUNNER = "TorchEncoder" if cpu_kernels.unsupported_reason() else "CpuEncoder"
PROMPTS = [[(13 * i * i + 3 * n + 5) % 128 + 2 for i in range(n)] for n in (1, 2, 16, 17, 33, 90, 5)]
PROMPTS.append([7, 1, 9, 0, 1, 1, 12])  # with tokens that RoBERTa takes for padding, which have no position


def expected(model: Any, style: str = "mean") -> torch.Tensor:
    rows = []
    for prompt in PROMPTS:
        with torch.no_grad():
            states = model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        rows.append(states[0] if style == "cls" else states.mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("name", [n if i % 3 == 0 else nightly(n) for i, n in enumerate(sorted(ENCODER_CONFIGS))])
def test_vectors_equal_the_models_own(name: str) -> None:
    model = tiny_encoder(name)
    want = expected(model)
    for runner in (None,) if name == "mpnet" else (None, "torch"):
        engine = load_engine(model, OPTIONS, runner=runner)
        assert isinstance(engine, EmbeddingEngine) and engine.metadata.kind == "encoder"
        kind = "TransformersEncoder" if name == "mpnet" else RUNNER if runner is None else "TorchEncoder"
        assert type(engine.runner).__name__ == kind
        torch.testing.assert_close(engine.embed(PROMPTS), want, atol=2e-5, rtol=1e-4)


def test_positions_behind_that_of_the_padding_are_all_there_are() -> None:
    """MPNet's config counts two that no token has."""
    model = tiny_encoder("mpnet")
    usable = model.config.max_position_embeddings - 2
    engine = load_engine(model, EngineConfig(dtype="fp32"))
    assert engine.metadata.max_length == usable
    assert engine.embed([[5] * usable]).isfinite().all()
    with pytest.raises(IndexError):
        model(torch.full((1, usable + 1), 5))


def test_company_does_not_matter_and_a_wrong_model_would_be_noticed() -> None:
    model = tiny_encoder("bert")
    engine = load_engine(model, OPTIONS)
    together = engine.embed(PROMPTS)
    alone = torch.cat([engine.embed([prompt]) for prompt in PROMPTS])
    assert torch.equal(together, alone) or RUNNER == "TorchEncoder"
    with torch.no_grad():
        model.encoder.layer[1].attention.self.value.weight.mul_(0.5)
    assert not torch.allclose(load_engine(model, OPTIONS).embed(PROMPTS), together, atol=1e-3)


@pytest.mark.parametrize(("form", "bound"), [("bf16", 0.03), ("int8", 0.03), ("int4", 0.25)])
def test_fewer_bits_give_nearly_the_same_vectors(form: str, bound: float) -> None:
    model = tiny_encoder("bert")
    quantize = form if form.startswith("int") else None
    got = load_engine(model, EngineConfig(dtype="bf16", quantization=quantize, max_model_len=96)).embed(PROMPTS)
    assert (1 - F.cosine_similarity(got, expected(model))).max() < bound


def sentence_encoder(folder: Path, pooling: dict[str, Any], *more: str) -> Path:
    """Write a directory as sentence-transformers does."""
    tiny_encoder("bert").save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_sentence_encoders_directory_says_how_to_pool(tmp_path: Path) -> None:
    both = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    e5 = sentence_encoder(tmp_path / "e5", both, "Normalize")
    bge = sentence_encoder(tmp_path / "bge", {"pooling_mode_cls_token": True})
    model = tiny_encoder("bert")
    torch.testing.assert_close(
        load_engine(e5, OPTIONS).embed(PROMPTS), F.normalize(expected(model), dim=1), atol=1e-5, rtol=1e-4
    )
    got = load_engine(bge, OPTIONS).embed(PROMPTS)
    torch.testing.assert_close(got, expected(model, "cls"), atol=2e-5, rtol=1e-4)
    assert not torch.allclose(got, expected(model), atol=1e-2)
    options = EngineConfig(dtype="fp32", pooling="mean", normalize=True)
    assert torch.allclose(load_engine(bge, options).embed(PROMPTS).norm(dim=1), torch.ones(len(PROMPTS)))
    with pytest.raises(ValueError, match="module of type Dense"):
        load_engine(sentence_encoder(tmp_path / "dense", both, "Dense"), OPTIONS)
    with pytest.raises(ValueError, match="only mean and cls"):
        load_engine(sentence_encoder(tmp_path / "max", {"pooling_mode_max_tokens": True}), OPTIONS)


def test_bad_prompts_are_refused() -> None:
    engine = load_engine(tiny_encoder("bert"), OPTIONS)
    for prompts, why in (
        ([[1], []], "empty"),
        ([[131]], "outside of 0 to 130"),
        ([[1] * 97], "this model takes 96"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.embed(prompts)
    with pytest.raises(ValueError, match="generates nothing"):
        engine.add(Request("r", [1]))
    assert not engine.has_work() and engine.step() == []
