"""Inference on an accelerator gives what it gives on the CPU; on a simulated one (``tests/simdevice``)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from thalweg.infer import StructuredOutput

pytest.importorskip("transformers")
REUSE_RANKS = True


def _letters() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def _generate(rank: int, world: int, device: str) -> dict[str, list[int]]:
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, Request, SamplingParams, StructuredOutput, load_engine

    model = tiny_decoder("llama", vocab_size=300)
    model.config.eos_token_id = model.generation_config.eos_token_id = 256
    options = EngineConfig(device=device, dtype="fp32", max_num_seqs=8, max_model_len=100)
    engine = load_engine(model, options, _letters(), runner="torch")
    requests = {
        "greedy": {"temperature": 0},
        "penalties": {"temperature": 0, "repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        "bias": {"temperature": 0, "logit_bias": {7: 3.0}, "min_tokens": 4},
        "sampled": {"temperature": 0.9, "top_p": 0.8, "seed": 3, "repetition_penalty": 1.2},
        "structure": {"temperature": 0, "structure": StructuredOutput(choices=("yes", "no"))},
    }
    for name, fields in requests.items():
        engine.add(Request(name, [1, 2, 3], SamplingParams(**{"max_tokens": 8, **fields})))
    found: dict[str, list[int]] = {name: [] for name in requests}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return found


def test_penalties_biases_and_structures_on_a_device():
    """C4: what is known of a request's tokens is kept where the logits are."""
    pytest.importorskip("llguidance")
    (host,) = run_ranks(_generate, 1, "cpu", device="cpu")
    (device,) = run_ranks(_generate, 1, "sim", device="sim")
    assert device == host
    assert host["penalties"] != host["greedy"] != host["bias"]


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.7, "frequency_penalty": 0.2},
    "nucleus": {"temperature": 0.9, "top_p": 0.8, "seed": 3},
    "top_k": {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "seed": 4},
    "bias": {"temperature": 0.7, "logit_bias": {7: 3.0}, "min_tokens": 30, "seed": 5},
    "structure": {"temperature": 0, "structure": StructuredOutput(regex="[a-z ]{300}")},
}


def _count_syncs(rank: int, world: int, family: str, num_sequences: int) -> tuple[dict[str, int], float]:
    """Decode sequences of all kinds for four steps; return the syncs of all, and the launches of one."""
    from tests import simdevice
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

    model = tiny_decoder(family, vocab_size=300)
    model.config.eos_token_id = model.generation_config.eos_token_id = 256
    options = EngineConfig(dtype="fp32", max_num_seqs=32, max_model_len=200, max_num_batched_tokens=2000)
    engine = load_engine(model, options, _letters())
    assert engine.runner.device.type == "sim", "the accelerator is the default where there is one"
    for number, kind in zip(range(num_sequences), itertools.cycle(SAMPLING.values()), strict=False):
        prompt = [(7 * i + number) % 256 for i in range(1 + 3 * number)]
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=40, ignore_eos=True, **kind)))
    for _ in range(3):  # prompts, and what is made once
        engine.step()
    assert engine.stats().running == num_sequences
    simdevice.reset_counts()
    for _ in range(4):
        engine.step()
    assert engine.stats().running == num_sequences
    return simdevice.num_syncs()[1], simdevice.num_launches() / 4


@pytest.mark.parametrize("family", ["llama", "gemma2", pytest.param("mixtral", marks=pytest.mark.nightly)])
def test_a_decoding_step_waits_once_for_the_device(family: str):
    """S8: for the tokens, whatever the 32 sequences ask for; and no kernel is launched for each sequence."""
    pytest.importorskip("llguidance")
    ((syncs, launches),) = run_ranks(_count_syncs, 1, family, 32, device="sim")
    assert syncs == {"copy to the host": 4}
    assert run_ranks(_count_syncs, 1, family, 12, device="sim") == [(syncs, launches)]


PROMPTS = [[(7 * i + 31 * n) % 131 for i in range(n)] for n in (3, 17, 40, 1, 70)]


