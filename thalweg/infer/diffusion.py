"""Pipelines of the library diffusers (Stable Diffusion and others) with the options of ``init_inference``.

The pipeline stays what it is: its components are cast, compiled, packed or offloaded in place, and closing
the engine puts them back (but for the dtype).  In fp32 images have the bits that they had; a stream changes
nothing, whatever the dtype.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.device import resolve_device
from thalweg.infer.offload.module_offload import ModuleOffloader
from thalweg.infer.quantization.modules import quantize_linears, restore_linears
from thalweg.utils.dtypes import parse_dtype

# Components that run at every step.
_DENOISERS = ("unet", "transformer", "transformer_2", "controlnet", "prior", "decoder")


# Options of :class:`.config.EngineConfig` that mean something to a pipeline, beside the dtype.
_OPTIONS = ("weight_offload", "weight_offload_dir", "weight_offload_bytes", "device", "quantization")


def is_pipeline(model: Any) -> bool:
    """Whether this is a pipeline of diffusers, or the directory of one."""
    if isinstance(model, str | Path):
        return (Path(model) / "model_index.json").is_file()
    return any(base.__module__.partition(".")[0] == "diffusers" for base in type(model).__mro__) and hasattr(
        model, "components"
    )


def load_pipeline(folder: str | Path, dtype: str | None) -> Any:
    """Return the pipeline in a directory; its weights must be safetensors files."""
    try:
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    except ImportError as error:
        raise ValueError(f"{folder} is a diffusion pipeline: install thalweg[diffusion]") from error
    extra_args: Any = {} if dtype is None else {"torch_dtype": parse_dtype(dtype)}
    return DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **extra_args)


class DiffusionEngine:
    """``engine(prompt, ...)`` is ``pipeline(prompt, ...)``; attributes are the pipeline's own.

    ``module`` is the pipeline, ``offloader`` what streams its weights, if anything does.

    ``dtype`` (``fp32``, ``bf16``, ``fp16``) and ``device``: None for what it has.  ``quantization``: ``int8`` or
    ``int4``, the weights of linear layers (convolutions stay as they are), on CPUs.  ``compile``: arguments of
    ``torch.compile`` for what runs at every step, and the image decoder.  The others are those of
    :class:`.config.EngineConfig`.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        device: str | None = None,
        weight_offload: str | None = None,
        weight_offload_dir: str | None = None,
        weight_offload_bytes: int | None = None,
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        if quantization not in (None, "int8", "int4"):
            raise ValueError(f"quantization is {quantization!r}; it must be int8, int4 or None")
        if weight_offload not in (None, "cpu", "nvme"):
            raise ValueError(f"weight_offload is {weight_offload!r}; it must be cpu, nvme or None")
        for name, value in (("compile", compile), ("quantization", quantization)):
            if weight_offload and value is not None:
                raise ValueError(f"weight_offload and {name} do not go together for a diffusion pipeline: choose one")
        self.module = pipeline
        self.offloader: ModuleOffloader | None = None
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._compiled: list[nn.Module] = []
        components = {key: part for key, part in pipeline.components.items() if isinstance(part, nn.Module)}
        if not components:
            raise ValueError(f"{type(pipeline).__name__} has no component with weights")
        if dtype is not None:
            pipeline.to(parse_dtype(dtype))
        target = resolve_device(device or pipeline.device)
        for part in components.values():
            part.eval()
        if weight_offload is None:
            pipeline.to(target)
        if quantization is not None:
            if target.type != "cpu":
                raise ValueError(f"quantization: packed weights are for CPUs, and the pipeline is on {target}")
            for part in components.values():
                self._replaced += quantize_linears(part, quantization)
        if compile is not None:
            self._compiled = [components[name] for name in _DENOISERS if name in components]
            decoder = getattr(components.get("vae"), "decoder", None)
            self._compiled += [decoder] if isinstance(decoder, nn.Module) else []
            for module in self._compiled:
                module.compile(**compile)
        if weight_offload is not None:
            for part in components.values():
                for owner in part.modules():
                    for name, buffer in list(owner.named_buffers(recurse=False)):
                        setattr(owner, name, buffer.to(target))
            self.offloader = ModuleOffloader(
                components.values(), offload_device=weight_offload, device=target, folder=weight_offload_dir,
                max_bytes=weight_offload_bytes,
            )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the pipeline's attribute."""
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def close(self) -> None:
        """Give the pipeline its own weights and code back."""
        if self.offloader is not None:
            self.offloader.close()
            self.offloader = None
        restore_linears(self._replaced)
        for module in self._compiled:
            module._compiled_call_impl = None
        self._replaced, self._compiled = [], []

    destroy = close


def parse_options(settings: dict[str, Any], ignored_keys: Collection[str]) -> dict[str, Any]:
    """Return a :class:`DiffusionEngine`'s arguments from ``init_inference``'s options, as ``config.py`` names them.

    Raises ValueError for keys that mean nothing to a pipeline of diffusers.
    """
    arguments: dict[str, Any] = {name: settings.pop(name) for name in _OPTIONS if name in settings}
    if (dtype := settings.pop("dtype", "auto")) != "auto":
        arguments["dtype"] = dtype
    compiled = settings.pop("compile", None)
    graphs = settings.pop("enable_cuda_graph", False) and torch.accelerator.is_available()
    if compiled or graphs:
        more = {"mode": "reduce-overhead"} if graphs else {}
        arguments["compile"] = {**more, **(compiled if isinstance(compiled, Mapping) else {})}
    if unknown := [key for key in settings if key not in ignored_keys]:
        known = "dtype, quant, zero, " + ", ".join(_OPTIONS) + ", compile, enable_cuda_graph"
        raise ValueError(f"a diffusion pipeline does not know {', '.join(unknown)}; it knows {known}")
    return arguments
