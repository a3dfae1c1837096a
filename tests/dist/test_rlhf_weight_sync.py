"""The hybrid engine: what the inference engine generates is what the actor's own weights say, at every stage.

Rows 6 and 43 of PAIN_POINTS.md: ``generate()`` under stage 3 hangs or takes hours; log-probabilities of rollouts that
are not the trainer's, and a full copy for each sync.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thalweg
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, SamplingParams
from thalweg.infer.models import DECODERS
from thalweg.infer.parallel import executor
from thalweg.infer.parallel.process_group import WorkerDiedError
from thalweg.infer.parallel.shard import shard_for_rank
from thalweg.infer.runners.cpu_runner import CpuRunner
from thalweg.rlhf import models, weight_sync
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.losses import token_logprobs
from thalweg.rlhf.policy import GRPOTrainer
from thalweg.rlhf.rollout import Rollout, generate_rollout
from thalweg.rlhf.rollout_ranks import RolloutRanks
from thalweg.rlhf.weight_sync import HybridEngine

REUSE_RANKS = True

PROMPTS = [[[5, 9, 2], [7, 7, 1, 30, 4, 8, 8], [100]], [[3] * 12, [60, 61], [17, 5, 5, 90]]]
NEW = 6


def _actor(
    stage: int,
    kind: str,
    bf16: bool = False,
    lora: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
) -> thalweg.Engine:
    model = tiny_decoder(kind)
    if bf16:  # whose own logits are rounded to 8 bits: small ones, so that the rounding is small beside the bound
        with torch.no_grad():
            model.lm_head.weight.mul_(0.3)
    if lora is not None:
        import peft

        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, **lora))
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero or {"stage": stage}, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3 if bf16 else 3e-2}}, "log_level": "error",
    }  # fmt: skip
    return thalweg.initialize(model=model, config=config)[0]


def _train(engine: thalweg.Engine, seed: int) -> None:
    engine.train()
    for step in range(2):
        draw = torch.Generator().manual_seed(100 * seed + step)
        ids = torch.randint(2, 131, (2, 16), generator=draw)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def _plain(engine: thalweg.Engine, kind: str, lora: dict[str, Any] | None) -> Any:
    """The actor's weights in a model of one process."""
    model = tiny_decoder(kind)
    if lora is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, **lora))
    model.load_state_dict(engine.state_dict())
    return model.eval()


def _greedy(model: Any, prompt: list[int], eos: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def _generate(
    rank: int, world: int, stage: int, kind: str, bf16: bool = False, lora: dict[str, Any] | None = None
) -> dict[str, Any]:
    engine = _actor(stage, kind, bf16, lora)
    hybrid = HybridEngine(engine)
    found: dict[str, Any] = {"equal": True, "gap": 0.0, "mean_gap": 0.0, "stale_gap": 1e9, "lengths": [], "all": []}
    for round_ in range(2):  # weights change between the two
        _train(engine, round_)
        plain = _plain(engine, kind, lora)
        # Rank 1's first response ends with its first token: it is empty but for the end.
        eos = _greedy(plain, PROMPTS[1][0], -1)[0]
        params = SamplingParams(max_tokens=NEW, temperature=0, stop_token_ids=(eos,), ignore_eos=True)
        with hybrid.generation() as core:
            rollout = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0)
        responses = rollout.responses()
        found["all"].append(responses)
        found["lengths"].append([len(x) for x in responses])
        found["equal"] &= responses == [_greedy(plain, prompt, eos) for prompt in PROMPTS[rank]]
        gap = _gap(engine, rollout)
        found["gap"], found["mean_gap"] = max(found["gap"], float(gap.max())), max(found["mean_gap"], float(gap.mean()))
        assert all(t.untyped_storage().size() == 0 for t in hybrid.weights._tensors.values())  # all is given back
        sleeping = hybrid._core
        assert sleeping is core and (round_ == 0 or core is found["core"])  # nothing is built again
        found["core"] = core
        if isinstance(core.runner, CpuRunner):  # the system may take what has been written of weights and cache
            assert _lazily_freed() >= core.runner.weight_bytes // 2
    _train(engine, 2)
    found["stale_gap"] = float(_gap(engine, rollout).mean())
    found["runner"] = hybrid.runner
    del found["core"]
    hybrid.close()
    engine.close()
    return found


def _lazily_freed() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("LazyFree")) * 1024


