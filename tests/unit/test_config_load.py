"""Loading: strict types, every fault at once with the nearest key, older spellings, all kinds of sources."""

from __future__ import annotations

import base64
import copy
import enum
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.config import Config, ConfigError, ConfigProblem, load, load_config


def problems(source: Any, **options: Any) -> dict[str, ConfigProblem]:
    """The problems of a bad config by path."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    return {problem.path: problem for problem in caught.value.problems}


# ---- keys ----


@pytest.mark.parametrize(
    ("source", "path", "nearest"),
    [
        ({"zero_optimizaton": {"stage": 2}}, "zero_optimizaton", "zero_optimization"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", "stage"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"Gradient_Clipping": 1.0}, "Gradient_Clipping", "gradient_clipping"),
        ({"fp16": {"loss_scale_windw": 1}}, "fp16.loss_scale_windw", "loss_scale_window"),
        ({"bfloat16": {"enabld": True}}, "bfloat16.enabld", "enabled"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decy": 0.1}}},
            "optimizer.params.weight_decy",
            "weight_decay",
        ),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, "optimizer.parms", "params"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_step": 1}}},
            "scheduler.params.warmup_step",
            None,
        ),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"lr": 1e-3}, "lr", "optimizer.params.lr"),
        ({"qqq": 1}, "qqq", None),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest(source: Any, path: str, nearest: str | None) -> None:
    """PAIN_POINTS 20: a misspelt key is an error with a suggestion."""
    found = problems(source)
    assert list(found) == [path]
    if nearest:
        assert found[path].suggestion == nearest
        assert f"did you mean {nearest}?" in str(found[path])
    assert "unknown key" in str(found[path])


def test_a_key_of_another_section_is_named() -> None:
    found = problems({"zero_optimization": {"loss_scale_window": 10}})
    assert "known as fp16.loss_scale_window" in str(found["zero_optimization.loss_scale_window"])


# ---- values ----


@pytest.mark.parametrize(
    ("source", "path", "word"),
    [
        ({"train_batch_size": "32"}, "train_batch_size", "whole number"),
        ({"train_batch_size": 2.5}, "train_batch_size", "whole number"),
        ({"train_batch_size": 0}, "train_batch_size", "at least 1"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "scheduler.params.warmup_num_steps",
            "at least 1",
        ),
        ({"train_batch_size": True}, "train_batch_size", "whole number"),
        ({"train_batch_size": 10**30}, "train_batch_size", "whole number"),
        ({"gradient_clipping": -0.5}, "gradient_clipping", "at least 0"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping", "number"),
        ({"gradient_clipping": True}, "gradient_clipping", "number"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping", "finite"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping", "finite"),
        ({"steps_per_print": float("-inf")}, "steps_per_print", "finite"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "true or false"),
        ({"fp16": {"enabled": "true"}}, "fp16.enabled", "true or false"),
        ({"fp16": True}, "fp16", "block"),
        ({"fp16": []}, "fp16", "block"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", "one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "one of 0, 1, 2, 3"),
        ({"zero_optimization": 3}, "zero_optimization", "block"),
        ({"communication_data_type": "fp8"}, "communication_data_type", '"bf16"'),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "optimizer.params.betas", "list of 2"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}},
            "optimizer.params.betas",
            "below 1",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}, "optimizer.params.lr", "number"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, "optimizer.type", "text"),
        ({"optimizer": {"type": 3}}, "optimizer.type", "text"),
        ({"optimizer": "AdamW"}, "optimizer", "block"),
        ({"comms_logger": {"prof_ops": [1]}}, "comms_logger.prof_ops[0]", "text"),
        ({"seed": object()}, "seed", "JSON"),
        ({3: 4}, "3", "text"),
        ([1, 2], "", "mapping"),
        (3, "", "a path"),
    ],
)
def test_a_wrong_value_is_told_with_path_value_and_expectation(source: Any, path: str, word: str) -> None:
    found = problems(source)
    assert path in {p.split("[")[0] for p in found} | set(found)
    text = str(next(problem for name, problem in found.items() if name.startswith(path)))
    assert word in text
    assert len(found) == 1


def test_the_cure_is_named_for_a_number_in_quotes() -> None:
    assert problems({"optimizer": {"type": "Adam", "params": {"lr": "1e-5"}}})["optimizer.params.lr"].suggestion == (
        "1e-5, without quotes"
    )
    assert problems({"fp16": {"enabled": "True"}})["fp16.enabled"].suggestion == "true"
    assert problems({"gradient_allreduce_op": "maen"})["gradient_allreduce_op"].suggestion == '"mean"'


def test_numbers_as_people_write_them() -> None:
    config = load(
        {
            "zero_optimization": {"reduce_bucket_size": 5e8, "stage": 2.0},
            "gradient_clipping": 1,
            "fp16": {"loss_scale": 0, "min_loss_scale": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 1, "betas": (0, 0.9)}},
        }
    )
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int
    assert type(config.zero_optimization.stage) is int
    assert type(config.gradient_clipping) is float
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == (0.0, 0.9)


def test_plain_forms_of_foreign_values() -> None:
    class Stage(enum.IntEnum):
        THREE = 3

    class Optimizer(enum.StrEnum):
        ADAM = "Adam"

    torch = pytest.importorskip("torch")
    config = load(
        {
            "zero_optimization": {"stage": Stage.THREE},
            "optimizer": {"type": Optimizer.ADAM, "params": {"lr": np.float32(0.5)}},
            "train_batch_size": np.int64(8),
            "data_types": {"param_dtype": torch.bfloat16},
            "csv_monitor": {"output_path": Path("out")},
        }
    )
    assert config.zero_optimization.stage == 3
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 0.5
    assert config.train_batch_size == 8
    assert config.data_types.param_dtype == "bf16"
    assert config.csv_monitor.output_path == "out"


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_spellings_of_a_dtype(name: str) -> None:
    assert load({"communication_data_type": name}).communication_data_type == "bf16"


def test_never_print_is_no_number() -> None:
    assert load({"steps_per_print": float("inf")}).steps_per_print is None
    assert load('{"steps_per_print": Infinity}').steps_per_print is None
    assert load({"steps_per_print": 0}).steps_per_print == 0


def test_null_blocks_are_absent_blocks() -> None:
    config = load(
        {
            "fp16": None,
            "scheduler": None,
            "zero_optimization": {"offload_param": None},
            "train_batch_size": None,
        }
    )
    assert config == load({})


# ---- all at once ----


def test_every_fault_in_one_error_in_the_order_of_the_text() -> None:
    text = """{ // a config with everything wrong
      "train_batch_size": "32",
      "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
      "fp16": {"enabled": true, "enabled": true, "loss_scal": 1},
      "bf16": {"enabled": true},
      "zero_optimization": {"stage": 9, "offload_optimizer": {"device": "disk"}},
      "optimizer": {"type": "Adamm", "params": {"lr": "fast"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_typ": "log"}},
      "seed": NaN
    }"""
    found = problems(text)
    assert list(found) == [
        "train_batch_size",
        "fp16.enabled",
        "fp16.loss_scal",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.params.warmup_typ",
        "scheduler.params.total_num_steps",
        "seed",
    ]
    assert [problem.line for problem in found.values()] == [2, 4, 4, 6, 6, 7, 7, 8, 8, 9]


def test_a_rule_is_not_judged_on_a_value_that_could_not_be_read() -> None:
    found = problems({"bf16": {"enabled": True}, "fp16": {"enabled": "yes"}})
    assert list(found) == ["fp16.enabled"]


def test_load_tells_what_is_not_built_along_with_other_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"autotuning": {"enabled": True}, "seed": -1})
    assert {problem.path for problem in caught.value.problems} == {"autotuning.enabled", "seed"}
    assert load({"autotuning": {"enabled": True}}).autotuning.enabled


def test_the_error_survives_pickling_and_prints_anywhere() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"\ud800": 1, "seed": -1})
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert str(error).encode()
    assert isinstance(error, ValueError)


# ---- older spellings ----


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        ),
        (
            {"zero_optimization": {"gather_fp16_weights_on_model_save": True}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
        (
            {"zero_optimization": {"max_live_parameters": 7}},
            {"zero_optimization": {"stage3_max_live_parameters": 7}},
        ),
        ({"aio": {"intra_op_parallelism": 4}}, {"aio": {"thread_count": 4}}),
        (
            {"zero_optimization": {"stage": 3, "aio": {"thread_count": 4}}},
            {"zero_optimization": {"stage": 3}, "aio": {"thread_count": 4}},
        ),
        ({"zero_optimization": {"cpu_offload": False}}, {"zero_optimization": {}}),
        ({"checkpoint": {"tag_validation": "FAIL"}}, {"checkpoint": {"tag_validation": "Fail"}}),
        ({"optimizer": {"type": "adamw"}}, {"optimizer": {"type": "AdamW"}}),
        (
            {"zero_optimization": {"leaf_module": {"names": "a"}}},
            {"zero_optimization": {"leaf_module": {"names": ["a"]}}},
        ),
    ],
)
def test_older_spellings_mean_the_same(old: Any, new: Any) -> None:
    assert load(old) == load(new)


@pytest.mark.parametrize(
    ("old", "block"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")]
)
def test_older_offload_keys_are_the_offload_blocks(old: str, block: str) -> None:
    source = {"zero_optimization": {"stage": 3, old: True, "cpu_offload_use_pin_memory": False}}
    section = getattr(load(source).zero_optimization, block)
    assert section.device == "cpu"
    assert section.pin_memory is False


def test_an_older_spelling_beside_the_new_one_is_refused() -> None:
    assert list(problems({"bf16": {}, "bfloat16": {}})) == ["bfloat16"]
    assert list(problems({"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {}}})) == [
        "zero_optimization.cpu_offload"
    ]


def test_what_was_renamed_is_told() -> None:
    assert "bfloat16 is read as bf16" in load({"bfloat16": {"enabled": True}}).describe()


def test_deepspeeds_decoupled_writer_is_an_asynchronous_save() -> None:
    for decoupled in (True, False):
        config = load({"checkpoint": {"writer": {"type": "fast", "decoupled": decoupled}}})
        assert config.checkpoint.asynchronous is decoupled
    both = {"checkpoint": {"asynchronous": True, "writer": {"decoupled": True}}}
    assert list(problems(both)) == ["checkpoint.writer.decoupled"]


# ---- sources ----


def test_all_sources_give_the_same_config(tmp_path: Path) -> None:
    tree = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    text = json.dumps(tree)
    path = tmp_path / "ds_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    encoded = base64.urlsafe_b64encode(text.encode()).decode()

    class Lazy(Mapping):
        def __getitem__(self, key: str) -> Any:
            return tree[key]

        def __iter__(self) -> Any:
            return iter(tree)

        def __len__(self) -> int:
            return len(tree)

    sources: list[Any] = [tree, text, path, str(path), encoded, encoded.rstrip("="), Lazy(), load(tree)]
    assert {load(source) for source in sources} == {load(tree)}


def test_base64_is_url_safe() -> None:
    text = '{"csv_monitor": {"job_name": "??>>~~"}}'
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert set(encoded) & set("-_")
    assert load(encoded).csv_monitor.job_name == "??>>~~"


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    found = problems(str(tmp_path / "ds_confg.json"))
    assert found[""].suggestion == str(tmp_path / "ds_config.json")
    assert list(problems(str(tmp_path))) == [""]
    assert list(problems("bm90IGpzb24=")) == [""]
    assert list(problems("nul\0byte")) == [""]


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": "\xff\xfe"}')
    assert "UTF-8" in str(problems(path)[""])


def test_no_source_means_the_defaults() -> None:
    assert load(None) == load({}) == load()


def test_a_mapping_that_contains_itself() -> None:
    tree: dict[str, Any] = {}
    tree["fp16"] = tree
    assert problems(tree)


def test_loading_leaves_the_callers_mapping_alone() -> None:
    tree = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"cpu_offload": False},
        "optimizer": {"type": "adam"},
    }
    before = copy.deepcopy(tree)
    load(tree)
    assert tree == before


# ---- the config itself ----


def test_a_config_cannot_be_changed() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}, "comms_logger": {"prof_ops": ["a"]}})
    assert config.optimizer is not None
    with pytest.raises(ValueError):
        config.seed = 3
    with pytest.raises(ValueError):
        config.fp16.enabled = True
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 2.0
    with pytest.raises(TypeError):
        config.optimizer.params.update(lr=2.0)
    assert isinstance(config.comms_logger.prof_ops, tuple)
    assert dict(**config.optimizer.params) == {"lr": 1.0}


def test_a_config_goes_round_through_json_pickle_and_copy() -> None:
    config = load_config(
        {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}
    )
    assert load(config.to_dict()) == config
    assert load(json.dumps(config.to_dict())) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert isinstance(config, Config)


def test_configs_that_differ_are_not_equal() -> None:
    assert load({"seed": 1}) != load({"seed": 2})
    assert load({"seed": 1}) == load({"seed": 1})


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, thalweg.config as c; c.load_config({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_remarks_are_no_options() -> None:
    remarks = {"_comment": "by hand", "//": 1, "# why": ["a"], "_comment_2": {"stage": 9}}
    config = load({**remarks, "zero_optimization": {**remarks, "stage": 2}})
    assert config.zero_optimization.stage == 2
    assert load(json.dumps(remarks)).zero_optimization.stage == 0
    with pytest.raises(ConfigError, match="_remark"):
        load({"_remark": 1})
