"""``thalweg.init_inference`` in DeepSpeed's form: called like the model, and it generates fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.infer.diffusion import DiffusionEngine, is_pipeline, load_pipeline, parse_options
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.hf_generate import generate, unsupported_reason
from thalweg.infer.loader.hf import get_model_kind, load_mmapped, load_model, load_tokenizer
from thalweg.infer.loader.load import load_engine
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.parallel.executor import WorkerLoop, broadcast_result, start_worker
from thalweg.infer.parallel.workers import WorkerGroup, is_launched, join_launched_group, spawn_workers
from thalweg.infer.types import EngineConfig
from thalweg.utils.dtypes import dtype_name, parse_dtype
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_IGNORED_KEYS = {
    "replace_with_kernel_inject", "kernel_inject", "replace_method", "injection_policy", "injection_dict",
    "injection_policy_tuple", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking",
    "return_tuple", "training_mp_size", "min_out_tokens", "set_empty_params", "save_mp_checkpoint_path",
    "checkpoint_config", "transposed_mode", "keep_module_on_host", "base_dir", "max_batch_size", "replace",
    "moe_experts", "moe_type",
}  # fmt: skip
"""DeepSpeed's keys that choose among its kernels; here the choice is measured or made by the processor."""
_ENGINE_FIELDS = {
    "max_length", "kv_memory", "kv_cache_dtype", "max_batch", "max_step_tokens", "prefix_cache",
    "batch_invariant", "speculate", "draft", "adapters", "stream", "stream_folder", "stream_memory",
    "trust_remote_code",
}  # fmt: skip
_NULLABLE_KEYS = ("mpu", "ep_group", "ep_mp_group", "config")
"""DeepSpeed's keys for objects of the caller's own, which may be there as None."""
_OFFLOAD_DEVICES = {"none": None, "cpu": "cpu", "nvme": "nvme"}


