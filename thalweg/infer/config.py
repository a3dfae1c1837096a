"""Every option of the inference engine, declared once: Python, DeepSpeed's config and the command line.

:class:`EngineConfig` is the one declaration.  ``load_engine``, ``thalweg.pipeline`` (MII's form) and Ray take its
fields, and the older names of :data:`ALIASES`, as keywords; :func:`from_deepspeed_config` translates the keys of
``init_inference``; ``thalweg serve`` and ``thalweg chat`` derive their flags from :func:`engine_options`; the table in
docs/inference.md is compared with it.  The names are vLLM's where vLLM has the option.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

# Other names of options, in Python and (with dashes) on the command line.
ALIASES = {
    "quantize": "quantization", "max_length": "max_model_len", "kv_memory": "kv_cache_bytes",
    "max_batch": "max_num_seqs", "max_step_tokens": "max_num_batched_tokens", "prefix_cache": "enable_prefix_caching",
    "speculate": "num_speculative_tokens", "draft": "draft_model", "adapter": "lora_adapters",
    "adapters": "lora_adapters", "stream": "weight_offload", "stream_folder": "weight_offload_dir",
    "stream_memory": "weight_offload_bytes", "tensor_parallel": "tensor_parallel_size", "tp": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size", "pp": "pipeline_parallel_size",
    "expert_parallel": "expert_parallel_size", "ep": "expert_parallel_size",
}  # fmt: skip

T = TypeVar("T")


def rename_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their own names; ValueError where one is there by two names."""
    renamed: dict[str, Any] = {}
    for key, value in options.items():
        name = ALIASES.get(key, key)
        if name in renamed:
            raise ValueError(f"{key} is another name of an option that is there already: give {name} once")
        renamed[name] = value
    return renamed


