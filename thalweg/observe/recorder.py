"""The sink: what happens in a step goes in once and comes out at every writer.

    engine --StepRecord--> Recorder --> console | steps.csv | metrics.jsonl | TensorBoard | W&B
    user   --metric()----^

Invariants: only rank 0 writes, the other ranks hold a recorder without writers, so the
caller never asks which rank it is; an observer never stops what it observes, so a writer
that fails in mid-run (disk full, service gone) is dropped with one warning, while one that
cannot be *built* is an error at the start; files are only ever appended to.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.observe.console_writer import build_console
from thalweg.observe.step_record import StepRecord, Writer, require_package
from thalweg.observe.writers import CometWriter, CsvWriter, JsonlWriter, TensorBoardWriter, WandbWriter

# key of the section -> the writer that it asks for
_WRITERS: dict[str, Callable[[Any], Writer]] = {
    "csv_monitor": lambda section: CsvWriter(_job_folder(section, "csv_logs")),
    "jsonl_monitor": lambda section: JsonlWriter(_job_folder(section, "jsonl_logs") / "metrics.jsonl"),
    "tensorboard": lambda section: TensorBoardWriter(_job_folder(section, "runs")),
    "wandb": lambda section: WandbWriter(project=section.project, group=section.group, team=section.team),
    "comet": CometWriter,
}

# key of the section -> the package it needs and what to install
_REQUIRED_PACKAGES = {
    "tensorboard": ("tensorboard", "'thalweg[monitor]'"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml"),
}


class Recorder:
    """Hands each record to each writer; without writers it is free and silent.

    ``enabled``: whether the config names a monitor, the same on every rank.
    After :meth:`close` further calls are ignored, as a late metric must not fail a finished run.
    """

    def __init__(self, writers: Sequence[Writer] = (), enabled: bool = False) -> None:
        self._writers = list(writers)
        self.enabled = enabled

    def step(self, record: StepRecord) -> None:
        """Record one optimiser step."""
        self._dispatch(lambda writer: writer.step(record))

    def metric(self, name: str, value: Any, step: int) -> None:
        """Record one scalar of the user's own, as ``metric("eval/loss", 3.2, step=100)``."""
        number = float(value)
        self._dispatch(lambda writer: writer.metric(name, number, step))

    def write_events(self, events: Iterable[tuple[str, Any, int]]) -> None:
        """Record scalars of the user's own, each a name, a value and a step."""
        for name, value, step in events:
            self.metric(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        """Record a text of the user's own, in Markdown, at the writers that have a ``text``."""
        self._dispatch(lambda writer: getattr(writer, "text", lambda *_: None)(name, text, step))

    def close(self) -> None:
        """Flush and close every writer; a second call does nothing."""
        self._dispatch(lambda writer: writer.close())
        self._writers = []

    def _dispatch(self, call: Callable[[Writer], None]) -> None:
        for writer in tuple(self._writers):
            try:
                call(writer)
            except Exception as error:
                self._writers.remove(writer)
                logging.getLogger("thalweg.observe").warning(
                    "%s stopped recording, training goes on: %s: %s", type(writer).__name__, type(error).__name__, error
                )


def build_recorder(config: Any, *, rank: int) -> Recorder:
    """Return the recorder that ``config`` asks for, with writers on rank 0 only.

    Reads ``steps_per_print``, ``csv_monitor``, ``jsonl_monitor``, ``tensorboard``,
    ``wandb`` and ``comet``; for the bar the schedule's ``total_num_steps``.

    Raises :class:`MissingPackageError` on *every* rank when a package is missing, so that
    no rank waits for one that has stopped.
    """
    sections = {key: section for key in _WRITERS if (section := getattr(config, key, None)) and section.enabled}
    for key, (package, install) in _REQUIRED_PACKAGES.items():
        if key in sections:
            require_package(package, key=key, install=install)
    if rank != 0:
        return Recorder(enabled=bool(sections))
    params = getattr(getattr(config, "scheduler", None), "params", None)
    total = params.get("total_num_steps") if isinstance(params, Mapping) else None
    console = build_console(config, total if isinstance(total, int) else None)
    writers = [_WRITERS[key](section) for key, section in sections.items()]
    return Recorder(writers if console is None else [console, *writers], enabled=bool(sections))


def _job_folder(section: Any, default: str) -> Path:
    """``output_path/job_name`` of a monitor's section."""
    return Path(getattr(section, "output_path", None) or default) / (getattr(section, "job_name", None) or "")
