"""The Python of the pages of a first day runs as it stands there, on two ranks; the options' page is the schema's."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.repo.source import ROOT
from thalweg.config.reference import config_reference

REUSE_RANKS = True


def _run_page(rank: int, world: int, page: str, folder: str) -> int:
    blocks = re.findall(r"^```python\n([\s\S]*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})
    return len(blocks)


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        *(("engine.md", 1), ("parameters.md", 7), ("checkpoints.md", 4), ("rlhf.md", 4)),
        *(("attention.md", 3), ("data.md", 5)),
    ],
)
def test_the_python_of_a_page_runs(page: str, at_least: int, tmp_path: Path) -> None:
    assert min(run_ranks(_run_page, 2, page, str(tmp_path))) >= at_least


def test_the_options_page_is_made_from_the_schema() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == config_reference(), "make it anew: thalweg config --reference > docs/config.md"
