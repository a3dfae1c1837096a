"""The console: one live bar on a terminal, an occasional plain line anywhere else.

Both go to standard error, so that standard output stays free for what a program was
asked to print (``--json``).
"""

import math
import os
import sys
from typing import Any, TextIO

from thalweg.observe.step_record import StepRecord, Writer

_FALLBACK_SIZE = (150, 24)


def format_record(record: StepRecord) -> str:
    """Return the parts of a record that a person watches, as ``loss 4.123 | 8.1k tok/s | ...``."""
    tokens_per_s = None if record.tokens_per_s is None else _format_count(record.tokens_per_s)
    templates = {
        "loss {:.4f}": record.loss,
        "lr {:.2e}": record.lr,
        "norm {:.2f}": record.grad_norm,
        "{} tok/s": tokens_per_s,
        "{:.3g} TFLOP/s": record.model_tflops,
        "{:,.0f} MiB": record.memory_mib,
    }
    fields = [template.format(value) for template, value in templates.items() if value is not None]
    if record.loss_scale not in (None, 1.0):
        fields.append(f"scale {record.loss_scale:g}")
    if record.skipped:
        fields.append("skipped: non-finite gradients")
    return " | ".join(fields + [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in record.phases.items()])


class ConsoleWriter:
    """A bar when ``stream`` is a terminal, else a line every ``steps_per_print`` steps (and at the last)."""

    def __init__(self, *, steps_per_print: int, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._steps_per_print, self._total_steps = steps_per_print, total_steps
        self._is_terminal = self._stream.isatty()
        self._bar: Any = None
        self._unprinted_record: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        if self._is_terminal:
            self._update_bar(record)
            return
        self._unprinted_record = record
        if record.step % self._steps_per_print == 0 or record.step == self._total_steps:
            self._write_record(record)

    def metric(self, name: str, value: float, step: int) -> None:
        self._write_line(f"step {step}: {name} {value:.6g}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._unprinted_record is not None:
            self._write_record(self._unprinted_record)

    def _update_bar(self, record: StepRecord) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # A resumed job's bar starts where the job does, or its rate would be fiction.
            has_size = _terminal_width(self._stream) > 0
            self._bar = tqdm(
                total=self._total_steps,
                initial=record.step - 1,
                file=self._stream,
                unit="step",
                # A terminal that does not know its size says 0 x 0, and the bar would not be drawn.
                dynamic_ncols=has_size,
                ncols=None if has_size else _FALLBACK_SIZE[0],
                nrows=None if has_size else _FALLBACK_SIZE[1],
            )
        self._bar.set_postfix_str(format_record(record), refresh=False)
        self._bar.update(record.step - self._bar.n)

    def _write_record(self, record: StepRecord) -> None:
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        self._write_line(f"step {record.step}{total}: {format_record(record)}")
        self._unprinted_record = None

    def _write_line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
            return
        self._stream.write(text + "\n")
        self._stream.flush()


def build_console(config: Any, total_steps: int | None = None) -> Writer | None:
    """Return the console that ``steps_per_print`` asks for; none when it is absent, 0 or infinite.

    Accelerate passes infinity to say "never".
    """
    steps_per_print = getattr(config, "steps_per_print", None)
    if not steps_per_print or math.isinf(steps_per_print):
        return None
    return ConsoleWriter(steps_per_print=max(1, int(steps_per_print)), total_steps=total_steps)


def _terminal_width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _format_count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