def _gap(engine: thalweg.Engine, rollout: Any) -> torch.Tensor:
    """By how much the trainer's log-probabilities of responses are off the rollout's."""
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask).logits
    return (token_logprobs(logits.cpu(), rollout.input_ids) - rollout.logprobs).abs()[rollout.mask]


def _check(results: list[dict[str, Any]], tolerance: float, tokens: bool = True) -> None:
    for found in results:
        assert found["gap" if tokens else "mean_gap"] < tolerance < found["stale_gap"], found
        assert found["runner"] is None  # the one inference engine's, not the model's own code
        assert found["equal"] or not tokens
        assert found["all"][0] != found["all"][1] or not tokens  # the weights were others
    if tokens:
        assert [row[0] for row in results[1]["lengths"]] == [1, 1]
        assert max(max(row) for found in results for row in found["lengths"]) == NEW


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_rows_06_43_greedy_tokens_and_logprobs_are_the_gathered_model_s(stage: int) -> None:
    _check(run_ranks(_generate, 2, stage, "llama"), 1e-4)


@pytest.mark.parametrize("stage", [nightly(1), 3])
def test_a_bf16_actor_and_its_rollouts_agree(stage: int) -> None:
    _check(run_ranks(_generate, 2, stage, "llama", True), 2e-2, tokens=False)


TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


@pytest.mark.parametrize(
    ("stage", "kind", "fields"),
    [
        nightly(3, "gpt2", {"use_rslora": True, "fan_in_fan_out": True}),
        (3, "llama", {"use_dora": True, "target_modules": [*TARGETS["llama"], "embed_tokens"]}),
        nightly(1, "llama", {}),
        nightly(0, "gpt2", {"fan_in_fan_out": True}),
    ],
)
def test_lora_is_merged_for_generation_and_the_base_is_as_it_was(stage: int, kind: str, fields: dict[str, Any]) -> None:
    lora = {"target_modules": TARGETS[kind], "task_type": "CAUSAL_LM", **fields}
    _check(run_ranks(_generate, 2, stage, kind, False, lora), 1e-4)


def _adapted(rank: int, world: int) -> tuple[list[str], float]:
    """What is said of adapters that cannot be merged; and how far off rollouts are by one on tied layers that can."""
    import peft

    task, said = {"task_type": "CAUSAL_LM"}, []
    config = {"train_micro_batch_size_per_gpu": 1, "log_level": "error"}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 3e-2}}}
    for kind, adapter in (
        ("llama", peft.PrefixTuningConfig(num_virtual_tokens=4, **task)),
        ("llama", peft.LNTuningConfig(**task)),
        ("qwen2_moe", peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"], **task)),
        ("tied", peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **task)),
        ("tied", peft.LoraConfig(target_modules=["q_proj", "lm_head"], **task)),
        ("tied", peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 9]}, **task)),
    ):
        model = tiny_decoder("llama", tie_word_embeddings=True) if kind == "tied" else tiny_decoder(kind)
        engine = thalweg.initialize(model=peft.get_peft_model(model, adapter), config=config)[0]
        try:
            hybrid = HybridEngine(engine)
        except ValueError as error:
            said.append(str(error).partition(" cannot be merged")[0])
            engine.close()
    for round_ in range(2):
        _train(engine, round_)
        with hybrid.generation() as core:
            params = SamplingParams(max_tokens=NEW, temperature=0)
            rollout = generate_rollout(core, PROMPTS[0], params, seed=0, pad_id=0)
    return said, float(_gap(engine, rollout).max())


def test_adapters_that_are_no_change_of_one_layer_s_weight_are_refused() -> None:
    said, gap = run_ranks(_adapted, 1)[0]
    assert said == ["PrefixTuningConfig", "LNTuningLayer", "ParamWrapper", "Embedding", "Linear"] and gap < 1e-4


def _families(rank: int, world: int, kinds: list[str]) -> list[str]:
    wrong = []
    for kind in kinds:
        engine = _actor(3, kind)
        _train(engine, 0)
        plain, hybrid = _plain(engine, kind, None), HybridEngine(engine)
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        with hybrid.generation() as core:
            responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
        if responses != [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]]:
            wrong.append(kind)
        engine.close()
    return wrong


@pytest.mark.parametrize(
    "kinds",
    [["gpt2", "gemma2"], nightly(["qwen2_moe", "opt", "bloom", "falcon40", "granite", "phi", "gpt_neox", "qwen3"])],
)
def test_families_with_tied_shuffled_and_scaled_weights(kinds: list[str]) -> None:
    assert run_ranks(_families, 2, kinds) == [[], []]


