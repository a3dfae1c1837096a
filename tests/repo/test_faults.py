"""The faults of tests/faults.py: what each replaces is there, and each is caught."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

from tests import faults


@pytest.mark.parametrize("name", faults.FAULTS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    fault = faults.FAULTS[name]
    reduce(getattr, fault.target.split("."), importlib.import_module(fault.module))  # or AttributeError
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (faults.ROOT / path).read_text(), test


@pytest.mark.nightly
@pytest.mark.parametrize("name", faults.FAULTS)
def test_each_fault_is_caught(name: str) -> None:
    assert faults.main([name]) == 0
