"""The surface: each module that ``import deepspeed`` can reach, its names, and where in Thalweg they live.

:mod:`thalweg.compat.finder` says how to read the table.  The names are those of DeepSpeed 0.19 that programs,
transformers, accelerate, PEFT and Lightning use.
"""

from __future__ import annotations

from thalweg.compat.finder import FALLBACK, PROGRAM, Names, NotOffered, Package

DEEPSPEED_VERSION = "0.19.8"

_HERE, _PROGRAMS = "thalweg.compat.deepspeed", "thalweg.cli.other_programs"
_SEQUENCE_PARALLEL = NotOffered('set "sequence_parallel_size" in the config; thalweg.initialize splits the attention')
_CONFIG = NotOffered("thalweg.load_config(path) reads and checks a config")

_ENGINE: Names = {name: f"{_HERE}.engine:{name}" for name in ("DeepSpeedEngine", "PipelineEngine")}
_ZERO: Names = {
    "Init": f"{_HERE}.zero_params:DeepSpeedInit",
    "GatheredParameters": "thalweg.zero.gathered_parameters:GatheredParameters",
    "register_external_parameter": f"{_HERE}.zero_params:register_external_parameter",
    "unregister_external_parameter": f"{_HERE}.zero_params:register_external_parameter",
    "MiCS_Init": f"{_HERE}.zero_params:DeepSpeedInit",
    "ZeroParamStatus": NotOffered("a parameter is a DTensor outside of forward and backward at every stage"),
    "TiledLinear": NotOffered('set "tiling" in the config'),
}
_LEAF_MODULES: Names = {
    name: f"{_HERE}.leaf_modules:{name}"
    for name in ("set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules", "z3_leaf_module")
}
_TENSOR_ACCESS: Names = {
    name: f"{_HERE}.tensor_access:{name}"
    for name in (
        "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
        "safe_set_full_fp32_param", "safe_set_full_optimizer_state", "safe_set_full_grad",
        "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state",
        "safe_set_local_fp32_param", "safe_set_local_optimizer_state",
    )
}  # fmt: skip
_LOGGING: Names = {name: f"{_HERE}.logs:{name}" for name in ("logger", "log_dist", "print_rank_0", "see_memory_usage")}
_LOADER: Names = {"RepeatingLoader": f"{_HERE}.arguments:RepeatingLoader"}
_GROUPS: Names = {FALLBACK: f"{_HERE}.parallel_groups"}
_COMM: Names = {"init_distributed": f"{_HERE}.arguments:init_distributed", FALLBACK: "torch.distributed"}
_COMM |= {name: f"{_HERE}.parallel_groups:{name}" for name in ("get_local_rank", "get_all_ranks_from_group")}
_ACCELERATOR: Names = {"get_accelerator": f"{_HERE}.accelerator:get_accelerator"}
_ADAM: Names = {name: f"{_HERE}.optimizers:{name}" for name in ("DeepSpeedCPUAdam", "FusedAdam")}
_ADAGRAD: Names = {"DeepSpeedCPUAdagrad": f"{_HERE}.optimizers:DeepSpeedCPUAdagrad"}
_LION: Names = {name: f"{_HERE}.optimizers:{name}" for name in ("DeepSpeedCPULion", "FusedLion")}
_LAMB: Names = {"FusedLamb": f"{_HERE}.optimizers:FusedLamb"}
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_LR_SCHEDULES: Names = {name: f"thalweg.optim.lr_scheduler:{name}" for name in _SCHEDULES}
_LR_SCHEDULES["VALID_LR_SCHEDULES"] = f"{_HERE}.surface:VALID_LR_SCHEDULES"
VALID_LR_SCHEDULES = list(_SCHEDULES)
_CHECKPOINTING: Names = {FALLBACK: f"{_HERE}.activation_checkpoints"}
_PIPE: Names = {FALLBACK: "thalweg.pipe"}
_MOE: Names = {FALLBACK: "thalweg.moe"}
_PARTITION: Names = {
    **_ZERO,
    "get_accelerator": _ACCELERATOR["get_accelerator"],
    "zero_wrapper_for_fp_tensor_constructor": f"{_HERE}.zero_params:zero_wrapper_for_fp_tensor_constructor",
    "_orig_torch_arange": "torch:arange",
}
_ULYSSES: Names = dict.fromkeys(("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"), _SEQUENCE_PARALLEL)
_ZERO_TO_FP32: Names = {
    name: f"{_HERE}.fp32_weights:{name}"
    for name in ("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint")
} | {PROGRAM: _PROGRAMS}

