"""Operations, parameters and seconds of a model, by module: of one forward pass, counted as it runs.

Operations are those of matrix products, convolutions and attention, as torch's own counter counts them (a multiply
and an add are two); what is elementwise is left out, a thousandth of a transformer's.  A backward pass takes
twice as many.  Seconds are an accelerator's own: the host waits for it where a module begins and where it ends.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from thalweg.device import synchronize
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class FlopsProfiler:
    """Counts what a model does between :meth:`start_profile` and :meth:`stop_profile`.

    ``engine``, ``recompute_fwd_factor``: taken for DeepSpeed's sake.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._handles: list[Any] = []
        self._begun: dict[nn.Module, float] = {}
        self._seconds: dict[nn.Module, float] = {}

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Count from now on."""
        self.end_profile()
        self._counter, self.started = FlopCounterMode(display=False), True
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))
        self._counter.__enter__()

    def stop_profile(self) -> None:
        """Count no longer; what was counted stays."""
        if self._counter is not None and self.started:
            self._counter.__exit__(None, None, None)
            self.started = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        if not self.started:
            self._counter = None
        self._seconds.clear()

    def end_profile(self) -> None:
        """Stop and forget."""
        self.stop_profile()
        self.reset_profile()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        synchronize()
        self._begun[module] = time.perf_counter()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if (begun := self._begun.pop(module, None)) is not None:
            synchronize()
            self._seconds[module] = self._seconds.get(module, 0.0) + time.perf_counter() - begun

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations, two for a multiply-add."""
        total = 0 if self._counter is None else self._counter.get_total_flops()
        return number_to_string(total, "FLOPs") if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds."""
        total = self.get_total_flops() // 2
        return number_to_string(total, "MACs") if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the whole model."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return number_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward passes."""
        outermost = [module for name, module in self.model.named_modules() if module in self._seconds]
        total = self._seconds[outermost[0]] if outermost else 0.0
        return f"{total * 1e3:.2f} ms" if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print a table, or write it to ``output_file``: the whole, and where ``detailed`` each module."""
        by_name = {} if self._counter is None else self._counter.get_flop_counts()
        root = type(self.model).__name__
        lines = [
            f"profile of step {profile_step}: {self.get_total_params(True)} parameters, {self.get_total_macs(True)}, "
            f"{self.get_total_flops(True)}, {self.get_total_duration(True)}"
        ]
        for name, module in self.model.named_modules() if detailed else ():
            depth = name.count(".") + 1 if name else 0
            if module not in self._seconds or (0 <= module_depth < depth):
                continue
            flops = sum(by_name.get(f"{root}.{name}", {}).values()) if name else self.get_total_flops()
            count = number_to_string(sum(parameter.numel() for parameter in module.parameters()))
            lines.append(
                f"{'  ' * depth}{name or root}  {count}, "
                f"{number_to_string(flops, 'FLOPs')}, {self._seconds[module] * 1e3:.2f} ms"
            )
        text = "\n".join(lines) + "\n"
        if not output_file:
            sys.stdout.write(text)
            return
        try:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        except OSError as error:
            _log.warning("no profile was written: %s", error)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the whole of it in one line."""
        self.print_model_profile(detailed=False)


class StepProfile:
    """Prints the profile of a forward pass, the first after ``options.profile_step`` steps of this run."""

    def __init__(self, model: nn.Module, options: Any) -> None:
        self._profiler, self._options, self._steps_left = FlopsProfiler(model), options, options.profile_step + 1
        self._hooks: list[Any] = []
        self.count_step()

    def count_step(self, result: Any = None) -> None:
        """A step is over; the run itself begins with one."""
        self._steps_left -= 1
        if self._steps_left == 0:
            model = self._profiler.model
            self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation is not a step
            self._profiler.start_profile()
            self._profiler._enter(model, inputs)  # its hooks of this pass are called already, and torch's tracker's too
            assert self._profiler._counter is not None
            self._profiler._counter.mod_tracker._get_mod_name(model)

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._profiler.started:
            return
        self._profiler._leave(model, inputs, output)
        self._profiler.stop_profile()
        names = ("profile_step", "module_depth", "top_modules", "detailed", "output_file")
        self._profiler.print_model_profile(**{name: getattr(self._options, name) for name in names})
        self._profiler.end_profile()
        for hook in self._hooks:
            hook.remove()


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """``(flops, macs, params)`` of a model's forward pass (or its ``generate``, by ``mode``).

    ``input_shape``: of a tensor of ones that the model is called with, in place of ``args`` and ``kwargs``.

    Raises:
        ValueError: nothing to call the model with.
    """
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = (torch.ones(input_shape, dtype=first.dtype, device=first.device),)
    if not args and not kwargs:
        raise ValueError("get_model_profile() needs something to call the model with: args=, kwargs= or input_shape=")
    call: Any = model if mode == "forward" else model.generate
    profiler, was_training = FlopsProfiler(model), model.training
    model.eval()
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        call(*args, **(kwargs or {}))
    profiler.stop_profile()
    model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    counts = [get(as_string) for get in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)]
    profiler.end_profile()
    return counts[0], counts[1], counts[2]


def number_to_string(number: float, unit: str = "") -> str:
    """``1.5 GFLOPs``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            return f"{number / factor:.2f} {prefix}{unit}".rstrip()
    return f"{number:g} {unit}".rstrip()
