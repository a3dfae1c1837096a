"""``deepspeed.initialize`` under the alias: how it reads a config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from thalweg.compat.deepspeed.engine import initialize
from thalweg.config import ConfigError


def test_a_wrong_config_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    """Also where DeepSpeed's defaults are filled in."""
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4,\n "zero_optimization": {"stage": 9}}')
    with pytest.raises(ConfigError) as caught:
        initialize(model=nn.Linear(2, 2), config=str(path))
    assert str(path) in str(caught.value) and "zero_optimization.stage (line 2) = 9" in str(caught.value)


def _clipping(rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for given in ({}, {"gradient_clipping": 0.0}, {"gradient_clipping": 0.25}):
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **given}
        engine = initialize(model=nn.Linear(2, 2, bias=False), config=config)[0]
        before = engine.state_dict()["weight"]
        engine.backward(100 * engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append((engine.gradient_clipping(), float((engine.state_dict()["weight"] - before).norm())))
        assert engine.config == config, "the user's own, without what was filled in"
        engine.close()
    return found


def test_a_config_that_says_nothing_clips_as_deepspeed_does() -> None:
    (found,) = run_ranks(_clipping, 1)
    assert [limit for limit, _ in found] == [1.0, 0.0, 0.25]
    assert [moved for _, moved in found] == pytest.approx([1.0, 200.0, 0.25], rel=1e-3)
