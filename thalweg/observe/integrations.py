"""Writers to TensorBoard and Weights & Biases; their packages are imported only when asked for."""

from __future__ import annotations

from typing import Any

from thalweg.observe.file_writers import job_folder
from thalweg.observe.step_record import StepRecord, Writer


def _to_scalars(record: StepRecord) -> dict[str, float]:
    row = {f"train/{name}": float(v) for name, v in record.scalars().items() if v is not None and name != "step"}
    return row | {f"phase/{name}": seconds for name, seconds in record.phases.items()}


class TensorBoardWriter:
    """Scalars ``train/<field>``, ``phase/<name>`` and the user's own names, by step."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Each start adds an event file to the folder; TensorBoard reads them all, so nothing is lost.
        self._summary = SummaryWriter(log_dir=folder)

    def step(self, record: StepRecord) -> None:
        for name, value in _to_scalars(record).items():
            self.metric(name, value, record.step)

    def metric(self, name: str, value: float, step: int) -> None:
        self._summary.add_scalar(name, value, step)

    def close(self) -> None:
        self._summary.close()


class WandbWriter:
    """The same names, sent to a Weights & Biases run."""

    def __init__(self, *, project: str | None, group: str | None, team: str | None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project=project, group=group, entity=team, resume="allow")

    def step(self, record: StepRecord) -> None:
        self._run.log(_to_scalars(record), step=record.step)

    def metric(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


def build_tensorboard(config: Any) -> Writer | None:
    """Return the writer that ``tensorboard`` asks for."""
    section = getattr(config, "tensorboard", None)
    return TensorBoardWriter(str(job_folder(section, "runs"))) if section and section.enabled else None


def build_wandb(config: Any) -> Writer | None:
    """Return the writer that ``wandb`` asks for."""
    section = getattr(config, "wandb", None)
    if not (section and section.enabled):
        return None
    return WandbWriter(project=section.project, group=section.group, team=section.team)