def _accept_aliases(cls: type[T]) -> type[T]:
    """Let a dataclass's constructor take the names of :data:`ALIASES`, too."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def with_aliases(self: T, **options: Any) -> None:
        init(self, **rename_aliases(options))

    cls.__init__ = with_aliases
    return cls


def _option(
    default: Any, help: str, *, choices: tuple[Any, ...] | None = None, minimum: int | None = None, metavar: str = "N"
) -> Any:
    metadata = {"help": help, "choices": choices, "minimum": minimum, "metavar": metavar}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@_accept_aliases
@dataclass(frozen=True)
class EngineConfig:
    """How to load and run a model; the defaults suit a server.

    ``thalweg.infer.load_engine(model, config=EngineConfig(), tokenizer=None) -> EngineCore`` takes it together with
    the directory of a Hugging Face model, or a live one.  Raises ValueError that names the option and its range.
    """

    dtype: str = _option(
        "auto",
        "what weights and activations are in; auto: bf16 where the processor multiplies it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    quantization: str | None = _option(
        None,
        "pack the weights of linear layers at load (int4: groups of 32, the head in int8)",
        choices=(None, "int8", "int4"),
    )
    max_model_len: int | None = _option(
        None, "prompt and output together, in tokens (default: what the model was made for)", minimum=2
    )
    max_num_seqs: int = _option(
        64, "sequences that run together; 0 with weight_offload: as many as cost no time", minimum=1
    )
    max_num_batched_tokens: int = _option(
        512, "tokens of one step, decoding ones and chunks of prompts together (Dynamic SplitFuse)", minimum=1
    )
    kv_cache_bytes: int | None = _option(
        None,
        "memory of the KV cache, of each process (default: room for max_num_seqs, in a quarter of the free memory, on"
        " an accelerator in 90% of it)",
        minimum=1,
    )
    kv_cache_dtype: str = _option(
        "auto",
        "what keys and values are stored as; auto: fp32 with fp32 weights, else bf16; int8: a scale for each position"
        " and head; fp8: without the CPU kernels",
        choices=("auto", "fp32", "bf16", "int8", "fp8"),
    )
    enable_prefix_caching: bool = _option(True, "share the KV blocks of equal beginnings of prompts")
    batch_invariant: bool = _option(
        False, "the same bits whatever runs beside a request; free with the CPU kernels, slow without"
    )
    enforce_eager: bool = _option(
        False, "launch the kernels of decoding steps one by one, where a CUDA graph would launch them together"
    )
    num_speculative_tokens: int = _option(
        0,
        "draft tokens of a step for each sequence, looked up in its own text (or from draft_model, then 4 unless"
        " given); the output stays the same",
        minimum=0,
    )
    draft_model: str | None = _option(
        None, "directory of a smaller model with the same vocabulary that proposes the draft tokens", metavar="DIR"
    )
    lora_adapters: Mapping[str, str] = _option(
        {}, "directories of LoRA adapters (peft's format) by the names that requests give", metavar="NAME=DIR"
    )
    device: str = _option(
        "auto",
        "where the model runs, as torch names it; auto: the accelerator where there is one, a live model where it is",
        metavar="DEVICE",
    )
    trust_remote_code: bool = _option(False, "run the modelling code of the model's directory")
    weight_offload: str | None = _option(
        None,
        "weights stay in a file and are read layer by layer (ZeRO-Inference); cpu: through the page cache; nvme:"
        " past it, into buffers",
        choices=(None, "cpu", "nvme"),
    )
    weight_offload_dir: str | None = _option(
        None, "where the packed weights are cached (default: the user's cache directory)", metavar="DIR"
    )
    weight_offload_bytes: int | None = _option(
        None, "weights in memory at a time with nvme (default: a quarter of what is free)", minimum=1
    )
    pooling: str = _option(
        "auto",
        "how an encoder's states become a vector; auto: as its directory says, or mean",
        choices=("auto", "mean", "cls"),
    )
    normalize: bool | None = _option(None, "scale an encoder's vectors to length 1 (default: as its directory says)")
    tensor_parallel_size: int = _option(
        1, "processes of this host that share each layer's heads, inner units and vocabulary", minimum=1
    )
    pipeline_parallel_size: int = _option(1, "stages of layers, each on processes of its own", minimum=1)
    expert_parallel_size: int = _option(1, "processes among which a layer's experts are distributed whole", minimum=1)

    def __post_init__(self) -> None:
        for option in engine_options():
            _check_range(option, getattr(self, option.name), self.weight_offload)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
            if getattr(self, name) > 1 and self.weight_offload:
                raise ValueError(f"weight_offload and {name} do not go together: choose one of them")
        small, large = sorted((self.tensor_parallel_size, self.expert_parallel_size))
        if large % small:
            raise ValueError(
                f"expert_parallel_size is {self.expert_parallel_size} and tensor_parallel_size"
                f" {self.tensor_parallel_size}; one must divide the other"
            )

    @property
    def ranks_per_stage(self) -> int:
        """Processes that share each layer."""
        return max(self.tensor_parallel_size, self.expert_parallel_size)

    @property
    def num_ranks(self) -> int:
        """Processes that run one model."""
        return self.pipeline_parallel_size * self.ranks_per_stage


@dataclass(frozen=True)
class EngineOption:
    """One field of :class:`EngineConfig`, for those who derive a spelling from it."""

    name: str
    aliases: tuple[str, ...]
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    minimum: int | None
    metavar: str
    # ``bool``, ``int``, ``str`` or ``dict``.
    value_type: type

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes."""
        return self.name.endswith("_bytes")


@functools.cache
def engine_options() -> tuple[EngineOption, ...]:
    """Return all options, in order."""
    value_types = {"bool": bool, "int": int, "str": str, "Mapping[str, str]": dict}
    return tuple(
        EngineOption(
            name=x.name,
            aliases=tuple(alias for alias, name in ALIASES.items() if name == x.name),
            default={} if x.default is MISSING else x.default,
            value_type=value_types[str(x.type).removesuffix(" | None")],
            **x.metadata,
        )
        for x in fields(EngineConfig)
    )


def _check_range(option: EngineOption, value: Any, weight_offload: str | None) -> None:
    """Raise ValueError unless the value is one of the option's choices, and large enough."""
    name = option.name
    if option.choices is not None and value not in option.choices:
        *known, last = ["None" if choice is None else choice for choice in option.choices]
        raise ValueError(f"{name} is {value!r}; it must be {', '.join(known)} or {last}")
    if option.minimum is None or value is None:
        return
    least = 0 if name == "max_num_seqs" and weight_offload else option.minimum
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


# DeepSpeed's keys that choose among its kernels; here the processor and a check at load choose the runner.
DEEPSPEED_IGNORED_KEYS = frozenset({
    "replace_with_kernel_inject", "kernel_inject", "replace_method", "injection_policy", "injection_dict",
    "injection_policy_tuple", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking",
    "return_tuple", "training_mp_size", "min_out_tokens", "set_empty_params", "save_mp_checkpoint_path",
    "checkpoint_config", "transposed_mode", "keep_module_on_host", "base_dir", "max_batch_size", "replace",
    "moe_experts", "moe_type",
})  # fmt: skip
# DeepSpeed's keys for objects of the caller's own, which may be there as None.
_NULLABLE_KEYS = ("mpu", "ep_group", "ep_mp_group", "config", "checkpoint")
_OFFLOAD_DEVICES = {"none": None, "cpu": "cpu", "nvme": "nvme"}


