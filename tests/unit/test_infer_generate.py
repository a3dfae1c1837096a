"""``init_inference``: called like the module, generating like Hugging Face."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

import thalweg
from tests.unit.infer_models import tiny_decoder, tiny_encoder
from thalweg.infer import EngineConfig, load_engine
from thalweg.ops import cpu_kernels


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_decoder("llama")


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    return thalweg.init_inference(model, {"replace_with_kernel_inject": True}, dtype=torch.float32)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of 9 and 5 tokens, the short one padded on the left."""
    tokens = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    return tokens, mask


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 12},
        {"max_length": 20},
        {"max_new_tokens": 12, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "eos_token_id": [17, 30, 44, 60, 90, 100], "pad_token_id": 5},
        {"max_new_tokens": 12, "eos_token_id": list(range(100)), "min_new_tokens": 6, "pad_token_id": 5},
        {},
        {"max_new_tokens": 12, "eos_token_id": [17, 50256], "pad_token_id": 5},
        {"max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": 5},
        {"max_new_tokens": 12, "repetition_penalty": 3.0, "pad_token_id": 5},
        {"max_new_tokens": 6, "num_beams": 2},
        {"max_new_tokens": 6, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_generate_equals_hugging_face(engine: Any, model: Any, arguments: dict[str, Any]) -> None:
    tokens, mask = batch()
    want = model.generate(tokens, attention_mask=mask, do_sample=False, **arguments)
    assert torch.equal(engine.generate(tokens, attention_mask=mask, do_sample=False, **arguments), want)
    assert torch.equal(engine.generate(input_ids=tokens, attention_mask=mask, do_sample=False, **arguments), want)


def test_what_a_config_leaves_open_is_the_models(model: Any) -> None:
    """And without a mask a padding token of its own is left out, as in Hugging Face's code."""
    from transformers import GenerationConfig

    own = copy.deepcopy(model)
    tokens, _ = batch()
    absent = next(token for token in range(131) if token not in tokens)
    first = own.generate(tokens, max_new_tokens=8)[0, 9:].tolist()
    own.generation_config.eos_token_id = first[3]
    engine = thalweg.init_inference(own, dtype=torch.float32)
    config = GenerationConfig(max_new_tokens=8, pad_token_id=absent)
    ended = engine.generate(tokens, generation_config=config)
    want = own.generate(tokens, generation_config=config)
    assert torch.equal(ended, want) and first[3] in ended[0, 9:13]
    own.generation_config.pad_token_id = 7
    tokens[1, :4] = 7
    want = own.generate(tokens, max_new_tokens=8)
    assert torch.equal(engine.generate(tokens, max_new_tokens=8), want)
    own.generation_config.pad_token_id = None
    assert not torch.equal(own.generate(tokens, max_new_tokens=8), want), "control: it matters"


def test_it_goes_on_where_the_engine_has_no_room() -> None:
    short = tiny_decoder("llama", max_position_embeddings=16)
    tokens, _ = batch()
    want = short.generate(tokens, max_new_tokens=12, do_sample=False)
    assert torch.equal(thalweg.init_inference(short).generate(tokens, max_new_tokens=12, do_sample=False), want)
    ended = thalweg.init_inference(short, max_out_tokens=16)
    got = ended.generate(tokens, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want[:, :16])


def test_a_sequence_longer_than_the_models_own_is_cut_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """No error: DeepSpeed's and MII's programs ask for lengths of buffers, in the same words."""
    short = tiny_decoder("llama", max_position_embeddings=16)
    for runner in ("torch", "transformers"):
        caplog.clear()
        core = load_engine(short, EngineConfig(dtype="fp32", max_model_len=1000), runner=runner)
        assert core.metadata.max_length == 16
        assert "max_model_len: this model takes 16 tokens" in caplog.text and "asked for 1000" in caplog.text
    caplog.clear()
    assert load_engine(short, EngineConfig(dtype="fp32", max_model_len=16)).metadata.max_length == 16
    unlimited = load_engine(tiny_encoder("t5"), EngineConfig(dtype="fp32", max_model_len=1000))
    assert unlimited.metadata.max_length == 1000 and "max_model_len" not in caplog.text


def test_it_is_called_like_the_module(engine: Any, model: Any) -> None:
    tokens, _ = batch()
    with torch.no_grad():
        want = model(tokens, labels=tokens)
    got = engine(tokens, labels=tokens)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    assert engine.module is model and not got.logits.requires_grad


def test_samples_repeat_under_a_seed_and_differ_without(engine: Any) -> None:
    tokens, mask = batch()
    arguments = {"max_new_tokens": 10, "do_sample": True, "num_return_sequences": 3, "attention_mask": mask}
    torch.manual_seed(1)
    first = engine.generate(tokens, **arguments)
    torch.manual_seed(1)
    assert torch.equal(engine.generate(tokens, **arguments), first) and first.shape == (6, 19)
    assert not torch.equal(engine.generate(tokens, **arguments), first)
    assert len({tuple(row) for row in first[:3].tolist()}) == 3


def test_refresh_takes_over_new_weights(model: Any) -> None:
    changing = copy.deepcopy(model)
    engine = thalweg.init_inference(changing)
    tokens, _ = batch()
    with torch.no_grad():
        changing.model.layers[0].mlp.down_proj.weight.mul_(-1)
    want = changing.generate(tokens, max_new_tokens=8, do_sample=False)
    if not cpu_kernels.unsupported_reason():  # packed copies; torch's operators read the live model's weights
        assert not torch.equal(engine.generate(tokens, max_new_tokens=8, do_sample=False), want)
    engine.update_weights()
    assert torch.equal(engine.generate(tokens, max_new_tokens=8, do_sample=False), want)


def test_configs(model: Any, tmp_path: Any) -> None:
    path = tmp_path / "inference.json"
    path.write_text(
        json.dumps(
            {
                "dtype": "int8",
                "tensor_parallel": {"enabled": False, "tp_size": 2},
                "max_out_tokens": 64,
                "mpu": None,
            }
        )
    )
    engine = thalweg.init_inference(model, path)
    assert engine.core.metadata.quantize == "int8" and engine.core.metadata.max_length == 64
    assert thalweg.init_inference(model).core.metadata.dtype == "fp32"
    for bad, text in [
        ({"tensor_parallel": {"tp_size": 0}, "mp_size": 0}, "tensor_parallel"),
        ({"dtypes": "fp16"}, "dtypes"),
        ({"quant": {"weight": {"num_bits": 3}}}, "num_bits"),
        ({"checkpoint": "x.json"}, "checkpoint"),
    ]:
        with pytest.raises(ValueError, match=text):
            thalweg.init_inference(model, bad)


def test_an_encoder_is_called_and_a_translator_generates() -> None:
    from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = thalweg.init_inference(BertModel(BertConfig(vocab_size=50, **sizes)).eval())
    assert encoder(torch.tensor([[1, 2, 3]])).last_hidden_state.shape == (1, 3, 32) and encoder.core is None
    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    translator = T5ForConditionalGeneration(config).eval()
    tokens = torch.tensor([[5, 6, 7]])
    want = translator.generate(tokens, max_new_tokens=5, do_sample=False)
    engine = thalweg.init_inference(translator)
    assert torch.equal(engine.generate(tokens, max_new_tokens=5, do_sample=False), want)
    other = translator.generate(tokens, max_new_tokens=5, decoder_start_token_id=9)
    assert torch.equal(engine.generate(tokens, max_new_tokens=5, decoder_start_token_id=9), other)
