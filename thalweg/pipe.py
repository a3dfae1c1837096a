"""``thalweg.pipe.PipelineModule`` and its layers: the names that DeepSpeed's users know."""

from thalweg.parallel.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
