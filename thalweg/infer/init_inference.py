"""``thalweg.init_inference`` in DeepSpeed's form: called like the model, and it generates fast."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.device import resolve_device
from thalweg.infer.config import DEEPSPEED_IGNORED_KEYS, EngineConfig, engine_options, from_deepspeed_config
from thalweg.infer.diffusion import DiffusionEngine, is_pipeline, load_pipeline, parse_options
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.hf_generate import generate, input_ids, unsupported_reason
from thalweg.infer.loader.hf import get_model_kind, load_mmapped, load_model, load_tokenizer, to_local_folder
from thalweg.infer.loader.load import load_engine
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.parallel.executor import WorkerLoop, broadcast_result, start_worker
from thalweg.infer.parallel.process_group import InferenceGroup, is_launched, join_launched_group, spawn_workers
from thalweg.utils.dtypes import dtype_name, parse_dtype
from thalweg.utils.log import get_logger

log = get_logger(__name__)


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
        self.module, self.options, self.tokenizer = module.eval(), options, tokenizer
        self.core: LLMEngine | None = None
        self._worker_loop: WorkerLoop | None = None
        self._take_weights(weights_id, model_path)

    def update_weights(self) -> None:
        """Take over the module's weights as they are now."""
        self._take_weights()

    def _take_weights(self, weights_id: Any = None, model_path: Any = None) -> None:
        """``weights_id`` and ``model_path``: identity and files of weights that are as they were loaded."""
        self.close()
        config: Any = getattr(self.module, "config", None)
        if hasattr(config, "model_type") and get_model_kind(self.module) != "encoder":
            workers = self._find_workers(model_path)
            if self._worker_loop is None:
                core = load_engine(self.module, self.options, self.tokenizer, weights_id=weights_id, workers=workers)
                assert isinstance(core, LLMEngine)
                self.core = core

    def __getattr__(self, name: str) -> Any:
        """What the engine has not is the module's, so that it stands where the model stood: ``pipe.model = engine``."""
        own = super().__getattr__
        return own(name) if name in ("module", *self.__dict__.get("_modules", ())) else getattr(own("module"), name)

    def _find_workers(self, model_path: Any) -> InferenceGroup | None:
        """Start or find the other tensor-parallel ranks, or become one of their workers."""
        num_ranks = self.options.num_ranks
        if not is_launched(num_ranks):
            return spawn_workers(model_path, self.options) if num_ranks > 1 and model_path is not None else None
        group = join_launched_group(self.options)
        if group.rank == 0:
            return group
        self._worker_loop = start_worker(build_decoder_spec(self.module), group, self.options.device)
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
        module, core = self.module, self.core
        reason = "it generates nothing"
        if core is not None or self._worker_loop is not None:
            # Nobody has asked for an end: the model's own code may go on where the engine's room ends.
            is_bounded = core is None or self.options.max_model_len is not None or self.options.num_ranks > 1
            max_length = 0 if core is None or is_bounded else core.metadata.max_length
            start_ids = () if core is None else core.decoder_start_ids
            reason = unsupported_reason(module, args, kwargs, max_length, start_ids)
        if reason:
            log.debug("generating by the module's own method: %s", reason)
            own: Any = module.generate
            return own(*args, **kwargs)
        if self._worker_loop is not None:
            return torch.tensor(self._worker_loop.wait_result()["tokens"]).to(input_ids(args, kwargs))
        assert core is not None
        with broadcast_result(core.runner) as outcome:
            result = generate(core, module, *args, **kwargs)
            outcome["tokens"] = result.tolist()
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
    ``max_out_tokens`` (prompt and output together), ``quant``, and :class:`EngineConfig`'s options by any name.
    ``device``: by default a live model's own; of a directory, the accelerator where there is one.

    ``zero`` with stage 3 and ``offload_param`` offloads the weights (ZeRO-Inference): ``device`` ``cpu`` or
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
    options = from_deepspeed_config(settings)
    if is_pipeline(model):
        arguments = parse_options(options, DEEPSPEED_IGNORED_KEYS)
        if not isinstance(model, str | Path):
            return DiffusionEngine(model, **arguments)
        return DiffusionEngine(load_pipeline(model, arguments.get("dtype")), **{"device": "auto", **arguments})
    known = {option.name for option in engine_options()}
    if unknown := [key for key in options if key not in known | DEEPSPEED_IGNORED_KEYS]:
        raise ValueError(
            f"init_inference does not know {', '.join(unknown)}; it knows {', '.join(sorted(known))}, their other names"
            " in docs/inference.md, and DeepSpeed's max_out_tokens, quant, zero, tp, mp_size and moe"
        )
    options = {key: value for key, value in options.items() if key in known}
    weights_id = model_path = None
    if isinstance(model, str | Path):
        model = model_path = to_local_folder(model)
        device = options["device"] = str(resolve_device(options.get("device", "auto")))
        # Weights that are packed or offloaded come to the device from the host; else the engine uses the module's own.
        if options.get("quantization") or options.get("weight_offload"):
            device = "cpu"
        load_config = EngineConfig(trust_remote_code=bool(options.get("trust_remote_code", False)), device=device)
        tokenizer = tokenizer or load_tokenizer(model, load_config)
        if options.get("weight_offload"):
            model, weights_id = load_mmapped(model, load_config)
        else:
            model = load_model(model, load_config)
    assert isinstance(model, nn.Module)
    return InferenceEngine(model, _complete_config(options, model), tokenizer, weights_id, model_path)


def _complete_config(options: dict[str, Any], model: nn.Module) -> EngineConfig:
    """Return the config of a live model: its own dtype and device, and with offload a batch for throughput."""
    first = next(model.parameters(), None)
    if "device" not in options and torch.accelerator.is_available() and (first is None or first.device.type == "cpu"):
        log.warning('the model is on the processor and runs there: move it first, or give init_inference device="auto"')
    options["device"] = str(resolve_device(options.get("device", "cpu" if first is None else str(first.device))))
    if "dtype" not in options:
        options["dtype"] = dtype_name(torch.float32 if first is None else first.dtype)
    elif options["dtype"] != "auto":
        options["dtype"] = dtype_name(parse_dtype(options["dtype"]))
    if options.get("weight_offload"):
        options.setdefault("max_num_seqs", 0)
    return EngineConfig(**options)