def from_deepspeed_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of :class:`EngineConfig` that ``init_inference``'s keys ask for, and the keys left over.

    DeepSpeed's own keys: ``dtype`` (``int8`` quantises), ``quant``, ``zero`` with ``offload_param``,
    ``tensor_parallel`` (``{"tp_size": n}`` or n), ``mp_size``, ``moe`` (``ep_size``), ``max_out_tokens``; besides them
    every option by any of its names.  Raises ValueError for a value that cannot be.
    """
    left: dict[str, Any] = dict(settings)
    for key in _NULLABLE_KEYS:
        if key in left and left[key] is None:
            del left[key]
    if left.pop("checkpoint", None):
        raise ValueError("checkpoint: load the weights into the model first, or pass a model directory")
    options = _parse_zero_section(left.pop("zero", None) or left.pop("zero_optimization", None) or {})
    for name, keys in _DEGREE_KEYS.items():
        if present := {key: left.pop(key) for key in keys if key in left}:
            options[name] = int(_largest_degree(present, *keys))
    for key in ("max_out_tokens", "max_tokens"):
        if (length := left.pop(key, None)) is not None:
            options["max_model_len"] = int(length)
    bits = _parse_quant_bits(left.pop("quant", None))
    left = rename_aliases(left)
    if left.get("dtype", "auto") is None:
        del left["dtype"]
    if "dtype" in left:
        dtype = str(left["dtype"]).removeprefix("torch.").lower()
        left["dtype"] = dtype
        if dtype in ("int8", "int4"):
            left |= {"dtype": "auto", "quantization": dtype}
    if bits is not None:
        left["quantization"] = f"int{bits}"
    return {**left, **options}


# Where DeepSpeed's users write how many processes share a model: as a number, or as a section that has one.
_DEGREE_KEYS = {
    "tensor_parallel_size": ("tensor_parallel_size", "tensor_parallel", "tp", "mp_size", "tp_size"),
    "pipeline_parallel_size": ("pipeline_parallel_size", "pipeline_parallel", "pp", "pp_size"),
    "expert_parallel_size": ("expert_parallel_size", "expert_parallel", "ep", "ep_size", "moe"),
}


def _largest_degree(section: Mapping[str, Any], *keys: str) -> Any:
    """Return the largest degree among the keys: a number, a list of them, or a section with one, or ``size``."""
    degrees = []
    for key in (*keys, "size"):
        value = section.get(key)
        if isinstance(value, Mapping):
            value = _largest_degree(value, *keys) if value.get("enabled", True) else 1
        if isinstance(value, list | tuple):  # DeepSpeed has one for each layer
            value = max(value, default=1)
        if value is not None and not isinstance(value, bool):
            degrees.append(value)
    return max(degrees, default=1)


def _parse_zero_section(zero: Any) -> dict[str, Any]:
    """Return the options for DeepSpeed's ``zero`` section: stage 3 with ``offload_param`` offloads the weights."""
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero is {zero!r}; it must be a section with stage and offload_param")
    offload = zero.get("offload_param") or {}
    if int(zero.get("stage", 0)) != 3 or not offload:
        return {}
    device = offload.get("device", "none")
    if device not in _OFFLOAD_DEVICES:
        raise ValueError(f"zero.offload_param.device is {device!r}; it must be cpu, nvme or none")
    options: dict[str, Any] = {"weight_offload": _OFFLOAD_DEVICES[device]}
    if device == "none":
        return {}
    if device == "nvme":
        if not offload.get("nvme_path"):
            raise ValueError("zero.offload_param.nvme_path is missing: name the folder for the weights")
        options["weight_offload_dir"] = str(offload["nvme_path"])
        if "buffer_count" in offload and "buffer_size" in offload:
            options["weight_offload_bytes"] = int(offload["buffer_count"]) * int(offload["buffer_size"])
    return options


def _parse_quant_bits(quant: Any) -> int | None:
    if not quant:
        return None
    weight = dict(quant).get("weight", {}) if isinstance(quant, Mapping) else {}
    if not (dict(quant).get("enabled", True) and dict(weight).get("enabled", True)):
        return None
    bits = int(dict(weight).get("num_bits", 8))
    if bits not in (4, 8):
        raise ValueError(f"quant.weight.num_bits is {bits}; it must be 4 or 8")
    return bits
