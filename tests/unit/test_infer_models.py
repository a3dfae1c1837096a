"""Greedy tokens of every family equal Hugging Face's ``generate``, batched, in pieces, on every runner."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import thalweg
from tests.marks import nightly
from tests.unit.infer_models import DECODER_CONFIGS, greedy_generate, in_generate, tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 17, 40)
OPTIONS = EngineConfig(dtype="fp32", max_num_seqs=4, max_model_len=96, max_num_batched_tokens=24)
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "odd_sizes"}
FOREIGN = {"falcon_alibi", "olmo2", "phi3_longer", "mamba"}
NATIVE_KINDS = sorted(set(DECODER_CONFIGS) - MIXTURES - FOREIGN)
# One of each way to rotate, normalise, mask, scale and join: the others differ in which of them they have together.
IN_THE_GATE = {"llama", "gemma2", "gpt2", "falcon40", "gpt_neox", "phi", "bloom", "cohere", "mixtral"}
NATIVE = pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())


def prompts(vocab: int = 131) -> list[list[int]]:
    return [torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def expected(model: Any, count: int = 10) -> list[list[int]]:
    return [
        model.generate(torch.tensor([p]), max_new_tokens=count, do_sample=False)[0, len(p) :].tolist()
        for p in prompts()
    ]


@NATIVE
@pytest.mark.parametrize("name", [n if n in IN_THE_GATE else nightly(n) for n in NATIVE_KINDS])
def test_native_tokens_equal_hugging_face(name: str) -> None:
    model = tiny_decoder(name)
    engine = load_engine(model, OPTIONS)
    assert type(engine.runner).__name__ == "CpuRunner"
    assert greedy_generate(engine, prompts(), 10) == expected(model)


@NATIVE
@pytest.mark.parametrize("isa", [isa.name for isa in cpu_kernels.supported_isas()][1:])
@pytest.mark.parametrize(
    "name", ["llama", *map(nightly, sorted(set(DECODER_CONFIGS) - MIXTURES - FOREIGN - {"llama"}))]
)
def test_kernels_for_smaller_processors_too(monkeypatch: pytest.MonkeyPatch, name: str, isa: str) -> None:
    monkeypatch.setenv("THALWEG_CPU_ISA", isa)
    model = tiny_decoder(name)
    engine = load_engine(model, OPTIONS)
    assert type(engine.runner).__name__ == "CpuRunner"
    assert greedy_generate(engine, prompts(), 10) == expected(model)


@pytest.mark.parametrize(
    "name", [n if n in IN_THE_GATE else nightly(n) for n in sorted(set(DECODER_CONFIGS) - FOREIGN)]
)
def test_eager_tokens_equal_hugging_face(name: str) -> None:
    model = tiny_decoder(name)
    engine = load_engine(model, OPTIONS, runner=None if name in MIXTURES else "torch")
    assert type(engine.runner).__name__ == "TorchRunner"
    assert greedy_generate(engine, prompts(), 10) == expected(model)


@pytest.mark.parametrize("name", [in_generate(name) for name in sorted(FOREIGN)])
def test_any_other_model_runs_through_its_own_code(name: str) -> None:
    model = tiny_decoder(name)
    engine = load_engine(model, OPTIONS)
    assert type(engine.runner).__name__ == "TransformersRunner"
    assert greedy_generate(engine, prompts(), 10) == expected(model)


@pytest.mark.parametrize("name", ["qwen2", nightly("llama"), nightly("gpt_neox"), "olmo2"])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_stretched_context_is_the_models_length(name: str, kind: str) -> None:
    """As Qwen's cards ask for it, with the length itself left as it was; the rotations are right beyond that."""
    fields = {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **fields}
    model = tiny_decoder(name, rope_parameters=rope, max_position_embeddings=64)
    engine = load_engine(model, replace(OPTIONS, max_model_len=None))
    assert engine.metadata.max_length == 256
    prompt = torch.randint(131, (90,), generator=torch.Generator().manual_seed(1))
    want = model.generate(prompt[None], max_new_tokens=10, do_sample=False)[0, 90:].tolist()
    assert greedy_generate(engine, [prompt.tolist()], 10) == [want]
    # The control: a length that is the stretched one already, and one that nothing stretches.
    whole = tiny_decoder(name, rope_parameters=rope, max_position_embeddings=400 if kind == "yarn" else 100)
    plain = tiny_decoder(name, max_position_embeddings=64)
    lengths = [load_engine(x, replace(OPTIONS, max_model_len=None)).metadata.max_length for x in (whole, plain)]
    assert lengths == [400, 64]


