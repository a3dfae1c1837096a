"""Sampling against the distributions by hand and against Hugging Face's processors; text as it streams."""

from __future__ import annotations

import codecs
import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from thalweg.infer import Request, SamplingParams, TokenLogprob
from thalweg.infer.engine.detokenizer import IncrementalDetokenizer
from thalweg.infer.engine.sampler import NotFiniteError, SampledRow, sample, sample_token, seeded_uniform
from thalweg.infer.engine.scheduler import Sequence

VOCAB = 40


class Chosen(NamedTuple):
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def choose(logits: torch.Tensor, sequences: list[Any]) -> list[Chosen]:
    """Choose a token for each row, of rows that are padded as the CPU kernels' are."""
    logits = torch.nn.functional.pad(logits, (0, 3), value=math.inf)[:, : logits.shape[1]]
    output = sample(logits, [SampledRow(row, of_row) for row, of_row in enumerate(sequences)])
    chosen = []
    for row, of_row in enumerate(sequences):
        try:
            chosen.append(Chosen(*sample_token(output, row, of_row)))
        except NotFiniteError as error:
            chosen.append(Chosen(0, error=str(error)))
    return chosen


def sequence(prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **fields: Any) -> Sequence:
    made = Sequence(Request("r", prompt, SamplingParams(**fields)), 0, 0, 100, frozenset({7}))
    made.tokens += output
    return made


def hugging_face(p: SamplingParams, prompt: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
    steps = LogitsProcessorList()
    if p.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        steps.append(MinPLogitsWarper(p.min_p))
    return steps(torch.tensor([prompt]), row[None].clone())[0].softmax(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.3, 2.0),
    st.sampled_from([0, 1, 3, 17]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([1.0, 1.7]),
)
def test_the_kept_tokens_are_hugging_faces(
    seed: int, heat: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> None:
    """Every draw lies in the support, and the support's most and least likely tokens can be drawn."""
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    fields = {"temperature": heat, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    made = sequence(**fields, repetition_penalty=repetition, seed=seed)
    want = hugging_face(made.params, (1, 2, 3), row)
    from thalweg.infer.engine import sampler

    drawn = set()
    for draw in (0.0, 0.25, 0.5, 0.75, 1 - 1e-12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "seeded_uniform", lambda *_, draw=draw: draw)
            drawn.add(choose(row[None], [made])[0].token)
    assert all(want[token] > 0 for token in drawn)
    if top_k != 1 and want.max() < 0.75:
        assert len(drawn) > 1


@pytest.mark.parametrize("heat", [1e-3, 1e-12, 1e-44, 5e-324])
def test_a_temperature_near_0_chooses_the_most_likely(heat: float) -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 20
    for fields in ({}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 5}):
        made = sequence(temperature=heat, seed=1, **fields)
        assert choose(row[None], [made])[0].token == int(row.argmax())


def test_frequencies_follow_the_probabilities() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
    drawn: Counter[int] = Counter()
    for seed in range(4000):
        drawn[choose(row[None], [sequence(prompt=(1,), seed=seed)])[0].token] += 1
    for token, chance in enumerate(row.softmax(0).tolist()):
        assert abs(drawn[token] / 4000 - chance) < 4 * math.sqrt(chance * (1 - chance) / 4000) + 1e-3


def test_a_seed_gives_the_same_in_any_company() -> None:
    rows = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    made = [sequence(seed=i, temperature=1.5, top_p=0.9) for i in range(6)]
    together = [c.token for c in choose(rows, made)]
    assert together == [choose(rows[i : i + 1], [made[i]])[0].token for i in range(6)]
    assert seeded_uniform(sequence(seed=1)) != seeded_uniform(sequence(seed=1, output=(4,)))


def test_penalties_biases_and_masked_ends() -> None:
    row = torch.zeros(VOCAB)
    row[5], row[6], row[7] = 3.0, 2.5, 9.0
    plain = {"temperature": 0.0}
    assert choose(row[None], [sequence(**plain)])[0].token == 7
    assert choose(row[None], [sequence(**plain, min_tokens=2)])[0].token == 5
    heavy = sequence(output=(7, 5), temperature=0.0, frequency_penalty=2.0, presence_penalty=5.0)
    assert choose(row[None], [heavy])[0].token == 6
    assert choose(row[None], [sequence(**plain, logit_bias={7: -100, 9: 50})])[0].token == 9
    rows = [
        sequence(**plain, logit_bias={9: 50}),
        sequence(**plain, min_tokens=2),
        sequence(**plain, logit_bias={3: 9.5}),
    ]
    assert [made.token for made in choose(row.expand(3, -1), rows)] == [9, 5, 3]
    chosen = choose(row[None], [sequence(**plain, logprobs=2)])[0].logprob
    assert chosen is not None and [t for t, _ in chosen.top] == [7, 5]
    assert chosen.logprob == pytest.approx(row.log_softmax(0)[7].item())


def test_output_that_is_not_finite_is_an_error_of_its_row() -> None:
    rows = torch.zeros(2, VOCAB)
    rows[0, 3], rows[1, 4] = math.nan, 1.0
    bad, good = choose(rows, [sequence(temperature=0.0), sequence(temperature=0.0)])
    assert bad.error and good.error is None and good.token == 4


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class Pieces:
    """Decodes tokens that are bytes; ``one_each`` puts a U+FFFD for each bad byte, as byte fallback does."""

    def __init__(self, one_each: bool) -> None:
        self.errors = "each" if one_each else "replace"
        self.longest = 0

    def decode(self, tokens: list[bytes], skip_special_tokens: bool, **_: Any) -> str:
        self.longest = max(self.longest, len(tokens))
        return b"".join(tokens).decode("utf-8", self.errors)


codecs.register_error("each", lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


@pytest.mark.parametrize("one_each", [False, True])
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(["é", "€", "𝄞", "ab"]).map(str.encode)),
        max_size=90,
    )
)
def test_bytes_that_never_become_a_character_hold_back_no_more_than_three(one_each: bool, tokens: list[bytes]) -> None:
    """A model may say one byte for ever: its text streams all the same, and is not decoded from the start."""
    decoder = Pieces(one_each)
    stream = IncrementalDetokenizer(decoder, (), include_stop=False, skip_special_tokens=True)
    got = ""
    for number, token in enumerate(tokens, 1):
        got += stream.append(token)[0]  # type: ignore[arg-type]
        so_far = decoder.decode(tokens[:number], True)
        assert len(so_far) - len(got) <= 3
        decoder.longest = 0
    whole = decoder.decode(tokens, True)
    decoder.longest = 0
    assert got + stream.flush() == whole
    assert decoder.longest <= 70


