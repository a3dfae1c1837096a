"""Every option of the inference engine, declared once: Python, DeepSpeed's config and the command line.

:class:`EngineConfig` has the types and defaults, ``options.toml`` beside it what each option is for and may be.
``load_engine``, ``thalweg.pipeline`` (MII's form) and Ray take its fields, and the older names of :data:`ALIASES`, as
keywords; :func:`from_deepspeed_config` translates the keys of ``init_inference``; ``thalweg serve`` and
``thalweg chat`` derive their flags from :func:`engine_options`; the table in docs/inference.md is compared with it.
The names are vLLM's where vLLM has the option.
"""

from __future__ import annotations  # engine_options reads the types of the fields as text

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
_DEEPSPEED: dict[str, Any] = _TABLE.pop("deepspeed")
DEEPSPEED_IGNORED_KEYS = frozenset(_DEEPSPEED["ignored"])
# Older names of the options, and DeepSpeed's and MII's where they mean the same.
ALIASES: dict[str, str] = {alias: name for name, row in _TABLE.items() for alias in row.get("aliases", ())}

# Tells a replica how many of its server have their KV caches in the same memory: on one device, or on this host.
MEMORY_SHARES_VARIABLE = "THALWEG_MEMORY_SHARES"

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


@_accept_aliases
@dataclass(frozen=True)
class EngineConfig:
    """How to load and run a model; the defaults suit a server.

    ``thalweg.infer.load_engine(model, config=EngineConfig(), tokenizer=None) -> EngineCore`` takes it together with
    the directory of a Hugging Face model, or a live one.  Raises ValueError that names the option and its range.
    """

    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    enforce_eager: bool = False
    num_speculative_tokens: int = 0
    draft_model: str | None = None
    lora_adapters: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    trust_remote_code: bool = False
    weight_offload: str | None = None
    weight_offload_dir: str | None = None
    weight_offload_bytes: int | None = None
    pooling: str = "auto"
    normalize: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1

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
    default: Any
    value_type: type[bool | int | str | dict[str, str]]
    help: str
    aliases: Sequence[str] = ()
    choices: Sequence[str | None] | None = None
    minimum: int | None = None
    metavar: str = "N"

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes."""
        return self.name.endswith("_bytes")


@functools.cache
def engine_options() -> tuple[EngineOption, ...]:
    """Return all options, in order."""
    value_types = {"bool": bool, "int": int, "str": str, "Mapping[str, str]": dict}
    options = []
    for x in fields(EngineConfig):
        row = _TABLE[x.name]
        if x.default is None and "choices" in row:
            row = {**row, "choices": [None, *row["choices"]]}
        default = {} if x.default is MISSING else x.default
        options.append(EngineOption(x.name, default, value_types[str(x.type).removesuffix(" | None")], **row))
    return tuple(options)


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


def from_deepspeed_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of :class:`EngineConfig` that ``init_inference``'s keys ask for, and the keys left over.

    DeepSpeed's own keys: ``dtype`` (``int8`` quantises), ``quant``, ``zero`` with ``offload_param``,
    ``tensor_parallel`` (``{"tp_size": n}`` or n), ``mp_size``, ``moe`` (``ep_size``), ``max_out_tokens``; besides them
    every option by any of its names.  Raises ValueError for a value that cannot be.
    """
    nullable = _DEEPSPEED["nullable"]
    left = {key: value for key, value in settings.items() if value is not None or key not in nullable}
    if left.pop("checkpoint", None):
        raise ValueError("checkpoint: load the weights into the model first, or pass a model directory")
    options = _parse_zero_section(left.pop("zero", None) or left.pop("zero_optimization", None) or {})
    for name, keys in _DEEPSPEED["degrees"].items():
        if present := {key: left.pop(key) for key in keys if key in left}:
            options[name] = int(_largest_degree(present, *keys))
    for key in ("max_out_tokens", "max_tokens"):
        if (length := left.pop(key, None)) is not None:
            options["max_model_len"] = int(length)
    bits = _parse_quant_bits(left.pop("quant", None))
    left = rename_aliases(left)
    if "dtype" in left:
        dtype = str(left["dtype"]).removeprefix("torch.").lower()
        left["dtype"] = dtype
        if dtype in ("int8", "int4"):
            left |= {"dtype": "auto", "quantization": dtype}
    if bits is not None:
        left["quantization"] = f"int{bits}"
    return {**left, **options}


def limit_length(model_max: int, requested: int | None) -> int:
    """Return the tokens requested, or the model's own, with a warning where it has fewer than were requested."""
    if requested is not None and requested > model_max:
        _log.warning(
            "max_model_len: this model takes %d tokens, so that is what it is; asked for %d", model_max, requested
        )
    return min(requested or model_max, model_max)


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
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(f"zero.offload_param.device is {device!r}; it must be cpu, nvme or none")
    if device == "none":
        return {}
    options: dict[str, Any] = {"weight_offload": device}
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
    weight = quant.get("weight", {}) if isinstance(quant, Mapping) else None
    if not isinstance(weight, Mapping):
        raise ValueError(f"quant is {quant!r}; it must be a section with enabled, and weight, a section with num_bits")
    if not (quant.get("enabled", True) and weight.get("enabled", True)):
        return None
    bits = weight.get("num_bits", 8)
    if bits not in (4, 8):
        raise ValueError(f"quant.weight.num_bits is {bits}; it must be 4 or 8")
    return bits
