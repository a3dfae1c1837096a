"""A chat request enters few files of the package: who reads its way need not read the rest."""

from __future__ import annotations

import pytest

from tests.count_files import request_files

pytest.importorskip("fastapi")
MAX_FILES = 14
MAX_INFER_FILES = 7
"""Four of the engine, the words for requests, and those of the runner: one with torch operators, two with kernels."""


@pytest.mark.parametrize("stream", [False, True])
def test_few_files_are_on_the_way_of_a_request(stream: bool) -> None:
    names = list(request_files(stream))
    of_infer = [name for name in names if name.startswith("infer/")]
    assert {"infer/engine/engine.py", "infer/engine/scheduler.py", "serve/app.py"} <= set(names), "would show nothing"
    assert len(of_infer) <= MAX_INFER_FILES, of_infer
    if "infer/runners/torch_runner.py" in of_infer:  # the kernels have files of their own, and of other rooms
        assert len(names) <= MAX_FILES, names
