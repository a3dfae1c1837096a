"""What becomes of each option that is not simply read: two tables.

``UNSUPPORTED``  switches of work that is still to come: on, they are an error that says what to do;
               ``UNSUPPORTED_BLOCKS`` lists the blocks whose other options only tune such a switch;
``IGNORED``  options that mean nothing on FSDP2: accepted, and listed once with the reason.

An option in neither is read by the program.  ``get_support_status`` names which it is, and the frozen list
``tests/repo/config_schema.txt`` shows it for every option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnsupportedFeature:
    """A feature of later work: ``is_enabled`` takes the value at ``path``; ``hint`` says what to do today."""

    path: str
    is_enabled: Callable[[Any], bool]
    hint: str


def above_one(value: Any) -> bool:
    return value > 1


def is_not_none_string(value: Any) -> bool:
    return value != "none"


def is_given(value: Any) -> bool:
    return value is not None and value is not False


def is_not_skip(value: Any) -> bool:
    return value not in ("skip", "ignore")


_REMOVE_BLOCK = "remove the block or set enabled to false"
_SET_TO_ONE = "set it to 1; the ranks are then data-parallel"
UNSUPPORTED = (
    UnsupportedFeature(
        "zero_optimization.elastic_checkpoint", bool, "remove it; every checkpoint loads at any world size"
    ),
    UnsupportedFeature(
        "tensor_parallel.partition_config.layer_specs", bool, "remove it; layers are found by themselves"
    ),
    UnsupportedFeature(
        "tensor_parallel.sequence_parallel",
        bool,
        "set it to false; sequence_parallel_size and context_parallel_size cut the activations of norms too",
    ),
    UnsupportedFeature(
        "expert_parallel.expert_tensor_parallel_size",
        above_one,
        "set it to 1; tensor_parallel cuts experts as it cuts the other layers",
    ),
    UnsupportedFeature(
        "expert_parallel.load_balance_coeff", is_given, "remove it; the model's own auxiliary loss counts"
    ),
    UnsupportedFeature("data_efficiency.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature("curriculum_learning.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature("progressive_layer_drop.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature("eigenvalue.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature("quantize_training.enabled", bool, _REMOVE_BLOCK),
    *(
        UnsupportedFeature(f"compression_training.{name}.shared_parameters.enabled", bool, _REMOVE_BLOCK)
        for name in (
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    ),
    UnsupportedFeature("compression_training.layer_reduction.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature(
        "sparse_attention.mode", lambda mode: mode != "dense", 'remove the block or set mode to "dense"'
    ),
    UnsupportedFeature("weight_quantization.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature(
        "elasticity.enabled", bool, f"{_REMOVE_BLOCK}; a checkpoint loads at another world size without it"
    ),
    UnsupportedFeature("autotuning.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature("hybrid_engine.enabled", bool, _REMOVE_BLOCK),
    UnsupportedFeature(
        "flops_profiler.enabled",
        bool,
        f"{_REMOVE_BLOCK}; wall_clock_breakdown and the progress line show TFLOP/s",
    ),
    UnsupportedFeature(
        "comet.enabled", bool, f"{_REMOVE_BLOCK}; csv_monitor, jsonl_monitor, tensorboard and wandb are built"
    ),
    UnsupportedFeature("amp.enabled", bool, f"{_REMOVE_BLOCK}; use bf16, fp16 or torch_autocast"),
    UnsupportedFeature("nebula.enabled", bool, f"{_REMOVE_BLOCK}; checkpoints are safe against a crash without it"),
    UnsupportedFeature("datastates_ckpt", is_given, "remove it"),
    UnsupportedFeature("graph_harvesting", bool, "set it to false; compile.enabled is built"),
    UnsupportedFeature(
        "optimizer.type",
        lambda name: name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
        "use Adam or Lamb; gradients are then sent uncompressed",
    ),
    UnsupportedFeature("managed_gradient_accumulation", lambda managed: not managed, "set it to true"),
    *(
        UnsupportedFeature(f"compile.{name}", bool, "set it to false; compile.enabled alone is built")
        for name in (
            "deepcompile",
            "free_activation",
            "offload_activation",
            "offload_opt_states",
            "offload_parameters",
        )
    ),
    UnsupportedFeature("checkpoint.asynchronous", bool, "set it to false; saving then waits for the disk"),
    UnsupportedFeature("checkpoint.use_node_local_storage", bool, "set it to false and save to a shared folder"),
    UnsupportedFeature("checkpoint.writer.decoupled", bool, "set it to false; saving then waits for the disk"),
    UnsupportedFeature("health.heartbeat_seconds", is_given, "remove it"),
    UnsupportedFeature("health.hang_seconds", is_given, "remove it; the process group's timeout still ends a hung run"),
    UnsupportedFeature("health.non_finite", is_not_skip, 'set it to "skip"'),
    UnsupportedFeature("health.spike", is_not_skip, 'set it to "ignore"'),
)

_FSDP_SIZES_BUFFERS = "FSDP2 gathers and reduces whole units and sizes its buffers by them"
_SINGLE_GRADIENT_PATH = "there is one gradient path for every stage"
_NVME_ALWAYS_OVERLAPS = "reads and writes of the NVMe tier always overlap the update"
_DEEPCOMPILE_ONLY = "belongs to DeepCompile; torch.compile decides by itself"
IGNORED = {
    "bf16.check_grad_overflow": "a step whose gradients are not finite is always skipped, in every dtype",
    "comms_logger.debug": "the ledger names the module of every collective in any case",
    "comms_logger.prof_all": "the ledger counts every collective",
    "comms_logger.prof_ops": "the ledger counts every collective",
    "zero_optimization.contiguous_gradients": _FSDP_SIZES_BUFFERS,
    "zero_optimization.reduce_scatter": "sharded stages always reduce-scatter, stage 0 all-reduces",
    "zero_optimization.reduce_bucket_size": _FSDP_SIZES_BUFFERS,
    "zero_optimization.use_multi_rank_bucket_allreduce": _FSDP_SIZES_BUFFERS,
    "zero_optimization.allgather_partitions": "parameters are gathered by all-gather alone",
    "zero_optimization.allgather_bucket_size": _FSDP_SIZES_BUFFERS,
    "zero_optimization.overlap_comm": "communication always overlaps; it cannot change a result",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the master weights",
    "zero_optimization.sub_group_size": "the optimiser steps over all shards at once",
    "zero_optimization.ignore_unused_parameters": "a parameter without gradient is left alone at every stage",
    "zero_optimization.round_robin_gradients": _FSDP_SIZES_BUFFERS,
    "zero_optimization.stage3_param_persistence_threshold": "a small parameter travels with its unit",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "save_16bit_model writes whole weights",
    "zero_optimization.stage3_prefetch_bucket_size": "prefetch runs unit by unit",
    "zero_optimization.stage3_model_persistence_threshold": "parameters are sharded by unit",
    "zero_optimization.stage3_max_live_parameters": "a unit is freed after use; at most two units are live",
    "zero_optimization.stage3_max_reuse_distance": "a unit is freed after use; at most two units are live",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "parameters are gathered by all-gather alone",
    "zero_optimization.stage3_allgather_sequential": _FSDP_SIZES_BUFFERS,
    "zero_optimization.legacy_stage1": _SINGLE_GRADIENT_PATH,
    "zero_optimization.memory_efficient_linear": "parameters are freed by unit, whatever the layer",
    "zero_optimization.pipeline_loading_checkpoint": "every checkpoint loads into every layout",
    "zero_optimization.override_module_apply": "no method of nn.Module is replaced",
    "zero_optimization.log_trace_cache_warnings": "no trace of modules is recorded",
    "zero_optimization.enable_sanity_checks": "shapes are those of the unsharded model at all times",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon's state is not streamed",
    "zero_optimization.offload_param.buffer_size": "memory for a unit's parameters is as large as the unit",
    "zero_optimization.offload_optimizer.pipeline": _NVME_ALWAYS_OVERLAPS,
    "zero_optimization.offload_optimizer.pipeline_read": _NVME_ALWAYS_OVERLAPS,
    "zero_optimization.offload_optimizer.pipeline_write": _NVME_ALWAYS_OVERLAPS,
    "zero_optimization.offload_optimizer.fast_init": "state comes into being on the disk at the first step",
    "zero_optimization.offload_optimizer.super_offload": "updates run within the backward pass if they may",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the update uses torch's threads",
    "zero_optimization.zenflow.offload": "the state of selected columns stays with that of the others",
    "zero_optimization.zenflow.pt_reserved_cores_perc": "the delayed update uses torch's threads",
    "aio": "transfers run in blocks of 8 MiB from 4 threads, the fastest that was measured",
    "prescale_gradients": "says when the mean is divided, not what it is",
    "gradient_predivide_factor": "says when the mean is divided, not what it is",
    "torch_autocast.lower_precision_safe_modules": "autocast picks by operator; see communication_data_type",
    "disable_allgather": "parameters are gathered by all-gather alone",
    "sparse_gradients": "gradients are reduced dense; the values are the same",
    "zero_allow_untested_optimizer": "every optimiser works at every stage",
    "zero_force_ds_cpu_optimizer": "torch's own fused kernels run on the CPU",
    "use_data_before_expert_parallelism": "expert-parallel ranks are neighbours on the data axis",
    "expert_parallel.enabled": "experts are spread where autoep_size is above 1",
    **{
        f"expert_parallel.{name}": "experts are found by their structure, whatever the model is called"
        for name in (
            "preset_model",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "has_shared_experts",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
        )
    },
    **{
        f"expert_parallel.{name}": "the model's own router decides; it runs as it is"
        for name in (
            "router_pattern",
            "route_norm",
            "route_scale",
            "score_func",
            "score_apply",
            "combine_impl",
            "top_k",
            "top_k_attr",
            "routed_scaling_factor",
            "num_expert_groups",
            "num_limited_groups",
        )
    },
    "expert_parallel.disable_triton_grouped_mm": "grouped products are torch's own",
    "expert_parallel.validate_folding_routing": "ranks of a tensor team route alike, to the bit",
    "seq_parallel_communication_data_type": "attention is exchanged in the dtype of the activations",
    "vocabulary_size": "was used for a warning about its divisor",
    "timers": "throughput is always measured, without waiting for the device",
    "optimizer.legacy_fusion": "chose between two fused kernels of DeepSpeed",
    "bf16.immediate_grad_update": _SINGLE_GRADIENT_PATH,
    "fp16.auto_cast": "floating-point inputs are always cast to the compute dtype",
    "activation_checkpointing.contiguous_memory_optimization": "torch's allocator places activations",
    "activation_checkpointing.number_checkpoints": "sized a buffer that is not needed",
    "activation_checkpointing.synchronize_checkpoint_boundary": "no synchronisation is needed between units",
    "activation_checkpointing.profile": "wall_clock_breakdown times the phases",
    "compile.free_activation_threshold": _DEEPCOMPILE_ONLY,
    "compile.offload_activation_pin_memory": _DEEPCOMPILE_ONLY,
    "compile.double_buffer": _DEEPCOMPILE_ONLY,
    "compile.symmetric_memory": _DEEPCOMPILE_ONLY,
    "compile.debug_log": _DEEPCOMPILE_ONLY,
    "compile.sync_before_reduce": _DEEPCOMPILE_ONLY,
    "compile.sync_after_reduce": _DEEPCOMPILE_ONLY,
    "compile.sync_before_allgather": _DEEPCOMPILE_ONLY,
    "compile.sync_after_allgather": _DEEPCOMPILE_ONLY,
    "compile.keep_int_input_tensors": _DEEPCOMPILE_ONLY,
    "compile.keep_all_input_tensors": _DEEPCOMPILE_ONLY,
    "compile.passes": _DEEPCOMPILE_ONLY,
    "checkpoint.load_universal": "every checkpoint is universal",
    "checkpoint.checkpoint_serialization": "one format: safetensors shards and a manifest",
    "checkpoint.parallel_write": "every rank writes its own shard",
    "checkpoint.writer": "there is one writer",
    "tensor_parallel.dtype": "the dtypes are those of bf16, fp16 and data_types",
    "tensor_parallel.tp_overlap_comm": "layers wait for their sums; it cannot change a result",
    "tensor_parallel.preset_model": "the family is read off the model's own config",
    "tensor_parallel.keep_module_on_host": "the model is cut tensor by tensor where it is",
    "tensor_parallel.replace_with_kernel_inject": "no kernel is injected",
    "tensor_parallel.tp.tp_grain_size": "layers are cut by whole heads and even widths",
    "pipeline.seed_layers": "PipelineModule(seed_layers=...) says so",
    "pipeline.pipe_partitioned": "activations between stages travel whole",
    "pipeline.grad_partitioned": "gradients between stages travel whole",
    "pipeline.use_reentrant": "recomputation is never re-entrant; it gives the same values",
}

UNSUPPORTED_BLOCKS = (
    "tensor_parallel.partition_config",
    "data_efficiency",
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "sparse_attention",
    "weight_quantization",
    "elasticity",
    "autotuning",
    "hybrid_engine",
    "flops_profiler",
    "comet",
    "amp",
    "nebula",
)


def get_support_status(path: str) -> str:
    """``read``, ``later`` (a switch of ``UNSUPPORTED`` or what it rules) or ``no effect``."""
    if any(path == feature.path for feature in UNSUPPORTED if feature.path != "optimizer.type"):
        return "later"
    if any(is_under(path, block) for block in UNSUPPORTED_BLOCKS):
        return "later"
    return "no effect" if any(is_under(path, block) for block in IGNORED) else "read"


def is_under(path: str, block: str) -> bool:
    """Whether ``path`` is ``block`` or lies in it."""
    return path == block or path.startswith((f"{block}.", f"{block}["))
