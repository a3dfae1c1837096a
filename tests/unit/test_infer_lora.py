"""LoRA adapters beside the weights: each request gives what peft gives for its adapter, in any company."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder, tiny_encoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

peft = pytest.importorskip("peft")
PROMPTS = [[(7 * i * i + 3 * n) % 128 + 2 for i in range(n)] for n in (5, 17, 40, 16)]
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "bloom": ["query_key_value", "dense"],
    "falcon40": ["query_key_value"],
    "phi3": ["qkv_proj", "gate_up_proj", "lm_head"],
    "qwen3": ["k_proj", "o_proj", "gate_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
    "qwen2_moe": ["v_proj", "shared_expert.down_proj"],
    "granite": ["o_proj", "down_proj"],
}
RUNNERS = ["torch"] if cpu_kernels.unsupported_reason() else ["cpu", "torch"]


def adapted(model: Any, folder: Path, seed: int, **fields: Any) -> Any:
    """Return peft's own model with a random adapter, saved to the folder."""
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**({"r": 4, "lora_alpha": 12} | fields)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(folder)
    return made.eval()


def expected(model: Any, prompt: list[int], **fields: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return made[0, fields.get("skip", len(prompt)) :].tolist()


def served(engine: Any, asked: list[tuple[list[int], str | None]]) -> list[list[int]]:
    for number, (prompt, adapter) in enumerate(asked):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add(Request(str(number), prompt, params, adapter=adapter))
    got: dict[str, list[int]] = {str(n): [] for n in range(len(asked))}
    while engine.has_work():
        for output in engine.step():
            got[output.request_id] += output.token_ids
    return list(got.values())


@pytest.mark.parametrize("name", [n if n in ("llama", "gpt2", "phi3") else nightly(n) for n in sorted(TARGETS)])
def test_requests_with_several_adapters_in_one_batch_equal_peft(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    models: dict[str | None, Any] = {None: model}
    models["a"] = adapted(model, tmp_path / "a", 1, target_modules=TARGETS[name])
    models["b"] = adapted(
        model, tmp_path / "b", 2, r=7, use_rslora=True, target_modules=TARGETS[name][:1],
        alpha_pattern={TARGETS[name][0]: 3},
    )  # fmt: skip
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "a", "b")]
    want = [expected(models[adapter], prompt) for prompt, adapter in asked]
    assert want[0::3] != want[1::3] != want[2::3] != want[0::3]
    for runner in ["torch"] if "moe" in name else RUNNERS:
        options = EngineConfig(
            dtype="fp32", max_num_seqs=8, max_model_len=96, max_num_batched_tokens=64,
            lora_adapters={key: str(tmp_path / key) for key in ("a", "b")},
        )  # fmt: skip
        engine = load_engine(model, options, runner=runner)
        assert engine.metadata.adapters == ("a", "b")
        assert served(engine, asked) == want
        assert served(engine, asked) == want  # with prefixes found, each its own adapter's


def test_an_alpha_of_0_is_an_adapter_that_says_nothing(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    adapted(model, tmp_path / "a", 1, target_modules=["q_proj", "up_proj"], lora_alpha=0)
    options = EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=96, lora_adapters={"a": str(tmp_path / "a")})
    assert served(load_engine(model, options), [(PROMPTS[1], "a")]) == [expected(model, PROMPTS[1])]


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapters_that_change_the_weights_they_begin_with_are_refused_with_the_cure(start: str, tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=start)
    made = peft.get_peft_model(copy.deepcopy(model), config)
    made.peft_config["default"].init_lora_weights = True  # what is saved is what it began with
    made.save_pretrained(tmp_path / "initial")
    made.peft_config["default"].init_lora_weights = start
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    made.save_pretrained(tmp_path / "plain")
    made.save_pretrained(tmp_path / "cured", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    options = EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=96, lora_adapters={"a": str(tmp_path / "plain")})
    with pytest.raises(ValueError, match=f"init_lora_weights is '{start}'.*path_initial_model_for_weight_conversion"):
        load_engine(model, options)
    options = replace(options, lora_adapters={"a": str(tmp_path / "cured")})
    want = expected(made.eval(), PROMPTS[1])
    assert served(load_engine(model, options), [(PROMPTS[1], "a")]) == [want] != [expected(model, PROMPTS[1])]


def test_a_model_that_listens_takes_them_too(tmp_path: Path) -> None:
    model = tiny_encoder("flan_t5")
    other = adapted(model, tmp_path / "a", 1, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM")
    options = EngineConfig(dtype="fp32", max_num_seqs=8, max_model_len=96, lora_adapters={"a": str(tmp_path / "a")})
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "a")]
    want = [expected(other if adapter else model, prompt, skip=1) for prompt, adapter in asked]
    assert want[0] != want[1]
    for runner in RUNNERS:
        assert served(load_engine(model, options, runner=runner), asked) == want


def test_what_is_unknown_or_does_not_fit_is_one_clear_error(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    adapted(model, tmp_path / "a", 1, target_modules=["q_proj"])

    def load(**adapters: str) -> Any:
        return load_engine(model, EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=64, lora_adapters=adapters))

    with pytest.raises(ValueError, match="no adapter 'c': the engine holds a"):
        load(a=str(tmp_path / "a")).add(Request("r", [1], adapter="c"))
    with pytest.raises(ValueError, match="adapter x: there is no"):
        load(x=str(tmp_path / "nowhere"))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for field, value in (
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa_niter_4"),
    ):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=f"adapter a: {field}"):
            load(a=str(tmp_path / "a"))
    adapted(model, tmp_path / "e", 1, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="no matrix of a linear layer"):
        load(e=str(tmp_path / "e"))
    adapted(tiny_decoder("gpt2"), tmp_path / "g", 1, target_modules=["c_attn"])
    with pytest.raises(ValueError, match="the model has no such module"):
        load(g=str(tmp_path / "g"))
    adapted(tiny_decoder("llama", intermediate_size=80), tmp_path / "w", 1, target_modules=["up_proj"])
    with pytest.raises(ValueError, match="do not fit a layer"):
        load(w=str(tmp_path / "w"))
    with pytest.raises(ValueError, match="lora_adapters needs a described model"):
        load_engine(tiny_decoder("olmo2"), EngineConfig(lora_adapters={"a": str(tmp_path / "a")}))
