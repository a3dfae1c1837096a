"""From a resolved config to how a model is sharded; the recipe and the plan ask for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from thalweg.config import Config, ModelFacts
from thalweg.utils.dtypes import parse_dtype
from thalweg.zero.offload import offload_of
from thalweg.zero.policy import Precision, TrafficPolicy, ZeroPolicy
from thalweg.zero.shard import ShardOptions
from thalweg.zero.units import UnitPolicy, num_parameters


def model_facts(model: nn.Module) -> ModelFacts:
    """What the config's ``"auto"`` values may depend on."""
    config = getattr(model, "config", None)

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    return ModelFacts(
        num_parameters=num_parameters(model),
        hidden_size=first("hidden_size", "n_embd", "d_model"),
        num_layers=first("num_hidden_layers", "n_layer", "num_layers"),
    )


def precision_of(config: Config) -> Precision:
    """The dtypes that the config asks for, spelled out."""
    compute = torch.float32
    low_master = False
    if config.bf16.enabled:
        compute, low_master = torch.bfloat16, config.bf16.bf16_master_weights_and_grads
    if config.fp16.enabled:
        compute, low_master = torch.float16, config.fp16.fp16_master_weights_and_grads
    if config.data_types.param_dtype is not None:
        compute = parse_dtype(config.data_types.param_dtype)
    master = compute if low_master else torch.float32
    wire = config.communication_data_type or config.data_types.grad_accum_dtype
    buffer = config.data_types.buffer_dtype
    return Precision(
        compute=compute,
        master=master,
        reduce=parse_dtype(wire) if wire is not None else master,
        buffer=None if buffer is None else parse_dtype(buffer),
    )


def shard_options(model: nn.Module, config: Config) -> ShardOptions:
    """How the model is to be sharded."""
    zero, precision = config.zero_optimization, precision_of(config)
    leaf = zero.leaf_module
    units = UnitPolicy(
        min_num_params=zero.stage3_module_granularity_threshold,
        leaf_classes=tuple(leaf.classes or ()),
        leaf_names=tuple(leaf.names or ()),
        leaf_suffixes=tuple(leaf.name_suffixes or ()),
    )
    return ShardOptions(
        policy=ZeroPolicy(zero.stage),
        precision=precision,
        units=units,
        sum_gradients=config.gradient_allreduce_op == "sum",
        fp32_modules=_fp32_modules(model, config, precision),
        traffic=traffic_of(config),
        offload=offload_of(config),
    )


def traffic_of(config: Config) -> TrafficPolicy:
    """What of ZeRO++ and MiCS the config asks for."""
    zero = config.zero_optimization
    loco = zero.zeropp_loco_param
    return TrafficPolicy(
        quantised_weights=zero.zero_quantized_weights,
        quantised_frozen=zero.zero_quantized_nontrainable_weights,
        quantised_gradients=zero.zero_quantized_gradients,
        feedback=None if loco is None else (loco.err_beta, loco.reset_T),
        secondary_size=zero.zero_hpz_partition_size,
        group_size=max(0, zero.mics_shard_size),
        two_level_gather=zero.mics_hierarchical_params_gather,
    )


def _fp32_modules(model: nn.Module, config: Config, precision: Precision) -> tuple[str, ...]:
    """Names of the modules that stay in fp32 while the rest computes in a lower precision."""
    if precision.compute == torch.float32:
        return ()
    keys: Iterable[str] = config.data_types.keep_in_fp32_modules or ()
    if config.data_types.keep_in_fp32_modules == "auto":
        found: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if precision.compute == torch.float16:
            found |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        keys = found
    wanted = set(keys)
    return tuple(
        name
        for name, module in model.named_modules()
        if name and wanted & {name, name.rpartition(".")[2]} and any(True for _ in module.parameters())
    )
