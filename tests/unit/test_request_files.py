"""A chat request enters few files of the package: who reads its way need not read the rest."""

from __future__ import annotations

import pytest

from tests.count_files_request import request_files

pytest.importorskip("fastapi")
MAX_INFER_FILES = 8
"""Six of the engine and the words for requests, and those of the runner: one with torch operators, two with kernels."""


def test_few_files_of_inference_are_on_the_way_of_a_request() -> None:
    names = request_files()
    of_infer = [name for name in names if name.startswith("infer/")]
    assert {"infer/engine/engine.py", "infer/engine/scheduler.py", "serve/app.py"} <= set(names), "would show nothing"
    assert len(of_infer) <= MAX_INFER_FILES, of_infer
