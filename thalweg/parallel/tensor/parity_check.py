"""Is the cut model still the same model?  One small forward before and one after say so.

The outputs of the layers that all ranks agree on (row-parallel, embeddings) are kept by
name, so that a wrong plan is refused with the first module where the two runs part.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.tensor.auto_plan.module_trace import is_close
from thalweg.parallel.tensor.dummy_inputs import DummyInputs, eval_mode
from thalweg.parallel.tensor.plan import TpPlan, UnshardableModelError
from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_REPLICATED_KINDS = ("row", "embedding", "experts")

RunOutputs = dict[str, Tensor | None]  # by module, in order of execution, and the model's at the end


def run_for_parity(model: nn.Module, plan: TpPlan, inputs: DummyInputs | None) -> RunOutputs | None:
    """What ``model`` and its modules give in evaluation mode, without gradients; None where it takes other inputs."""
    if inputs is None:
        _log.warning("tensor-parallel parity check skipped: could not build sample inputs for the model")
        return None
    outputs: RunOutputs = {}

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs.setdefault(name, output.detach().clone())

    with torch.no_grad(), eval_mode(model), ExitStack() as hooks:
        for name, layer in plan.layers.items():
            if layer.kind in _REPLICATED_KINDS:
                hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(record, name)))
        try:
            args, kwargs = inputs
            result = model(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            _log.warning("the tensor-parallel plan was not checked: %s", error)
            return None
    return outputs | {"the model's output": _main_output(result)}


def check_parity(
    model: nn.Module, plan: TpPlan, inputs: DummyInputs | None, expected: RunOutputs, world_size: int
) -> None:
    """Run the cut model and compare.

    Raises:
        UnshardableModelError: it computes something else; the message names the first module that differs.
    """
    misfit = f"{plan.source} does not fit {type(model).__name__}"
    try:
        actual = run_for_parity(model, plan, inputs)
    except RuntimeError as error:
        raise UnshardableModelError(f"{misfit} at {world_size} tensor ranks: {error}") from error
    if actual is None:
        raise UnshardableModelError(f"{misfit}: its forward no longer runs")
    for name, value in expected.items():
        if value is not None and not is_close(actual.get(name), value, _TOLERANCE):
            raise UnshardableModelError(
                f"{misfit} at {world_size} tensor ranks: {name} differs from the unsharded model; set "
                "tensor_parallel.autotp_size to 1"
            )


def _main_output(result: Any) -> Tensor | None:
    output = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if output is None and hasattr(result, "__getitem__"):
        output = result[0]
    if isinstance(output, VocabParallelLogits):
        return output.full_tensor()
    return output if isinstance(output, Tensor) else None
