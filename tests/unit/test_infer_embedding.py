"""Encoders: the vectors are those of the model's own code, whatever is embedded beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from tests.marks import nightly
from tests.unit.infer_models import ENCODER_CONFIGS, tiny_decoder, tiny_encoder
from thalweg.infer import EngineConfig, Request, load_engine
from thalweg.infer.engine.embedding import EmbeddingEngine
from thalweg.infer.loader.hf import load_mmapped, to_local_folder
from thalweg.infer.quantization.zeroquant import save_quantized
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = EngineConfig(dtype="fp32", max_model_len=96, max_num_batched_tokens=100)
RUNNER = "TorchEncoder" if cpu_kernels.unsupported_reason() else "CpuEncoder"
PROMPTS = [[(13 * i * i + 3 * n + 5) % 128 + 2 for i in range(n)] for n in (1, 2, 16, 17, 33, 90, 5)]
PROMPTS.append([7, 1, 9, 0, 1, 1, 12])  # with tokens that RoBERTa takes for padding, which have no position


def expected(model: Any, style: str = "mean") -> torch.Tensor:
    one = {"cls": 0, "last": -1}.get(style)
    rows = []
    for prompt in PROMPTS:
        with torch.no_grad():
            states = model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        rows.append(states.mean(0) if one is None else states[one])
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


def sentence_encoder(folder: Path, pooling: dict[str, Any], *more: str, model: Any = None) -> Path:
    """Write a directory as sentence-transformers does."""
    (model or tiny_encoder("bert")).save_pretrained(folder)
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
    with pytest.raises(ValueError, match="by pooling_mode_max_tokens: only mean, cls and last token are known"):
        load_engine(sentence_encoder(tmp_path / "max", {"pooling_mode_max_tokens": True}), OPTIONS)


def test_decoders_that_embed_are_encoders(tmp_path: Path) -> None:
    """As Qwen 3 Embedding is saved, a decoder that generates beside a list of modules; or as E5 Mistral, without its
    head; or where somebody says how to pool."""
    model = tiny_decoder("qwen3")
    last = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    folder = sentence_encoder(tmp_path / "modules", last, "Normalize", model=model)
    engine = load_engine(folder, OPTIONS)
    assert isinstance(engine, EmbeddingEngine)
    want = expected(model, "last")
    torch.testing.assert_close(engine.embed(PROMPTS), F.normalize(want, dim=1), atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    assert load_engine(tmp_path / "plain", OPTIONS).metadata.kind == "causal"  # the control
    asked = EngineConfig(dtype="fp32", pooling="last")
    torch.testing.assert_close(load_engine(tmp_path / "plain", asked).embed(PROMPTS), want, atol=2e-5, rtol=1e-4)
    model.model.save_pretrained(tmp_path / "headless")
    got = load_engine(tmp_path / "headless", OPTIONS)
    torch.testing.assert_close(got.embed(PROMPTS), expected(model), atol=2e-5, rtol=1e-4)
    for options, given in ((asked, model), (EngineConfig(normalize=True), tmp_path / "plain")):
        with pytest.raises(ValueError, match="for encoders, and this model generates text; load it by its AutoModel"):
            load_engine(given, options)


def test_a_sentence_encoders_directory_says_how_long_a_text_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sentence-transformers embeds the beginning of a longer one: embedded whole, its vector would be another."""
    folder = sentence_encoder(tmp_path, {"pooling_mode_mean_tokens": True})
    assert load_engine(folder, EngineConfig(dtype="fp32")).metadata.max_length == 256  # the control
    file = folder / "sentence_bert_config.json"
    for length, asked, want in ((16, None, 16), (16, 12, 12), (16, 20, 16), (None, None, 256)):
        file.write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
        caplog.clear()
        engine = load_engine(folder, EngineConfig(dtype="fp32", max_model_len=asked))
        assert engine.metadata.max_length == want and ("asked for 20" in caplog.text) == (asked == 20)
    file.write_text(json.dumps({"max_seq_length": 16}))
    engine = load_engine(folder, EngineConfig(dtype="fp32"))
    torch.testing.assert_close(engine.embed([PROMPTS[2]]), expected(tiny_encoder("bert"))[2:3], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="has 17 tokens; this model takes 16"):
        engine.embed([PROMPTS[3]])


