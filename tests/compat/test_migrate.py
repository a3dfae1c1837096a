"""`thalweg migrate`: what a config and a script of DeepSpeed's come to, by the schema's and the surface's tables."""

from __future__ import annotations

import copy
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from thalweg.cli import main
from thalweg.compat.migrate import migrate_config
from thalweg.config import ConfigError, load

CONFIG = """{
  // as the documentation of DeepSpeed and of Hugging Face has them, and two mistakes
  "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
  "steps_per_print": 2000, "wall_clock_breakdown": false, "prescale_gradients": false, "trian_batch": 3,
  "zero_optimization": {"stage": 3, "cpu_offload": true, "overlap_comm": true, "reduce_bucket_size": 5e8,
                        "stage3_gather_fp16_weights_on_model_save": true},
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "eps": 1e-8, "betas": [0.8, 0.999]}},
  "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16},
  "bfloat16": {"enabled": true}, "nebula": {"enabled": false, "load_path": "x"},
  "autotuning": {"enabled": true}
}"""
SCRIPT = """
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.sparse_attention import BertSparseSelfAttention as Sparse
    from deepspeed.runtime.lr_schedules import WarmupLR

    DS = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}}

    def main(model, args):
        engine, _, _, _ = deepspeed.initialize(model=model, config=DS, modle_parameters=[])
        other, *_ = deepspeed.initialize(args=args, model=model)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            loss = engine(1)
        engine.backward(loss)
        engine.stpe()
        print(engine.zero_reduce_scatter(), engine.global_steps, engine.was_step_applied())
        print(dist.get_rank(), engine.global_rank, engine.module.anything, deepspeed.no_such_name)
        third, *_ = deepspeed.initialize(model=model, config=make_config())
"""


def test_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(CONFIG)
    assert main(["migrate", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "bfloat16 is read as bf16" in report["renamed"]
    assert "the result" in report["ignored"]["prescale_gradients"] and "nebula" in report["ignored"]
    unknown, later = report["not_offered"]
    assert "trian_batch (line 4)" in unknown and "autotuning.enabled (line 10)" in later
    assert report["defaults"] == {"gradient_clipping": 1.0}
    assert report["config"] == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 2000,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "eps": 1e-8, "betas": [0.8, 0.999]}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    assert main(["migrate", str(path)]) == 0
    text = capsys.readouterr().out
    assert all(line in text for line in (unknown, later, *report["renamed"])) and '"stage": 3' in text


def _leaves(tree: dict[str, Any]) -> list[list[str]]:
    return [
        path
        for key, value in tree.items()
        for path in ([[key, *rest] for rest in _leaves(value)] if isinstance(value, dict) and value else [[key]])
    ]


def test_the_shortest_config_is_the_same_job_and_none_is_shorter() -> None:
    """Read, it is the given one with DeepSpeed's clipping; without any of its options it is another."""
    given: dict[str, Any] = {
        "train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5, "seed": None,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
        "activation_checkpointing": {"partition_activations": False},
    }  # fmt: skip
    report = migrate_config(given)
    assert report.config is not None and not (report.not_offered or report.defaults)
    meaning = load(copy.deepcopy(given)).to_dict()
    assert load(copy.deepcopy(report.config)).to_dict() == meaning
    assert len(_leaves(report.config)) < len(_leaves(given))
    for *blocks, name in _leaves(report.config):
        shorter = copy.deepcopy(report.config)
        block = shorter
        for part in blocks:
            block = block[part]
        del block[name]
        try:
            assert load(shorter).to_dict() != meaning, name
        except ConfigError:
            continue


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8,, }')
    (tmp_path / "bad.py").write_text("def f(:\n")
    for name, said in [
        ("bad.json", "line 1"), ("bad.py", "bad.py, line 1: this is not Python"), ("none.py", "there is no script"),
        ("none.json", "an existing file"),
    ]:  # fmt: skip
        assert main(["migrate", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def _migrate_scripts(rank: int, world: int, *names: str) -> list[dict[str, Any]]:
    from thalweg.compat.migrate import migrate_script

    return [dataclasses.asdict(migrate_script(Path(name))) for name in names]


def test_a_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "plain.py").write_text("from transformers import Trainer\n")
    report, plain = run_ranks(_migrate_scripts, 1, str(path), str(tmp_path / "plain.py"))[0]
    uses = {use["name"]: use for use in report["uses"]}
    assert "modle_parameters" in uses["deepspeed.initialize"]["problem"] and uses["deepspeed.initialize"]["line"] == 11
    assert uses["deepspeed.zero.GatheredParameters"]["becomes"] == "thalweg.zero.GatheredParameters"
    assert uses["deepspeed.runtime.lr_schedules.WarmupLR"]["becomes"] == "thalweg.optim.lr_scheduler.WarmupLR"
    assert uses["deepspeed.ops.lamb.FusedLamb"]["problem"] is None  # by the alias
    assert "sparse_attention" in uses["deepspeed.ops.sparse_attention.BertSparseSelfAttention"]["problem"]
    assert "not among the names" in uses["deepspeed.no_such_name"]["problem"]
    assert [name for name in uses if name.startswith("engine.")] == ["engine.stpe"]
    assert uses["engine.stpe"]["line"] == 16 and "engine.backward" not in uses and "engine.module" not in uses
    assert uses["deepspeed.comm.get_rank"]["problem"] is None
    (config,) = report["configs"]
    assert config["config"]["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert len(report["notes"]) == 1 and "print the dict" in report["notes"][0]
    assert not plain["uses"] and "as it is" in plain["notes"][0]


def test_the_report_is_plain_data() -> None:
    assert json.dumps(dataclasses.asdict(migrate_config({"train_batch_size": 4})))
