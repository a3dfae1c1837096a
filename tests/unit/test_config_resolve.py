"""Resolution: the batch equation, every "auto", rules between options, what is not built or has no effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.config import Config, ConfigError, ModelSize, load, load_config, resolve
from thalweg.config.rules import RULES
from thalweg.config.schema.base import (
    AUTO,
    get_by_path,
    get_section_type,
    list_options,
    literal_choices,
    replace_by_path,
)
from thalweg.config.support import ignored_options, unread_blocks, unsupported_options

IGNORED, UNSUPPORTED = ignored_options(Config), unsupported_options(Config)
UNSUPPORTED_BLOCKS = unread_blocks(Config)
LAUNCHERS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def only_problem(source: Any, world_size: int = 1) -> Any:
    """The one problem of a config that cannot be resolved."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, world_size=world_size)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value.problems[0]


def sizes(config: Config) -> tuple[int, int, int]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


# ---- the batch equation ----


@pytest.mark.parametrize(
    ("given_sizes", "ranks", "solved"),
    [
        ({TOTAL: 32, MICRO: 4, STEPS: 2}, 4, (32, 4, 2)),
        ({TOTAL: 32, MICRO: 4}, 4, (32, 4, 2)),
        ({TOTAL: 32, STEPS: 2}, 4, (32, 4, 2)),
        ({MICRO: 4, STEPS: 2}, 4, (32, 4, 2)),
        ({TOTAL: 32}, 4, (32, 8, 1)),
        ({MICRO: 4}, 4, (16, 4, 1)),
        ({STEPS: 3}, 4, (12, 1, 3)),
        ({}, 4, (4, 1, 1)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: "auto"}, 2, (2, 1, 1)),
        ({TOTAL: 32, MICRO: None, STEPS: "auto"}, 4, (32, 8, 1)),
    ],
)
def test_the_missing_sizes_are_derived(given_sizes: dict, ranks: int, solved: tuple) -> None:
    """PAIN_POINTS 19: whatever of the three is missing is derived."""
    config = load_config(given_sizes, world_size=ranks)
    assert sizes(config) == solved
    assert config.data_parallel_size == ranks


def test_row19_a_mismatch_shows_both_sides_and_the_missing_launcher_variable() -> None:
    """PAIN_POINTS 19: the message names the launcher variable that is not set."""
    problem = only_problem({TOTAL: 32, MICRO: 4, STEPS: 2})
    text = str(problem)
    assert problem.path == TOTAL
    assert "train_batch_size = 32" in text
    assert "4 x 2 x 1 = 8" in text
    for name in LAUNCHERS:
        assert name in text
    assert "thalweg run --nproc 4" in text


def test_a_launcher_that_says_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    text = str(only_problem({TOTAL: 32, MICRO: 4, STEPS: 2}))
    assert "WORLD_SIZE=1" in text
    assert "4 ranks" in text


def test_at_several_ranks_no_launcher_is_suspected() -> None:
    text = str(only_problem({TOTAL: 32, MICRO: 4, STEPS: 2}, world_size=2))
    assert "4 x 2 x 2 = 16" in text
    assert "SLURM" not in text


@pytest.mark.parametrize(
    ("given_sizes", "term"),
    [({TOTAL: 30, MICRO: 4}, STEPS), ({TOTAL: 30, STEPS: 4}, MICRO), ({TOTAL: 3}, MICRO)],
)
def test_a_size_that_would_not_be_whole(given_sizes: dict, term: str) -> None:
    text = str(only_problem(given_sizes, world_size=4))
    assert f"so that {term} is a whole number" in text


def test_the_data_parallel_size_is_checked() -> None:
    assert only_problem({"data_parallel_size": 4}, world_size=2).path == "data_parallel_size"
    assert load_config({"data_parallel_size": 2}, world_size=2).data_parallel_size == 2


@pytest.mark.parametrize("ranks", [0, -1, True, "2", 2.5, None])
def test_a_world_size_that_is_none(ranks: Any) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        resolve(load({}), world_size=ranks)


