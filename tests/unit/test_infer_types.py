"""Sampling parameters refuse what cannot work, with the field's name in the message."""

from __future__ import annotations

import math

import pytest

from thalweg.infer import EngineConfig, RequestOutput, SamplingParams, StructuredOutput

BAD = [
    ("max_tokens", 0), ("max_tokens", 1.5), ("min_tokens", -1), ("n", 0), ("n", 10**9), ("n", True),
    ("temperature", math.nan), ("temperature", -0.1), ("temperature", math.inf), ("top_k", -1), ("top_p", 0),
    ("top_p", 1.01), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", math.inf),
    ("frequency_penalty", "1"), ("logit_bias", {1: math.nan}), ("logit_bias", {"a": 1}), ("stop", "text"),
    ("stop", ("",)), ("stop", None), ("stop_token_ids", ("a",)), ("stop_token_ids", 5), ("logit_bias", [1]),
    ("seed", 0.5), ("logprobs", -1), ("temperature", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_good_values_pass() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(top_k=1).greedy
    assert not SamplingParams(temperature=0.7, top_p=0.9, n=3, seed=-5, stop=("a",), logprobs=5).greedy
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_options_and_structures() -> None:
    for bad in ({"dtype": "float128"}, {"quantization": "int7"}, {"max_num_seqs": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            EngineConfig(**bad)
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutput()
    assert RequestOutput("a", 0, finish_reason="stop").finished and not RequestOutput("a", 0).finished
