"""The console: one live bar on a terminal, an occasional plain line anywhere else.

Both go to standard error, so that standard output stays free for what a program was
asked to print (``--json``).
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, TextIO

from thalweg.observe.record import StepRecord, Writer

_SIZE = (150, 24)


def describe(record: StepRecord) -> str:
    """Return the parts of a record that a person watches, as ``loss 4.123 | 8.1k tok/s | ...``."""
    parts = []
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.lr is not None:
        parts.append(f"lr {record.lr:.2e}")
    if record.grad_norm is not None:
        parts.append(f"norm {record.grad_norm:.2f}")
    if record.tokens_per_s is not None:
        parts.append(f"{_short(record.tokens_per_s)} tok/s")
    if record.model_tflops is not None:
        parts.append(f"{record.model_tflops:.3g} TFLOP/s")
    if record.memory_mib is not None:
        parts.append(f"{record.memory_mib:,.0f} MiB")
    if record.loss_scale not in (None, 1.0):
        parts.append(f"scale {record.loss_scale:g}")
    if record.skipped:
        parts.append("skipped: non-finite gradients")
    return " | ".join(parts)


class ConsoleWriter:
    """A bar when ``stream`` is a terminal, else a line every ``every`` steps (and at the last)."""

    def __init__(self, *, every: int, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._every = every
        self._total = total_steps
        self._live = self._stream.isatty()
        self._bar: Any = None
        self._unprinted: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        if self._live:
            self._update_bar(record)
            return
        self._unprinted = record
        if record.step % self._every == 0 or record.step == self._total:
            self._line(record)

    def metric(self, name: str, value: float, step: int) -> None:
        self._say(f"step {step}: {name} {value:.6g}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._unprinted is not None:
            self._line(self._unprinted)

    def _update_bar(self, record: StepRecord) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # A resumed job's bar starts where the job does, or its rate would be fiction.
            known = _width(self._stream) > 0
            self._bar = tqdm(
                total=self._total,
                initial=record.step - 1,
                file=self._stream,
                unit="step",
                # A terminal that does not know its size says 0 x 0, and the bar would not be drawn.
                dynamic_ncols=known,
                ncols=None if known else _SIZE[0],
                nrows=None if known else _SIZE[1],
            )
        self._bar.set_postfix_str(describe(record), refresh=False)
        self._bar.update(record.step - self._bar.n)

    def _line(self, record: StepRecord) -> None:
        total = "" if self._total is None else f"/{self._total}"
        phases = "".join(f" | {name} {seconds * 1e3:.1f} ms" for name, seconds in record.phases.items())
        self._say(f"step {record.step}{total}: {describe(record)}{phases}")
        self._unprinted = None

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
            return
        self._stream.write(text + "\n")
        self._stream.flush()


def build_console(config: Any, total_steps: int | None = None) -> Writer | None:
    """Return the console that ``steps_per_print`` asks for; none when it is absent, 0 or infinite.

    Accelerate passes infinity to say "never".
    """
    every = getattr(config, "steps_per_print", None)
    if not every or math.isinf(every):
        return None
    return ConsoleWriter(every=max(1, int(every)), total_steps=total_steps)


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
