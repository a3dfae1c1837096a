"""Models that listen and speak: token for token Hugging Face's, in any company, under preemption."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thalweg
from tests.marks import nightly
from tests.unit.infer_models import SEQ2SEQ_CONFIGS, greedy_generate, tiny_decoder, tiny_encoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.hf_generate import unsupported_reason
from thalweg.ops import cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

RUNNER = "torch" if cpu_kernels.unsupported_reason() else "cpu"
OPTIONS = EngineConfig(dtype="fp32", max_num_seqs=8, max_model_len=96, max_num_batched_tokens=64)
SOURCES = [[(11 * i * i + 5 * n + 7) % 128 + 2 for i in range(n)] for n in (1, 15, 16, 17, 40)]
DESCRIBED = sorted(set(SEQ2SEQ_CONFIGS) - {"blenderbot_small"})


def expected(model: Any, sources: list[list[int]], count: int) -> list[list[int]]:
    rows = [model.generate(torch.tensor([s]), max_new_tokens=count, do_sample=False)[0] for s in sources]
    return [row[1:].tolist() for row in rows]


@pytest.mark.parametrize("runner", [RUNNER] if RUNNER == "torch" else [RUNNER, nightly("torch")])
@pytest.mark.parametrize("name", DESCRIBED)
def test_tokens_equal_hugging_face(name: str, runner: str) -> None:
    model = tiny_encoder(name, seed=2 if name == "bart" else 0)  # with which each source has its own answer
    engine = load_engine(model, OPTIONS, runner=runner)
    assert engine.metadata.kind == "seq2seq"
    want = expected(model, SOURCES, 20)
    assert greedy_generate(engine, SOURCES, 20) == want
    assert len({tuple(row) for row in want}) == len(SOURCES)
    assert greedy_generate(engine, SOURCES, 20) == want  # sources found again
    assert engine.stats().cached_tokens > 0


def test_another_family_runs_through_its_own_code() -> None:
    model = tiny_encoder("blenderbot_small")
    engine = load_engine(model, OPTIONS)
    assert type(engine.runner).__name__ == "TransformersRunner"
    assert greedy_generate(engine, SOURCES, 10) == expected(model, SOURCES, 10)


def test_the_comparison_would_notice_other_biases() -> None:
    """Negative control: the positions' biases of one head."""
    model = tiny_encoder("t5")
    want = expected(model, SOURCES, 20)
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[:, 0] *= -1
    assert greedy_generate(load_engine(model, OPTIONS), SOURCES, 20) != want


@cache
def engine_of(blocks: int) -> LLMEngine:
    per_block = 3 * 2 * 3 * 16 * 4 * 16
    options = EngineConfig(
        dtype="fp32", max_num_seqs=5, max_model_len=96, max_num_batched_tokens=160, kv_cache_bytes=blocks * per_block
    )
    engine = load_engine(tiny_encoder("flan_t5"), options, runner=RUNNER)
    assert isinstance(engine, LLMEngine) and engine.runner.num_blocks == blocks
    return engine


def fresh(blocks: int, step_tokens: int, prefix_cache: bool) -> LLMEngine:
    """An engine of its own around the runner that all examples share."""
    shared = engine_of(blocks)
    return LLMEngine(
        shared.runner, shared.metadata, max_num_seqs=5, max_num_batched_tokens=step_tokens, prefix_cache=prefix_cache,
        decoder_start_ids=shared.decoder_start_ids,
    )  # fmt: skip


@cache
def alone(length: int, heat: float, count: int) -> dict[int, list[int]]:
    engine = fresh(40, 160, False)
    return work(engine, [(length, heat, count, 0, None)])["0"]


def work(engine: LLMEngine, wanted: list[Any]) -> dict[str, dict[int, list[int]]]:
    got: dict[str, dict[int, list[int]]] = {}
    step, waiting = 0, list(enumerate(wanted))
    while waiting or engine.has_work():
        for number, (length, heat, count, _, _) in [w for w in waiting if w[1][3] <= step]:
            params = SamplingParams(temperature=heat, seed=3, n=2 if heat else 1, max_tokens=count)
            engine.add(Request(str(number), SOURCES[length], params))
            waiting = [w for w in waiting if w[0] != number]
        for number, (_, _, _, arrival, cancel) in enumerate(wanted):
            if cancel is not None and arrival + cancel == step:
                engine.abort(str(number))
        for output in engine.step():
            got.setdefault(output.request_id, {}).setdefault(output.index, []).extend(output.token_ids)
        step += 1
        assert step < 2000, "no progress"
    assert engine.stats().kv_blocks_used == 0 and engine.stats().running == 0
    return got


