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

from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.tensor.dummy_inputs import DummyInputs, eval_mode, make_dummy_inputs
from thalweg.parallel.tensor.plan import TpPlan, UnshardableModelError
from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_REPLICATED_KINDS = ("row", "embedding", "experts")


@dataclass
class RunOutputs:
    """What a run gave: by module, in order of execution, and at the end."""

    by_module: dict[str, Tensor]
    final_output: Tensor | None


@dataclass(frozen=True)
class ParityCheck:
    """A small random batch for a model, and the modules to look at."""

    inputs: DummyInputs | None
    module_names: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module, plan: TpPlan) -> ParityCheck:
        """Inputs that the model takes as it is."""
        module_names = tuple(name for name, layer in plan.layers.items() if layer.kind in _REPLICATED_KINDS)
        return cls(make_dummy_inputs(model), module_names)

    def run(self, model: nn.Module) -> RunOutputs | None:
        """Forward in evaluation mode, without gradients; None where the model takes other inputs."""
        if self.inputs is None:
            _log.warning("the tensor-parallel plan was not checked: no inputs were found that the model takes")
            return None
        outputs = RunOutputs({}, None)
        with torch.no_grad(), eval_mode(model), self._recording(model, outputs):
            try:
                result = self.inputs.call(model)
            except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
                _log.warning("the tensor-parallel plan was not checked: %s", error)
                return None
        outputs.final_output = _main_output(result)
        return outputs

    @contextmanager
    def _recording(self, model: nn.Module, outputs: RunOutputs) -> Iterator[None]:
        def record(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs.by_module.setdefault(name, output.detach().clone())

            return hook

        handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in self.module_names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, model: nn.Module, expected: RunOutputs, plan: TpPlan, tp_group: ParallelGroup) -> None:
        """Run the cut model and compare.

        Raises:
            Refused: it computes something else; the message names the first module that differs.
        """
        try:
            actual = self.run(model)
        except RuntimeError as error:
            raise UnshardableModelError(
                f"{plan.source} does not fit {type(model).__name__} at {tp_group.size} tensor ranks: {error}"
            ) from error
        if actual is None:
            raise UnshardableModelError(
                f"{plan.source} does not fit {type(model).__name__}: its forward no longer runs"
            )
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
            (name, value, actual.by_module.get(name)) for name, value in expected.by_module.items()
        ]
        pairs.append(("the model's output", expected.final_output, actual.final_output))
        for name, value, other in pairs:
            if value is not None and (other is None or not _is_close(value, other)):
                raise UnshardableModelError(
                    f"{plan.source} does not fit {type(model).__name__} at {tp_group.size} tensor ranks: "
                    f"{name} differs from the unsharded model; set tensor_parallel.autotp_size to 1"
                )


def _main_output(result: Any) -> Tensor | None:
    output = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if output is None and hasattr(result, "__getitem__"):
        output = result[0]
    if isinstance(output, VocabParallelLogits):
        return output.full_tensor()
    return output if isinstance(output, Tensor) else None


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = _TOLERANCE.get(a.dtype, 1e-3)
    a, b = a.double(), b.double()
    scale = max(float(a.abs().max()), 1e-6) if a.numel() else 1.0
    return bool((a - b).abs().max() <= tolerance * scale) if a.numel() else True
