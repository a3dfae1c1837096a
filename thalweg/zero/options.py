"""From a resolved config to how a model is sharded; the recipe and the plan ask for it."""

import torch
from torch import nn

from thalweg.config import Config, ModelSize
from thalweg.config.schema.optimizer import COMPRESSED_OPTIMIZERS
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.trees import first_positive_int
from thalweg.zero.leaf_modules import set_z3_leaf_module
from thalweg.zero.policy import Precision, ZeroPolicy
from thalweg.zero.shard import ShardOptions
from thalweg.zero.units import UnitPolicy, num_parameters


def get_model_size(model: nn.Module) -> ModelSize:
    """What the config's ``"auto"`` values may depend on."""
    config = getattr(model, "config", None)
    return ModelSize(
        num_parameters=num_parameters(model),
        hidden_size=first_positive_int(config, "hidden_size", "n_embd", "d_model"),
        num_layers=first_positive_int(config, "num_hidden_layers", "n_layer", "num_layers"),
    )


def build_precision(config: Config) -> Precision:
    """The dtypes that the config asks for, spelled out."""
    compute_dtype = torch.float32
    low_precision_master = False
    if config.bf16.enabled:
        compute_dtype, low_precision_master = torch.bfloat16, config.bf16.bf16_master_weights_and_grads
    if config.fp16.enabled:
        compute_dtype, low_precision_master = torch.float16, config.fp16.fp16_master_weights_and_grads
    if config.data_types.param_dtype is not None:
        compute_dtype = parse_dtype(config.data_types.param_dtype)
    master_dtype = compute_dtype if low_precision_master else torch.float32
    reduce_dtype = config.communication_data_type or config.data_types.grad_accum_dtype
    buffer_dtype = config.data_types.buffer_dtype
    return Precision(
        compute_dtype=compute_dtype,
        master_dtype=master_dtype,
        reduce_dtype=parse_dtype(reduce_dtype) if reduce_dtype is not None else master_dtype,
        buffer_dtype=None if buffer_dtype is None else parse_dtype(buffer_dtype),
    )


def build_shard_options(model: nn.Module, config: Config) -> ShardOptions:
    """How the model is to be sharded."""
    zero, precision = config.zero_optimization, build_precision(config)
    site_size = "auto" if config.gradient_compression is not None else None
    leaf = zero.leaf_module
    unit_policy = UnitPolicy(
        min_num_params=zero.stage3_module_granularity_threshold,
        leaf_classes=tuple(leaf.classes or ()),
        leaf_names=tuple(leaf.names or ()),
        leaf_suffixes=tuple(leaf.name_suffixes or ()),
    )
    for name, module in model.named_modules():
        if unit_policy.is_leaf(name, module):
            set_z3_leaf_module(module, True)
    return ShardOptions(
        policy=ZeroPolicy(zero.stage),
        zero=zero,
        precision=precision,
        unit_policy=unit_policy,
        sum_gradients=config.gradient_allreduce_op == "sum",
        within_hosts=config.optimizer is not None and config.optimizer.type in COMPRESSED_OPTIMIZERS,
        site_size=site_size if config.outer_optimizer is None else config.outer_optimizer.site_size,
        fp32_modules=_find_fp32_modules(model, config, precision),
    )


def _find_fp32_modules(model: nn.Module, config: Config, precision: Precision) -> tuple[str, ...]:
    """Names of the modules that stay in fp32 while the rest computes in a lower precision."""
    if precision.compute_dtype == torch.float32:
        return ()
    given = config.data_types.keep_in_fp32_modules or ()
    names = {given} if isinstance(given, str) else set(given)
    if "auto" in names:
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if precision.compute_dtype == torch.float16:
            names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return tuple(
        name
        for name, module in model.named_modules()
        if name
        and names & {name, name.rpartition(".")[2], type(module).__name__}
        and any(True for _ in module.parameters())
    )