def test_a_runner_that_reads_its_layers_late_has_read_them_all() -> None:
    """The torch runner packs a layer when it is first used: by then the ranks would no longer gather together."""
    assert run_ranks(_lazily, 2) == [True, True]


def _lazily(rank: int, world: int) -> bool:
    engine = _actor(3, "llama")
    plain = _plain(engine, "llama", None)
    hybrid = HybridEngine(engine, runner="torch")
    params, equal = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True), True
    for round_ in range(2):
        with hybrid.generation() as core:
            if rank == 1:  # this rank alone has prompts
                responses = generate_rollout(core, PROMPTS[1], params, seed=0, pad_id=0).responses()
                equal &= responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[1]]
        _train(engine, round_)
        plain = _plain(engine, "llama", None)
    engine.close()
    return equal


TIERS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": {"device": "cpu"}},
    "nvme": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
}


def _tier(rank: int, world: int, tier: str, folder: str) -> bool:
    zero = {"stage": 3} | {key: {**value, "nvme_path": folder} for key, value in TIERS[tier].items()}
    engine = _actor(3, "llama", zero=zero)
    _train(engine, 0)
    plain, hybrid = _plain(engine, "llama", None), HybridEngine(engine)
    params, equal = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True), True
    for _ in range(2):
        with hybrid.generation() as core:
            responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
        equal &= responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]]
    _train(engine, 1)  # goes on
    engine.close()
    return equal and hybrid.runner is None


@pytest.mark.parametrize("tier", ["host", nightly("nvme")])
def test_shards_that_rest_elsewhere_are_gathered_unit_by_unit(tier: str, tmp_path: Path) -> None:
    assert run_ranks(_tier, 2, tier, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(("degree", "runner"), [(1, None), (2, "torch"), nightly(2, None)])
def test_at_most_one_layer_is_there_beside_what_the_engine_reads_in_place(degree: int, runner: str | None) -> None:
    for largest, most, end, views in run_ranks(_bucket_bytes, 2, degree, runner):
        assert most == largest and end == 0
        assert not views  # a part that keeps the whole layer in memory


def _bucket_bytes(rank: int, world: int, degree: int, runner: str | None) -> tuple[int, int, int, int]:
    """Bytes of the largest linear layer of the description, of the most that was there, and at the end; how many
    weights that a runner has read have more memory than they need."""
    engine, views = _actor(3, "llama"), 0
    hybrid, most = HybridEngine(engine, EngineConfig(tensor_parallel_size=degree), runner=runner), 0
    weights = hybrid.weights

    def there() -> int:
        storages = {id(s): s for name in weights._bucketed if (s := weights._tensors[name].untyped_storage())}
        addresses = {s.data_ptr(): s.size() for s in storages.values()}
        return sum(addresses.values())

    gather = weights._gather

    def counting(names: Any) -> None:
        nonlocal most
        gather(names)
        most = max(most, there())

    def select(layer: Any, *pick: Any) -> torch.Tensor:
        nonlocal views
        part = own_select(layer, *pick)
        views += part.untyped_storage().nbytes() > part.nbytes
        return part

    weights._gather = counting  # type: ignore[method-assign]
    own_select, weight_sync._BucketedLinear.select = weight_sync._BucketedLinear.select, select  # type: ignore[method-assign]
    try:
        with hybrid.generation():
            end = there()
    finally:
        weight_sync._BucketedLinear.select = own_select  # type: ignore[method-assign]
    config = engine.module.config
    hybrid.close()
    engine.close()
    return 2 * config.hidden_size * config.intermediate_size * 4, most, end, views  # gate and up projection in one


def _over_links(rank: int, world: int) -> tuple[bool, int]:
    os.environ["THALWEG_HOST"] = f"host {rank}"
    engine = _actor(3, "llama")
    _train(engine, 0)
    plain, hybrid, unsharded = _plain(engine, "llama", None), HybridEngine(engine), 0
    gather = hybrid.weights._gather

    def counting(names: Any) -> None:
        nonlocal unsharded
        gather(names)
        unsharded += sum(not group.is_sharded for group in engine.sharded_model.groups)

    hybrid.weights._gather = counting  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    with hybrid.generation() as core:
        responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
    _train(engine, 1)  # goes on
    engine.close()
    return responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]], unsharded