_PICTURES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def seeing_model(kind: str) -> Any:
    """A tiny model that takes pictures around the text's half of a tiny decoder; its last tokens stand for pictures."""
    text_kind = {"Gemma3": "gemma3", "Mistral3": "mistral_window", "Llava": "llama", "Qwen2_5_VL": "qwen2"}[kind]
    text = DECODER_CONFIGS[text_kind][1] | {"vocab_size": 140, "bos_token_id": None, "eos_token_id": None}
    fields: dict[str, Any] = {"image_token_index": 139, "vision_config": _PICTURES}
    if kind == "Gemma3":
        fields |= {"mm_tokens_per_image": 4, "boi_token_index": 138, "eoi_token_index": 137}
    elif kind == "Mistral3":
        fields |= {"vision_config": _PICTURES | {"model_type": "pixtral", "head_dim": 16}, "spatial_merge_size": 1}
        text |= {"model_type": "mistral"}
    elif kind == "Llava":
        fields["vision_config"] = _PICTURES | {"model_type": "clip_vision_model", "projection_dim": 32}
        text |= {"model_type": "llama"}
    else:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
                  "fullatt_block_indexes": [0]}  # fmt: skip
        fields = {"vision_config": vision, "image_token_id": 139, "video_token_id": 138, "vision_start_token_id": 137,
                  "vision_end_token_id": 136}  # fmt: skip
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{kind}Config")(text_config=text, **fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3", nightly("Llava"), "Qwen2_5_VL"])
def test_models_that_take_pictures_take_text_alone(kind: str, tmp_path: Any) -> None:
    """Described where their text's half is, which the whole model's logits confirm, from a directory too."""
    model = seeing_model(kind)
    model.save_pretrained(tmp_path)
    want = expected(model)
    runner = "TransformersRunner" if kind == "Qwen2_5_VL" else "TorchRunner" if NATIVE.args[0] else "CpuRunner"
    for given in (model, tmp_path):
        engine = load_engine(given, OPTIONS)
        assert type(engine.runner).__name__ == runner
        assert greedy_generate(engine, prompts(), 10) == want
    if kind == "Gemma3":
        cache = load_engine(tmp_path, replace(OPTIONS, kv_cache_dtype="int8")).runner
        assert type(cache).__name__ == runner
        with torch.no_grad():
            model.model.language_model.layers[1].mlp.down_proj.weight.neg_()
        assert greedy_generate(load_engine(model, OPTIONS), prompts(), 10) != want  # the control


