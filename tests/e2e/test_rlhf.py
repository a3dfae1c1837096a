"""`thalweg rlhf all` as a user calls it: two ranks, from a base model to one that an inference engine loads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.repo.source import ROOT
from tests.rlhf_support import make_base, make_data
from thalweg.infer import EngineConfig, load_engine

pytestmark = pytest.mark.nightly


def _environ() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def _thalweg(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thalweg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=_environ(), **more)


def _rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _thalweg("rlhf", *arguments)


def _write_config(tmp_path: Path, **more: Any) -> Path:
    """Options of `all` on small models."""
    options = {
        "model_name_or_path": str(make_base(tmp_path / "base")), "data_path": str(make_data(tmp_path / "data.jsonl")),
        "output_dir": str(tmp_path / "out"), "zero_stage": 3, "per_device_train_batch_size": 2, "max_seq_len": 48,
        "max_answer_seq_len": 4, "per_device_generation_batch_size": 2, "num_train_steps": 2,
        **more,
    }  # fmt: skip
    (tmp_path / "rlhf.json").write_text(json.dumps(options))
    return tmp_path / "rlhf.json"


def test_all_of_it_in_one_command_and_again(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    done = _rlhf("all", "--config", str(config), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    model = Path(done.stdout.split()[-1])
    assert model == tmp_path / "out" / "ppo" / "model"
    assert (model.parent / "report.html").is_file()
    load_engine(model, EngineConfig(max_num_seqs=1, max_model_len=32)).close()
    again = _rlhf("all", "--config", str(config), "--nproc", "2")
    assert again.returncode == 0 and again.stderr.count("is done") == 3, again.stderr
    _check_chat(model)


def _check_chat(model: Path) -> None:
    """`thalweg chat DIR` answers two questions, the second with the first behind it, as transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    messages, answers = [], []
    for question in ("red", "the sun"):
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = plain.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(out, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    options = ("--temperature", "0", "--max-tokens", "6")
    chat = _thalweg("chat", str(model), *options, input="red\nthe sun\n\nunheard\n")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout == "".join(f"{answer}\n" for answer in answers)
    assert any(answers), "a model that says nothing shows nothing"


def _kill_after(rows: int, seconds: float, out: Path, log: Path, *arguments: str) -> bool:
    """Whether `thalweg rlhf` was still there to be killed, with all of its process group, so long after it had recorded
    ``rows`` updates in all; nothing of it is left."""
    mark = f"RLHF_TEST={log}"
    with open(log, "w") as file:
        command = [sys.executable, "-m", "thalweg", "rlhf", *arguments]
        environ = _environ() | {"RLHF_TEST": str(log)}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if sum(_count_rows(out).values()) >= rows:
                time.sleep(seconds)
                break
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    assert code in (0, -signal.SIGKILL), log.read_text()
    deadline = time.monotonic() + 20
    while (left := _find_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"a killed run leaves processes behind: {left}"
    return code != 0


def _count_rows(out: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl")}


def _find_processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # somebody else's, or gone
    return found


@pytest.mark.parametrize("seed", [0])
def test_all_of_it_killed_at_random_times_ends_as_one_run_does(seed: int, tmp_path: Path) -> None:
    """SIGKILL of the command and its ranks, five times, then the same command: the metrics of every step, the texts and
    the weights are, to the bit, those of a run that nobody killed."""
    config = str(_write_config(tmp_path, num_train_steps=4, save_interval=1, enable_ema=True))
    whole = _rlhf("all", "--config", config, "--nproc", "2", "--output_dir", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    draw, killed, out = random.Random(seed), 0, tmp_path / "died"
    command = ("all", "--config", config, "--nproc", "2", "--output_dir", str(out))
    for trial, rows in enumerate(sorted(draw.sample(range(1, 12), 5))):  # of twelve updates
        delay = draw.uniform(0, 2)
        killed += _kill_after(rows, delay, out, tmp_path / f"trial{trial}.log", *command)
        done = [path.parent.name for path in out.glob("*/model")]
        print(f"killed {delay:.2f} s after {rows} updates, so far {killed}: {_count_rows(out)}, done {done}")
    assert killed >= 4
    last = _rlhf(*command)
    assert last.returncode == 0, last.stderr
    names = sorted(str(path.relative_to(tmp_path / "whole")) for path in tmp_path.glob("whole/*/model*/*.safetensors"))
    models = [
        "ppo/model/model",
        "ppo/model_ema/model",
        "reward/model/model",
        "reward/model/value_head",
        "sft/model/model",
    ]
    assert names == [f"{name}.safetensors" for name in models]
    for name in names:
        one, other = (load_file(tmp_path / run / name) for run in ("whole", "died"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    for step in ("sft", "reward", "ppo"):
        rows = [(tmp_path / run / step / "metrics.jsonl").read_text().splitlines() for run in ("whole", "died")]
        assert rows[0] == rows[1] and len(rows[0]) == 4, step
        assert len(set(rows[0])) == 4


def test_ppo_whose_last_rank_only_generates(tmp_path: Path) -> None:
    base, data = str(make_base(tmp_path / "base")), str(make_data(tmp_path / "data.jsonl"))
    ppo = _rlhf(
        "ppo", "--model_name_or_path", base, "--data_path", data, "--reward_function",
        f"{ROOT}/tests/rlhf_support.py:score_vowels", "--zero_stage", "3", "--per_device_train_batch_size", "2",
        "--per_device_generation_batch_size", "2", "--num_train_steps", "3", "--max_answer_seq_len", "4", "--lora_dim",
        "4", "--rollout_ranks", "1", "--rollout_ahead", "1", "--save_interval", "1", "--enable_ema", "--output_dir",
        str(tmp_path / "out"), "--nproc", "3",
    )  # fmt: skip
    assert ppo.returncode == 0, ppo.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness"] for row in rows] == [0, 1, 1]
    load_engine(ppo.stdout.split()[-1], EngineConfig(max_num_seqs=1, max_model_len=32)).close()


def test_deepspeed_chat_s_three_commands_and_its_one(tmp_path: Path) -> None:
    """The flags of its README and scripts (training_scripts/opt/single_node), on small models."""
    base, data = str(make_base(tmp_path / "base")), str(make_data(tmp_path / "data.jsonl"))
    out = [str(tmp_path / name) for name in ("actor", "reward", "final")]
    common = [
        "--data_path", data, "--data_split", "2,4,4", "--seed", "1234", "--deepspeed", "--num_warmup_steps", "0",
        "--lr_scheduler_type", "cosine", "--gradient_accumulation_steps", "1", "--num_train_epochs", "1",
        "--nproc", "2",
    ]  # fmt: skip
    batches = ["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--max_seq_len", "48"]
    sft = _rlhf(
        "sft", "--model_name_or_path", base, *common, *batches, "--learning_rate", "9.65e-6", "--weight_decay", "0.",
        "--zero_stage", "3", "--enable_tensorboard", "--tensorboard_path", out[0], "--output_dir", out[0],
    )  # fmt: skip
    assert sft.returncode == 0, sft.stderr
    reward = _rlhf(
        "reward", "--model_name_or_path", base, *common, *batches, "--num_padding_at_beginning", "1", "--learning_rate",
        "5e-5", "--weight_decay", "0.1", "--disable_dropout", "--zero_stage", "0", "--output_dir", out[1],
    )  # fmt: skip
    assert reward.returncode == 0, reward.stderr
    ppo = _rlhf(
        "ppo", "--actor_model_name_or_path", sft.stdout.split()[-1], "--critic_model_name_or_path",
        reward.stdout.split()[-1], *common, "--num_padding_at_beginning", "1",
        "--per_device_generation_batch_size", "1", "--per_device_training_batch_size", "1",
        "--generation_batches", "1", "--ppo_epochs", "1",
        "--max_answer_seq_len", "6", "--max_prompt_seq_len", "48", "--actor_learning_rate", "9.65e-6",
        "--critic_learning_rate", "5e-6", "--actor_weight_decay", "0.1", "--critic_weight_decay", "0.1",
        "--actor_gradient_checkpointing", "--critic_gradient_checkpointing", "--offload_reference_model",
        "--disable_actor_dropout", "--disable_critic_dropout", "--actor_zero_stage", "3", "--critic_zero_stage", "3",
        "--enable_hybrid_engine", "--inference_tp_size", "2", "--tp_gather_partition_size", "4",
        "--actor_lora_dim", "4", "--actor_lora_module_name", "layers.", "--critic_lora_dim", "4",
        "--critic_lora_module_name", "layers.", "--enable_mixed_precision_lora", "--output_dir", out[2],
    )  # fmt: skip
    assert ppo.returncode == 0, ppo.stderr
    load_engine(ppo.stdout.split()[-1], EngineConfig(max_num_seqs=1, max_model_len=32)).close()
    whole = _rlhf(
        "all", "--actor-model", base, "--reward-model", base, "--deployment-type", "single_node", "--data_path", data,
        "--output_dir", str(tmp_path / "all"), "--num_train_steps", "1", "--max_answer_seq_len", "4",
        "--zero_stage", "2", "--per_device_train_batch_size", "2", "--per_device_generation_batch_size", "2",
        "--max_seq_len", "48",
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["ppo", "report.html", "reward", "sft"]


def test_wrong_use_is_one_paragraph_with_its_cure(tmp_path: Path) -> None:
    done = _rlhf("sft", "--output_dir", str(tmp_path), "--data_path", "x.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "thalweg: sft has no model to begin with: set model_name_or_path"
