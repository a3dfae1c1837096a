"""Gradients that rest in a swap file: the norm kept of them is used only while they are what was measured."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from thalweg.optim.offload.step_in_backward import GradOffload
from thalweg.storage_io.swap_file import SwapFile


@pytest.mark.parametrize("count", [17, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_write_to_an_offloaded_gradient_is_seen(tmp_path, count, where, through_data):
    """``p.grad.data`` has a version counter of its own, so counting versions would miss it."""
    with closing(SwapFile(tmp_path, 1 << 20)) as swap:
        offload, param = GradOffload(swap), nn.Parameter(torch.zeros(count))
        param.grad = torch.randn(count)
        offload.offload([param])
        if swap.direct:  # else nobody can tell, and the norm is taken again
            assert list(offload.partial_norms()) == [param]
        grad = param.grad.data if through_data else param.grad
        grad[where] += 1
        assert not offload.partial_norms()
        param.grad = torch.randn(count)
        offload.offload([param])
        assert len(offload.partial_norms()) == swap.direct
