"""Products of a GPU in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """fp32 as it is said."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
