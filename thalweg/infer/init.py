"""``thalweg.init_inference`` in DeepSpeed's form: called like the model, and it generates fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.infer.api import EngineOptions
from thalweg.infer.diffusion import DiffusionEngine, is_pipeline, load_pipeline, options_of
from thalweg.infer.engine import Engine
from thalweg.infer.generate import generate, unsupported
from thalweg.infer.load import load_engine
from thalweg.infer.models import describe
from thalweg.infer.parallel import Follower, follow, telling
from thalweg.infer.ranks import Peers, gathered, launched, spawned
from thalweg.infer.source import kind_of, load_model, load_tokenizer, map_model
from thalweg.utils.dtypes import dtype_name, parse_dtype
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_NO_MATTER = {
    "replace_with_kernel_inject", "kernel_inject", "replace_method", "injection_policy", "injection_dict",
    "injection_policy_tuple", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking",
    "return_tuple", "training_mp_size", "min_out_tokens", "set_empty_params", "save_mp_checkpoint_path",
    "checkpoint_config", "transposed_mode", "keep_module_on_host", "base_dir", "max_batch_size", "replace",
    "moe_experts", "moe_type",
}  # fmt: skip
"""DeepSpeed's keys that choose among its kernels; here the choice is measured or made by the processor."""
_OURS = {
    "max_length", "kv_memory", "kv_cache_dtype", "max_batch", "max_step_tokens", "prefix_cache",
    "batch_invariant", "speculate", "draft", "adapters", "stream", "stream_folder", "stream_memory",
    "trust_remote_code",
}  # fmt: skip
_ABSENT = ("mpu", "ep_group", "ep_mp_group", "config")
"""DeepSpeed's keys for objects of the caller's own, which may be there as None."""
_TIERS = {"none": None, "cpu": "cpu", "nvme": "nvme"}


class InferenceEngine(nn.Module):
    """``engine(...)`` is ``module(...)``; ``engine.generate(...)`` takes Hugging Face's arguments.

    ``core`` is the engine behind ``generate``, None where the model generates nothing, and on the ranks of
    tensor parallelism that have a part in another rank's.  The module itself is
    neither changed nor moved.  Its weights are copied into the engine's layout: after changing them, call
    :meth:`refresh`.
    """

    def __init__(
        self,
        module: nn.Module,
        options: EngineOptions,
        tokenizer: Any = None,
        source: Any = None,
        origin: Any = None,
    ) -> None:
        super().__init__()
        self.module = module.eval()
        self.options, self.tokenizer, self._source, self._origin = options, tokenizer, source, origin
        self.core: Engine | None = None
        self._follower: Follower | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the module's weights as they are now."""
        self.close()
        config: Any = getattr(self.module, "config", None)
        if hasattr(config, "model_type") and kind_of(self.module) != "encoder":
            # What is known by its source are the weights as they were loaded, not as they may be by now.
            source, self._source = self._source, None
            origin, self._origin = self._origin, None
            peers = self._find_peers(origin)
            if self._follower is None:
                core = load_engine(self.module, self.options, self.tokenizer, source=source, peers=peers)
                assert isinstance(core, Engine)
                self.core = core

    def _find_peers(self, origin: Any) -> Peers | None:
        """Find the other ranks of tensor parallelism, or become one of them."""
        size = self.options.ranks
        if not launched(size):
            return spawned(origin, self.options) if size > 1 and origin is not None else None
        found = gathered(size)
        if isinstance(found, Peers):
            return found
        line, place = found
        self._follower = follow(describe(self.module), line, place, size, self.options.device)
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``module.generate`` does, with the same arguments and the same result.

        What the engine does not know (beams, processors of your own, ...) is left to the module's method.
        Tensor-parallel ranks of a launcher all call it, with the same arguments; all get the same result.
        """
        module: Any = self.module
        idle = self.core is None and self._follower is None
        # Nobody has asked for an end: the model's own code may go on where the engine's room ends.
        free = self.core is not None and self.options.max_length is None and self.options.ranks == 1
        most = self.core.facts.max_length if self.core is not None and free else 0
        start = () if self.core is None else self.core.start
        reason = "it generates nothing" if idle else unsupported(module, args, kwargs, most, start)
        if reason:
            log.debug("generating by the module's own method: %s", reason)
            return module.generate(*args, **kwargs)
        if self._follower is not None:
            tokens: Any = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            return self._follower.result().to(tokens)
        assert self.core is not None
        with telling(self.core.runner) as told:
            told["tokens"] = result = generate(self.core, module, *args, **kwargs)
        return result

    def close(self) -> None:
        """Free the engine's weights and cache; the module stays."""
        for part in (self.core, self._follower):
            if part is not None:
                part.close()
        self.core = self._follower = None


