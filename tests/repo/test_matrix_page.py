"""docs/MATRIX.md says what the parity matrix runs."""

from __future__ import annotations

import pytest

from tests.dist import matrix
from tests.repo.matrix_page import pair_status, render_page
from tests.repo.source import ROOT


def test_the_page_is_made_from_the_tests() -> None:
    written = (ROOT / "docs" / "MATRIX.md").read_text()
    assert written == render_page(), "run `python -m tests.repo.matrix_page > docs/MATRIX.md`"


def test_a_pair_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "COMBINATIONS", "s0 dp2\n")
    with pytest.raises(LookupError, match="s1 x tp: no combination shows it"):
        pair_status("s1", "tp")
