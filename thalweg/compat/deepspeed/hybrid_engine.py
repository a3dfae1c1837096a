"""DeepSpeed's hybrid engine: an engine that trains, whose ``generate`` is the inference engine's."""

from typing import Any

from torch import Tensor

from thalweg.compat.deepspeed.engine import DeepSpeedEngine
from thalweg.compat.deepspeed.param_views import unwrap_model_for_generation
from thalweg.infer.config import EngineConfig
from thalweg.infer.hf_generate import generate, unsupported_reason
from thalweg.rlhf.weight_sync import HybridEngine
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """What ``initialize`` returns where ``hybrid_engine`` is enabled."""

    _hybrid: HybridEngine | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Generate as ``module.generate`` does, with the weights as they are now; collective over all ranks.

        What the inference engine does not know (beams, processors of one's own) is left to the module's method, with
        whole parameters.
        """
        kwargs.pop("synced_gpus", None)  # ranks need not take the same number of steps
        module: Any = self.module
        # Ranks that generate together go the same way: their arguments differ in their prompts alone.
        if reason := unsupported_reason(module, args, kwargs):
            _log.debug("generating by the module's own method: %s", reason)
            with unwrap_model_for_generation(self) as whole:
                return whole.generate(*args, **kwargs)  # type: ignore[operator]
        if self._hybrid is None:
            degree = self.resolved_config.hybrid_engine.inference_tp_size
            self._hybrid = HybridEngine(self, EngineConfig(tensor_parallel_size=degree))
        with self._hybrid.generation() as inference:
            return generate(inference, module, *args, **kwargs)

    def close(self) -> None:
        """Free both."""
        if self._hybrid is not None:
            self._hybrid.close()
            self._hybrid = None
        super().close()

    destroy = close