def init_inference(
    model: Any,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Return an :class:`InferenceEngine` for a Hugging Face model (live, or a directory of one).

    For a pipeline of diffusers it is a :class:`.diffusion.DiffusionEngine`, which is called like it.

    ``config``: DeepSpeed's keys, as a dict or a JSON file; keywords go over it.  ``dtype``: by default the
    model's own; ``torch.int8`` (or ``"int8"``, ``"int4"``) quantises the weights of linear layers.  Also
    ``max_out_tokens`` (prompt and output together), ``quant``, and :class:`EngineOptions`' fields.

    ``zero`` with stage 3 and ``offload_param`` streams the weights (ZeRO-Inference): ``device`` ``cpu`` or
    ``nvme``, ``nvme_path``, and ``buffer_count`` times ``buffer_size``, which bounds the bytes in memory.  A
    directory is then not loaded: its files stay mapped, and the batch is chosen for throughput.

    ``tensor_parallel`` (``{"tp_size": n}``, or n) or ``mp_size`` shares each layer's work out to n processes
    of this host: the ranks of a launcher, which all call this and ``generate``, or processes started here.
    ``pipeline_parallel`` gives them layers, ``expert_parallel`` (``moe``'s ``ep_size``) whole experts.

    Raises ValueError for a key that is unknown or asks for what does not exist here yet.
    """
    read: Any = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else config
    wanted: dict[str, Any] = {**(read or {}), **kwargs}
    if dtype is not None:
        wanted["dtype"] = dtype
    wanted |= _streaming(wanted)
    wanted = {key: value for key, value in wanted.items() if key not in _ABSENT or value is not None}
    if is_pipeline(model):
        chosen = options_of(wanted, _quantised_bits(wanted.pop("quant", None)), _NO_MATTER)
        live = load_pipeline(model, chosen.dtype) if isinstance(model, str | Path) else model
        return DiffusionEngine(live, chosen)
    source = origin = None
    if isinstance(model, str | Path):
        origin = model
        plain = EngineOptions(trust_remote_code=bool(wanted.get("trust_remote_code", False)))
        tokenizer = tokenizer or load_tokenizer(model, plain)
        if wanted.get("stream"):
            model, source = map_model(model, plain)
        else:
            model = load_model(model, plain)
    assert isinstance(model, nn.Module)
    return InferenceEngine(model, _options(wanted, model), tokenizer, source, origin)


def _options(wanted: dict[str, Any], model: nn.Module) -> EngineOptions:
    fields: dict[str, Any] = {key: wanted.pop(key) for key in _OURS & set(wanted)}
    if fields.get("stream"):
        fields.setdefault("max_batch", 0)
    parallel = wanted.pop("tensor_parallel", wanted.pop("tp", {})) or {}
    section = {"tp_size": parallel} if isinstance(parallel, int) else dict(parallel)
    asked_for = section.get("tp_size", 1) if section.get("enabled", True) else 1
    degree = max(int(asked_for), int(wanted.pop("mp_size", 1)))
    fields["tensor_parallel"] = degree
    fields["pipeline_parallel"] = int(_degree(wanted, "pipeline_parallel", "pp_size"))
    fields["expert_parallel"] = int(_degree(wanted, "expert_parallel", "ep_size", "moe"))
    if wanted.pop("checkpoint", None):
        raise ValueError("checkpoint: load the weights into the model first, or pass a model directory")
    if (most := wanted.pop("max_out_tokens", wanted.pop("max_tokens", None))) is not None:
        fields["max_length"] = int(most)
    first = next(model.parameters(), None)
    own = torch.float32 if first is None else first.dtype
    fields["device"] = "cpu" if first is None else str(first.device)
    asked = wanted.pop("dtype", None)
    text = str(asked).removeprefix("torch.").lower() if asked is not None else dtype_name(own)
    bits = _quantised_bits(wanted.pop("quant", None))
    if text in ("int8", "int4"):
        fields |= {"quantize": text, "dtype": "auto"}
    else:
        fields["dtype"] = dtype_name(parse_dtype(text))
    if bits is not None:
        fields["quantize"] = f"int{bits}"
    unknown = [key for key in wanted if key not in _NO_MATTER]
    if unknown:
        more = {"dtype", "max_out_tokens", "quant", "zero", "tensor_parallel", "pipeline_parallel", "moe"}
        known = sorted(_OURS | _NO_MATTER | more)
        raise ValueError(f"init_inference does not know {', '.join(unknown)}; it knows {', '.join(known)}")
    return EngineOptions(**fields)


def _degree(wanted: dict[str, Any], *names: str) -> Any:
    """Take a degree out of the keys: a number, or a section that has it under one of the names or `size`."""
    found = 1
    for name in names:
        value = wanted.pop(name, None)
        if isinstance(value, Mapping):
            inner = {key: x for key, x in value.items() if key in (*names, "size")}
            value = _degree(inner, *names, "size") if value.get("enabled", True) else 1
        if isinstance(value, list | tuple):  # DeepSpeed has one for each layer
            value = max(value, default=1)
        found = max(found, 1 if value is None or isinstance(value, bool) else value)
    return found


def _streaming(wanted: dict[str, Any]) -> dict[str, Any]:
    """Take DeepSpeed's ``zero`` section out of the keys and say it in ours."""
    zero = wanted.pop("zero", None) or wanted.pop("zero_optimization", None) or {}
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero is {zero!r}; it must be a section with stage and offload_param")
    offload = zero.get("offload_param") or {}
    if int(zero.get("stage", 0)) != 3 or not offload:
        return {}
    device = offload.get("device", "none")
    if device not in _TIERS:
        raise ValueError(f"zero.offload_param.device is {device!r}; it must be cpu, nvme or none")
    made: dict[str, Any] = {"stream": _TIERS[device]}
    if made["stream"] is None:
        return {}
    if device == "nvme":
        if not offload.get("nvme_path"):
            raise ValueError("zero.offload_param.nvme_path is missing: name the folder for the weights")
        made["stream_folder"] = str(offload["nvme_path"])
        if "buffer_count" in offload and "buffer_size" in offload:
            made["stream_memory"] = int(offload["buffer_count"]) * int(offload["buffer_size"])
    return made


def _quantised_bits(quant: Any) -> int | None:
    if not quant:
        return None
    weight = dict(quant).get("weight", {}) if isinstance(quant, Mapping) else {}
    if not (dict(quant).get("enabled", True) and dict(weight).get("enabled", True)):
        return None
    bits = int(dict(weight).get("num_bits", 8))
    if bits not in (4, 8):
        raise ValueError(f"quant.weight.num_bits is {bits}; it must be 4 or 8")
    return bits