class InferenceEngine(nn.Module):
    """``engine(...)`` is ``module(...)``; ``engine.generate(...)`` takes Hugging Face's arguments.

    ``core`` is the engine behind ``generate``, None where the model generates nothing, and on the tensor-parallel
    ranks that are another rank's workers.  The module itself is neither changed nor moved.  Its weights are copied
    into the engine's layout: after changing them, call :meth:`update_weights`.
    """

    def __init__(
        self,
        module: nn.Module,
        options: EngineConfig,
        tokenizer: Any = None,
        weights_id: Any = None,
        model_path: Any = None,
    ) -> None:
        super().__init__()
        self.module = module.eval()
        self.options, self.tokenizer, self._weights_id, self._model_path = (
            options,
            tokenizer,
            weights_id,
            model_path,
        )
        self.core: LLMEngine | None = None
        self._worker_loop: WorkerLoop | None = None
        self.update_weights()

    def update_weights(self) -> None:
        """Take over the module's weights as they are now."""
        self.close()
        config: Any = getattr(self.module, "config", None)
        if hasattr(config, "model_type") and get_model_kind(self.module) != "encoder":
            # The identity is that of the weights as they were loaded, not as they may be by now.
            weights_id, self._weights_id = self._weights_id, None
            model_path, self._model_path = self._model_path, None
            workers = self._find_workers(model_path)
            if self._worker_loop is None:
                core = load_engine(self.module, self.options, self.tokenizer, weights_id=weights_id, workers=workers)
                assert isinstance(core, LLMEngine)
                self.core = core

    def _find_workers(self, model_path: Any) -> WorkerGroup | None:
        """Start or find the other tensor-parallel ranks, or become one of their workers."""
        num_ranks = self.options.num_ranks
        if not is_launched(num_ranks):
            return spawn_workers(model_path, self.options) if num_ranks > 1 and model_path is not None else None
        joined = join_launched_group(num_ranks)
        if isinstance(joined, WorkerGroup):
            return joined
        channel, local_rank = joined
        self._worker_loop = start_worker(
            build_decoder_spec(self.module), channel, local_rank, num_ranks, self.options.device
        )
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
        cannot_generate = self.core is None and self._worker_loop is None
        # Nobody has asked for an end: the model's own code may go on where the engine's room ends.
        may_exceed_length = self.core is not None and self.options.max_length is None and self.options.num_ranks == 1
        max_length = self.core.metadata.max_length if self.core is not None and may_exceed_length else 0
        decoder_start_ids = () if self.core is None else self.core.decoder_start_ids
        reason = (
            "it generates nothing"
            if cannot_generate
            else unsupported_reason(module, args, kwargs, max_length, decoder_start_ids)
        )
        if reason:
            log.debug("generating by the module's own method: %s", reason)
            return module.generate(*args, **kwargs)
        if self._worker_loop is not None:
            tokens: Any = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            return self._worker_loop.wait_result().to(tokens)
        assert self.core is not None
        with broadcast_result(self.core.runner) as outcome:
            outcome["tokens"] = result = generate(self.core, module, *args, **kwargs)
        return result

    def close(self) -> None:
        """Free the engine's weights and cache; the module stays."""
        for component in (self.core, self._worker_loop):
            if component is not None:
                component.close()
        self.core = self._worker_loop = None


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
    ``max_out_tokens`` (prompt and output together), ``quant``, and :class:`EngineConfig`' fields.

    ``zero`` with stage 3 and ``offload_param`` streams the weights (ZeRO-Inference): ``device`` ``cpu`` or
    ``nvme``, ``nvme_path``, and ``buffer_count`` times ``buffer_size``, which bounds the bytes in memory.  A
    directory is then not loaded: its files stay mapped, and the batch is chosen for throughput.

    ``tensor_parallel`` (``{"tp_size": n}``, or n) or ``mp_size`` shares each layer's work out to n processes
    of this host: the ranks of a launcher, which all call this and ``generate``, or processes started here.
    ``pipeline_parallel`` gives them layers, ``expert_parallel`` (``moe``'s ``ep_size``) whole experts.

    Raises ValueError for a key that is unknown or asks for what does not exist here yet.
    """
    file_config: Any = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else config
    settings: dict[str, Any] = {**(file_config or {}), **kwargs}
    if dtype is not None:
        settings["dtype"] = dtype
    settings |= _pop_zero_section(settings)
    settings = {key: value for key, value in settings.items() if key not in _NULLABLE_KEYS or value is not None}
    if is_pipeline(model):
        diffusion_options = parse_options(settings, _parse_quant_bits(settings.pop("quant", None)), _IGNORED_KEYS)
        live_pipeline = load_pipeline(model, diffusion_options.dtype) if isinstance(model, str | Path) else model
        return DiffusionEngine(live_pipeline, diffusion_options)
    weights_id = model_path = None
    if isinstance(model, str | Path):
        model_path = model
        load_config = EngineConfig(trust_remote_code=bool(settings.get("trust_remote_code", False)))
        tokenizer = tokenizer or load_tokenizer(model, load_config)
        if settings.get("stream"):
            model, weights_id = load_mmapped(model, load_config)
        else:
            model = load_model(model, load_config)
    assert isinstance(model, nn.Module)
    return InferenceEngine(model, _build_engine_config(settings, model), tokenizer, weights_id, model_path)


def _build_engine_config(settings: dict[str, Any], model: nn.Module) -> EngineConfig:
    fields: dict[str, Any] = {key: settings.pop(key) for key in _ENGINE_FIELDS & set(settings)}
    if fields.get("stream"):
        fields.setdefault("max_batch", 0)
    parallel = settings.pop("tensor_parallel", settings.pop("tp", {})) or {}
    section = {"tp_size": parallel} if isinstance(parallel, int) else dict(parallel)
    tp_size = section.get("tp_size", 1) if section.get("enabled", True) else 1
    degree = max(int(tp_size), int(settings.pop("mp_size", 1)))
    fields["tensor_parallel"] = degree
    fields["pipeline_parallel"] = int(_pop_degree(settings, "pipeline_parallel", "pp_size"))
    fields["expert_parallel"] = int(_pop_degree(settings, "expert_parallel", "ep_size", "moe"))
    if settings.pop("checkpoint", None):
        raise ValueError("checkpoint: load the weights into the model first, or pass a model directory")
    if (max_out_tokens := settings.pop("max_out_tokens", settings.pop("max_tokens", None))) is not None:
        fields["max_length"] = int(max_out_tokens)
    first = next(model.parameters(), None)
    model_dtype = torch.float32 if first is None else first.dtype
    fields["device"] = "cpu" if first is None else str(first.device)
    requested_dtype = settings.pop("dtype", None)
    dtype_text = (
        str(requested_dtype).removeprefix("torch.").lower() if requested_dtype is not None else dtype_name(model_dtype)
    )
    bits = _parse_quant_bits(settings.pop("quant", None))
    if dtype_text in ("int8", "int4"):
        fields |= {"quantize": dtype_text, "dtype": "auto"}
    else:
        fields["dtype"] = dtype_name(parse_dtype(dtype_text))
    if bits is not None:
        fields["quantize"] = f"int{bits}"
    unknown = [key for key in settings if key not in _IGNORED_KEYS]
    if unknown:
        more = {"dtype", "max_out_tokens", "quant", "zero", "tensor_parallel", "pipeline_parallel", "moe"}
        known = sorted(_ENGINE_FIELDS | _IGNORED_KEYS | more)
        raise ValueError(f"init_inference does not know {', '.join(unknown)}; it knows {', '.join(known)}")
    return EngineConfig(**fields)


def _pop_degree(settings: dict[str, Any], *names: str) -> Any:
    """Take a degree out of the keys: a number, or a section that has it under one of the names or `size`."""
    degree = 1
    for name in names:
        value = settings.pop(name, None)
        if isinstance(value, Mapping):
            inner = {key: x for key, x in value.items() if key in (*names, "size")}
            value = _pop_degree(inner, *names, "size") if value.get("enabled", True) else 1
        if isinstance(value, list | tuple):  # DeepSpeed has one for each layer
            value = max(value, default=1)
        degree = max(degree, 1 if value is None or isinstance(value, bool) else value)
    return degree


def _pop_zero_section(settings: dict[str, Any]) -> dict[str, Any]:
    """Take DeepSpeed's ``zero`` section out of the keys and say it in ours."""
    zero = settings.pop("zero", None) or settings.pop("zero_optimization", None) or {}
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero is {zero!r}; it must be a section with stage and offload_param")
    offload = zero.get("offload_param") or {}
    if int(zero.get("stage", 0)) != 3 or not offload:
        return {}
    device = offload.get("device", "none")
    if device not in _OFFLOAD_DEVICES:
        raise ValueError(f"zero.offload_param.device is {device!r}; it must be cpu, nvme or none")
    fields: dict[str, Any] = {"stream": _OFFLOAD_DEVICES[device]}
    if fields["stream"] is None:
        return {}
    if device == "nvme":
        if not offload.get("nvme_path"):
            raise ValueError("zero.offload_param.nvme_path is missing: name the folder for the weights")
        fields["stream_folder"] = str(offload["nvme_path"])
        if "buffer_count" in offload and "buffer_size" in offload:
            fields["stream_memory"] = int(offload["buffer_count"]) * int(offload["buffer_size"])
    return fields


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
