"""Inference on an accelerator gives what it gives on the CPU; on a simulated one (``tests/simdevice``)."""

from __future__ import annotations

import itertools
import json
import logging
import logging.handlers
import os
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import is_device_real, run_ranks
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

    device = str(simdevice.accelerator())
    model = tiny_decoder(family, vocab_size=300)
    model.config.eos_token_id = model.generation_config.eos_token_id = 256
    sizes = {"max_num_seqs": 32, "max_model_len": 200, "max_num_batched_tokens": 2000}
    engine = load_engine(model, EngineConfig(dtype="fp32", device=device, **sizes), _letters())
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
    assert sum(syncs.values()) == 4 if is_device_real() else syncs == {"copy to the host": 4}, syncs
    ((fewer_syncs, fewer_launches),) = run_ranks(_count_syncs, 1, family, 12, device="sim")
    assert fewer_syncs == syncs
    assert fewer_launches == (pytest.approx(launches, rel=0.1) if is_device_real() else launches)


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """What torch's kernel gives for rows (M, K) and matrices (E, K, N), by nothing that waits."""
    group = torch.searchsorted(offs, torch.arange(len(x), device=x.device, dtype=offs.dtype), right=True)
    return (x[:, None] @ weight.index_select(0, group))[:, 0]


def _mixture(rank: int, world: int, dtype: str, has_kernel: bool) -> tuple[list[list[float]], list[int]]:
    """Log-probabilities of prompts of 100 and 20 tokens, and how often the host waits at such prompts, and at a token
    of each."""
    from types import SimpleNamespace

    from tests import simdevice
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
    from thalweg.infer.runners import torch_runner
    from thalweg.ops import grouped_mm

    sizes = {"max_num_seqs": 4, "max_model_len": 200, "max_num_batched_tokens": 200}
    options = EngineConfig(dtype=dtype, device=str(simdevice.accelerator()), enable_prefix_caching=False, **sizes)
    engine = load_engine(tiny_decoder("mixtral"), options, runner="torch")
    if has_kernel:
        torch_runner.has_grouped_kernel = lambda weight: True
        grouped_mm.F = SimpleNamespace(grouped_mm=_grouped_mm)
    scores, waits = list[list[float]](), list[int]()
    for length in (100, 20):
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
        engine.add(Request("scored", [(7 * i + length) % 131 for i in range(length)], params))
        scored = [x for output in iter(engine.step, []) for x in output[0].prompt_logprobs or ()]
        scores.append([x.logprob for x in scored if x is not None])
        engine.add(Request("timed", [(5 * i + 1) % 131 for i in range(length)], replace(params, prompt_logprobs=None)))
        for _ in range(2):
            simdevice.reset_counts()
            engine.step()
            waits.append(simdevice.num_syncs()[0])
        while engine.has_work():
            engine.step()
    engine.close()
    return scores, waits


def test_a_prompt_waits_once_for_each_mixture_and_not_where_groups_have_a_kernel():
    """It waited for each expert of each layer.  The kernel's stand-in waits for nothing, as on a GPU of CUDA."""
    ((plain, waits),) = run_ranks(_mixture, 1, "fp32", False, device="simulated")
    ((grouped, _),) = run_ranks(_mixture, 1, "fp32", True, device="simulated")
    for one, other, length in zip(plain, grouped, (100, 20), strict=True):
        assert len(one) == length - 1 and one == pytest.approx(other, abs=1e-5)
    assert waits == [1 + 3, 1, 1, 1]  # layers, and the tokens
    ((_, waits),) = run_ranks(_mixture, 1, "bf16", True, device="simulated")
    assert waits == [1, 1, 1, 1]


PROMPTS = [[(7 * i + 31 * n) % 131 for i in range(n)] for n in (3, 17, 40, 1, 70)]