def test_over_links_a_bucket_is_gathered_and_no_unit() -> None:
    assert run_ranks(_over_links, 2) == [(True, 0)] * 2


def _quantized(rank: int, world: int, weight_format: str) -> tuple[bool, bool, str | None]:
    import peft

    from thalweg.adapt.quantized_weight import quantize_linears

    def make() -> Any:
        model = tiny_decoder("llama")
        assert quantize_linears(model, weight_format)  # type: ignore[arg-type]
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS["llama"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora)

    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
    }  # fmt: skip
    engine = thalweg.initialize(model=make(), config=config)[0]
    hybrid, plain, equal, seen = HybridEngine(engine), make().eval(), True, []
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for round_ in range(2):
        _train(engine, round_)
        state = engine.state_dict()
        plain.load_state_dict({k: v for k, v in state.items() if "lora_" in k}, strict=False)
        with hybrid.generation() as core:
            seen.append(generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses())
        equal &= seen[-1] == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]]
    engine.close()
    return equal, seen[0] != seen[1], hybrid.runner


@pytest.mark.parametrize("weight_format", ["nf4", nightly("int8")])
def test_row45_a_base_in_few_bits_is_made_numbers_bucket_by_bucket(weight_format: str) -> None:
    assert run_ranks(_quantized, 2, weight_format) == [(True, True, None)] * 2


def _draw(core: Any, prompts: Any, eos: int, rank: int, world: int) -> list[Rollout]:
    """Greedy responses and, but on the last rank, samples: ranks need not generate equally often."""
    greedy = SamplingParams(max_tokens=NEW, temperature=0, stop_token_ids=(eos,), ignore_eos=True)
    rollouts = [generate_rollout(core, prompts, greedy, seed=0, pad_id=0)]
    if rank < world - 1:
        params = replace(greedy, temperature=1.0)
        rollouts.append(generate_rollout(core, prompts, params, seed=7 + rank, pad_id=0, num_samples=2))
    return rollouts


def _grouped(rank: int, world: int, degree: int, kind: str, lora: Any, runner: str | None) -> dict[str, Any]:
    """What a degree generates against what each rank generates by itself."""
    engine, found = _actor(3, kind, lora=lora), {"equal": True, "gap": 0.0, "trainer_gap": 0.0, "lengths": []}
    alone = HybridEngine(engine, runner=runner)
    hybrid = HybridEngine(engine, EngineConfig(tensor_parallel_size=degree), runner=runner)
    prompts, sizes = PROMPTS[rank % 2], []
    for round_ in range(2):  # weights change between the two
        _train(engine, round_)
        with alone.generation() as core:
            params = SamplingParams(max_tokens=1, temperature=0)
            # The first response of ranks 1 and 3 ends with its first token.
            eos = generate_rollout(core, PROMPTS[1], params, seed=0, pad_id=0).responses()[0][0]
            want = _draw(core, prompts, eos, rank, world)
            sizes.append(getattr(core.runner, "weight_bytes", None) or 2)
        with hybrid.generation() as core:
            got = _draw(core, prompts, eos, rank, world)
            member = core.member
            sizes.append(getattr(getattr(member, "runner", None) or member._runner, "weight_bytes", None) or 1)
        for one, other in zip(want, got, strict=True):
            found["equal"] &= one.responses() == other.responses() and torch.equal(one.ended, other.ended)
            found["gap"] = max(found["gap"], float((one.logprobs - other.logprobs).abs().max()))
        found["trainer_gap"] = max(found["trainer_gap"], float(_gap(engine, got[0]).max()))
        found["lengths"].append([len(x) for x in got[0].responses()])
        assert all(t.untyped_storage().size() == 0 for t in hybrid.weights._tensors.values())
    _train(engine, 2)
    found |= {"stale_gap": float(_gap(engine, got[0]).mean()), "share": sizes[-1] / sizes[-2]}
    alone.close()
    hybrid.close()
    engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "degree", "kind", "lora", "runner"),
    [
        (2, 2, "llama", None, None),
        nightly(2, 2, "llama", None, "torch"),
        nightly(2, 2, "gpt2", {"target_modules": TARGETS["gpt2"], "fan_in_fan_out": True}, None),
        nightly(4, 2, "llama", {"target_modules": TARGETS["llama"], "use_dora": True}, None),
        nightly(4, 4, "gpt2", None, None),
        nightly(2, 2, "qwen2_moe", None, None),
    ],
)
def test_ranks_that_generate_together_draw_what_each_draws_alone(
    world: int, degree: int, kind: str, lora: Any, runner: str | None
) -> None:
    results = run_ranks(_grouped, world, degree, kind, lora, runner)
    for found in results:
        assert found["equal"] and max(found["gap"], found["trainer_gap"]) < 1e-4 < found["stale_gap"], found
        assert found["share"] < 0.75, found  # its part of the weights, and of the vocabulary whole panels
    assert [row[0] for row in results[1]["lengths"]] == [1, 1]


