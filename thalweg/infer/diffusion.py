"""Pipelines of the library diffusers (Stable Diffusion and others) with the options of ``init_inference``.

The pipeline stays what it is: its components are cast, compiled, packed or offloaded in place, and closing
the engine puts them back (but for the dtype).  In fp32 images have the bits that they had; a stream changes
nothing, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.infer.offload.module_offload import ModuleOffloader
from thalweg.infer.quantization.modules import quantize_linears, restore_linears
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.log import get_logger

log = get_logger(__name__)
_DENOISERS = ("unet", "transformer", "transformer_2", "controlnet", "prior", "decoder")
"""Components that run at every step."""


@dataclass(frozen=True)
class DiffusionOptions:
    """What to make of a pipeline; ``stream`` and its fields are those of :class:`.config.EngineConfig`."""

    dtype: str | None = None
    """``fp32``, ``bf16``, ``fp16``; None: as it is."""
    quantize: str | None = None
    """``int8`` or ``int4``: the weights of linear layers (convolutions stay as they are), on CPUs."""
    device: str | None = None
    """Where it runs; None: where it is."""
    stream: str | None = None
    stream_folder: str | None = None
    stream_memory: int | None = None
    compile: Mapping[str, Any] | None = None
    """Arguments of ``torch.compile`` for what runs at every step, and the image decoder."""

    def __post_init__(self) -> None:
        if self.quantize not in (None, "int8", "int4"):
            raise ValueError(f"quantize is {self.quantize!r}; it must be int8, int4 or None")
        if self.stream not in (None, "cpu", "nvme"):
            raise ValueError(f"stream is {self.stream!r}; it must be cpu, nvme or None")
        for name in ("compile", "quantize"):
            if self.stream and getattr(self, name) is not None:
                raise ValueError(f"stream and {name} do not go together for a diffusion pipeline: choose one")


_OPTION_FIELDS = {
    "weight_offload": "stream", "weight_offload_dir": "stream_folder", "weight_offload_bytes": "stream_memory",
    "device": "device", "quantization": "quantize",
}  # fmt: skip


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
    """

    def __init__(self, pipeline: Any, options: DiffusionOptions) -> None:
        self.module, self.options = pipeline, options
        self.offloader: ModuleOffloader | None = None
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._compiled: list[nn.Module] = []
        components = {
            key: component for key, component in pipeline.components.items() if isinstance(component, nn.Module)
        }
        if not components:
            raise ValueError(f"{type(pipeline).__name__} has no component with weights")
        if options.dtype is not None:
            pipeline.to(parse_dtype(options.dtype))
        device = torch.device(options.device or str(pipeline.device))
        for part in components.values():
            part.eval()
        if options.stream is None:
            pipeline.to(device)
        if options.quantize is not None:
            if device.type != "cpu":
                raise ValueError(f"quantize: packed weights are for CPUs, and the pipeline is on {device}")
            for part in components.values():
                self._replaced += quantize_linears(part, options.quantize)
        if options.compile is not None:
            self._compile(components)
        if options.stream is not None:
            for part in components.values():
                for owner in part.modules():
                    for name, buffer in list(owner.named_buffers(recurse=False)):
                        setattr(owner, name, buffer.to(device))
            self.offloader = ModuleOffloader(
                components.values(), offload_device=options.stream, device=device, folder=options.stream_folder,
                max_bytes=options.stream_memory,
            )  # fmt: skip

    def _compile(self, components: Mapping[str, nn.Module]) -> None:
        modules = [components[name] for name in _DENOISERS if name in components]
        decoder = getattr(components.get("vae"), "decoder", None)
        if isinstance(decoder, nn.Module):
            modules.append(decoder)
        for module in modules:
            module.compile(**dict(self.options.compile or {}))
        self._compiled = modules

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


def parse_options(settings: dict[str, Any], ignored_keys: Collection[str]) -> DiffusionOptions:
    """Return the options of a pipeline of diffusers from ``init_inference``'s, as ``config.py`` names them.

    Raises ValueError for keys that mean nothing to a pipeline of diffusers.
    """
    fields: dict[str, Any] = {
        field: settings.pop(option) for option, field in _OPTION_FIELDS.items() if option in settings
    }
    if (dtype := settings.pop("dtype", "auto")) != "auto":
        fields["dtype"] = dtype
    compiled = settings.pop("compile", None)
    graphs = settings.pop("enable_cuda_graph", False)
    if compiled or (graphs and torch.cuda.is_available()):
        more = {"mode": "reduce-overhead"} if graphs and torch.cuda.is_available() else {}
        fields["compile"] = {**more, **(compiled if isinstance(compiled, Mapping) else {})}
    unknown = [key for key in settings if key not in ignored_keys]
    if unknown:
        known = "dtype, quant, zero, " + ", ".join(_OPTION_FIELDS) + ", compile, enable_cuda_graph"
        raise ValueError(f"a diffusion pipeline does not know {', '.join(unknown)}; it knows {known}")
    return DiffusionOptions(**fields)