def _scores(rank: int, world: int, family: str, device: str, options: dict[str, Any]) -> list[Any]:
    """Tokens of several prompts together, in pieces, and the log-probabilities of one's."""
    from tests.unit import infer_models
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
    from thalweg.infer.quantization import modules

    # The host multiplies by the operator that the device has, not by oneDNN's.
    if device == "cpu":
        modules.pack_linear = lambda weight, bias, *_: lambda x: torch.nn.functional.linear(x, weight, bias)
    seq2seq = family in infer_models.SEQ2SEQ_CONFIGS
    model = infer_models.tiny_encoder(family) if seq2seq else infer_models.tiny_decoder(family)
    sizes = {"max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 30}
    options = {"dtype": "fp32", "device": device, **sizes, **options}
    draft = infer_models.tiny_decoder(family) if options.pop("draft", False) else None
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
    tolerance = max(tolerance, 1e-3) if is_device_real() else tolerance
    for mine, expected in zip(device, host, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in expected]
        assert [score for _, score in mine] == pytest.approx([score for _, score in expected], abs=tolerance)


FAMILIES = ["llama", "gpt2", "gemma2", "t5", "mixtral"]
UNDESCRIBED = ["olmo2", "blenderbot_small"]
MORE = ["bloom", "mistral_window", "qwen2_moe", "falcon40", "gpt_neox", "cohere", "phi", "flan_t5", *UNDESCRIBED]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(x, marks=pytest.mark.nightly) for x in MORE)])
def test_families_give_on_a_device_what_they_give_on_the_host(family: str):
    (host,) = run_ranks(_scores, 1, family, "cpu", {}, device="cpu")
    (device,) = run_ranks(_scores, 1, family, "sim", {}, device="sim")
    # On a device all experts compute a few tokens, on the host theirs alone.
    if family in ("mixtral", "qwen2_moe") or is_device_real():
        _assert_equal(device, host)
    else:
        assert device == host


PACKED = [("llama", "int8"), ("llama", "int4"), pytest.param("olmo2", "int8", marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("family", "weight_format"), PACKED)
def test_packed_weights_on_a_device_are_those_numbers(family: str, weight_format: str):
    """W6: they were left as they are; what is expected has the rounded weights in fp32."""
    cache = {} if family in UNDESCRIBED else {"kv_cache_dtype": "fp32"}
    (host,) = run_ranks(_scores, 1, family, "cpu", {"quantized_weights": weight_format, **cache}, device="cpu")
    (device,) = run_ranks(_scores, 1, family, "sim", {"quantization": weight_format, **cache}, device="sim")
    (unrounded,) = run_ranks(_scores, 1, family, "cpu", {}, device="cpu")
    _assert_equal(device, host, 1e-4)
    with pytest.raises(AssertionError):  # negative control
        _assert_equal(device, unrounded, 1e-4)


FEATURES: dict[str, dict[str, Any]] = {
    "lookup": {"num_speculative_tokens": 3},
    "draft": {"draft": True, "num_speculative_tokens": 2},
    "cache int8": {"kv_cache_dtype": "int8"},
    "cache fp8": {"kv_cache_dtype": "fp8"},
    "adapters": {"adapters": True},
}


@pytest.mark.parametrize(
    "feature",
    ["lookup", "adapters", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("draft", "cache int8", "cache fp8"))],
)
def test_features_give_on_a_device_what_they_give_on_the_host(feature: str, tmp_path: Path):
    options = dict(FEATURES[feature])
    if options.pop("adapters", False):
        peft = pytest.importorskip("peft")
        from tests.unit.infer_models import tiny_decoder

        made = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
        torch.manual_seed(0)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) * 0.2
        made.save_pretrained(tmp_path)
        options["lora_adapters"] = {"a": str(tmp_path)}
    (host,) = run_ranks(_scores, 1, "llama", "cpu", options, device="cpu")
    (device,) = run_ranks(_scores, 1, "llama", "sim", options, device="sim")
    if is_device_real():
        _assert_equal(device, host)
    else:
        assert device == host
    if feature == "adapters":  # negative control
        (plain,) = run_ranks(_scores, 1, "llama", "sim", {}, device="sim")
        assert [x == y for x, y in zip(device, plain, strict=True)] == [False, True, False, True, False]


def _shared_prefix(rank: int, world: int, device: str) -> tuple[list[Any], int]:
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

    options = EngineConfig(device=device, dtype="fp32", max_num_seqs=2, max_model_len=128)
    engine = load_engine(tiny_decoder("llama"), options, runner="torch")
    found = []
    for number in range(3):
        prompt = [*range(40), number]
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=6)))
        while engine.has_work():
            found += [output.token_ids for output in engine.step()]
    return found, engine.stats().cached_tokens


