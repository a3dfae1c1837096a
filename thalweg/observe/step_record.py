"""The one row that describes an optimiser step, and what a writer of such rows must do."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step of the whole job; ``None`` means "not known", never zero.

    ``loss`` is the mean over the global batch (nats for a language model), ``samples``
    and ``tokens`` are the counts of this step over all ranks, ``seconds`` its wall-clock
    time, ``model_tflops`` the model's own arithmetic in 1e12 operations a second over
    all ranks (see :func:`thalweg.observe.flops_per_token`), ``memory_mib`` the memory of
    rank 0, ``phases`` seconds by phase when ``wall_clock_breakdown`` is on.
    """

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    samples: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    model_tflops: float | None = None
    memory_mib: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, int | float | bool | None]:
        """Return every field but ``phases``, in the order of the columns of the files."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = tuple(item.name for item in fields(StepRecord) if item.name != "phases")


class Writer(Protocol):
    """A place where records go.  Called on rank 0 only, from the training thread."""

    def step(self, record: StepRecord) -> None:
        """Take one step's record."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Take one named scalar, as ``eval/loss``."""

    def close(self) -> None:
        """Flush and let go; called once."""


class MissingPackageError(ImportError, ValueError):
    """The configuration asks for a writer whose package is not installed."""


def require_package(package: str, *, key: str, install: str) -> None:
    """Raise :class:`MissingPackageError` unless ``package`` can be imported (it is not imported here)."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"{key}.enabled is true but the package {package!r} is not installed: "
            f"run `pip install {install}`, or set {key}.enabled to false"
        )


def to_json_scalar(value: float | int | bool | None) -> float | int | bool | str | None:
    """Return ``value`` as JSON can hold it: non-finite floats become ``"nan"``, ``"inf"``, ``"-inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