def test_a_byte_said_for_ever_is_not_decoded_from_the_start() -> None:
    decoder = Pieces(False)
    stream = IncrementalDetokenizer(decoder, (), include_stop=False, skip_special_tokens=True)
    assert "".join(stream.append(b"\xc3")[0] for _ in range(500)) + stream.flush() == "\ufffd" * 500  # type: ignore[arg-type]
    assert decoder.longest <= 40


def test_text_is_what_the_tokens_say_and_not_cleaned_up() -> None:
    """A tokenizer's config may ask for that: the space before a full stop would come and go as text streams."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["a", "Ġ.", "Ġn't", "b"]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "a"))
    model.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=True)
    stream = IncrementalDetokenizer(fast, (), include_stop=False, skip_special_tokens=True)
    assert "".join(stream.append(token)[0] for token in range(4)) + stream.flush() == "a . n'tb"


class Spaces:
    """A tokenizer whose tokens are words with a space in front, which the first one loses."""

    def decode(self, tokens: list[str], skip_special_tokens: bool = True, **_: Any) -> str:
        return "".join(tokens).removeprefix(" ")


@given(st.lists(st.sampled_from([" a", " bc", "d", ".", " "]), max_size=8), st.integers(0, 8))
def test_the_space_between_prompt_and_output_is_there(tokens: list[str], at: int) -> None:
    stream = IncrementalDetokenizer(
        Spaces(), (), include_stop=False, skip_special_tokens=True, prompt_tokens=tokens[:at]
    )  # type: ignore[arg-type]
    got = "".join(stream.append(token)[0] for token in tokens[at:]) + stream.flush()  # type: ignore[arg-type]
    assert Spaces().decode(tokens[:at]) + got == Spaces().decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.booleans())
def test_text_streams_whole_characters_up_to_the_stop(text: str, stops: list[str], include: bool) -> None:
    stream = IncrementalDetokenizer(Bytes(), stops, include_stop=include, skip_special_tokens=True)
    got, stop = "", None
    for token in text.encode("utf-8"):
        new, stop = stream.append(token)
        assert "\ufffd" not in new or "\ufffd" in text
        got += new
        if stop is not None:
            break
    else:
        got += stream.flush()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert got == text and stop is None
    else:
        assert stop is not None
        end = min(ends)
        assert got == (text[:end] if include else text[: end - len(stop)])