def test_prefixes_are_found_again_on_a_device():
    (host,) = run_ranks(_shared_prefix, 1, "cpu", device="cpu")
    (device,) = run_ranks(_shared_prefix, 1, "sim", device="sim")
    assert device == host and device[1] == 64


def _allocated() -> int:
    """Bytes that were asked for: a GPU's allocator gives large tensors up to 1 MiB more."""
    return torch.accelerator.memory_stats().get("requested_bytes.all.current", torch.accelerator.memory_allocated())


def _memory(rank: int, world: int, live: bool) -> dict[str, int]:
    """Bytes on the device of a model's weights, and of its cache, against what there is."""
    from tests.simdevice import accelerator
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, load_engine

    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "tie_word_embeddings": True}
    model = tiny_decoder("llama", **shape)
    device = str(accelerator())
    if live:
        model.to(device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # A GPU's products have workspaces, made once by the first of their kind.
    x = torch.ones(64, 64, device=device)
    torch.nn.functional.linear(x @ x, x, x[0])
    before = _allocated() - x.nbytes
    sizes = {"max_num_seqs": 1 << 20, "max_model_len": 256, "max_num_batched_tokens": 64}
    total, ask = 256 << 20, torch.accelerator.get_memory_info  # of a device on which a cache is soon filled
    torch.accelerator.get_memory_info = lambda _: (total - _allocated(), total)
    try:
        where = "auto" if live else device
        # Graphs have a layer's keys and values once more: much, where there are three layers.
        engine = load_engine(model, EngineConfig(dtype="fp32", device=where, enforce_eager=True, **sizes))
    finally:
        torch.accelerator.get_memory_info = ask
    cache = sum(x._rows.nbytes for x in engine.runner._kv_cache)
    used = _allocated() - cache
    return {"weights": weights, "added": used - before, "cache": cache, "rest": total - used}


@pytest.mark.parametrize("live", [False, True])
def test_weights_are_on_a_device_once_and_the_cache_takes_most_of_the_rest(live: bool):
    """S8: queries, keys and values were stacked beside the model's own, and the cache took a quarter."""
    (found,) = run_ranks(_memory, 1, live, device="sim")
    slack = 0.02 * found["weights"] + (1 << 16)
    assert abs(found["added"] - (0 if live else found["weights"])) < slack
    assert 0.5 * found["rest"] < found["cache"] <= 0.9 * found["rest"]


def _offloaded(rank: int, world: int, device: str, family: str, offload: str) -> tuple[list[Any], int]:
    from contextlib import ExitStack

    from tests.unit.infer_models import greedy_generate, tiny_decoder
    from thalweg.infer import EngineConfig, load_engine

    options = EngineConfig(device=device, dtype="fp32", max_num_seqs=4, max_model_len=96, weight_offload=offload)
    with ExitStack() as stack:
        if device != "cpu":
            from tests.simdevice import late_work, num_syncs, reset_counts

            stack.enter_context(late_work())
        engine = load_engine(tiny_decoder(family), options, runner="torch")
        found = greedy_generate(engine, PROMPTS[:3], 6)
        syncs = 0
        if device != "cpu":
            reset_counts()
            greedy_generate(engine, [[1, 2, 3]], 5)
            syncs = num_syncs()[0]
        engine.close()
        return found, syncs


OFFLOADED = [
    ("llama", "cpu"),
    *(pytest.param(*x, marks=pytest.mark.nightly) for x in [("llama", "nvme"), ("mixtral", "cpu")]),
]


@pytest.mark.parametrize(("family", "offload"), OFFLOADED)
def test_weights_from_the_host_come_while_others_are_used(family: str, offload: str):
    """S10: copies on a stream of their own that run only where something waits for them, and no waiting of the host."""
    (host,) = run_ranks(_offloaded, 1, "cpu", family, "cpu", device="cpu")
    (device,) = run_ranks(_offloaded, 1, "sim", family, offload, device="sim")
    assert device == (host[0], 5)


def _layers_offloaded(rank: int, world: int, offload: str, folder: str) -> list[bool]:
    """By a ring, and by modules; what is computed is late as well as what is copied."""
    from tests.simdevice import accelerator, late_work
    from thalweg.infer.models.spec import LinearSpec
    from thalweg.infer.offload.module_offload import ModuleOffloader
    from thalweg.infer.offload.weight_ring import DeviceWeightRing

    torch.manual_seed(0)
    device = accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
    x = torch.randn(3, 64).to(device)
    expected = model(x).cpu()
    layers = [LinearSpec(layer.weight.detach().cpu(), layer.bias.detach().cpu()) for layer in model]
    with late_work(), torch.no_grad(), torch.Stream(device):
        ring, equal = DeviceWeightRing(torch.device(device.type, 0), torch.float32, offload == "cpu"), []
        for _ in range(3):
            y = x
            for layer in layers:
                y = torch.nn.functional.linear(y, *ring.get(layer))
            ring._stream.synchronize()  # copies may run ahead of the products, whose weights are gone by now
            equal.append(torch.equal(y.cpu(), expected))
        offloader = ModuleOffloader(
            [model], offload_device=offload, device=device.type, folder=folder, max_bytes=4 * 4 * 64 * 65
        )
        for _ in range(3):
            y = model(x)
            offloader._copy_stream.synchronize()
            equal.append(torch.equal(y.cpu(), expected))
        offloader.close()
        return [*equal, torch.equal(model(x).cpu(), expected)]


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_layers_weights_come_while_others_are_used(offload: str, tmp_path: Path):
    assert run_ranks(_layers_offloaded, 1, offload, str(tmp_path), device="sim") == [[True] * 7]


def _generate_on_ranks(rank: int, world: int, family: str, degrees: dict[str, int]) -> tuple[Any, ...]:
    import thalweg
    from tests import simdevice
    from tests.unit.infer_models import tiny_decoder

    engine = thalweg.init_inference(tiny_decoder(family), degrees, dtype="fp32", device="auto")
    assert engine.options.device == f"{simdevice.accelerator()}:{rank}"
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
    results = run_ranks(_generate_on_ranks, 2, family, degrees, device="simulated")
    assert [equal for equal, _ in results] == [True, True]
    assert [syncs for _, syncs in results] == [{"copy to the host": 9}, {}]


def _from_a_folder(rank: int, world: int, folder: str) -> list[Any]:
    """What a directory gives by ``init_inference`` and ``pipeline``, without a word of devices."""
    import thalweg
    from tests.unit.infer_models import tiny_decoder

    tiny_decoder("llama", hidden_size=256, intermediate_size=512, vocab_size=1024).save_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    found: list[Any] = []
    for fields in ({}, {"dtype": "int8"}):
        before = torch.accelerator.memory_allocated()
        engine = thalweg.init_inference(folder, {"max_out_tokens": 64, "max_batch": 2}, **fields)
        cache = sum(x._rows.nbytes for x in engine.core.runner._kv_cache)
        used = torch.accelerator.memory_allocated() - before - cache
        found.append((engine.options.device, used / sum(p.nbytes for p in engine.module.parameters()) < 1.1))
        tokens = engine.generate(ids, max_new_tokens=5, do_sample=False)
        found.append(tokens.tolist())
        if not fields:
            logits = engine(ids.to(torch.device(engine.options.device))).logits
            assert torch.equal(logits[0, -1].argmax().cpu(), tokens[0, 4])
        engine.close()
        del engine
    warnings = logging.handlers.MemoryHandler(100)
    logging.getLogger("thalweg").addHandler(warnings)
    assert thalweg.init_inference(tiny_decoder("llama")).options.device == "cpu"
    logging.getLogger("thalweg").removeHandler(warnings)
    found.append([record.getMessage() for record in warnings.buffer if record.levelno == logging.WARNING])
    pipe = thalweg.pipeline(folder, max_length=64)
    found.append(pipe.engine.runner.device.type)
    pipe.destroy()
    return found


def test_a_directory_goes_to_the_accelerator(tmp_path: Path):
    """W6: it always ran on the processor."""
    plain, tokens, packed, rounded, warnings, device = run_ranks(_from_a_folder, 1, str(tmp_path), device="sim")[0]
    assert plain == packed == (f"{device}:0", True) and device != "cpu"
    assert len(tokens[0]) == len(rounded[0]) == 9
    assert any("on the processor and runs there" in warning for warning in warnings), "a live model stays where it is"


def _resolved(rank: int, world: int) -> list[str]:
    from thalweg.device import resolve_device

    found = [str(resolve_device(name)) for name in ("auto", "sim", "sim:0", "cpu")]
    for name, local_rank in (("sim:5", "0"), ("auto", "5")):
        os.environ["LOCAL_RANK"] = local_rank
        try:
            resolve_device(name)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_rank_has_its_own_device_or_is_refused():
    *devices, missing, shared = run_ranks(_resolved, 2, device="simulated")[1]
    assert devices == ["sim:1", "sim:1", "sim:0", "cpu"]
    assert "device sim:5: torch sees 2 of that kind here" in missing
    assert "local rank 5 has no sim device of its own" in shared


def _path_of_children(folder: str, num_devices: int) -> str:
    """What PYTHONPATH must be for processes that register the device before they do anything else."""
    code = f"from tests import simdevice\nsimdevice.register(num_devices={num_devices}, memory_bytes=1 << 28)\n"
    Path(folder, "sitecustomize.py").write_text(code)
    return os.pathsep.join([folder, str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])


def _spawn(rank: int, world: int, folder: str) -> list[Any]:
    """Two ranks of which the second is started by the first."""
    from tests.unit.infer_models import greedy_generate, tiny_decoder
    from thalweg.infer import EngineConfig, load_engine

    if rank:
        return []
    model = tiny_decoder("llama")
    model.save_pretrained(Path(folder) / "model")
    os.environ["PYTHONPATH"] = _path_of_children(folder, 2)
    options = {"dtype": "fp32", "max_num_seqs": 4, "max_model_len": 96}
    engine = load_engine(Path(folder) / "model", EngineConfig(tensor_parallel_size=2, device="sim:0", **options))
    found = greedy_generate(engine, PROMPTS[:3], 6)
    engine.close()
    expected = greedy_generate(
        load_engine(model, EngineConfig(device="cpu", **options), runner="torch"), PROMPTS[:3], 6
    )
    try:
        load_engine(Path(folder) / "model", EngineConfig(tensor_parallel_size=2, device="sim:1", **options))
    except ValueError as error:
        return [found == expected, str(error)]
    return []


@pytest.mark.nightly
def test_ranks_that_are_started_here_have_the_next_devices(tmp_path: Path):
    equal, error = run_ranks(_spawn, 2, str(tmp_path), device="simulated", reuse=False)[0]
    assert equal and "from sim:1 on, and torch sees 2 devices" in error


def _embed(rank: int, world: int, device: str, family: str) -> list[Any]:
    from tests.unit import infer_models
    from thalweg.infer import EngineConfig, load_engine
    from thalweg.infer.quantization import modules

    if device == "cpu":
        modules.pack_linear = lambda weight, bias, *_: lambda x: torch.nn.functional.linear(x, weight, bias)
    model = infer_models.tiny_encoder(family)
    engine = load_engine(
        model, EngineConfig(device=device, dtype="fp32"), runner=None if family == "mpnet" else "torch"
    )
    return engine.embed([[3, 4, 5], list(range(40)), [7], list(range(2, 25))]).tolist()


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("roberta", "mpnet"))]
)
def test_embeddings_have_the_hosts_bits_on_a_device(family: str):
    (host,) = run_ranks(_embed, 1, "cpu", family, device="cpu")
    (device,) = run_ranks(_embed, 1, "sim", family, device="sim")
    assert device == ([pytest.approx(row, abs=1e-3) for row in host] if is_device_real() else host)


