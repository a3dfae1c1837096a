"""`elasticity`: one batch for many numbers of ranks, the one that DeepSpeed finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.compat.deepspeed import elasticity as deepspeed
from thalweg.config import ConfigError, load_config
from thalweg.config.batch_size import find_elastic_batch

BLOCK = {
    "enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32, "max_gpus": 1500, "version": 0.1,
}  # fmt: skip


def resolve(world: int, more: dict[str, Any] | None = None, **block: Any) -> Any:
    return load_config({"elasticity": {**BLOCK, **block}, **(more or {})}, world_size=world)


def problems(world: int, more: dict[str, Any] | None = None, **block: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(world, more, **block)
    return str(caught.value)


def test_the_batch_is_deepspeeds() -> None:
    """Its own documentation's and tests' figures."""
    batch, ranks = find_elastic_batch(10000, [8, 12, 16, 17], 32, 1500, True)
    assert (batch, len(ranks)) == (9792, 23)
    config = resolve(64)
    assert config.train_batch_size == 9792 and config.train_micro_batch_size_per_gpu == 17
    assert config.gradient_accumulation_steps == 9
    assert resolve(40, max_train_batch_size=2000, micro_batch_sizes=[2, 4, 6], min_gpus=1).train_batch_size == 1680


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True),
    st.integers(40, 5000),
    st.integers(1, 8),
    st.integers(1, 400),
    st.booleans(),
)
def test_every_listed_number_of_ranks_divides_the_batch(
    micros: list[int], limit: int, least: int, span: int, larger: bool
) -> None:
    batch, ranks = find_elastic_batch(limit, micros, least, least + span, larger)
    assert 0 < batch <= limit
    fits = [n for n in range(least, least + span + 1) if any(batch % (n * micro) == 0 for micro in micros)]
    assert ranks == fits
    for number in ranks[:5]:
        config = load_config(
            {"elasticity": {"enabled": True, "max_train_batch_size": limit, "micro_batch_sizes": micros,
                            "min_gpus": least, "max_gpus": least + span, "prefer_larger_batch": larger}},
            world_size=number,
        )  # fmt: skip
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        assert micro in micros and micro * steps * number == config.train_batch_size == batch


def test_ranks_that_do_not_divide_it() -> None:
    assert "a batch for 33 data-parallel ranks: 9792 goes with 32 or 34" in problems(33)
    own = resolve(33, version=0.2)  # DeepSpeed's later versions give them a batch of their own
    assert own.train_batch_size % 33 == 0 and 9000 < own.train_batch_size <= 10000
    assert own.provenance.derived[0][1] == "elasticity: of this number of ranks alone"


def test_hosts_come_and_go_whole() -> None:
    config = resolve(32, {"tensor_parallel": {"autotp_size": 4}}, version=0.2, num_gpus_per_node=8, min_gpus=8)
    assert config.data_parallel_size == 8
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert micro * steps * 8 == config.train_batch_size
    assert "a multiple of the 16 ranks" in problems(64, version=0.2, num_gpus_per_node=8, model_parallel_size=16)
    assert "0.2, as 4 ranks share a model" in problems(64, model_parallel_size=4)


def test_what_is_wrong_is_said() -> None:
    assert "elasticity.micro_batch_sizes = null" in problems(64, micro_batch_sizes=None)
    assert "elasticity.max_train_batch_size = null" in problems(64, max_train_batch_size=None)
    assert "at least 17, the largest micro-batch" in problems(64, max_train_batch_size=16)
    hosts = problems(64, max_train_batch_size=40, version=0.2, num_gpus_per_node=4)
    assert "at least 68, the largest micro-batch of each of the 4 ranks of a host" in hosts
    assert "goes with no number from min_gpus to max_gpus" in problems(64, min_gpus=9, max_gpus=3)
    alone = problems(33, {"tensor_parallel": {"autotp_size": 2}}, version=0.2)
    assert alone.startswith("1 problem") and "a multiple of tensor_parallel.autotp_size = 2" in alone
    assert "elasticity.version = 0.3" in problems(64, version=0.3)
    assert "elasticity.micro_batch_sizes[1]" in problems(64, micro_batch_sizes=[1, -1])
    given_too = problems(64, {"train_batch_size": 64})
    assert "train_batch_size = 64: expected 9792, which elasticity finds, or nothing" in given_too
    assert resolve(64, {"train_batch_size": 64}, ignore_non_elastic_batch_info=True).train_batch_size == 9792
    assert resolve(64, {"train_batch_size": 9792, "gradient_accumulation_steps": "auto"}).train_batch_size == 9792
    off = load_config({"elasticity": {**BLOCK, "enabled": False}, "train_batch_size": 64}, world_size=64)
    assert off.train_batch_size == 64


def test_deepspeeds_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"elasticity": BLOCK}
    assert deepspeed.elasticity_enabled(config) and not deepspeed.elasticity_enabled({})
    batch, ranks, micro = deepspeed.compute_elastic_config(config, "0.19.8", world_size=64)
    assert (batch, len(ranks), micro) == (9792, 23, 17)
    assert deepspeed.compute_elastic_config(config, "0.19.8+abc") == (batch, ranks)
    with pytest.raises(deepspeed.ElasticityIncompatibleWorldSize):
        deepspeed.compute_elastic_config(config, world_size=128)
    later = {"elasticity": {**BLOCK, "version": 0.2}}
    for wrong in (config | {"elasticity": {}}, later):
        with pytest.raises(deepspeed.ElasticityError):
            deepspeed.compute_elastic_config(wrong)
    with pytest.raises(deepspeed.ElasticityError, match=r"at least 0\.3\.8"):
        deepspeed.compute_elastic_config(config, "0.2")
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert deepspeed.compute_elastic_config(later, return_microbatch=True)[2] == 17
    deepspeed.ensure_immutable_elastic_config(BLOCK)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(BLOCK))
    deepspeed.ensure_immutable_elastic_config(BLOCK)
    with pytest.raises(deepspeed.ElasticityError, match=r"max_train_batch_size = 27: expected 10000"):
        deepspeed.ensure_immutable_elastic_config({**BLOCK, "max_train_batch_size": 27})