def _divided(rank: int, world: int, tp: int, degree: int, kind: str) -> list[bool]:
    config = {
        "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": tp}, "log_level": "error",
        "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
    }  # fmt: skip
    engine = thalweg.initialize(model=tiny_decoder(kind), config=config)[0]
    hybrid, found = HybridEngine(engine, EngineConfig(tensor_parallel_size=degree)), list[bool]()
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for round_ in range(2):
        _train(engine, round_)
        plain = _plain(engine, kind, None)
        with hybrid.generation() as core:
            responses = generate_rollout(core, PROMPTS[rank % 2], params, seed=0, pad_id=0).responses()
        same = responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank % 2]]
        found.append(same and hybrid.runner is None)
    hybrid.close()
    engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "tp", "degree", "kind"),
    [(2, 2, 1, "llama"), nightly(4, 2, 1, "gpt2"), nightly(4, 2, 4, "llama_bias_tied")],
)
def test_an_actor_whose_layers_are_divided_generates_at_another_degree(
    world: int, tp: int, degree: int, kind: str
) -> None:
    """Training's tensor ranks and generation's have nothing to do with each other."""
    assert run_ranks(_divided, world, tp, degree, kind) == [[True, True]] * world


def _wrong_part(rank: int, world: int) -> str:
    def first_heads(decoder: Any, rank: int, options: Any) -> Any:
        own, first = shard_for_rank(decoder, rank, options), shard_for_rank(decoder, 0, options)
        pairs = zip(own.layers, first.layers, strict=True)
        return replace(own, layers=[replace(layer, attention=other.attention) for layer, other in pairs])

    engine = _actor(3, "gpt2")
    hybrid = HybridEngine(engine, EngineConfig(tensor_parallel_size=2))
    executor.shard_for_rank = first_heads
    try:
        with (
            pytest.raises(ValueError, match="of generation") as error,
            hybrid.generation(),
        ):
            pass
    finally:
        executor.shard_for_rank = shard_for_rank
    engine.close()
    return str(error.value)


def test_a_rank_that_has_another_one_s_part_is_found_out_on_all() -> None:
    first, other = run_ranks(_wrong_part, 2)
    assert "standard deviations" in first and "another rank" in other


def _fails(rank: int, world: int) -> str:
    engine = _actor(3, "llama")
    hybrid = HybridEngine(engine, EngineConfig(tensor_parallel_size=2))
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    try:
        with hybrid.generation() as core:
            if rank == 1:
                raise KeyError("the caller's own")
            generate_rollout(core, PROMPTS[0], params, seed=0, pad_id=0)
    except (KeyError, WorkerDiedError) as error:
        found = type(error).__name__
    with hybrid.generation() as core:  # all are there again
        assert len(generate_rollout(core, PROMPTS[0], params, seed=0, pad_id=0)) == 3
    hybrid.close()
    engine.close()
    return found


def test_a_rank_that_fails_keeps_nobody_of_its_group_waiting() -> None:
    assert run_ranks(_fails, 2) == ["WorkerDiedError", "KeyError"]