def _scores(rank: int, world: int, family: str, device: str, options: dict[str, Any]) -> list[Any]:
    """Tokens of several prompts together, in pieces, and the log-probabilities of one's."""
    from tests.unit import infer_models
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
    from thalweg.infer.quantization import modules

    # The host multiplies by the operator that the device has, not by oneDNN's.
    modules.pack_linear = lambda weight, bias, *_: lambda x: torch.nn.functional.linear(x, weight, bias)
    seq2seq = family in infer_models.SEQ2SEQ_CONFIGS
    model = infer_models.tiny_encoder(family) if seq2seq else infer_models.tiny_decoder(family)
    sizes = {"max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 30}
    options = {"dtype": "fp32", "device": device, **sizes, **options}
    draft = infer_models.tiny_decoder(family, seed=1) if options.pop("draft", False) else None
    if quantized := options.pop("quantized_weights", None):
        _round_weights(model, quantized)
    runner = None if family in UNDESCRIBED else "torch"
    engine = load_engine(model, EngineConfig(**options), draft_model=draft, runner=runner)
    for number, prompt in enumerate(PROMPTS):
        adapter = ("a", None)[number % 2] if options.get("lora_adapters") else None
        params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, prompt_logprobs=None if seq2seq else 0)
        engine.add(Request(str(number), prompt, params, adapter=adapter))
    found: dict[str, list[Any]] = {str(number): [] for number in range(len(PROMPTS))}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            scored = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
            found[output.request_id] += [(x.token_id, x.logprob) for x in scored if x is not None]
    if options.get("num_speculative_tokens"):
        assert engine.stats().accepted_tokens > 0
    engine.close()
    return list(found.values())


def _round_weights(model: Any, weight_format: str) -> None:
    """Give linear layers the numbers that a packed weight stands for."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            if weight_format == "int8":
                scale = weight.abs().amax(1, keepdim=True) / 127
                module.weight.data = (weight / scale).round() * scale
            else:
                groups = weight.unflatten(1, (-1, 32))
                low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
                scale = ((high - low) / 15).bfloat16().float()
                numbers = ((groups - low) / scale).round().clamp(0, 15)
                module.weight.data = ((numbers - 8) * scale + (low + 8 * scale).bfloat16().float()).flatten(1)


def _assert_equal(device: list[Any], host: list[Any], tolerance: float = 1e-5) -> None:
    for mine, expected in zip(device, host, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in expected]
        assert [score for _, score in mine] == pytest.approx([score for _, score in expected], abs=tolerance)


FAMILIES = ["llama", "gpt2", "gemma2", "t5", "mixtral"]
UNDESCRIBED = ["olmo2", "bart"]
MORE = ["bloom", "mistral_window", "qwen2_moe", "falcon40", "gpt_neox", "cohere", "phi", "flan_t5", *UNDESCRIBED]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(x, marks=pytest.mark.nightly) for x in MORE)])
def test_families_give_on_a_device_what_they_give_on_the_host(family: str):
    (host,) = run_ranks(_scores, 1, family, "cpu", {}, device="cpu")
    (device,) = run_ranks(_scores, 1, family, "sim", {}, device="sim")
    if family in ("mixtral", "qwen2_moe"):  # on a device all experts compute a few tokens, on the host theirs alone
        _assert_equal(device, host)
    else:
        assert device == host


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_packed_weights_on_a_device_are_those_numbers(weight_format: str):
    """W6: they were left as they are; what is expected has the rounded weights in fp32."""
    cache = {"kv_cache_dtype": "fp32"}
    (host,) = run_ranks(_scores, 1, "llama", "cpu", {"quantized_weights": weight_format, **cache}, device="cpu")
    (device,) = run_ranks(_scores, 1, "llama", "sim", {"quantization": weight_format, **cache}, device="sim")
    (unrounded,) = run_ranks(_scores, 1, "llama", "cpu", {}, device="cpu")
    _assert_equal(device, host, 1e-4)
    with pytest.raises(AssertionError):  # negative control
        _assert_equal(device, unrounded, 1e-4)


def _generate_on_ranks(rank: int, world: int, family: str, degrees: dict[str, int]) -> tuple[Any, ...]:
    import thalweg
    from tests import simdevice
    from tests.unit.infer_models import tiny_decoder

    engine = thalweg.init_inference(tiny_decoder(family), degrees, dtype="fp32", device="auto")
    assert engine.options.device == f"sim:{rank}"
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    engine.generate(ids, max_new_tokens=2, do_sample=False)
    simdevice.reset_counts()
    got = engine.generate(ids, max_new_tokens=9, do_sample=False)
    syncs = simdevice.num_syncs()[1]
    expected = engine.module.generate(ids, max_new_tokens=9, do_sample=False)
    engine.close()
    return torch.equal(got, expected), syncs


DEGREES = [
    ("llama", {"tensor_parallel_size": 2}),
    pytest.param("gpt2", {"pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
    pytest.param("mixtral", {"expert_parallel_size": 2}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("family", "degrees"), DEGREES)
def test_ranks_meet_on_their_devices(family: str, degrees: dict[str, int]):
    """S9: nothing of a step passes through the host but rank 0's tokens."""
    results = run_ranks(_generate_on_ranks, 2, family, degrees, device="sim")
    assert [equal for equal, _ in results] == [True, True]
    assert [syncs for _, syncs in results] == [{"copy to the host": 9}, {}]


def _refused(rank: int, world: int) -> str:
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, load_engine

    try:
        load_engine(tiny_decoder("llama"), EngineConfig(device="cuda"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused():
    assert "device cuda: torch sees no such device here" in run_ranks(_refused, 1, device="sim")[0]
