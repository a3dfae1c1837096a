"""``thalweg.init_inference`` in DeepSpeed's form: called like the model, and it generates fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.infer.api import EngineOptions
from thalweg.infer.engine import Engine
from thalweg.infer.generate import generate, unsupported
from thalweg.infer.load import load_engine
from thalweg.utils.dtypes import dtype_name, parse_dtype
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_NO_MATTER = {
    "replace_with_kernel_inject", "kernel_inject", "replace_method", "injection_policy", "injection_dict",
    "injection_policy_tuple", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking",
    "return_tuple", "training_mp_size", "min_out_tokens", "set_empty_params", "save_mp_checkpoint_path",
    "checkpoint_config", "transposed_mode", "keep_module_on_host", "base_dir", "max_batch_size", "replace",
}  # fmt: skip
"""DeepSpeed's keys that choose among its kernels; here the choice is measured or made by the processor."""
_OURS = {"max_length", "kv_memory", "max_batch", "max_step_tokens", "prefix_cache", "batch_invariant"}


class InferenceEngine(nn.Module):
    """``engine(...)`` is ``module(...)``; ``engine.generate(...)`` takes Hugging Face's arguments.

    ``core`` is the engine behind ``generate``, None where the model has no causal form.  The module itself is
    neither changed nor moved.  Its weights are copied into the engine's layout: after changing them, call
    :meth:`refresh`.
    """

    def __init__(self, module: nn.Module, options: EngineOptions, tokenizer: Any = None) -> None:
        super().__init__()
        self.module = module.eval()
        self.options, self.tokenizer = options, tokenizer
        self.core: Engine | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the module's weights as they are now."""
        if self.core is not None:
            self.core.close()
            self.core = None
        config: Any = getattr(self.module, "config", None)
        causal = hasattr(self.module, "generate") and not getattr(config, "is_encoder_decoder", False)
        if config is not None and causal:
            self.core = load_engine(self.module, self.options, self.tokenizer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``module.generate`` does, with the same arguments and the same result.

        What the engine does not know (beams, processors of your own, ...) is left to the module's method.
        """
        module: Any = self.module
        reason = "it has no causal form" if self.core is None else unsupported(module, args, kwargs)
        if self.core is None or reason:
            log.debug("generating by the module's own method: %s", reason)
            return module.generate(*args, **kwargs)
        return generate(self.core, module, *args, **kwargs)

    def close(self) -> None:
        """Free the engine's weights and cache; the module stays."""
        if self.core is not None:
            self.core.close()
            self.core = None


def init_inference(
    model: nn.Module | str | Path,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> InferenceEngine:
    """Return an engine for a Hugging Face model (live, or a directory of one).

    ``config``: DeepSpeed's keys, as a dict or a JSON file; keywords go over it.  ``dtype``: by default the
    model's own; ``torch.int8`` (or ``"int8"``, ``"int4"``) quantises the weights of linear layers.  Also
    ``max_out_tokens`` (prompt and output together), ``quant``, and :class:`EngineOptions`' fields.  Raises
    ValueError for a key that is unknown or asks for what does not exist here yet.
    """
    read: Any = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else config
    wanted: dict[str, Any] = {**(read or {}), **kwargs}
    if dtype is not None:
        wanted["dtype"] = dtype
    if isinstance(model, str | Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = model
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(source)
    assert isinstance(model, nn.Module)
    return InferenceEngine(model, _options(wanted, model), tokenizer)


def _options(wanted: dict[str, Any], model: nn.Module) -> EngineOptions:
    fields: dict[str, Any] = {key: wanted.pop(key) for key in _OURS & set(wanted)}
    parallel = wanted.pop("tensor_parallel", wanted.pop("tp", {})) or {}
    degree = max(int(dict(parallel).get("tp_size", 1)), int(wanted.pop("mp_size", 1)))
    if degree > 1:
        raise ValueError(f"tensor_parallel.tp_size is {degree}: inference has one process so far; use 1")
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
    unknown = [key for key in wanted if key not in _NO_MATTER and key not in ("zero", "moe", "ep_size")]
    if unknown:
        known = sorted(_OURS | _NO_MATTER | {"dtype", "max_out_tokens", "quant", "tensor_parallel"})
        raise ValueError(f"init_inference does not know {', '.join(unknown)}; it knows {', '.join(known)}")
    return EngineOptions(**fields)


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