def _refused(rank: int, world: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine = thalweg.initialize(model=tiny_decoder("llama"), config=config)[0]
    saved = DECODERS.pop("llama")
    try:
        with (
            pytest.raises(ValueError, match="the model's own code divides its layers"),
            HybridEngine(engine).generation(),
        ):
            pass
    finally:
        DECODERS["llama"] = saved
    with pytest.raises(ValueError, match="the model's own code divides its layers"):
        HybridEngine(engine, runner="transformers")
    with pytest.raises(ValueError, match="must divide the number of ranks, 2"):
        HybridEngine(engine, EngineConfig(pipeline_parallel_size=2))
    one_head = tiny_decoder("llama", num_attention_heads=1, num_key_value_heads=1)
    other = thalweg.initialize(model=one_head, config=config | {"tensor_parallel": {}})[0]
    hybrid = HybridEngine(other, EngineConfig(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="this model's heads can be divided by 1"), hybrid.generation():
        pass
    other.close()
    with pytest.raises(ValueError, match="of 2 ranks, one at least must train"):
        RolloutRanks(2)
    with pytest.raises(ValueError, match="1 rollout_ranks are no whole number of groups of 2"):
        RolloutRanks(1, 2)
    engine.close()
    engine = thalweg.initialize(
        model=tiny_decoder("llama"), config=config | {"tensor_parallel": {}, "sequence_parallel_size": 2}
    )[0]
    with pytest.raises(ValueError, match="responses are not divided over others; leave sequence_parallel_size"):
        GRPOTrainer(RLHFConfig(num_generations=2), engine, None, None, None, None)  # type: ignore[arg-type]
    divided = RLHFConfig(deepspeed_config={"sequence_parallel_size": 2})
    with pytest.raises(ValueError, match="examples and responses are not divided over others; leave sequence_parallel"):
        models.build_engine(tiny_decoder("llama"), divided, num_updates=1)
    with pytest.raises(ValueError, match="must divide the number of ranks, 2"):
        HybridEngine(engine, EngineConfig(tensor_parallel_size=2), runner="transformers")
    engine.close()


def test_layouts_that_cannot_be_are_refused() -> None:
    run_ranks(_refused, 2)


def test_samples_depend_on_their_seed_alone() -> None:
    first, second = run_ranks(_samples, 2)
    assert first == second  # the same prompts in other company
    assert first[0] == first[1] != first[2]


def _samples(rank: int, world: int) -> list[Any]:
    engine = _actor(3, "llama")
    hybrid, params, found = HybridEngine(engine, EngineConfig(dtype="fp32", max_num_seqs=2 + rank)), None, []
    for seed in (1, 1, 2):
        params = SamplingParams(max_tokens=NEW, temperature=1.0)
        with hybrid.generation() as core:
            rollout = generate_rollout(core, PROMPTS[0], params, seed=seed, pad_id=0, num_samples=3)
        assert len(rollout) == 9
        found.append(rollout.responses())
    engine.close()
    return found


def test_ranks_of_a_model_that_nobody_described_use_its_own_code() -> None:
    assert run_ranks(_undescribed, 2) == [True, True]


def _undescribed(rank: int, world: int) -> bool:
    engine = _actor(3, "llama")
    plain = copy.deepcopy(_plain(engine, "llama", None))
    saved = DECODERS.pop("llama")
    try:
        hybrid = HybridEngine(engine)
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        with hybrid.generation() as core:
            responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
    finally:
        DECODERS["llama"] = saved
    engine.close()
    return hybrid.runner == "transformers" and responses == [_greedy(plain, p, -1) for p in PROMPTS[rank]]


def _on_device(rank: int, world: int, degree: int) -> tuple[str, bool]:
    engine = _actor(3, "llama")
    _train(engine, 0)
    plain, hybrid = _plain(engine, "llama", None), HybridEngine(engine, EngineConfig(tensor_parallel_size=degree))
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    with hybrid.generation() as core:
        responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
    hybrid.close()
    engine.close()
    return engine.device.type, responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]]


@pytest.mark.nightly
@pytest.mark.parametrize("degree", [1, 2])
def test_an_actor_on_a_device_generates_there(degree: int) -> None:
    """The torch runner keeps a model's own tensors on a device, where the skeleton's are gone by then."""
    assert run_ranks(_on_device, 2, degree, device="sim", reuse=False) == [("sim", True)] * 2


def _one_differs(rank: int, world: int) -> tuple[str | None, bool]:
    from thalweg.infer.models.spec import UnsupportedModelError

    def refuse(*_: Any) -> None:
        raise UnsupportedModelError("off by much")

    engine = _actor(3, "llama")
    plain, hybrid, check = _plain(engine, "llama", None), HybridEngine(engine), weight_sync.check_logits_close
    if rank == 1:
        weight_sync.check_logits_close = refuse
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    try:
        with hybrid.generation() as core:
            responses = generate_rollout(core, PROMPTS[rank], params, seed=0, pad_id=0).responses()
    finally:
        weight_sync.check_logits_close = check
    engine.close()
    return hybrid.runner, responses == [_greedy(plain, prompt, -1) for prompt in PROMPTS[rank]]


def test_where_one_rank_finds_other_logits_all_use_the_model_s_code() -> None:
    assert run_ranks(_one_differs, 2) == [("transformers", True)] * 2
