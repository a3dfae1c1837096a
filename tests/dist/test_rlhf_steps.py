"""From a base model to a chat model: the steps on two ranks, a crash in the middle, engines that commit as one (R26).

Rows 11 and 14 of PAIN_POINTS.md: an adapter saved empty; several engines in one process.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import run_ranks
from tests.marks import nightly
from tests.rlhf_support import make_base, make_data, score_vowels
from thalweg.rlhf import checkpoint, losses
from thalweg.rlhf.config import load_rlhf_config
from thalweg.rlhf.models import ValueModel
from thalweg.rlhf.report import RunLog
from thalweg.rlhf.steps import run_all, run_step

REUSE_RANKS = True

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_seq_len": 48, "learning_rate": 3e-3, "max_answer_seq_len": 6,
    "max_prompt_seq_len": 48, "per_device_generation_batch_size": 2, "num_train_steps": 3, "save_interval": 1,
    "sft": {"zero_stage": 2, "gradient_accumulation_steps": 2}, "reward": {"zero_stage": 1},
    "ppo": {"zero_stage": 3, "critic_zero_stage": 1, "kl_target": 0.1, "kl_horizon": 50, "ppo_epochs": 2,
            "enable_ema": True, "ema_decay": 0.7, "unsup_coef": 0.5},
    "grpo": {"zero_stage": 3, "num_generations": 4, "reward_function": "tests.rlhf_support:score_vowels"},
    "dpo": {"zero_stage": 3, "lora_dim": 4, "only_optimize_lora": True, "label_smoothing": 0.1},
}  # fmt: skip

TENSOR = {"deepspeed_config": {"tensor_parallel": {"autotp_size": 2}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rlhf")
    data = make_data(folder / "data.jsonl")
    ppo = OPTIONS["ppo"] | {"unsupervised_dataset_name": str(data)}
    model = make_base(folder / "base", hidden_size=64, intermediate_size=64, num_attention_heads=4)
    return OPTIONS | {"ppo": ppo, "model_name_or_path": str(model), "data_path": str(data)}


class _DeadError(Exception):
    """What ends a run where a test says."""


def _die_at(update: int, step: str) -> Any:
    """Let a run end before the update of a step is recorded."""
    add = RunLog.add

    def dying_add(self: RunLog, number: int, *args: Any) -> None:
        if number == update and self.directory.name == step:
            raise _DeadError
        add(self, number, *args)

    return dying_add


def _run(
    rank: int,
    world: int,
    options: dict[str, Any],
    out: str,
    algorithm: Any,
    deaths: list[tuple[int, str]],
    goes_on: bool = True,
) -> str:
    options = options | {"output_dir": out}
    add = RunLog.add
    for death in deaths:
        RunLog.add = _die_at(*death)  # type: ignore[method-assign]
        with pytest.raises(_DeadError):
            run_all(options, algorithm)
        RunLog.add = add  # type: ignore[method-assign]
    return str(run_all(options, algorithm)) if goes_on else ""


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("algorithm", "deaths"),
    [nightly("ppo", [(2, "sft"), (3, "ppo")]), nightly("grpo", [(3, "grpo")]), ("dpo", [(2, "dpo")])],
)
def test_a_run_that_died_goes_on_to_the_same_end(
    algorithm: str, deaths: list[tuple[int, str]], base: dict[str, Any], tmp_path: Path
) -> None:
    ends = []
    for name, when in (("whole", []), ("died", deaths)):
        model = run_ranks(_run, 2, base, str(tmp_path / name), algorithm, when)[0]
        ends.append({path.name: _rows(path) for path in (tmp_path / name).iterdir() if path.is_dir()})
        assert Path(model).is_dir()
    whole, died = ends
    assert all(len(rows) == 3 for rows in whole.values())
    assert died == whole  # every metric of every step, and the samples' texts
    for name in ("model", "model_ema")[: 1 + (algorithm == "ppo")]:
        states = [load_file(tmp_path / run / algorithm / name / "model.safetensors") for run in ("whole", "died")]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    last = whole[algorithm]
    assert last[0] != last[1]
    report = (Path(model).parent / "report.html").read_text()
    assert report.count("<svg") == len(last[0].keys() - {"step", "samples"})
    reports = {(tmp_path / run / "report.html").read_text() for run in ("whole", "died")}
    assert len(reports) == 1  # of all steps
    of_all, parts = reports.pop(), [(tmp_path / "whole" / step / "report.html").read_text() for step in whole]
    assert of_all.count("<svg") == sum(part.count("<svg") for part in parts) > report.count("<svg")
    assert all(f"<h1>{step}</h1>" in of_all for step in whole)


def _windows(rank: int, world: int, options: dict[str, Any], out: str, deaths: list[int]) -> None:
    for death in [*deaths, None]:
        with pytest.MonkeyPatch.context() as patch, nullcontext() if death is None else pytest.raises(_DeadError):
            if death is not None:
                patch.setattr(RunLog, "add", _die_at(death, "sft"))
            _step(rank, world, "sft", options, out)


@pytest.mark.parametrize("world", [1, nightly(2)])
def test_an_update_is_a_window_of_the_engine_s_also_at_an_epoch_s_end(
    world: int, base: dict[str, Any], tmp_path: Path
) -> None:
    """Ten batches are three windows of at most four; each is trained on in each epoch, and none is lost by a death."""
    data = make_data(tmp_path / "data.jsonl", 20 * world)
    options = base | {
        "data_path": str(data), "data_split": "1,0,0", "num_train_steps": 0, "num_train_epochs": 3,
        "sft": {"zero_stage": 2, "gradient_accumulation_steps": 4},
    }  # fmt: skip
    ends = []
    for name, deaths in (("whole", []), ("died", [4, 6])):
        run_ranks(_windows, world, options, str(tmp_path / name), deaths)
        ends.append(_rows(tmp_path / name / "sft"))
    assert ends[0] == ends[1] and [row["step"] for row in ends[0]] == list(range(1, 10))
    states = [load_file(tmp_path / run / "sft" / "model" / "model.safetensors") for run in ("whole", "died")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_steps_that_are_asked_for_take_few_examples_again_and_again(base: dict[str, Any], tmp_path: Path) -> None:
    options = base | {
        "data_path": str(make_data(tmp_path / "data.jsonl", 4)), "data_split": "1,0,0",
        "sft": {"zero_stage": 2, "gradient_accumulation_steps": 4},
    }  # fmt: skip
    run_ranks(_windows, 1, options, str(tmp_path / "out"), [])
    assert [row["step"] for row in _rows(tmp_path / "out" / "sft")] == [1, 2, 3]


def _step(rank: int, world: int, step: Any, options: dict[str, Any], out: str) -> None:
    run_step(step, load_rlhf_config(options, step, output_dir=out))


def _steps(rank: int, world: int, steps: tuple[Any, ...], options: dict[str, Any], out: str) -> None:
    for step in steps:
        _step(rank, world, step, options, out)


@pytest.mark.parametrize("last", ["dpo", nightly("ppo")])
def test_each_step_goes_on_with_the_bottleneck_adapters_that_the_one_before_has_trained(
    last: str, base: dict[str, Any], tmp_path: Path
) -> None:
    options = base | {
        "bottleneck_dim": 4, "num_train_steps": 2, "save_interval": 0, "sft": {"zero_stage": 2, "learning_rate": 0.1},
        "dpo": {"zero_stage": 3, "learning_rate": 1e-4},
        "ppo": {"zero_stage": 3, "critic_zero_stage": 1, "learning_rate": 1e-4},
    }  # fmt: skip
    run_ranks(_steps, 2, ("sft", "reward", last), options, str(tmp_path))
    sft, reward, end = (load_file(tmp_path / step / "model" / "model.safetensors") for step in ("sft", "reward", last))
    begin, adapters = load_file(Path(base["model_name_or_path"]) / "model.safetensors"), {}
    for key, value in sft.items():
        if ".down." in key or ".up." in key:
            adapters[key] = value
            moved = float((end[key] - value).abs().max())
            assert 0 < moved < 1e-2 and (".up." not in key or float(value.abs().max()) > 0.05), (key, moved)
        else:  # the frozen base
            assert torch.equal(value, begin[key.replace(".base_layer.", ".")]) and torch.equal(value, end[key])
    assert len(adapters) == 4 * 4
    assert reward.keys() >= {key.removeprefix("model.") for key in adapters}
    score = ValueModel.from_pretrained(tmp_path / "reward" / "model")
    assert score.value_head.weight.abs().max() > 0
    own = score.backbone.state_dict()
    assert own.keys() == reward.keys() and all(torch.equal(own[key], value) for key, value in reward.items())


def _gaps(folder: Path, other: Path) -> tuple[float, float]:
    """The largest difference of two runs' metrics, in parts of the larger or of 1, and the mean one of a weight that
    differs most; their texts are the same."""
    gap = 0.0
    for one, two in zip(_rows(folder), _rows(other), strict=True):
        assert one.keys() == two.keys()
        samples = [[sample["response"] for sample in row.pop("samples", ())] for row in (one, two)]
        assert samples[0] == samples[1]
        gap = max(gap, *(abs(one[key] - two[key]) / max(1.0, abs(one[key])) for key in one))
    weights = 0.0
    for path in (*folder.glob("model*/*.safetensors"), *folder.glob("model/adapter/*.safetensors")):
        states = [load_file(each / path.relative_to(folder)) for each in (folder, other)]
        weights = max(weights, *(float((states[0][key] - states[1][key]).abs().mean()) for key in states[0]))
    return gap, weights


@pytest.mark.nightly
def test_tensor_ranks_train_on_one_rank_s_responses(base: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks that divide each layer, of which the second's reward function says nonsense, are one."""
    options = base | {
        "num_train_steps": 2, "save_interval": 0, "reward_function": "tests.rlhf_support:score_on_even_ranks",
        "per_device_generation_batch_size": 3, "per_device_train_batch_size": 3,
    }  # fmt: skip
    run_ranks(_step, 1, "ppo", options, str(tmp_path / "alone"))
    run_ranks(_step, 2, "ppo", options | TENSOR, str(tmp_path / "divided"))
    gap, weights = _gaps(tmp_path / "alone" / "ppo", tmp_path / "divided" / "ppo")
    assert gap < 1e-5 and weights < 1e-6, (gap, weights)


