"""The rules between options, and who asks the tables about a given config.

``RULES`` lists the combinations that contradict themselves; the tables of ``support.py`` say
what is not built yet and what has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from thalweg.config.errors import ConfigProblem, UnsupportedOption
from thalweg.config.schema.base import AUTO, Section, get_by_path
from thalweg.config.schema.optimizer import COMPRESSED_OPTIMIZERS
from thalweg.config.schema.scheduler import REQUIRED_PARAMS
from thalweg.config.support import is_under, unsupported_options


@dataclass(frozen=True)
class Rule:
    """``violated`` takes the values at ``paths``; the problem is reported at the first of them."""

    paths: tuple[str, ...]
    violated: Callable[..., bool]
    expected: str


def _both_set(first: Any, second: Any) -> bool:
    return bool(first and second)


def above_one(value: Any) -> bool:
    return value > 1


def is_not_none_string(value: Any) -> bool:
    return value != "none"


def _is_sparse(mode: Any) -> bool:
    return mode != "dense"


_TENSOR_PATHS = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
_SEQUENCE_PATHS = ("sequence_parallel_size", "context_parallel_size")
_MODEL_SPLIT_PATHS = (*_TENSOR_PATHS, *_SEQUENCE_PATHS)
_COMPRESSION_SWITCHES = (
    *(
        f"compression_training.{technique}.shared_parameters.enabled"
        for technique in (
            "weight_quantization", "activation_quantization",
            "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning",
        )
    ),
    "compression_training.layer_reduction.enabled",
    "quantize_training.enabled",
)  # fmt: skip
# What does not go with a pipeline yet: path, whether a value means it is on, the value that goes.
_NOT_WITH_PIPELINE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("zero_optimization.zero_hpz_partition_size", above_one, "1"),
    ("zero_optimization.zenflow.topk_ratio", lambda ratio: ratio > 0, "no zenflow block"),
    ("tiling.loss", bool, "false"),
    ("sparse_attention.mode", _is_sparse, '"dense"'),
    ("progressive_layer_drop.enabled", bool, "false"),
    ("curriculum_learning.enabled", bool, "false"),
    ("data_efficiency.data_sampling.dynamic_batching.enabled", bool, "false"),
    ("data_efficiency.data_routing.random_ltd.enabled", bool, "false"),
    *((path, bool, "false") for path in _COMPRESSION_SWITCHES),
    (
        "managed_gradient_accumulation",
        lambda managed: not managed,
        "true (windows of the program's own are not supported with pipeline parallelism)",
    ),
)
# What sites that train by themselves do not go with: path, whether a value means it is on, the value that goes.
_NOT_WITH_SITES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("zero_optimization.stage", lambda stage: stage == 3, "0, 1 or 2"),
    ("zero_optimization.mics_shard_size", lambda size: size > 0, "left out: a site shards within itself"),
    ("zero_optimization.offload_optimizer.device", lambda device: device == "nvme", '"cpu" or "none"'),
    ("zero_optimization.zenflow.topk_ratio", lambda ratio: ratio > 0, "no zenflow block"),
    ("optimizer.type", lambda name: name in (*COMPRESSED_OPTIMIZERS, "Adafactor"), "another optimiser"),
    ("optimizer.params.state_dtype", lambda dtype: dtype == "int8", '"fp32" or "bf16"'),
    ("fp16.enabled", bool, "false, as in bf16: sites would have to agree on a loss scale at each step"),
    ("token_weighted_loss", bool, "false: sites would have to count tokens together at each step"),
    ("gradient_allreduce_op", lambda op: op == "sum", '"mean"'),
    *(
        (path, lambda size: isinstance(size, int) and size > 1, "1")
        for path in (*_MODEL_SPLIT_PATHS, "pipeline.stages", "expert_parallel.autoep_size")
    ),
)
# What does not go with layers or sequences that several ranks share: path, whether a value means it is on, the degrees
# of which none may then be above 1, what is expected.
_NO_TENSOR_RANKS = "tensor_parallel.autotp_size to be 1"
_NO_SEQUENCE_RANKS = "sequence_ and context_parallel_size to be 1"
_NO_RANKS = "tensor_parallel.autotp_size, sequence_ and context_parallel_size to be 1"
_OTHER_TOKENS = f"false, or {_NO_SEQUENCE_RANKS}; ranks that share a sequence would differ in tokens"
_NO_NESTED_GROUPS = f"1 or left out, or {_NO_TENSOR_RANKS}; groups of groups are not built yet"
_NOT_WITH_SPLIT: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...], str], ...] = (
    ("optimizer.type", lambda name: name == "Adafactor", _TENSOR_PATHS,
     f"another optimiser, or {_NO_TENSOR_RANKS}; Adafactor needs whole matrices"),
    ("zero_optimization.mics_shard_size", above_one, _TENSOR_PATHS, _NO_NESTED_GROUPS),
    ("zero_optimization.zero_hpz_partition_size", above_one, _TENSOR_PATHS, _NO_NESTED_GROUPS),
    *((path, bool, _TENSOR_PATHS, f"false, or {_NO_TENSOR_RANKS}; split layers are not compressed yet")
      for path in _COMPRESSION_SWITCHES),
    ("tiling.loss", bool, _MODEL_SPLIT_PATHS, f"false, or {_NO_RANKS}; a loss over their ranks is not tiled yet"),
    ("tiling.mlp", above_one, _MODEL_SPLIT_PATHS, f"1, or {_NO_RANKS}"),
    ("compile.enabled", bool, _SEQUENCE_PATHS,
     f"false, or {_NO_SEQUENCE_RANKS}; exchanges of a sequence are not compiled yet"),
    ("compile.enabled", bool, _TENSOR_PATHS, f"false, or {_NO_TENSOR_RANKS}; split layers are not compiled yet"),
    ("sparse_attention.mode", _is_sparse, _SEQUENCE_PATHS,
     f'"dense", or {_NO_SEQUENCE_RANKS}: a layout is over whole sequences'),
    ("curriculum_learning.enabled", bool, _SEQUENCE_PATHS, _OTHER_TOKENS),
    ("data_efficiency.data_routing.random_ltd.enabled", bool, _SEQUENCE_PATHS, _OTHER_TOKENS),
)  # fmt: skip
RULES = (
    Rule(("bf16.enabled", "fp16.enabled"), _both_set, "false, because fp16.enabled is true; keep one of the two"),
    *(
        Rule(
            ("torch_autocast.dtype", "torch_autocast.enabled", f"{kind}.enabled"),
            lambda dtype, autocast, on, kind=kind: autocast and on and dtype != kind,
            f'"{kind}", because {kind}.enabled is true; or switch one of the two off',
        )
        for kind in ("fp16", "bf16")
    ),
    *(
        Rule(
            (f"fp16.{name}", "fp16.enabled", "fp16.loss_scale"),
            lambda value, on, scale, is_wrong=is_wrong: on and scale == 0 and is_wrong(value),
            f"{bound}, because the loss scale is dynamic (fp16.loss_scale is 0)",
        )
        for name, is_wrong, bound in (
            ("loss_scale_window", lambda window: window < 1, "at least 1"),
            ("min_loss_scale", lambda min_scale: min_scale <= 0, "above 0"),
            ("hysteresis", lambda hysteresis: hysteresis < 1, "at least 1"),
        )
    ),
    Rule(
        ("fp16.min_loss_scale", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power"),
        lambda min_scale, on, scale, power: on and scale == 0 and min_scale > 2.0**power,
        "at most the initial scale, 2 to the power of fp16.initial_scale_power",
    ),
    *(
        Rule(
            (f"{block}.{name}", f"{block}.enabled"),
            lambda asked, on: asked and not on,
            f"false, or {block}.enabled to be true",
        )
        for block, name in (
            ("fp16", "fp16_master_weights_and_grads"),
            ("bf16", "bf16_master_weights_and_grads"),
            ("bf16", "bf16_optimizer_states"),
        )
    ),
    Rule(
        ("token_weighted_loss", "gradient_allreduce_op"),
        lambda asked, op: asked and op == "sum",
        'false, because gradient_allreduce_op is "sum", which is a mean over nothing',
    ),
    Rule(
        ("scheduler.params.cycle_max_lr", "scheduler.params.cycle_min_lr"),
        lambda top, bottom: isinstance(top, float) and isinstance(bottom, float) and top < bottom,
        "at least scheduler.params.cycle_min_lr",
    ),
    Rule(
        ("zero_optimization.offload_param.device", "zero_optimization.stage"),
        lambda device, stage: is_not_none_string(device) and stage != 3,
        '"none", or zero_optimization.stage to be 3, the only stage that shards parameters',
    ),
    *(
        Rule(
            (f"zero_optimization.{name}", "zero_optimization.stage"),
            lambda value, stage, is_on=is_on: is_on(value) and stage == 0,
            f"{off}, or zero_optimization.stage to be 1, 2 or 3{why}",
        )
        for name, is_on, off, why in (
            ("offload_optimizer.device", is_not_none_string, '"none"', ""),
            ("zero_quantized_weights", bool, "false", "; nothing is sharded at stage 0"),
            ("zero_quantized_nontrainable_weights", bool, "false", "; nothing is sharded at stage 0"),
            ("zero_quantized_gradients", bool, "false", "; nothing is sharded at stage 0"),
            ("zero_hpz_partition_size", above_one, "1", "; nothing is gathered at stage 0"),
            ("mics_shard_size", lambda size: size > 0, "-1", "; nothing is sharded at stage 0"),
        )
    ),
    Rule(
        (
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_param.nvme_path",
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device",
        ),
        lambda states, params, *devices: devices == ("nvme", "nvme") and states != params,
        "the folder of zero_optimization.offload_param.nvme_path; a rank has one swap file",
    ),
    Rule(
        ("zero_optimization.zero_hpz_partition_size", "zero_optimization.offload_param.device"),
        lambda size, device: device == "nvme" and size > 1,
        '1, or zero_optimization.offload_param.device to be "none" or "cpu": hpZ keeps a copy of the '
        "parameters in the memory of each host",
    ),
    Rule(
        ("activation_checkpointing.every", "activation_checkpointing.policy"),
        lambda every, policy: every != 1 and policy != "selective",
        '1, or activation_checkpointing.policy to be "selective"',
    ),
    Rule(("zero_optimization.zenflow.topk_ratio",), lambda ratio: ratio == 0, "above 0, and at most 1"),
    Rule(
        ("zero_optimization.zenflow.topk_ratio", "optimizer.type"),
        lambda ratio, name: name not in ("Adam", "AdamW"),
        "no zenflow block, or optimizer.type to be Adam or AdamW: only their updates can wait",
    ),
    Rule(
        ("zero_optimization.zenflow.topk_ratio", "zero_optimization.offload_optimizer.device"),
        lambda ratio, device: device == "nvme",
        "no zenflow block, or offload_optimizer.device to be cpu or none: gradients that wait are in memory",
    ),
    Rule(
        ("zero_optimization.zenflow.topk_ratio", "bf16.bf16_optimizer_states"),
        lambda ratio, low: low,
        "no zenflow block, or bf16.bf16_optimizer_states to be false",
    ),
    Rule(
        ("bf16.bf16_optimizer_states", "optimizer.type"),
        lambda states, name: states and name not in ("Adam", "AdamW", "Lion"),
        "false, or optimizer.type to be Adam, AdamW or Lion",
    ),
    Rule(
        ("optimizer.params.state_dtype", "optimizer.params.amsgrad"),
        lambda kind, on: kind != "fp32" and on,
        '"fp32", because optimizer.params.amsgrad keeps a third moment',
    ),
    Rule(
        ("activation_checkpointing.offload", "activation_checkpointing.policy"),
        lambda where, policy: is_not_none_string(where) and policy == "none",
        '"none", or activation_checkpointing.policy to be "full" or "selective": only their inputs are moved',
    ),
    Rule(
        ("activation_checkpointing.offload", "compile.enabled"),
        lambda where, on: is_not_none_string(where) and on,
        '"none", because compile.enabled is true and a compiled unit keeps its own inputs',
    ),
    Rule(
        ("activation_checkpointing.cpu_checkpointing", "activation_checkpointing.offload"),
        lambda on, where: on and where == "nvme",
        'false, because activation_checkpointing.offload is "nvme"',
    ),
    Rule(
        ("tiling.mlp", "compile.enabled"),
        lambda tiles, on: tiles > 1 and on,
        "1, because compile.enabled is true and a compiled unit plans its own memory",
    ),
    Rule(
        ("tiling.mlp_modules", "tiling.mlp"),
        lambda names, tiles: bool(names) and tiles == 1,
        "null, or tiling.mlp to be the number of tiles, 2 or more",
    ),
    Rule(("tiling.head", "tiling.loss"), lambda head, on: bool(head) and not on, "null, or tiling.loss to be true"),
    Rule(
        ("optimizer.params.max_grad_norm",),
        lambda norm: norm != 0,
        "0; the top-level gradient_clipping clips by the global norm",
    ),
    Rule(("optimizer.params.capturable",), bool, "false; a step on shards is not captured into a CUDA graph"),
    Rule(("optimizer.params.differentiable",), bool, "false; a step on shards has no gradient of its own"),
    Rule(
        ("optimizer.params.amsgrad", "optimizer.type"),
        lambda on, name: on and name in ("Adagrad", "Lamb", *COMPRESSED_OPTIMIZERS),
        "false; the optimiser has no such variant",
    ),
    Rule(
        ("zero_optimization.stage", "optimizer.type"),
        lambda stage, name: stage == 3 and name in COMPRESSED_OPTIMIZERS,
        "0, 1 or 2, or another optimizer.type: parameters that are gathered at each use cost more than bits save",
    ),
    Rule(
        ("zero_optimization.offload_optimizer.device", "optimizer.type"),
        lambda device, name: device == "nvme" and name in COMPRESSED_OPTIMIZERS,
        '"cpu" or "none", or another optimizer.type: the momentum of all parameters is exchanged at once',
    ),
    *(
        Rule(
            ("optimizer.type", path),
            lambda name, size: name in COMPRESSED_OPTIMIZERS and isinstance(size, int) and size > 1,
            f"another optimiser, or {path} to be 1: only data-parallel ranks exchange momentum in bits",
        )
        for path in (*_MODEL_SPLIT_PATHS, "pipeline.stages", "expert_parallel.autoep_size")
    ),
    Rule(
        ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
        lambda size, inner: size > 1 and inner > 1 and size != inner,
        "equal to tensor_parallel.tp.tp_size, which says the same, or one of the two left out",
    ),
    *(
        Rule((path, *split_by), lambda value, *sizes, on=on: on(value) and max(sizes) > 1, expected)
        for path, on, split_by, expected in _NOT_WITH_SPLIT
    ),
    Rule(
        ("sparse_attention.different_layout_per_head", "sparse_attention.mode", *_TENSOR_PATHS),
        lambda on, mode, *sizes: on and _is_sparse(mode) and max(sizes) > 1,
        "false, or tensor_parallel.autotp_size to be 1: a rank does not know which heads it has",
    ),
    Rule(
        ("sparse_attention.mode", "compile.enabled"),
        lambda mode, on: _is_sparse(mode) and on,
        '"dense", or compile.enabled to be false: attention over blocks is not compiled',
    ),
    Rule(
        ("data_efficiency.data_routing.random_ltd.enabled", "compile.enabled"),
        _both_set,
        "false, because compile.enabled is true and the number of tokens of a layer changes",
    ),
    Rule(
        (
            "data_efficiency.data_sampling.dynamic_batching.enabled",
            "data_efficiency.data_sampling.curriculum_learning.enabled",
        ),
        _both_set,
        "false, or curriculum_learning.enabled in the same block; each chooses the samples of a batch",
    ),
    *(
        Rule(
            (path, "pipeline.stages"),
            lambda value, stages, on=on: stages > 1 and on(value),
            f"{default}, or pipeline.stages to be 1; the two are not built together yet",
        )
        for path, on, default in _NOT_WITH_PIPELINE
    ),
    *(
        Rule(
            (path, "outer_optimizer.sync_every"),
            lambda value, every, is_on=is_on: is_on(value),
            f"{expected}, or no outer_optimizer",
        )
        for path, is_on, expected in _NOT_WITH_SITES
    ),
    Rule(
        ("pipeline.micro_batches", "gradient_accumulation_steps", "pipeline.stages"),
        lambda count, steps, stages: stages > 1 and count != steps,
        "equal to gradient_accumulation_steps, which says the same, or left out",
    ),
    Rule(
        ("pipeline.schedule", "gradient_accumulation_steps", "pipeline.stages"),
        lambda name, steps, stages: stages > 1 and name == "dualpipev" and steps < 2 * stages,
        "another schedule, or gradient_accumulation_steps to be at least twice pipeline.stages",
    ),
    Rule(
        ("pipeline.virtual_stages", "pipeline.schedule"),
        lambda number, name: number > 1 and name != "interleaved",
        '1, or pipeline.schedule to be "interleaved"',
    ),
    Rule(
        ("autotuning.end_profile_step", "autotuning.start_profile_step"),
        lambda end, start: end < start,
        "at least autotuning.start_profile_step",
    ),
)


def find_rule_violations(config: Section, skip_paths: Iterable[str] = ()) -> Iterator[ConfigProblem]:
    """Every broken rule whose options are known and not below a path of ``skip_paths``."""
    skipped = tuple(skip_paths)
    for rule in RULES:
        values = [get_by_path(config, path) for path in rule.paths]
        if any(value is None or value == AUTO for value in values) or _overlaps(rule.paths, skipped):
            continue
        if rule.violated(*values):
            yield ConfigProblem(rule.paths[0], values[0], rule.expected)
    yield from _missing_required_params(config, skipped)
    yield from _find_curriculum_problems(config, skipped)
    for block in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{block}"
        on_disk = get_by_path(config, f"{path}.device") == "nvme"
        if on_disk and not get_by_path(config, f"{path}.nvme_path") and not _overlaps((path,), skipped):
            yield ConfigProblem(f"{path}.nvme_path", None, f'a folder on the disk to use, as {path}.device is "nvme"')


def _missing_required_params(config: Section, skipped: tuple[str, ...]) -> Iterator[ConfigProblem]:
    type_name = get_by_path(config, "scheduler.type")
    params = get_by_path(config, "scheduler.params")
    for name in REQUIRED_PARAMS.get(type_name, ()) if isinstance(type_name, str) else ():
        path = f"scheduler.params.{name}"
        if params.get(name) is None and not _overlaps((path,), skipped):
            yield ConfigProblem(path, None, f"a value, which {type_name} cannot do without")


_SCHEDULE_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _find_curriculum_problems(config: Section, skipped: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """What a curriculum, batches by tokens or random-LTD that is switched on cannot do without."""
    block = "data_efficiency"
    if any(is_under(path, block) or is_under(path, "curriculum_learning") for path in skipped):
        return

    def need(path: str, section: Any, expected: str, *keys: str) -> Iterator[ConfigProblem]:
        for key in keys:
            if (value := get_by_path(section, key)) in (None, ()):
                yield ConfigProblem(f"{path}.{key}", value, expected)

    legacy, efficiency = get_by_path(config, "curriculum_learning"), get_by_path(config, block)
    schedules = {"curriculum_learning": legacy} if legacy.enabled is True else {}
    for name, metric in efficiency.curriculum_metrics.items():
        path = f"{block}.data_sampling.curriculum_learning.curriculum_metrics.{name}"
        schedules[path] = metric
        if metric.clustering_type == "schedule_based":
            files = ("index_to_sample_path", "index_to_metric_path")[: 1 + (metric.difficulty_type == "value")]
            yield from need(path, metric, "a file that DataAnalyzer wrote", *files)
        elif not name.startswith("seqlen"):
            expected = '"schedule_based"; only a metric called seqlen cuts sequences and needs no index'
            yield ConfigProblem(f"{path}.clustering_type", metric.clustering_type, expected)
        elif any(above_one(get_by_path(config, one)) for one in ("sequence_parallel_size", "context_parallel_size")):
            yield ConfigProblem(path, name, "no metric that cuts sequences, as several ranks share one")
    for path, one in schedules.items():
        paces = (f"schedule_config.{key}" for key in _SCHEDULE_NEEDS[one.schedule_type])
        expected = f"a value, which {one.schedule_type} cannot do without"
        yield from need(path, one, expected, "min_difficulty", "max_difficulty", *paces)
        pace = one.schedule_config
        if one.schedule_type == "fixed_discrete" and len(pace.difficulty) != len(pace.max_step) + 1:
            expected = f"{len(pace.difficulty) - 1} steps, one for each difficulty but the last"
            yield ConfigProblem(f"{path}.schedule_config.max_step", list(pace.max_step), expected)
    if efficiency.dynamic_batching is not None:
        path = f"{block}.data_sampling.dynamic_batching"
        yield from need(path, efficiency.dynamic_batching, "the tokens of a micro-batch", "max_tokens")
    if (ltd := efficiency.random_ltd) is not None:
        path = f"{block}.data_routing.random_ltd"
        keys = ("min_value", "max_value", "schedule_config.require_steps", "schedule_config.seq_per_step")
        yield from need(f"{path}.random_ltd_schedule", ltd.random_ltd_schedule, "a value", *keys)
        yield from need(path, ltd, "the numbers of the layers, counted from 0", "random_ltd_layer_id")
        if ltd.random_ltd_layer_num not in (None, len(ltd.random_ltd_layer_id)):
            expected = f"{len(ltd.random_ltd_layer_id)}, as many as random_ltd_layer_id names"
            yield ConfigProblem(f"{path}.random_ltd_layer_num", ltd.random_ltd_layer_num, expected)


def find_unsupported(config: Section, skip_paths: Iterable[str] = ()) -> Iterator[ConfigProblem]:
    """One problem for each switch of later work that is on."""
    skipped = tuple(skip_paths)
    for path, (hint, is_on) in unsupported_options(type(config)).items():
        value = get_by_path(config, path)
        if value is None or (isinstance(value, str) and value == AUTO) or _overlaps((path,), skipped):
            continue
        if is_on(value):
            yield UnsupportedOption(path, value, hint)


def _overlaps(paths: tuple[str, ...], skipped: tuple[str, ...]) -> bool:
    return any(is_under(path, other) or is_under(other, path) for path in paths for other in skipped)
