"""Marks that many test files share."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """One set of parameters that `make nightly` runs and the gate does not: it is longer, or of more ranks."""
    return pytest.param(*values, marks=pytest.mark.nightly)