def _placements(rank: int, world: int) -> list[Any]:
    from thalweg.infer import EngineConfig
    from thalweg.serve.replicas.launcher import _device_of_replica

    found: list[Any] = []
    for device, index in (("auto", 0), ("auto", 1), ("sim:0", 1), ("cpu", 1)):
        placed = _device_of_replica(EngineConfig(device=device), index, 2)
        found.append((placed, torch.accelerator.current_device_index()))
    try:
        _device_of_replica(EngineConfig(tensor_parallel_size=2), 0, 2)
    except ValueError as error:
        found.append(str(error))
    return found


def test_each_replica_has_devices_of_its_own():
    """S9: all of them took the first; it stayed the current one, on which torch then has a context of each process."""
    *devices, error = run_ranks(_placements, 2, device="simulated")[0]
    assert devices == [("sim:0", 0), ("sim:1", 1), ("sim:0", 0), ("cpu", 0)]
    assert "2 replicas of 2 ranks need 4 sim devices" in error and "give --replicas 1" in error


def _replica_caches(rank: int, world: int, folder: str) -> list[int]:
    """KV blocks of a replica of two, on a device that is its own and on one that both have."""
    from thalweg.infer.config import MEMORY_SHARES_VARIABLE, EngineConfig
    from thalweg.serve.replicas.launcher import EngineSpec

    if rank:
        return []
    total, ask = 256 << 20, torch.accelerator.get_memory_info
    torch.accelerator.get_memory_info = lambda _: (total, total)
    sizes: dict[str, Any] = {"max_num_seqs": 1 << 20, "max_num_batched_tokens": 64}
    found = []
    try:
        for device in ("sim", "sim:0"):
            config = EngineConfig(dtype="fp32", device=device, enforce_eager=True, **sizes)
            engine = EngineSpec(folder, config, replica=(0, 2)).load()
            found.append(engine.stats().kv_blocks)
            engine.close()
    finally:
        torch.accelerator.get_memory_info = ask
        os.environ.pop(MEMORY_SHARES_VARIABLE, None)
    return found


