"""Blocks that nothing reads, as DeepSpeed names them: work that is still to come, and what has no use on FSDP2.

One table, a line for each block.  A config that carries such a block switched off is accepted; a key that the block
does not have is an error as everywhere, and so is a switch that is on.  The default of an option says what it takes,
see :func:`_to_field`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from thalweg.config.schema.base import (
    AnyDict,
    FrozenDict,
    Int64,
    NonNegativeFloat,
    NonNegativeInt,
    Section,
    ignored,
    to_str_tuple,
    unsupported,
)

_TYPES: dict[type, Any] = {bool: bool, int: NonNegativeInt, float: NonNegativeFloat, str: str, type(None): Any}


class UnreadBlock(Section):
    """A block whose options nothing reads."""


class Typed(NamedTuple):
    """An option whose default does not say what it takes."""

    annotation: Any
    default: Any


def _to_field(option: Any) -> tuple[Any, Any]:
    """(type, default): a value stands for its type, a tuple for a choice (its first is the default), a list for any
    list, a block (or a mapping to blocks) for itself; None is the default of an option that takes anything."""
    if isinstance(option, Typed):
        return option
    if isinstance(option, FieldInfo):
        annotation, default = _to_field(option.default)
        return annotation, Field(default, json_schema_extra=option.json_schema_extra)
    if isinstance(option, type) and issubclass(option, Section):
        return option, option()
    if get_origin(option) is dict or option == {}:
        return option or AnyDict, FrozenDict()
    if isinstance(option, tuple):
        return Literal.__getitem__(option), option[0]  # type: ignore[attr-defined]
    if isinstance(option, list):
        return Annotated[tuple[Any, ...], BeforeValidator(to_str_tuple)], tuple(option)
    return Int64 if option == -1 else _TYPES[type(option)], option


def block(
    _fields: dict[str, tuple[Any, Any]] | None = None,
    base: type[Section] | tuple[type[Section], ...] = UnreadBlock,
    **options: Any,
) -> type[Section]:
    """A block of these options; ``_fields`` give type and default in full."""
    fields: dict[str, Any] = {key: _to_field(option) for key, option in options.items()} | (_fields or {})
    return create_model("Block", __base__=base, **fields)


def ignored_options(why: str, base: type[Section] = Section, **options: Any) -> type[Section]:
    """Options of a block that is read, without effect for one reason."""
    return block(base=base, **{key: ignored(option, why) for key, option in options.items()})


def _absent(section: type[Section]) -> tuple[Any, Any]:
    """A block that is there only where it is written."""
    return section | None, None


_REMOVE_BLOCK = "remove the block or set enabled to false"


def _off(hint: str = "") -> Any:
    return unsupported(False, f"{_REMOVE_BLOCK}{hint and '; ' + hint}")


# fmt: off
UNREAD_BLOCKS = block({
    "weight_quantization": _absent(block(
        enabled=unsupported(
            True, f"{_REMOVE_BLOCK}; thalweg.infer.quantization.zeroquant quantizes a trained model", on=bool),
        num_bits=8, q_type=("symmetric", "asymmetric"), q_groups=1,
        quantized_initialization={}, post_init_quant={})),
    }, base=Section,
    aio=ignored(
        block(block_size=1_048_576, queue_depth=8, thread_count=1, single_submit=False, overlap_events=True,
              use_gds=False),
        "transfers run in blocks of 8 MiB from 4 threads, the fastest that was measured"),
    timers=ignored(block(throughput=block(enabled=True, synchronized=True)),
                   "throughput is always measured, without waiting for the device"),
    amp=block(
        enabled=_off("use bf16, fp16 or torch_autocast"), opt_level="O1", cast_model_type=None,
        patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None,
        min_loss_scale=None, max_loss_scale=None),
    nebula=block(
        enabled=_off("checkpoints are safe against a crash without it"), enable_nebula_load=True, load_path=None,
        nebula_load_path=None, persistent_storage_path=None, persistent_time_interval=100,
        num_of_version_in_retention=2),
    elasticity=block(
        enabled=_off("a checkpoint loads at another world size without it"), max_train_batch_size=2000,
        micro_batch_sizes=[2, 4, 6], min_gpus=1, max_gpus=10000, min_time=0, version=0.2, prefer_larger_batch=True,
        ignore_non_elastic_batch_info=False, num_gpus_per_node=1, model_parallel_size=1),
    autotuning=block(
        {"model_info": _absent(block(profile=False, num_params=None, hidden_size=None, num_layers=None))},
        enabled=_off("`thalweg tune` searches a configuration"), fast=True, results_dir="autotuning_results",
        exps_dir="autotuning_exps", overwrite=True,
        start_profile_step=3, end_profile_step=5, metric=("throughput", "latency", "flops"), metric_path=None,
        tuner_type=("gridsearch", "random", "model_based"), tuner_early_stopping=5, tuner_num_trials=50,
        arg_mappings=None, max_train_batch_size=None, min_train_batch_size=1, max_train_micro_batch_size_per_gpu=1024,
        min_train_micro_batch_size_per_gpu=1, num_tuning_micro_batch_sizes=3, mp_size=1, model_info_path=None),
)
# fmt: on