def test_models_without_a_head_generate_only_where_they_need_none(tmp_path: Path) -> None:
    """Cerebras-GPT is saved as GPT2Model, whose embeddings are its head; BERT's kin have heads of several layers."""
    tiny_decoder("gpt2").transformer.save_pretrained(tmp_path / "gpt2")
    assert load_engine(tmp_path / "gpt2", OPTIONS).metadata.kind == "causal"
    ernie = transformers.ErnieModel(transformers.ErnieConfig(**ENCODER_CONFIGS["bert"][1])).eval()
    ernie.save_pretrained(tmp_path / "ernie")
    got = load_engine(tmp_path / "ernie", OPTIONS).embed(PROMPTS)
    torch.testing.assert_close(got, expected(ernie), atol=2e-5, rtol=1e-4)


def test_encoders_with_code_of_their_own(tmp_path: Path) -> None:
    """As gte-base-en-v1.5; its configuration names no class that generates, though its code is trusted."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from transformers import PretrainedConfig, PreTrainedModel\n"
        "from transformers.modeling_outputs import BaseModelOutput\n\n\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    vocab_size, hidden_size = 131, 32\n\n\n"
        "class OwnModel(PreTrainedModel):\n    config_class = OwnConfig\n\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.embeddings = torch.nn.Embedding(131, 32)\n        self.post_init()\n\n"
        "    def forward(self, input_ids=None, attention_mask=None, return_dict=True, **kwargs):\n"
        "        return BaseModelOutput(last_hidden_state=self.embeddings(input_ids))\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = torch.randn(131, 32)
    save_file({"embeddings.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    engine = load_engine(tmp_path, EngineConfig(dtype="fp32", trust_remote_code=True))
    torch.testing.assert_close(engine.embed([[5, 7]]), weight[[5, 7]].mean(0)[None])


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``org/name`` in the hub's cache, as it lies there when all of it has been downloaded."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--org--name", "0123456789abcdef" * 2 + "01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("kind", ["sentence encoder", "quantised", "mapped"])
def test_a_name_on_the_hub_is_what_its_directory_is(kind: str, hub_cache: Path) -> None:
    if kind == "sentence encoder":
        sentence_encoder(hub_cache, {"pooling_mode_cls_token": True}, "Normalize")
        named, local = (load_engine(model, OPTIONS) for model in ("org/name", hub_cache))
        assert named.metadata.name == "org/name" and torch.equal(named.embed(PROMPTS), local.embed(PROMPTS))
        assert not torch.allclose(named.embed(PROMPTS), expected(tiny_encoder("bert")), atol=1e-2)
    elif kind == "quantised":
        save_quantized(tiny_decoder("llama"), hub_cache)
        named, local = (load_engine(model, OPTIONS).embed(PROMPTS[:3]) for model in ("org/name", hub_cache))
        assert torch.equal(named, local)
    else:
        tiny_decoder("llama").save_pretrained(hub_cache)
        digests = [load_mmapped(model, OPTIONS)[1] for model in ("org/name", hub_cache)]
        assert digests[0] is not None and digests[0] == digests[1]


def test_what_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a directory says, and the weights in one form: PyTorch's own where there is no other."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("thalweg.infer.loader.hf.check_model_path", lambda _: None)
    files = [
        "1_Pooling/config.json", "config.json", "modules.json", "modeling_own.py", "onnx/model.onnx",
        "consolidated.safetensors", "pytorch_model.bin", "tokenizer.model", "vocab.txt", "chat_template.jinja",
        "source.spm", "target.spm", "bpe.codes",
    ]  # fmt: skip
    asked: list[set[str]] = []

    def download(name: str, **patterns: Any) -> str:
        asked.append(set(hub.utils.filter_repo_objects(files, **patterns)))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    unwanted = {"onnx/model.onnx", "consolidated.safetensors"}
    assert to_local_folder("org/name") == tmp_path and asked[-1] == {*files} - unwanted
    (tmp_path / "model.safetensors").touch()
    asked.clear()
    assert to_local_folder("org/name") == tmp_path and asked == [{*files} - unwanted - {"pytorch_model.bin"}]
    assert to_local_folder(tmp_path) == tmp_path and len(asked) == 1


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