def test_replicas_on_one_device_share_its_memory(tmp_path: Path):
    from tests.unit.infer_models import tiny_decoder

    tiny_decoder("llama").save_pretrained(tmp_path)
    own, shared = run_ranks(_replica_caches, 2, str(tmp_path), device="simulated")[0]
    assert own > 1000 and shared == own // 2


@pytest.mark.nightly
@pytest.mark.parametrize("num_devices", [2, 1])
def test_a_server_with_two_replicas_needs_two_devices(num_devices: int, tmp_path: Path):
    """Answers come from either; where there is one device the server says what to do, and ends."""
    from tests import simdevice
    from tests.count_files import save_model

    pytest.importorskip("fastapi")
    if reason := simdevice.missing_tool():
        pytest.skip(reason)
    simdevice.build()
    save_model(tmp_path / "model")
    command = [sys.executable, "-m", "thalweg", "serve", str(tmp_path / "model"), "--json", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": _path_of_children(str(tmp_path), num_devices)}
    with (tmp_path / "errors").open("w+") as errors:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        server = subprocess.Popen([*command, "--replicas", "2", "--max-num-seqs", "2"], env=environ, **streams)
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            body = {"model": "model", "prompt": "import os", "max_tokens": 8}
            for _ in range(4 if ready else 0):
                url, headers = json.loads(ready)["url"] + "/v1/completions", {"Content-Type": "application/json"}
                request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] == 8
        finally:
            server.terminate()
            code = server.wait(60)
            server.stdout.close()  # type: ignore[union-attr]
        errors.seek(0)
        assert bool(ready) == (num_devices == 2)
        if num_devices == 1:
            assert code == 1 and "need 2 sim devices of their own, and torch sees 1" in errors.read()


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


def _streamed_steps(rank: int, world: int) -> tuple[int, int]:
    import thalweg
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer.offload import weight_ring
    from thalweg.plan.spec.devices import get_device

    weight_ring.local_device = lambda _: get_device("h100")
    engine = thalweg.init_inference(tiny_decoder("llama"), {"device": "auto", "weight_offload": "cpu"})
    core, steps = engine.core, 0
    step = core.step

    def count() -> Any:
        nonlocal steps
        steps += 1
        return step()

    core.step = count
    engine.generate(torch.randint(1, 100, (16, 8)), max_new_tokens=6, do_sample=False)
    slots = core.runner.num_slots
    engine.close()
    return slots, steps


def test_streamed_weights_are_used_for_as_many_sequences_as_a_device_has_time_for():
    """By the device's speed and its link, not the processor's, which has no time for more than a few."""
    ((slots, steps),) = run_ranks(_streamed_steps, 1, device="sim")
    assert slots == 512 and steps < 16