# fmt: off
SURFACE: dict[str, Names] = {
    "deepspeed": {
        **_ENGINE, **_LOGGING,
        "__version__": f"{_HERE}.surface:DEEPSPEED_VERSION",
        "initialize": f"{_HERE}.engine:initialize",
        "init_inference": "thalweg.infer.init_inference:init_inference",
        "init_distributed": f"{_HERE}.arguments:init_distributed",
        "add_config_arguments": f"{_HERE}.arguments:add_config_arguments",
        "tp_model_init": f"{_HERE}.leaf_modules:tp_model_init",
        "checkpointing": f"{_HERE}.activation_checkpoints",
        "lr_schedules": "deepspeed.runtime.lr_schedules",
        "PipelineModule": "thalweg.pipe:PipelineModule",
        "OnDevice": NotOffered("build the model under thalweg.zero.Init()"),
        "DeepSpeedConfig": _CONFIG,
        "DeepSpeedConfigError": "thalweg.config:ConfigError",
        "DeepSpeedTransformerLayer": NotOffered("thalweg.nn.transformer has a transformer in plain PyTorch"),
        "DeepSpeedHybridEngine": NotOffered("engine.generate generates with the weights in training"),
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.accelerator.real_accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.ds_to_universal": {PROGRAM: _PROGRAMS},
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": f"{_HERE}.tensor_access:clone_tensors_for_torch_save",
    },
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.env_report": {PROGRAM: _PROGRAMS},
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": f"{_HERE}.surface:ENVIRONMENT_FILE",
        PROGRAM: _PROGRAMS,
    },
    "deepspeed.moe": {},
    "deepspeed.moe.layer": _MOE,
    "deepspeed.moe.utils": _MOE,
    "deepspeed.ops": {
        "DeepSpeedTransformerLayer": NotOffered("thalweg.nn.transformer has a transformer in plain PyTorch"),
    },
    "deepspeed.ops.adagrad": _ADAGRAD,
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": _ADAM,
    "deepspeed.ops.adam.fused_adam": _ADAM,
    "deepspeed.ops.lamb": _LAMB,
    "deepspeed.ops.lion": _LION,
    "deepspeed.ops.op_builder": {
        f"{name}Builder": NotOffered("no operator is compiled; kernels come with torch or are generated at load")
        for name in ("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLamb", "FusedLion", "AsyncIO", "Utils")
    },
    "deepspeed.ops.sparse_attention": dict.fromkeys(
        ("SparseSelfAttention", "SparsityConfig", "FixedSparsityConfig", "BertSparseSelfAttention"),
        NotOffered("torch.nn.attention.flex_attention takes a mask of blocks"),
    ),
    "deepspeed.pipe": _PIPE,
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": {
        name: NotOffered('"wall_clock_breakdown": true in the config times the phases and counts TFLOP/s')
        for name in ("FlopsProfiler", "get_model_profile")
    },
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": "thalweg.optim.step:EngineOptimizer",
        "ZeROOptimizer": "thalweg.optim.step:EngineOptimizer",
    },
    "deepspeed.runtime.dataloader": _LOADER,
    "deepspeed.runtime.config": {"DeepSpeedConfig": _CONFIG, "DeepSpeedConfigError": "thalweg.config:ConfigError"},
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": _LR_SCHEDULES,
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": _ULYSSES,
    "deepspeed.runtime.utils": _LOGGING,
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": _PARTITION,
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {"DistributedAttention": _SEQUENCE_PARALLEL},
    "deepspeed.utils": {**_LOGGING, **_LEAF_MODULES, **_TENSOR_ACCESS, **_LOADER},
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.zero_to_fp32": _ZERO_TO_FP32,
    "deepspeed.zero": _ZERO,
}
# fmt: on
ENVIRONMENT_FILE = ".deepspeed_env"
PACKAGE = Package(
    "deepspeed",
    "DeepSpeed",
    "deepspeed",
    DEEPSPEED_VERSION,
    SURFACE,
    ("accelerate.utils", "transformers.integrations.deepspeed", "lightning.pytorch", "pytorch_lightning"),
)