@settings(deadline=None, max_examples=200)
@given(
    total=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    steps=st.none() | st.integers(1, 8),
    ranks=st.integers(1, 8),
)
def test_the_equation_holds_or_is_refused(total: Any, micro: Any, steps: Any, ranks: int) -> None:
    source = {TOTAL: total, MICRO: micro, STEPS: steps}
    solvable = any(
        (total or m * s * ranks) == m * s * ranks
        for m in ([micro] if micro else range(1, 65))
        for s in ([steps] if steps else ([1] if total and not micro else range(1, 65)))
    )
    try:
        config = load_config(source, world_size=ranks)
    except ConfigError:
        assert not solvable
        return
    found = dict(zip((TOTAL, MICRO, STEPS), sizes(config), strict=True))
    assert found[TOTAL] == found[MICRO] * found[STEPS] * ranks
    assert all(value is None or found[key] == value for key, value in source.items())


def test_load_checks_the_equation_only_with_a_world_size() -> None:
    source = {TOTAL: 32, MICRO: 4, STEPS: 2}
    assert load(source).train_batch_size == 32
    assert load_config(source, world_size=4).train_batch_size == 32
    with pytest.raises(ConfigError):
        load_config(source, world_size=3)


# ---- auto ----


def test_buffers_follow_the_hidden_size() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    source = {"zero_optimization": dict.fromkeys(names, "auto")}
    model = ModelSize(num_parameters=10**6, hidden_size=100, num_layers=2)
    zero = load_config(source, model=model).zero_optimization
    assert [getattr(zero, name) for name in names] == [10_000, 9_000, 1_000]


def test_a_model_without_hidden_size_gets_the_defaults() -> None:
    """PAIN_POINTS 18: "auto" never depends on a ``hidden_size`` being there."""
    source = {"zero_optimization": {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}
    for model in (None, ModelSize(num_parameters=10)):
        config = load_config(source, model=model)
        assert config.zero_optimization == load_config({}).zero_optimization


def test_the_schedule_follows_the_optimiser() -> None:
    config = load_config(
        {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-4, "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_max_lr": "auto",
                    "warmup_min_lr": "auto",
                    "warmup_num_steps": "auto",
                    "total_num_steps": 50,
                },
            },
        }
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert dict(config.optimizer.params) == {
        "lr": 3e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert dict(config.scheduler.params) == {
        "warmup_max_lr": 3e-4,
        "warmup_min_lr": 0.0,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }


def test_an_auto_that_nobody_can_know() -> None:
    source = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    assert load(source).scheduler is not None
    assert only_problem(source).path == "scheduler.params.total_num_steps"


def test_clipping_with_and_without_its_key() -> None:
    assert load_config({}).gradient_clipping == 0.0
    assert "no clipping" in load_config({}).describe()
    assert load_config({"gradient_clipping": "auto"}).gradient_clipping == 1.0
    assert load_config({"gradient_clipping": 0.5}).gradient_clipping == 0.5


def test_what_huggingface_hands_over() -> None:
    config = load_config(
        {
            "fp16": {
                "enabled": "auto",
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "initial_scale_power": 16,
            },
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), "auto"),
            },
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": float("inf"),
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        },
        world_size=2,
    )
    assert sizes(config) == (2, 1, 1)
    assert not config.fp16.enabled
    assert not config.bf16.enabled
    assert AUTO not in str(config.optimizer)


def test_phases_that_are_timed_are_shown() -> None:
    """In each step's line, where the config does not say which steps have one."""
    for keys, every in (({}, 1), ({"steps_per_print": 5}, 5), ({"steps_per_print": 0}, 0)):
        config = resolve(load({"train_batch_size": 2, "wall_clock_breakdown": True, **keys}), world_size=1)
        assert config.steps_per_print == every
    assert resolve(load({"train_batch_size": 2}), world_size=1).steps_per_print is None


SWITCHED_ON_BY_PRESENCE = ("weight_quantization.",)


@pytest.mark.parametrize("path", [path for path, _ in list_options(Config)])
def test_auto_is_taken_at_every_option_and_resolved(path: str) -> None:
    tree: Any = AUTO
    for name in reversed(path.split(".")):
        tree = {name: tree}
    for block, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if path.startswith(f"{block}."):
            tree[block].setdefault("type", kind)
    if path.startswith(SWITCHED_ON_BY_PRESENCE):
        with pytest.raises(ConfigError, match="not offered: weight_quantization"):
            load_config(tree, world_size=2)
        return
    config = load_config(tree, world_size=2)
    field = dict(list_options(Config))[path]
    value = get_by_path(config, path)
    assert value != AUTO or AUTO in literal_choices(field.annotation)


