"""Pipeline parallelism: schedules as data, and what runs them."""

from thalweg.parallel.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
