"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobResult:
    """The exit code of the job and what to tell the user on standard error (empty on success)."""

    exit_code: int
    report: str