def test_resolving_twice_changes_nothing() -> None:
    config = load({"gradient_clipping": "auto", TOTAL: 16, "zero_optimization": {"reduce_bucket_size": "auto"}})
    model = ModelSize(num_parameters=10, hidden_size=8)
    once = resolve(config, world_size=4, model=model)
    assert resolve(once, world_size=4) == once
    assert once.describe() == resolve(once, world_size=4).describe()
    assert config.gradient_clipping == AUTO, "resolving must not change the loaded config"


def test_describe_tells_where_values_come_from() -> None:
    """PAIN_POINTS 18: the resolved config is printed, with the origin of each value."""
    text = load_config({TOTAL: 32, "gradient_clipping": "auto"}, world_size=4).describe()
    assert "train_batch_size = 32\n" in text
    assert "train_micro_batch_size_per_gpu = 8  # train_batch_size /" in text
    assert "gradient_clipping = 1.0  #" in text


# ---- rules between options ----

BROKEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
    ({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast.dtype"),
    ({"amp": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
    ({"amp": {"enabled": True, "opt_level": "O2"}, "bfloat16": {"enabled": True}}, "bfloat16.enabled"),
    ({"amp": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
    ({"amp": {"enabled": True, "opt_level": "O4"}}, "amp.opt_level"),
    ({"amp": {"enabled": True, "loss_scale": -1}}, "amp.loss_scale"),
    ({"amp": {"enabled": True, "min_loss_scale": 1e9}}, "amp.min_loss_scale"),
    ({"amp": {"enabled": True, "cast_model_type": "fp8"}}, "amp.cast_model_type"),
    (
        {"expert_parallel": {"load_balance_coeff": 1e-3}, "pipeline": {"stages": 2}},
        "expert_parallel.load_balance_coeff",
    ),
    (
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
        "torch_autocast.dtype",
    ),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
    ({"fp16": {"enabled": True, "min_loss_scale": 64, "initial_scale_power": 5}}, "fp16.min_loss_scale"),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis"),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
    ({"activation_checkpointing": {"every": 2}}, "activation_checkpointing.every"),
    ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
    ({"outer_optimizer": {}, "zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
    (
        {"outer_optimizer": {}, "zero_optimization": {"stage": 1, "mics_shard_size": 2}},
        "zero_optimization.mics_shard_size",
    ),
    ({"outer_optimizer": {}, "fp16": {"enabled": True}}, "fp16.enabled"),
    ({"outer_optimizer": {}, "token_weighted_loss": True}, "token_weighted_loss"),
    ({"outer_optimizer": {}, "health": {"non_finite": "stop"}}, "health.non_finite"),
    ({"outer_optimizer": {}, "health": {"spike": "rewind"}}, "health.spike"),
    ({"outer_optimizer": {}, "gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ({"outer_optimizer": {}, "optimizer": {"type": "Adafactor"}}, "optimizer.type"),
    (
        {"outer_optimizer": {}, "optimizer": {"type": "Lion", "params": {"state_dtype": "int8"}}},
        "optimizer.params.state_dtype",
    ),
    ({"outer_optimizer": {}, "sequence_parallel_size": 2}, "sequence_parallel_size"),
    ({"outer_optimizer": {}, "context_parallel_size": 2}, "context_parallel_size"),
    ({"outer_optimizer": {}, "tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size"),
    ({"outer_optimizer": {}, "expert_parallel": {"autoep_size": 2}}, "expert_parallel.autoep_size"),
    ({"outer_optimizer": {}, "pipeline": {"stages": 2}}, "pipeline.stages"),
    ({"gradient_compression": {}, "zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
    (
        {"gradient_compression": {"type": "topk"}, "zero_optimization": {"stage": 1, "mics_shard_size": 2}},
        "zero_optimization.mics_shard_size",
    ),
    (
        {
            "gradient_compression": {},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
        },
        "zero_optimization.offload_optimizer.device",
    ),
    ({"gradient_compression": {}, "optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
    ({"gradient_compression": {}, "outer_optimizer": {}}, "outer_optimizer.sync_every"),
    ({"gradient_compression": {}, "pipeline": {"stages": 2}}, "pipeline.stages"),
    ({"gradient_compression": {}, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
    ({"gradient_compression": {"compress_ratio": 0}}, "gradient_compression.compress_ratio"),
    ({"optimizer": {"type": "ZeroOneAdam"}, "tensor_parallel": {"autotp_size": 2}}, "optimizer.type"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
    ({"optimizer": {"type": "Adam", "params": {"capturable": True}}}, "optimizer.params.capturable"),
    ({"optimizer": {"type": "Adam", "params": {"differentiable": True}}}, "optimizer.params.differentiable"),
    ({"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
    ({"optimizer": {"type": "LBFGS"}}, "optimizer.type"),
    ({"optimizer": {"type": "SparseAdam"}}, "optimizer.type"),
    ({"scheduler": {"type": "LambdaLR"}}, "scheduler.type"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "scheduler.params.cycle_max_lr"),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.01}}},
        "scheduler.params.cycle_max_lr",
    ),
    ({"autotuning": {"start_profile_step": 9}}, "autotuning.end_profile_step"),
    ({"token_weighted_loss": True, "gradient_allreduce_op": "sum"}, "token_weighted_loss"),
    (
        {
            "pipeline": {"stages": 2, "micro_batches": 2},
            "tensor_parallel": {},
            "gradient_accumulation_steps": 4,
        },
        "pipeline.micro_batches",
    ),
    (
        {
            "pipeline": {"stages": 2, "schedule": "dualpipev"},
            "tensor_parallel": {},
            "gradient_accumulation_steps": 3,
        },
        "pipeline.schedule",
    ),
    ({"pipeline": {"virtual_stages": 2}}, "pipeline.virtual_stages"),
    *(
        ({"zero_optimization": {"stage": 0, name: value}}, f"zero_optimization.{name}")
        for name, value in (
            ("zero_quantized_weights", True),
            ("zero_quantized_nontrainable_weights", True),
            ("zero_quantized_gradients", True),
            ("zero_hpz_partition_size", 2),
            ("mics_shard_size", 2),
        )
    ),
    ({"optimizer": {"type": "Adafactor"}, "tensor_parallel": {"autotp_size": 2}}, "optimizer.type"),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, "tensor_parallel.autotp_size"),
    ({"compile": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}, "compile.enabled"),
    ({"compile": {"enabled": True}, "tensor_parallel": {}, "sequence_parallel_size": 2}, "compile.enabled"),
    ({"tiling": {"loss": True}, "tensor_parallel": {"autotp_size": 2}}, "tiling.loss"),
    *(
        (
            {
                "compression_training": {name: {"shared_parameters": {"enabled": True}}},
                "tensor_parallel": {"autotp_size": 2},
            },
            f"compression_training.{name}.shared_parameters.enabled",
        )
        for name in (
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    ),
    (
        {"compression_training": {"layer_reduction": {"enabled": True}}, "tensor_parallel": {"autotp_size": 2}},
        "compression_training.layer_reduction.enabled",
    ),
    ({"quantize_training": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}, "quantize_training.enabled"),
    (
        {"managed_gradient_accumulation": False, "pipeline": {"stages": 2}, "tensor_parallel": {}},
        "managed_gradient_accumulation",
    ),
    ({"tiling": {"mlp": 2}, "tensor_parallel": {}, "sequence_parallel_size": 2}, "tiling.mlp"),
    ({"tiling": {"mlp_modules": ["x"]}}, "tiling.mlp_modules"),
    (
        {"sparse_attention": {"mode": "bigbird"}, "tensor_parallel": {}, "sequence_parallel_size": 2},
        "sparse_attention.mode",
    ),
    ({"sparse_attention": {"mode": "fixed"}, "compile": {"enabled": True}}, "sparse_attention.mode"),
    (
        {"sparse_attention": {"different_layout_per_head": True}, "tensor_parallel": {"autotp_size": 2}},
        "sparse_attention.different_layout_per_head",
    ),
    (
        {"progressive_layer_drop": {"enabled": True}, "tensor_parallel": {}, "pipeline": {"stages": 2}},
        "progressive_layer_drop.enabled",
    ),
    (
        {
            "tensor_parallel": {},
            "curriculum_learning": {
                "enabled": True,
                "min_difficulty": 8,
                "max_difficulty": 64,
                "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8},
            },
            "sequence_parallel_size": 2,
        },
        "curriculum_learning.enabled",
    ),
    (
        {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}, "compile": {"enabled": True}},
        "data_efficiency.data_routing.random_ltd.enabled",
    ),
    (
        {
            "data_efficiency": {
                "data_sampling": {
                    "dynamic_batching": {"enabled": True, "max_tokens": 9},
                    "curriculum_learning": {"enabled": True},
                }
            }
        },
        "data_efficiency.data_sampling.dynamic_batching.enabled",
    ),
    ({"tiling": {"head": "x"}}, "tiling.head"),
    (
        {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0}}},
        "zero_optimization.zenflow.topk_ratio",
    ),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    (
        {"optimizer": {"type": "Adam", "params": {"state_dtype": "int8", "amsgrad": True}}},
        "optimizer.params.state_dtype",
    ),
    ({"activation_checkpointing": {"offload": "cpu"}}, "activation_checkpointing.offload"),
    (
        {
            "activation_checkpointing": {"policy": "full", "offload": "nvme", "cpu_checkpointing": True},
            "memory": {"nvme_path": "/x"},
        },
        "activation_checkpointing.cpu_checkpointing",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/y"},
            }
        },
        "zero_optimization.offload_optimizer.nvme_path",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
                "zero_hpz_partition_size": 2,
            }
        },
        "zero_optimization.zero_hpz_partition_size",
    ),
)


@pytest.mark.parametrize(("source", "path"), BROKEN)
def test_contradictions_are_refused(source: dict[str, Any], path: str) -> None:
    axes = {"tensor_parallel", "pipeline", "sequence_parallel_size", "context_parallel_size"} & source.keys()
    assert only_problem(source, world_size=8 if axes else 1).path == path
    with pytest.raises(ConfigError):
        load(source)


def test_every_rule_has_a_case() -> None:
    assert {rule.paths[0] for rule in RULES} <= {path for _, path in BROKEN}


@pytest.mark.parametrize(
    "source",
    [
        {"fp16": {"enabled": False, "min_loss_scale": 0, "loss_scale_window": 0}},
        {"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": True}},
        {"activation_checkpointing": {"policy": "selective", "every": 3}},
        {"optimizer": {"type": "Adafactor"}, "zero_optimization": {"stage": 3}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        {"checkpoint": {"keep": 3, "resume": "must", "tag_validation": "Ignore"}},
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
        {
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 2,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
            }
        },
        {
            "zero_optimization": {
                "stage": 1,
                "mics_shard_size": 4,
                "mics_hierarchical_params_gather": True,
                "zero_quantized_nontrainable_weights": True,
            }
        },
        {"compile": {"enabled": True, "backend": "eager", "dynamic": False, "kwargs": {"options": {"x": 1}}}},
        {"jsonl_monitor": {"enabled": True, "output_path": "x"}, "wandb": {"enabled": True}},
        {
            "seed": 3,
            "deterministic": True,
            "cpu_kernels": "torch",
            "dump_state": True,
            "log_level": "WARNING",
        },
    ],
)
def test_what_is_built_is_accepted(source: dict[str, Any]) -> None:
    load_config(source)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "SGD", "rmsprop", "NAdam"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimisers_at_every_stage(name: str, stage: int) -> None:
    load_config({"optimizer": {"type": name, "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}})


# ---- NVIDIA Apex's amp ----


@pytest.mark.parametrize(
    ("amp", "expected"),
    [
        ({"opt_level": "O0"}, {"data_types.param_dtype": "fp32", "fp16.enabled": False, "bf16.enabled": False}),
        (
            {},
            {
                "torch_autocast.enabled": True, "torch_autocast.dtype": "fp16", "data_types.param_dtype": "fp32",
                "fp16.enabled": True, "fp16.loss_scale": 0, "fp16.loss_scale_window": 2000, "fp16.hysteresis": 1,
                "fp16.initial_scale_power": 16, "fp16.max_loss_scale": 2**24,
            },
        ),
        (
            {"opt_level": "O1", "cast_model_type": "torch.bfloat16"},
            {"torch_autocast.enabled": True, "torch_autocast.dtype": "bf16", "fp16.enabled": False},
        ),
        (
            {"opt_level": "O2", "loss_scale": "dynamic", "min_loss_scale": 2, "max_loss_scale": 4096},
            {
                "fp16.enabled": True, "fp16.loss_scale": 0, "fp16.min_loss_scale": 2, "fp16.max_loss_scale": 4096,
                "fp16.initial_scale_power": 12, "torch_autocast.enabled": False,
                "fp16.fp16_master_weights_and_grads": False,
            },
        ),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "False", "master_weights": False, "loss_scale": 128},
            {
                "fp16.loss_scale": 128, "data_types.keep_in_fp32_modules": "auto",
                "fp16.fp16_master_weights_and_grads": True,
            },
        ),
        ({"opt_level": "O3"}, {"fp16.enabled": True, "fp16.loss_scale": 1, "data_types.keep_in_fp32_modules": "auto"}),
        ({"opt_level": "O3", "cast_model_type": "bf16"}, {"bf16.enabled": True, "fp16.enabled": False}),
    ],
)  # fmt: skip
def test_an_amp_block_is_read_as_the_blocks_that_mean_it(amp: dict[str, Any], expected: dict[str, Any]) -> None:
    """With what a config of that time has beside it: an fp16 block that is switched off, and says other things."""
    off = {"fp16": {"enabled": False, "loss_scale": 64, "loss_scale_window": 7}, "bf16": {"enabled": "auto"}}
    source = {**off, "amp": {"enabled": True, **amp}}
    config = load_config(source)
    assert {path: get_by_path(config, path) for path in expected} == expected
    assert f"amp.opt_level {amp.get('opt_level', 'O1')} is read as " in config.describe()
    assert load_config(config.to_dict()) == config
    # The control: a block that is switched off changes nothing.
    assert load_config({**off, "amp": {**amp, "enabled": False}}).fp16.loss_scale == 64


# ---- not built ----

ON: dict[str, Any] = {
    "zero_optimization.zenflow": ({}, {}),
    "activation_checkpointing.offload": ("cpu", {"activation_checkpointing": {"policy": "full"}}),
    "datastates_ckpt": ({"x": 1}, {}),
    "health.heartbeat_seconds": (1, {}),
    "health.hang_seconds": (1, {}),
    "health.non_finite": ("rewind", {}),
    "health.spike": ("stop", {}),
    "memory.device_limit": ("80GiB", {}),
    "memory.host_limit": (1, {}),
    "memory.nvme_path": ("/x", {}),
    "compression_training.sparse_pruning.shared_parameters.method": ("snip_momentum", {}),
}


def _with(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {**tree, head: _with(tree.get(head, {}), rest, value) if rest else value}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_a_switch_of_what_is_not_built_is_one_clear_error(path: str) -> None:
    field = dict(list_options(Config))[path]
    kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
    value, base = ON.get(path, (True if bool in kinds else 2, {}))
    with pytest.raises(ConfigError) as caught:
        load_config(_with(base, path, value), world_size=2)
    problems = caught.value.problems
    assert [problem.path for problem in problems] == [path]
    hint, _, status = UNSUPPORTED[path]
    words = "not built yet" if status == "later" else "not offered"
    assert f"{words}: {path} = " in str(problems[0])
    assert hint in str(problems[0])


def test_blocks_that_are_switched_off_are_accepted() -> None:
    tree: dict[str, Any] = {}
    fields = dict(list_options(Config))
    for path in UNSUPPORTED:
        default = fields[path].default
        if path.endswith(".enabled"):
            tree = _with(tree, path, False)
        elif isinstance(default, bool | int | float) or default in ("none", "skip", "ignore"):
            tree = _with(tree, path, default)
    load_config(tree, world_size=4)


@pytest.mark.parametrize("block", UNSUPPORTED_BLOCKS)
@pytest.mark.parametrize("enabled", [False, True])
def test_an_unknown_key_is_an_error_in_a_block_that_nothing_reads(block: str, enabled: bool) -> None:
    """Whether the block is switched on or off, at any depth, with the nearest key."""
    section = get_section_type(dict(list_options(Config))[block].annotation)
    assert section is not None
    known = next(reversed(section.model_fields))
    tree = _with({}, f"{block}.{known}x", None)
    if enabled and "enabled" in section.model_fields:
        tree = _with(tree, f"{block}.enabled", True)
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    problem = next(problem for problem in caught.value.problems if problem.path == f"{block}.{known}x")
    assert "unknown key" in str(problem) and problem.suggestion == known


def test_an_unknown_key_is_an_error_in_a_named_group_of_a_block_that_nothing_reads() -> None:
    groups = {"different_groups": {"wq1": {"params": {"start_bit": 8}}}}
    assert only_problem({"compression_training": {"weight_quantization": groups}}).suggestion == "start_bits"
    metrics = {"curriculum_learning": {"curriculum_metrics": {"seqlen": {"min_dificulty": 8}}}}
    assert only_problem({"data_efficiency": {"data_sampling": metrics}}).suggestion == "min_difficulty"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ({"elasticity": {"max_gpus": "many"}}, "whole number"),
        ({"flops_profiler": {"detailed": 1}}, "true or false"),
        ({"comet": False}, "block"),
        ({"autotuning": {"metric": "speed"}}, '"throughput"'),
        ({"eigenvalue": {"tol": "small"}}, "a number"),
        ({"nebula": {"persistent_time_interval": -1}}, "at least 0"),
    ],
)
def test_values_of_blocks_that_nothing_reads_are_of_the_kind_of_their_defaults(source: Any, word: str) -> None:
    assert word in only_problem(source).expected


def test_a_degree_that_does_not_divide_is_blamed_before_the_batch_equation() -> None:
    problem = only_problem({"context_parallel_size": 3, TOTAL: 8, MICRO: 4, STEPS: 1}, world_size=4)
    assert problem.path == "world_size" and "context_parallel_size = 3" in problem.expected


# ---- accepted, no effect ----


def _a_leaf(path: str) -> tuple[str, Any]:
    """The path itself, or the first option below it that is no block, and its default."""
    found = ((p, field) for p, field in list_options(Config) if p == path or p.startswith(f"{path}."))
    return next(
        (p, field.default) for p, field in found if not get_section_type(field.annotation) and field.default != AUTO
    )


@pytest.mark.parametrize("path", list(IGNORED))
def test_what_has_no_effect_is_told_once_if_it_was_set(path: str) -> None:
    assert f"{path} = " not in load_config({}).describe()
    leaf, value = (path, True) if path.endswith("overlap_comm") else _a_leaf(path)
    base = {"optimizer": {"type": "Adam"}} if path.startswith("optimizer") else {}
    text = load_config(_with(base, leaf, value)).describe()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(f"{path} = ")]
    assert len(lines) == 1
    assert lines[0].endswith(IGNORED[path])
    assert "accepted, no effect" in text


def test_values_are_replaced_by_path_without_touching_the_original() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}})
    changed = replace_by_path(config, {"optimizer.params.lr": 2.0, "fp16.enabled": True, "seed": 4})
    assert get_by_path(changed, "optimizer.params.lr") == 2.0
    assert get_by_path(changed, "fp16.enabled") is True
    assert get_by_path(config, "optimizer.params.lr") == 1.0
    assert get_by_path(config, "fp16.enabled") is False


def test_a_config_in_one_line_names_what_is_set_filled_in_and_without_effect() -> None:
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "bfloat16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    }
    line = load_config(given, world_size=4).summarize()
    assert "\n" not in line, line
    for part in ("zero_optimization.stage 3", "bf16.enabled true", "optimizer.params.lr 0.25", "train_batch_size 8"):
        assert part in line, (part, line)
    assert "bfloat16 is read as bf16" in line
    unset = load_config({}).summarize()
    assert "fp16" not in unset and "without effect" not in unset, unset
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "fast_init": True}}
    ignored = load_config({"zero_optimization": zero}).summarize()
    assert "without effect: zero_optimization.offload_optimizer.fast_init" in ignored
