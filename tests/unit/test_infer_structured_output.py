"""Structured output: whatever a model with random weights would say, its text has the shape asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, StructuredOutput, load_engine

pytest.importorskip("llguidance")
END = 256


@pytest.fixture(scope="module")
def engine() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    assert tokenizer.eos_token_id == END
    model = tiny_decoder("llama", vocab_size=300)  # more outputs than tokens
    model.config.eos_token_id = model.generation_config.eos_token_id = END
    return load_engine(model, EngineConfig(dtype="fp32", max_num_seqs=16, max_model_len=200), tokenizer)


def texts(engine: Any, structure: StructuredOutput | None, **fields: Any) -> list[str]:
    """Sample eight texts."""
    params = SamplingParams(**{"max_tokens": 150, "n": 8, "seed": 1, "structure": structure} | fields)
    engine.add(Request("r", [1, 2, 3], params))
    found, ends = [""] * params.n, {}
    while engine.has_work():
        for output in engine.step():
            found[output.index] += output.text
            if output.finished:
                ends[output.index] = output.finish_reason
    assert len(ends) == params.n
    return [found[i] for i in range(params.n) if ends[i] == "stop"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def test_json_of_a_schema(engine: Any) -> None:
    found = texts(engine, StructuredOutput(json_schema=json.dumps(SCHEMA)))
    assert len(set(found)) >= 4  # white space alone may use up the tokens of some
    for text in found:
        value = json.loads(text)
        assert set(value) == set(SCHEMA["properties"])
        assert re.fullmatch("[a-z]{1,8}", value["name"]) and 0 <= value["age"] <= 120
        assert value["kind"] in ("cat", "dog") and len(value["tags"]) <= 3


@pytest.mark.parametrize("fields", [{}, {"temperature": 0, "n": 1}, {"top_k": 5, "repetition_penalty": 1.3}])
def test_a_regex_and_a_choice(engine: Any, fields: dict[str, Any]) -> None:
    for text in texts(engine, StructuredOutput(regex=r"[0-9]{3}-(ab|c)+z"), **fields):
        assert re.fullmatch(r"[0-9]{3}-(ab|c)+z", text)
    choices = ("yes", 'no, "never"', "näh")
    found = texts(engine, StructuredOutput(choices=choices), **fields)
    assert found and set(found) <= set(choices)
    assert set(texts(engine, StructuredOutput(choices=choices), ignore_eos=True, **fields)) <= set(choices)


def test_without_a_structure_the_text_is_noise(engine: Any) -> None:
    """Negative control."""
    for text in texts(engine, None, max_tokens=20, ignore_eos=True):
        with pytest.raises(ValueError):
            json.loads(text)


def test_what_is_not_understood_is_refused(engine: Any) -> None:
    for bad in (StructuredOutput(regex="(a"), StructuredOutput(json_schema='{"type": "nonsense"}')):
        with pytest.raises(ValueError, match="not understood"):
            engine.add(Request("bad", [1], SamplingParams(structure=bad)))
    assert not engine.has_work()
    plain = load_engine(tiny_decoder("llama"), EngineConfig(dtype="fp32", max_num_seqs=1, max_model_len=32))
    with pytest.raises(ValueError, match="llguidance"):
        plain.add(Request("r", [1], SamplingParams(structure=StructuredOutput(regex="a"))))