requests = st.lists(
    st.tuples(
        st.integers(0, len(SOURCES) - 1), st.sampled_from([0.0, 0.8]), st.integers(1, 30), st.integers(0, 9),
        st.one_of(st.none(), st.none(), st.integers(1, 20)),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(requests, st.sampled_from([6, 12]), st.integers(1, 40), st.booleans())
def test_any_company_gives_the_same_tokens(
    wanted: list[Any], blocks: int, step_tokens: int, prefix_cache: bool
) -> None:
    got = work(fresh(blocks, step_tokens, prefix_cache), wanted)
    for number, (length, heat, count, _, cancel) in enumerate(wanted):
        for index, tokens in alone(length, heat, count).items():
            mine = got.get(str(number), {}).get(index, [])
            assert mine == (tokens if cancel is None else tokens[: len(mine)]), number


def test_the_cases_do_preempt() -> None:
    engine = fresh(6, 40, True)
    work(engine, [(3, 0.0, 40, 0, None)] * 4)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and stats.finished == {"length": 4}


def test_what_can_never_run_is_refused() -> None:
    engine = fresh(6, 40, True)
    with pytest.raises(ValueError, match="give kv_cache_bytes more"):
        engine.add(Request("r", [1] * 96))
    with pytest.raises(ValueError, match="this model takes 96"):
        engine.add(Request("r", [1] * 97))
    with pytest.raises(ValueError, match="does not score it"):
        engine.add(Request("r", [1], SamplingParams(prompt_logprobs=0)))
    with pytest.raises(ValueError, match="only the weights of causal models"):
        load_engine(tiny_encoder("t5"), EngineConfig(weight_offload="cpu"))


@pytest.mark.parametrize("heat", [0.0, 2.0])
def test_tokens_that_the_generation_config_bans_are_not_said(heat: float) -> None:
    """Marian's is that of the padding, which a model may say for ever."""
    model = tiny_encoder("marian")
    likely = greedy_generate(load_engine(model, OPTIONS), SOURCES[:1], 1)[0][0]
    model.generation_config.bad_words_ids = [[likely], [129, 130], *([token] for token in range(40))]
    model.generation_config.suppress_tokens = [*range(40, 80), 10**6]
    engine = load_engine(model, OPTIONS)
    for number, source in enumerate(SOURCES):
        engine.add(Request(str(number), source, SamplingParams(temperature=heat, seed=1, max_tokens=10)))
    # A bias that a request asks for goes before.
    own = SamplingParams(temperature=0, max_tokens=10, logit_bias={likely: 100.0})
    engine.add(Request("own", SOURCES[0], own))
    said: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.token_ids)
    assert said.pop("own") == [likely] * 10
    assert not {likely, *range(80)} & {token for tokens in said.values() for token in tokens}
    if heat == 0:
        model.generation_config.suppress_tokens.pop()  # the engine alone leaves out what is no token
        assert list(said.values()) == expected(model, SOURCES, 10)


def test_each_request_names_what_its_translation_begins_with() -> None:
    """As NLLB needs it; beside requests of other languages and of none."""
    model = tiny_encoder("m2m_100")
    languages = (None, 9, 120)
    want = {
        language: model.generate(
            torch.tensor([SOURCES[3]]), max_new_tokens=10, do_sample=False, forced_bos_token_id=language
        )[0, 1:].tolist()
        for language in languages
    }
    assert len({tuple(tokens) for tokens in want.values()}) == 3 and want[9][0] == 9
    for default, runner in ((None, RUNNER), (None, "transformers"), (120, RUNNER)):
        model.generation_config.forced_bos_token_id = default
        engine = load_engine(model, OPTIONS, runner=runner)
        for language in languages[default is not None :]:
            params = SamplingParams(
                temperature=0, max_tokens=10 if language is None else 9, forced_bos_token_id=language
            )
            engine.add(Request(str(language), SOURCES[3], params))
        engine.add(Request("default", SOURCES[3], SamplingParams(temperature=0, max_tokens=9)))
        said: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step():
                said.setdefault(output.request_id, []).extend(output.token_ids)
        assert said.pop("default") == (want[None][:9] if default is None else want[120][1:])
        assert said == {str(x): want[x] if x is None else want[x][1:] for x in languages[default is not None :]}
    with pytest.raises(ValueError, match="forced_bos_token_id: a token not in 0 to 130"):
        engine.add(Request("r", [1], SamplingParams(forced_bos_token_id=131)))
    with pytest.raises(ValueError, match="forced_bos_token_id is -1"):
        SamplingParams(forced_bos_token_id=-1)
    with pytest.raises(ValueError, match="forced_bos_token_id: for encoder-decoder models"):
        load_engine(tiny_decoder("llama"), OPTIONS).add(Request("r", [1], SamplingParams(forced_bos_token_id=5)))


def test_generate_forces_the_token_that_hugging_face_forces() -> None:
    """By the engine, whatever the length says; and the module's own method where the two do not go together."""
    model = tiny_encoder("mbart", seed=3)
    ids = torch.tensor([SOURCES[3], SOURCES[3][::-1]])
    fields = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    for default in (None, 120):
        model.generation_config.forced_bos_token_id = default
        engine = thalweg.init_inference(model, max_batch=4, max_length=96)
        start_ids = engine.core.decoder_start_ids
        for asked, by_engine in (
            ({"max_new_tokens": 9, "forced_bos_token_id": 9}, True),
            ({"max_length": 7, "forced_bos_token_id": 9}, True),
            ({"forced_bos_token_id": 9}, True),
            ({"max_new_tokens": 9}, True),
            ({"max_new_tokens": 9, "forced_bos_token_id": 9, "min_new_tokens": 6, "eos_token_id": 125}, True),
            ({"max_new_tokens": 9, "forced_bos_token_id": 9, "repetition_penalty": 1.5}, True),
            ({"max_new_tokens": 1, "forced_bos_token_id": 9}, False),
            ({"max_new_tokens": 9, "forced_bos_token_id": None}, default is None),
            ({"max_new_tokens": 9, "forced_bos_token_id": 9, "decoder_start_token_id": 5}, False),
        ):
            want = model.generate(ids, **fields, **asked)
            assert torch.equal(engine.generate(ids, **fields, **asked), want), asked
            reason = unsupported_reason(model, (ids,), fields | asked, 96, start_ids)
            assert (reason == "") == by_engine, (asked, reason)
    causal = tiny_decoder("llama")
    assert "after a prompt" in unsupported_reason(causal, (ids,), {"forced_bos_token_id": 9, "max_new_tokens": 4}, 96)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_fewer_bits_give_nearly_the_same_logits(form: str) -> None:
    model = tiny_encoder("flan_t5")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".q." in name:
                parameter.mul_(0.2)  # attention that is sharp is a matter of luck in few bits
    quantize = form if form.startswith("int") else None
    options = EngineConfig(
        dtype="fp32" if quantize is None and form == "fp32" else "bf16",
        quantization=quantize,
        max_num_seqs=2,
        max_model_len=96,
    )
    engine = load_engine(model, options)
    engine.add(Request("r", SOURCES[4], SamplingParams(temperature=0, max_tokens=1, logprobs=130)))
    (output,) = engine.step()
    assert output.logprobs is not None
    ids = torch.tensor([SOURCES[4]])
    with torch.no_grad():
        want = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, -1].log_softmax(0)
    got = torch.tensor([value for _, value in sorted(output.logprobs[0].top)])
    kept = [token for token, _ in sorted(output.logprobs[0].top)]
    off = ((got - want[kept]).abs().mean() / want.std()).item()
    assert off < {"bf16": 0.1, "int8": 0.2, "int4": 0.7}[form]


def test_generate_takes_hugging_faces_arguments() -> None:
    model = tiny_encoder("t5")
    engine = thalweg.init_inference(model, max_batch=4, max_length=96)
    assert engine.core is not None
    ids = torch.zeros(2, 17, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate((17, 15)):
        ids[row, :length] = torch.tensor(SOURCES[3][:length]).clamp(min=1)
        mask[row, :length] = 1
    for fields in (
        {"max_new_tokens": 9},
        {"max_length": 7},
        {"max_new_tokens": 9, "repetition_penalty": 1.3},
    ):
        want = model.generate(ids, attention_mask=mask, do_sample=False, **fields)
        assert torch.equal(engine.generate(ids, attention_mask=mask, do_sample=False, **fields), want)
    beams = engine.generate(ids, attention_mask=mask, num_beams=2, do_sample=False, max_new_tokens=5)
    assert beams.shape[0] == 2