@pytest.mark.nightly
def test_another_learning_rate_shows(base: dict[str, Any], tmp_path: Path) -> None:
    """The control of the two tests beside it: a hundredth more."""
    for name, lr in (("one", 3e-3), ("other", 3.03e-3)):
        options = base | {"num_train_steps": 2, "save_interval": 0, "learning_rate": lr}
        run_ranks(_step, 1, "grpo", options, str(tmp_path / name))
    gap, weights = _gaps(tmp_path / "one" / "grpo", tmp_path / "other" / "grpo")
    assert gap > 1e-4 and weights > 1e-5, (gap, weights)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "options", "deaths", "ends_on"),
    [
        ("ppo", {"zero_stage": 3}, [(2, "ppo")], 4),
        ("ppo", {"zero_stage": 1, "lora_dim": 4, "only_optimize_lora": True, "rollout_ahead": 1}, [(3, "ppo")], 2),
        ("grpo", {"inference_tp_size": 4, "num_mini_batches": 2}, [(2, "grpo")], 4),
        ("grpo", {"inference_tp_size": 2, "rollout_ahead": 1, "per_device_generation_batch_size": 1}, [], 4),
        ("dpo", {"num_train_steps": 0}, [(2, "sft"), (2, "dpo")], 4),
    ],
)
def test_every_step_over_tensor_and_data_ranks_equals_data_ranks_alone(
    algorithm: str,
    options: dict[str, Any],
    deaths: list[tuple[int, str]],
    ends_on: int,
    base: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Four ranks, two to a layer, that die and go on, or two of them, against two: metrics, texts and weights."""
    options = base | {algorithm: base[algorithm] | options}
    alone = options | {algorithm: options[algorithm] | {"inference_tp_size": 1}}
    run_ranks(_run, 2, alone, str(tmp_path / "data"), algorithm, [])
    run_ranks(_run, 4, options | TENSOR, str(tmp_path / "both"), algorithm, deaths, ends_on == 4)
    if ends_on == 2:
        run_ranks(_run, 2, alone, str(tmp_path / "both"), algorithm, [])
    steps = {path.name for path in (tmp_path / "data").iterdir() if path.is_dir()}
    assert steps >= {"sft", algorithm}
    for step in steps:
        gap, weights = _gaps(tmp_path / "data" / step, tmp_path / "both" / step)
        assert gap < 1e-4 and weights < 1e-5, (step, gap, weights)


@pytest.mark.nightly
def test_a_reward_function_raises_the_reward_it_gives(base: dict[str, Any], tmp_path: Path) -> None:
    """A reward that is easy to raise, a control in which it says nothing of the response."""
    options = base | {
        "num_train_steps": 12, "learning_rate": 1e-2, "per_device_generation_batch_size": 8, "beta": 0.0,
        "data_split": "0,0,1", "save_interval": 0, "lr_scheduler_type": "constant",
        "num_generations": 8, "per_device_train_batch_size": 32,
    }  # fmt: skip
    rewards = run_ranks(_raise_reward, 2, options, str(tmp_path))
    assert rewards[0] == rewards[1]
    (first, last), (_, control) = rewards[0]
    assert last > first + 0.05 and control < first + 0.03, rewards


def _raise_reward(rank: int, world: int, options: dict[str, Any], out: str) -> list[tuple[float, float]]:
    ends = []
    options = options | {"grpo": {"zero_stage": 3}}
    for name in ("score_vowels", "score_nothing"):
        flags = {"reward_function": f"tests.rlhf_support:{name}", "output_dir": f"{out}/{name}"}
        run_step("grpo", load_rlhf_config(options, "grpo", **flags))
        torch.distributed.barrier()
        rows = _rows(Path(out) / name / "grpo")
        vowels = [sum(score_vowels([""] * 4, [s["response"] for s in row["samples"]], [""] * 4)) / 4 for row in rows]
        rewards = [row["reward"] for row in rows] if name == "score_vowels" else vowels
        ends.append((rewards[0], sum(rewards[-3:]) / 3))
    return ends


class _Recorded:
    """An engine of which only its checkpoints matter."""

    meshes = SimpleNamespace(world_group=None)  # all ranks

    def __init__(self, value: int) -> None:
        self.value = value

    def save_checkpoint(self, directory: Path, tag: str, save_latest: bool) -> None:
        if self.value < 0:
            raise _DeadError
        (directory / tag).mkdir(parents=True, exist_ok=True)
        (directory / tag / "value").write_text(str(self.value))

    def wait_for_checkpoint(self) -> None:
        """It is there."""

    def load_checkpoint(self, directory: Path, tag: str) -> None:
        self.value = int((directory / tag / "value").read_text())


def _commit(rank: int, world: int, out: str) -> list[Any]:
    engines: Any = {"actor": _Recorded(1), "critic": _Recorded(10)}
    found: list[Any] = [checkpoint.resume(out, engines)]
    checkpoint.commit(out, 1, engines, {"iteration": 1})
    engines["actor"].value, engines["critic"].value = 2, -1
    with pytest.raises(_DeadError):  # between the two engines' saves
        checkpoint.commit(out, 2, engines, {"iteration": 2})
    engines = {"actor": _Recorded(0), "critic": _Recorded(0)}
    found.append((checkpoint.resume(out, engines), engines["actor"].value, engines["critic"].value))
    engines["actor"].value, engines["critic"].value = 3, 30
    checkpoint.commit(out, 2, engines, {"iteration": 2})
    found.append(sorted(path.name for path in Path(out).glob("*/*")))
    with pytest.raises(ValueError, match="is of actor, critic, and this run has actor"):
        checkpoint.resume(out, {"actor": engines["actor"]})
    return found


def test_engines_of_a_run_that_dies_in_a_save_are_all_of_the_step_before(tmp_path: Path) -> None:
    fresh, resumed, left = run_ranks(_commit, 2, str(tmp_path))[0]
    assert fresh == [0, {}] or fresh == (0, {})
    assert resumed == ((1, {"iteration": 1}), 1, 10)  # and not the actor's 2
    assert left == ["step2", "step2"]


def test_row11_what_is_saved_is_the_merged_model_and_an_adapter_that_is_not_empty(
    base: dict[str, Any], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_ranks(_dpo, 2, base, str(tmp_path))
    ids = torch.tensor([[5, 9, 100, 7]])
    model = tmp_path / "dpo" / "model"
    merged, plain = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, base["model_name_or_path"]))
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base["model_name_or_path"]), model / "adapter"
    )
    with torch.no_grad():
        want, got, before = merged(ids).logits, adapted.eval()(ids).logits, plain(ids).logits
    assert (got - want).abs().max() < 1e-5 < 1e-4 < (before - want).abs().max()
    reward = ValueModel.from_pretrained(tmp_path / "reward" / "model")
    assert reward(ids).abs().max() > 0  # its head was new and said 0


def _dpo(rank: int, world: int, options: dict[str, Any], out: str) -> None:
    run_step("dpo", load_rlhf_config(options, "dpo", output_dir=out))
    lora = {"lora_dim": 4, "only_optimize_lora": True}
    run_step("reward", load_rlhf_config(options, "reward", output_dir=out, **lora))


def test_losses_of_parts_weigh_tokens_alike() -> None:
    """Mean losses of two parts, weighed by their tokens, are the mean of the whole: what the engine is told."""
    values, mask = torch.arange(12.0).view(3, 4), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    parts = [(losses.masked_mean(values[r], mask[r]), int(mask[r].sum())) for r in (slice(0, 1), slice(1, 3))]
    weighed = sum(float(mean) * count for mean, count in parts) / sum(count for _, count in parts)
    assert weighed == float(losses.masked_mean(values, mask))
