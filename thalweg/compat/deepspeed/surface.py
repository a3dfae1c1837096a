"""The surface: each module that ``import deepspeed`` can reach, its names, and where in Thalweg they live.

:mod:`thalweg.compat.finder` says how to read the table.  The names are those of DeepSpeed 0.19 that programs,
transformers, accelerate, PEFT and Lightning use.
"""

from __future__ import annotations

from thalweg.compat.finder import FALLBACK, PROGRAM, Names, NotOffered, Package, names_in, with_parents

DEEPSPEED_VERSION = "0.19.8"

_HERE, _PROGRAMS = "thalweg.compat.deepspeed", "thalweg.cli.other_programs"
_SEQUENCE_PARALLEL = NotOffered('set "sequence_parallel_size" in the config; thalweg.initialize splits the attention')
_TENSOR_PARALLEL = NotOffered('set "tensor_parallel": {"autotp_size": N} in the config; initialize splits the layers')
_OPTIMIZERS = f"{_HERE}.zero_optimizers"
_CONFIG = f"{_HERE}.config:DeepSpeedConfig"

_ENGINE = names_in(f"{_HERE}.engine", "DeepSpeedEngine PipelineEngine")
_ZERO: Names = {
    "Init": f"{_HERE}.param_views:DeepSpeedInit",
    "GatheredParameters": f"{_HERE}.param_views:DeepSpeedGatheredParameters",
    "register_external_parameter": "thalweg.zero.leaf_modules:register_external_parameter",
    "unregister_external_parameter": "thalweg.zero.leaf_modules:register_external_parameter",
    "MiCS_Init": f"{_HERE}.param_views:DeepSpeedInit",
    "unwrap_model_for_generation": f"{_HERE}.param_views:unwrap_model_for_generation",
    "ZeroParamStatus": f"{_HERE}.zero_params:ZeroParamStatus",
    "TiledLinear": NotOffered('set "tiling" in the config'),
}
_LEAF_MODULES = names_in(
    "thalweg.zero.leaf_modules",
    "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix set_z3_leaf_module "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module",
)
_TENSOR_ACCESS = names_in(
    f"{_HERE}.tensor_access",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_optimizer_state",
)
_LOGGING = names_in(f"{_HERE}.logs", "logger log_dist print_rank_0 see_memory_usage")
_LOADER = names_in("thalweg.data.repeating_loader", "RepeatingLoader")
_GROUPS: Names = {FALLBACK: f"{_HERE}.parallel_groups"}
_COMM: Names = {
    **names_in(f"{_HERE}.arguments", "init_distributed"),
    **names_in(f"{_HERE}.parallel_groups", "get_local_rank get_all_ranks_from_group"),
    FALLBACK: f"{_HERE}.collectives",
}
_ACCELERATOR = names_in("thalweg.accelerator", "get_accelerator")
_ADAM = names_in(f"{_HERE}.optimizers", "DeepSpeedCPUAdam FusedAdam")
_SPARSE_ATTENTION: Names = {
    **dict.fromkeys(
        ("BertSparseSelfAttention", "SparseAttentionUtils"),
        NotOffered('set "sparse_attention" in the config; thalweg.initialize replaces attention, and pads by itself'),
    ),
    FALLBACK: "thalweg.nn.sparse_attention",
}
_VERSIONS = ("version_major", "version_minor", "version_patch", "git_hash", "git_branch")
_LR_SCHEDULES: Names = {
    **names_in("thalweg.optim.lr_scheduler", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
    FALLBACK: f"{_HERE}.schedule_names",
}
_PIPE: Names = {FALLBACK: "thalweg.pipe"}
_PARTITION: Names = {
    **_ZERO,
    "get_accelerator": _ACCELERATOR["get_accelerator"],
    "zero_wrapper_for_fp_tensor_constructor": f"{_HERE}.zero_params:zero_wrapper_for_fp_tensor_constructor",
    "_orig_torch_arange": "torch:arange",
    "MultipleAllGatherHandles": f"{_HERE}.param_views:MultipleAllGatherHandles",
    **dict.fromkeys(
        ("AllGatherHandle", "AllGatherCoalescedHandle", "partitioned_param_data_shape"),
        NotOffered("FSDP2 gathers by unit; thalweg.zero.GatheredParameters gathers for a program"),
    ),
}
_COMPRESSION: Names = {
    **names_in("thalweg.compression", "init_compression redundancy_clean"),
    **names_in(f"{_HERE}.compression", "student_initialization"),
}
_PROFILER = names_in("thalweg.observe.flops_profiler", "FlopsProfiler get_model_profile number_to_string")
_ESTIMATES: Names = {FALLBACK: "thalweg.plan.estimates"}
_TRANSFORMER = NotOffered("thalweg.nn.transformer has a transformer in plain PyTorch")
# Modules that have the names of one of ours and no others.
_WHOLE_MODULES = {
    "deepspeed.git_version_info": f"{_HERE}.versions",
    "deepspeed.moe.layer": "thalweg.moe",
    "deepspeed.moe.utils": "thalweg.moe",
    "deepspeed.ops.op_builder": f"{_HERE}.op_builders",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "thalweg.activation_checkpointing.checkpointing",
    "deepspeed.runtime.constants": f"{_HERE}.config",
    "deepspeed.runtime.precision_config": f"{_HERE}.config",
    "deepspeed.runtime.zero.config": f"{_HERE}.config",
    "deepspeed.runtime.zero.leaf_module_config": f"{_HERE}.config",
    "deepspeed.runtime.zero.offload_config": f"{_HERE}.config",
    "deepspeed.utils.numa": f"{_HERE}.runtime_utils",
    "deepspeed.utils.torch": f"{_HERE}.runtime_utils",
}

# fmt: off
SURFACE: dict[str, Names] = with_parents({
    **{module: {FALLBACK: ours} for module, ours in _WHOLE_MODULES.items()},
    "deepspeed": {
        **_ENGINE, **_LOGGING,
        "__version__": f"{_HERE}.surface:DEEPSPEED_VERSION",
        "initialize": f"{_HERE}.engine:initialize",
        "init_inference": "thalweg.infer.init_inference:init_inference",
        "init_distributed": f"{_HERE}.arguments:init_distributed",
        "add_config_arguments": "thalweg.config.arguments:add_config_arguments",
        "tp_model_init": "thalweg.parallel.tensor.model_init:tp_model_init",
        "checkpointing": "thalweg.activation_checkpointing.checkpointing",
        "get_accelerator": _ACCELERATOR["get_accelerator"],
        **{f"__{name}__": f"{_HERE}.versions:{name}" for name in _VERSIONS},
        "lr_schedules": "deepspeed.runtime.lr_schedules",
        "PipelineModule": "thalweg.pipe:PipelineModule",
        "OnDevice": "thalweg.deferred_init.on_device:OnDevice",
        "DeepSpeedConfig": _CONFIG,
        "DeepSpeedConfigError": f"{_HERE}.config:DeepSpeedConfigError",
        "DeepSpeedTransformerLayer": _TRANSFORMER,
        "DeepSpeedHybridEngine": NotOffered("engine.generate generates with the weights in training"),
    },
    "deepspeed.accelerator": {
        **_ACCELERATOR, "is_current_accelerator_supported": f"{_HERE}.runtime_utils:is_current_accelerator_supported",
    },
    "deepspeed.accelerator.real_accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {"UNIVERSAL_CHECKPOINT_INFO": f"{_HERE}.universal:UNIVERSAL_CHECKPOINT_INFO"},
    "deepspeed.checkpoint.ds_to_universal": {FALLBACK: f"{_HERE}.universal", PROGRAM: _PROGRAMS},
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": "thalweg.zero.whole_tensors:clone_tensors_for_torch_save",
        "get_model_ckpt_name_for_rank": NotOffered("thalweg.checkpoint.Checkpoint.open(DIR) reads tensors by name"),
    },
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.compression": _COMPRESSION,
    "deepspeed.compression.compress": _COMPRESSION,
    "deepspeed.compression.helper": {"convert_conv1d_to_linear": f"{_HERE}.compression:convert_conv1d_to_linear"},
    "deepspeed.env_report": {PROGRAM: _PROGRAMS},
    "deepspeed.launcher.runner": {FALLBACK: f"{_HERE}.launcher", PROGRAM: _PROGRAMS},
    "deepspeed.moe.sharded_moe": {
        FALLBACK: f"{_HERE}.gating",
        "dist": f"{_HERE}.collectives",
        **dict.fromkeys(
            ("TopKGate", "MOELayer"),
            NotOffered("thalweg.moe.MoE has the gate: k, capacity_factor, drop_tokens and the rest are its arguments"),
        ),
    },
    "deepspeed.module_inject.layers": dict.fromkeys(
        ("LinearAllreduce", "LinearLayer", "set_autotp_mode", "is_autotp_training_mode"), _TENSOR_PARALLEL
    ),
    "deepspeed.module_inject.tp_shard": {"get_shard_size_list": _TENSOR_PARALLEL},
    "deepspeed.ops": {
        "__compatible_ops__": f"{_HERE}.op_builders:COMPATIBLE_OPS",
        "DeepSpeedTransformerLayer": _TRANSFORMER,
    },
    "deepspeed.ops.adagrad": names_in(f"{_HERE}.optimizers", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": _ADAM,
    "deepspeed.ops.adam.fused_adam": _ADAM,
    "deepspeed.ops.lamb": names_in(f"{_HERE}.optimizers", "FusedLamb"),
    "deepspeed.ops.lion": names_in(f"{_HERE}.optimizers", "DeepSpeedCPULion FusedLion"),
    "deepspeed.ops.aio": {"AsyncIOBuilder": f"{_HERE}.op_builders:AsyncIOBuilder"},
    "deepspeed.ops.sparse_attention": _SPARSE_ATTENTION,
    "deepspeed.ops.sparse_attention.sparse_self_attention": _SPARSE_ATTENTION,
    "deepspeed.ops.sparse_attention.sparsity_config": _SPARSE_ATTENTION,
    "deepspeed.pipe": _PIPE,
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.runtime.base_optimizer": names_in(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": names_in(_OPTIMIZERS, "BF16_Optimizer"),
    "deepspeed.runtime.fp16.fused_optimizer": names_in(_OPTIMIZERS, "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": f"{_OPTIMIZERS}:FP16_Optimizer"},
    "deepspeed.runtime.dataloader": _LOADER,
    "deepspeed.runtime.config": {
        FALLBACK: f"{_HERE}.config", "DeepSpeedConfigError": f"{_HERE}.config:DeepSpeedConfigError",
    },
    "deepspeed.runtime.data_pipeline.data_routing.helper": names_in(
        f"{_HERE}.data_pipeline", "convert_to_random_ltd save_without_random_ltd"
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        "DataAnalyzer": f"{_HERE}.data_pipeline:DeepSpeedDataAnalyzer"
    },
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": _LR_SCHEDULES,
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": _ENGINE,
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": {
        "PipelineParallelGrid": NotOffered("engine.meshes has the axes; the groups follow from pipeline.stages"),
        FALLBACK: "thalweg.parallel.pipeline.topology",
    },
    "deepspeed.runtime.progressive_layer_drop": names_in("thalweg.nn.layer_drop", "ProgressiveLayerDrop"),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": dict.fromkeys(
        ("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"), _SEQUENCE_PARALLEL
    ),
    "deepspeed.runtime.utils": {**_LOGGING, FALLBACK: f"{_HERE}.runtime_utils"},
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": _PARTITION,
    "deepspeed.runtime.zero.stage3": {
        **_ESTIMATES, "DeepSpeedZeroOptimizer_Stage3": f"{_OPTIMIZERS}:DeepSpeedZeroOptimizer_Stage3",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **_ESTIMATES, "DeepSpeedZeroOptimizer": f"{_OPTIMIZERS}:DeepSpeedZeroOptimizer",
    },
    "deepspeed.runtime.zero.tiling": _ZERO,
    "deepspeed.runtime.zero.utils": {"ZeRORuntimeException": f"{_HERE}.zero_params:ZeRORuntimeException"},
    "deepspeed.sequence.layer": {"DistributedAttention": _SEQUENCE_PARALLEL},
    "deepspeed.utils": {
        **_LOGGING, **_LEAF_MODULES, **_TENSOR_ACCESS, **_LOADER,
        "OnDevice": "thalweg.deferred_init.on_device:OnDevice",
    },
    "deepspeed.utils.init_on_device": {"OnDevice": "thalweg.deferred_init.on_device:OnDevice"},
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.z3_leaf_module": _LEAF_MODULES,
    "deepspeed.utils.zero_to_fp32": {
        **names_in(
            f"{_HERE}.fp32_weights", "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint"
        ),
        PROGRAM: _PROGRAMS,
    },
    "deepspeed.zero": _ZERO,
})
# fmt: on
PACKAGE = Package(
    "deepspeed",
    "DeepSpeed",
    "deepspeed",
    DEEPSPEED_VERSION,
    SURFACE,
    ("accelerate.utils", "transformers.integrations.deepspeed", "lightning.pytorch", "pytorch_lightning"),
)