def test_the_comparison_would_notice_another_model() -> None:
    """Negative control: one weight of one layer, changed after the reference was taken."""
    model = tiny_decoder("llama")
    want = expected(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    assert greedy_generate(load_engine(changed, OPTIONS), prompts(), 10) != want


@pytest.mark.parametrize("runner", [pytest.param("cpu", marks=NATIVE), "torch", "transformers"])
@pytest.mark.parametrize("name", ["cohere", "granite"])
def test_embeddings_are_the_models_last_states(name: str, runner: str) -> None:
    """Of models whose logits are scaled, too: the states themselves are not."""
    model = tiny_decoder(name)
    with torch.no_grad():
        states = [model(torch.tensor([p]), output_hidden_states=True).hidden_states[-1][0].mean(0) for p in prompts()]
    got = load_engine(model, OPTIONS, runner=runner).embed(prompts())
    torch.testing.assert_close(got, torch.stack(states), atol=2e-5, rtol=1e-4)


def test_the_cache_of_a_models_own_code_has_no_size_to_ask_for() -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes needs a described model"):
        load_engine(tiny_decoder("olmo2"), replace(OPTIONS, kv_cache_bytes=2**20))


def test_a_description_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that has changed under us runs through its own code, and gives its own tokens."""
    from thalweg.infer.loader import load
    from thalweg.infer.models import build_decoder_spec

    def wrong(model: Any) -> Any:
        import dataclasses

        good = build_decoder_spec(model)
        return dataclasses.replace(good, embed_scale=1.1)

    model = tiny_decoder("llama")
    want = expected(model)
    monkeypatch.setattr(load, "build_decoder_spec", wrong)
    engine = load_engine(model, OPTIONS)
    assert type(engine.runner).__name__ == "TransformersRunner"
    assert greedy_generate(engine, prompts(), 10) == want
    with pytest.raises(ValueError, match="off by"):
        load_engine(model, OPTIONS, runner="torch")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_no_reason_for_a_slow_runner(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as it is, wherever a runner or a description needs memory."""
    from thalweg.infer.loader import load
    from thalweg.infer.models import llama

    def no_memory(*_: Any, **__: Any) -> Any:
        raise error

    broken = type("Broken", (load.TorchRunner,), {"__init__": no_memory})  # its parent still verifies the description
    for owner, name, value in (
        (llama, "build_linear", no_memory), (load, "DECODER_RUNNERS", (broken,)), (load, "LLMEngine", no_memory),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(type(error)) as raised:
                load_engine(tiny_decoder("llama"), OPTIONS)
        assert raised.value is error
    monkeypatch.setattr(llama, "build_linear", lambda *_: {}["a part that this variant lacks"])
    assert type(load_engine(tiny_decoder("llama"), OPTIONS).runner).__name__ == "TransformersRunner"


def test_the_first_runner_that_supports_a_model_runs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each runner says why it cannot; the reasons of all are the error where none can."""
    from thalweg.infer.loader.load import DECODER_RUNNERS, choose_runner
    from thalweg.infer.models import build_decoder_spec

    spec = build_decoder_spec(tiny_decoder("llama"))
    cpu, eager, own_code = DECODER_RUNNERS
    assert choose_runner(DECODER_RUNNERS, spec, EngineConfig(dtype="fp16")) is eager
    assert choose_runner(DECODER_RUNNERS, spec, EngineConfig(dtype="fp16")) is eager
    assert choose_runner(DECODER_RUNNERS, None, EngineConfig()) is own_code
    assert choose_runner(DECODER_RUNNERS, spec, EngineConfig(), "transformers") is own_code
    if not cpu_kernels.unsupported_reason():
        assert choose_runner(DECODER_RUNNERS, spec, EngineConfig(dtype="bf16")) is cpu
        assert "running by CPU kernels for" in caplog.text
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setenv("THALWEG_CPU_ISA", "riscv")
        assert choose_runner(DECODER_RUNNERS, spec, EngineConfig()) is eager
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and "several times the tokens" in warning.message
    assert "this processor has none of riscv" in warning.message
    with pytest.raises(ValueError, match="no fp16"):
        choose_runner(DECODER_RUNNERS, spec, EngineConfig(dtype="fp16"), "cpu")
    with pytest.raises(ValueError, match=r"not described; lora_adapters needs a described model: because"):
        choose_runner(DECODER_RUNNERS, None, EngineConfig(lora_adapters={"a": "b"}), undescribed="because")
    with pytest.raises(ValueError, match="there are cpu, torch, transformers"):
        choose_runner(DECODER_RUNNERS, spec, EngineConfig(), "eager")


def test_a_directory_loads_with_its_end_tokens(tmp_path: Any) -> None:
    model = tiny_decoder("qwen2")
    first = expected(model)[0]
    model.generation_config.eos_token_id = first[3]
    model.save_pretrained(tmp_path)
    engine = load_engine(tmp_path, OPTIONS)
    assert engine.metadata.eos_token_ids == (first[3],) and engine.metadata.max_length == 96
    assert greedy_generate(engine, prompts()[:1], 10) == [first[: first.index(first[3]) + 1]]


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_a_tensor_that_is_not_there_is_an_error_never_random_numbers(tmp_path: Any, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    tiny_decoder("llama").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[lost]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    for stream in (None, "cpu"):
        with pytest.raises(ValueError, match=f"nothing for 1 of the model's tensors: {lost}"):
            load_engine(tmp_path, replace(OPTIONS, weight_offload=stream))
    save_file(stored | {lost: torch.ones(3, 5)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"other shapes.*{lost} \(3, 5\) not"):
        load_engine(tmp_path, OPTIONS)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load_engine(tmp_path, OPTIONS)


def test_what_cannot_be_loaded_says_why() -> None:
    with pytest.raises(ValueError, match="no Hugging Face model"):
        load_engine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="weight_offload needs a described model"):
        load_engine(tiny_decoder("olmo2"), EngineConfig(weight_offload="cpu"))


def scores(model: Any, quantize: str | None) -> tuple[Any, torch.Tensor]:
    """Return an engine and the log-probabilities that it gives to a prompt."""
    engine = load_engine(model, replace(OPTIONS, quantization=quantize, max_num_batched_tokens=64))
    engine.add(Request("r", prompts()[2], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)))
    (output,) = engine.step()
    return engine, torch.tensor([x.logprob for x in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_are_packed_and_their_own_weights_let_go(kind: str, form: str) -> None:
    model = tiny_decoder(kind)
    exact = scores(model, None)[1]
    engine, found = scores(model, form)
    # A few tokens of a random mixture go to other experts, so the middle one's error is looked at.
    error = (found - exact).abs().median() / exact.std()
    # Without AVX-512 torch's product takes activations in 7 bits (ops/linear/packed.py), a step twice as large.
    limit = {"int8": 0.05 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 0.1, "int4": 0.6}[form]
    assert 1e-4 < error < limit
    assert all(x.mlp.up.numel() == 0 and x.mlp.num_experts == 4 for x in engine.runner.decoder.layers)
    assert model.model.layers[0].mlp.experts.gate_up_proj.numel() > 0


def test_any_other_model_computes_in_the_dtype_asked_for(tmp_path: Any) -> None:
    """In a copy: the live model keeps its own, and lends its parameters where they are in that dtype already."""
    model = tiny_decoder("olmo2")
    model.save_pretrained(tmp_path)
    want = expected(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert want != expected(model)  # the control
    for given in (model, tmp_path):
        core = thalweg.init_inference(given, dtype=torch.bfloat16, device="cpu").core
        assert core.metadata.dtype == "bf16" and type(core.runner).__name__ == "TransformersRunner"
        assert greedy_generate(core, prompts(), 10) == want
        assert {x.dtype for x in core.runner._model.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert load_engine(model, OPTIONS).runner._model is model


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_any_other_model_takes_packed_weights(form: str) -> None:
    """Its own code, with its linear layers exchanged in a copy that shares the rest."""
    model = tiny_decoder("olmo2")
    exact = scores(model, None)[1]
    engine, found = scores(model, form)
    assert type(engine.runner).__name__ == "TransformersRunner"
    error = (found - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < (0.05 if form == "int8" else 0.4)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert greedy_generate(load_engine(model, OPTIONS), prompts()[:1], 4) == [expected(model, 4)[0]]
