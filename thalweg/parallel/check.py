"""Is the cut model still the same model?  One small forward before and one after say so.

The outputs of the layers that all ranks agree on (row-parallel, embeddings) are kept by
name, so that a wrong plan is refused with the first module where the two runs part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.logits import VocabularyShards
from thalweg.parallel.plans import Plan, Refused
from thalweg.parallel.sample import Sample, evaluating, sample_of
from thalweg.parallel.team import Team
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_AGREED = ("row", "embedding", "experts")


@dataclass
class Outputs:
    """What a run gave: by module, in order of execution, and at the end."""

    modules: dict[str, Tensor]
    final: Tensor | None


@dataclass(frozen=True)
class Probe:
    """A small random batch for a model, and the modules to look at."""

    sample: Sample | None
    watched: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> Probe:
        """Inputs that the model takes as it is."""
        watched = tuple(name for name, layer in plan.layers.items() if layer.kind in _AGREED)
        return cls(sample_of(model), watched)

    def run(self, model: nn.Module) -> Outputs | None:
        """Forward in evaluation mode, without gradients; None where the model takes other inputs."""
        if self.sample is None:
            _log.warning(
                "the tensor-parallel plan was not checked: no inputs were found that the model takes"
            )
            return None
        outputs = Outputs({}, None)
        with torch.no_grad(), evaluating(model), self._watching(model, outputs):
            try:
                result = self.sample.call(model)
            except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
                _log.warning("the tensor-parallel plan was not checked: %s", error)
                return None
        outputs.final = _main(result)
        return outputs

    @contextmanager
    def _watching(self, model: nn.Module, outputs: Outputs) -> Iterator[None]:
        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs.modules.setdefault(name, output.detach().clone())

            return hook

        handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in self.watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, model: nn.Module, expected: Outputs, plan: Plan, team: Team) -> None:
        """Run the cut model and compare.

        Raises:
            Refused: it computes something else; the message names the first module that differs.
        """
        try:
            found = self.run(model)
        except RuntimeError as error:
            raise Refused(
                f"{plan.source} does not fit {type(model).__name__} at {team.size} tensor ranks: {error}"
            ) from error
        if found is None:
            raise Refused(f"{plan.source} does not fit {type(model).__name__}: its forward no longer runs")
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
            (name, value, found.modules.get(name)) for name, value in expected.modules.items()
        ]
        pairs.append(("the model's output", expected.final, found.final))
        for name, value, other in pairs:
            if value is not None and (other is None or not _close(value, other)):
                raise Refused(
                    f"{plan.source} does not fit {type(model).__name__} at {team.size} tensor ranks: "
                    f"{name} differs from the unsharded model; set tensor_parallel.autotp_size to 1"
                )


def _main(result: Any) -> Tensor | None:
    found = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if found is None and hasattr(result, "__getitem__"):
        found = result[0]
    if isinstance(found, VocabularyShards):
        return found.whole()
    return found if isinstance(found, Tensor) else None


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = _TOLERANCE.get(a.dtype, 1e-3)
    a, b = a.double(), b.double()
    scale = max(float(a.abs().max()), 1e-6) if a.numel() else 1.0
    return bool((a - b).abs().max() <= tolerance * scale) if a.numel() else True
