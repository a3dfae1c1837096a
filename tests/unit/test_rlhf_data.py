"""Data of RLHF: forms of examples, parts and blends, packed rows, prompts that depend on the iteration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rlhf_support import make_data, make_tokenizer
from thalweg.rlhf.data import (
    AnswerDataset,
    PackedAnswers,
    PromptSource,
    encode_example,
    encode_prompt,
    end_ids,
    load_examples,
)
from thalweg.rlhf.packing import pack_rows

TOKENIZER = make_tokenizer()


def _text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def test_a_line_of_a_csv_with_too_many_fields_does_not_shift_the_others(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt,chosen\n" + "".join(f"Q{i}: , A{i}\n" for i in range(20)))
    (one, *_) = examples = load_examples([str(path)], "1", "sft", seed=0)
    assert one["prompt"].startswith("Q") and len(examples) > 10
    path.write_text("prompt,chosen\n" + "".join(f"Q{i}: , A{i}, and more\n" for i in range(20)))
    with pytest.warns(Warning, match="Length of header"):
        examples = load_examples([str(path)], "1", "sft", seed=0)
    assert {one["prompt"] for one in examples} == {f"Q{i}: " for i in range(20)}


@pytest.mark.parametrize(
    ("example", "prompt", "answer"),
    [
        ({"prompt": "Q:", "chosen": " yes"}, "Q:", " yes<|end|>"),
        ({"text": "all of it"}, "", "all of it<|end|>"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
            "<user>hi<assistant>", "ho<|end|>",
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}]},
            "<user>a<assistant>", "b<|end|>",
        ),
        (  # whole conversations: ultrafeedback's beside its prompt, TRL's implicit prompt
            {"prompt": "a", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "<user>a<assistant>", "b<|end|>",
        ),
        (
            {"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "<user>a<assistant>", "b<|end|>",
        ),
        ({"chosen": [{"role": "assistant", "content": "b"}]}, "", "<assistant>b<|end|>"),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}]}, "<user>a<assistant>", "b<|end|>"),
        (
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "<user>a<assistant>", "b<|end|>",
        ),
    ],
)  # fmt: skip
def test_forms_of_an_example(example: dict[str, Any], prompt: str, answer: str) -> None:
    assert tuple(map(_text, encode_example(TOKENIZER, example))) == (prompt, answer)
    assert _text(encode_prompt(TOKENIZER, example)) == prompt


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_chatml_tokenizer(eos_token: str = "<|end|>") -> Any:
    """A tokenizer with Qwen's template, whose turns end with another token than its texts do."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": eos_token})
    tokenizer.chat_template = CHATML
    return tokenizer


def talk(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|end|>", "<|im_end|>"]),
        # Phi 3's end of a turn and then a text's; Gemma's, whose token for empty lines is an added one as well.
        ("{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}<|end|>", ["<|end|>", "<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }}<|im_end|>\n\n{% endfor %}", ["<|end|>", "<|im_end|>"]),
        ("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}", ["<|end|>"]),
        (None, ["<|end|>"]),
    ],
    ids=["chatml", "two ends", "an empty line", "no end", "none"],
)
def test_an_answer_ends_with_the_tokenizer_s_end_or_with_what_the_template_writes_behind_it(
    template: str | None, ends: list[str]
) -> None:
    tokenizer = make_chatml_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    tokenizer.chat_template = template
    assert tokenizer.convert_ids_to_tokens(end_ids(tokenizer)) == ends


def test_a_chat_s_answer_is_no_longer_than_a_response_can_be() -> None:
    """The line's end that a template writes behind a turn's end is no part of it: a response ends before it, and a
    reward model is read there."""
    tokenizer = make_chatml_tokenizer("<|im_end|>")
    answers = {"chosen": talk("", "b")[1:], "rejected": talk("", "c\n")[1:]}
    (row,) = AnswerDataset([{"prompt": talk("a"), **answers}], tokenizer, 64, ("chosen", "rejected")).rows
    assert [tokenizer.decode(row[name]) for name in answers] == ["b<|im_end|>", "c\n<|im_end|>"]
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "")  # the end of the line is all that ends a turn
    texts = [{"prompt": "Q:", "chosen": f" yes{end}"} for end in ("", "<|im_end|>", "\n")]
    rows = AnswerDataset([{"messages": talk("a", "b")}, *texts], tokenizer, 64).rows
    answers = "b\n", " yes<|im_end|>", " yes<|im_end|>", " yes\n<|im_end|>"
    assert tuple(tokenizer.decode(row["chosen"]) for row in rows) == answers


THINKS = (  # as Qwen 3: the last turn is begun otherwise than those of history
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, THINKS], ids=["chatml", "thinks"])
@pytest.mark.parametrize("max_length", [40, 60, 400])
def test_every_turn_of_the_assistant_s_counts(template: str, max_length: int) -> None:
    """Also where what comes before the last one does not fit."""
    tokenizer = make_chatml_tokenizer()
    tokenizer.chat_template = template
    chats = [{"messages": talk("hi", "ho", "why?", "so", "and?", "no.")}, {"messages": talk("a", "b", "thanks, bye")}]
    data = AnswerDataset(chats, tokenizer, max_length)
    batch = data.collate(data.rows)
    counted = map(tokenizer.decode, batch["input_ids"].masked_fill(~batch["response_mask"], tokenizer.eos_token_id))
    thought = "<think></think>" * (template == THINKS)
    expected = ["ho", "so", f"{thought}no."][: {40: 1, 60: 2, 400: 3}[max_length]], [f"{thought}b"]
    said = [[part for part in text.split("<|end|>") if part] for text in counted]
    assert said == [[f"{text}<|im_end|>" for text in texts] for texts in expected]
    packed = PackedAnswers(data, 400)
    assert torch.equal(packed.collate([data.rows])["response_mask"], batch["response_mask"])
    laid_out = pack_rows(batch, 8, always=True)  # each token sees all that is before it, its end is where it was
    assert laid_out is not None
    tokens = laid_out.inputs["input_ids"].flatten()[laid_out.places]
    assert torch.equal(tokens[batch["attention_mask"]], batch["input_ids"][batch["attention_mask"]])
    places = laid_out.places[0][batch["attention_mask"][0]]
    width = laid_out.inputs["input_ids"].shape[1]
    seen = laid_out.inputs["attention_mask"][places[-1] // width, 0, places[-1] % width]
    assert set(seen.nonzero().flatten().tolist()) == set((places % width).tolist())


@pytest.mark.parametrize(
    "template",
    [
        # Mistral's: what stands before the last question alone.
        CHATML.replace("m.role + ", "m.role + ('SYS' if loop.index0 == (messages | length - 1) // 2 * 2 else '') + "),
        # gpt-oss's: an end that only the last turn has.
        CHATML.replace("'<|im_end|>\n'", "('<|im_end|>' if loop.last and m.role == 'assistant' else '') + '\\n'"),
    ],
    ids=["the last question", "the last answer"],
)
def test_a_turn_that_the_template_writes_otherwise_in_history_does_not_count(template: str) -> None:
    tokenizer = make_chatml_tokenizer()
    assert template != CHATML
    for counted, tokenizer.chat_template in ((1, template), (2, CHATML)):  # the control
        data = AnswerDataset([{"messages": talk("hi", "ho", "why?", "so")}], tokenizer, 400)
        batch = data.collate(data.rows)
        said = tokenizer.decode(batch["input_ids"][batch["response_mask"]])
        assert said == "ho<|im_end|>so<|im_end|>"[-12 * counted :]


def test_what_the_user_says_last_is_no_answer() -> None:
    """SFT leaves it out; a rollout answers it."""
    chat = [{"role": "system", "content": "be brief"}, *talk("2+2?")]
    (prompt, _), *_ = PromptSource([{"messages": chat}], TOKENIZER, 99, seed=0).items
    assert _text(prompt) == "<system>be brief<user>2+2?<assistant>"
    example = {"messages": talk("hi", "ho", "thanks, bye")}
    assert tuple(map(_text, encode_example(TOKENIZER, example))) == ("<user>hi<assistant>", "ho<|end|>")
    with pytest.raises(ValueError, match=r"an example has no chosen .* it has messages"):
        encode_example(TOKENIZER, {"messages": chat})


def test_a_text_is_not_its_own_rejected_answer() -> None:
    with pytest.raises(ValueError, match=r"an example has no rejected .* it has text"):
        AnswerDataset([{"text": "Q: a A: b"}], TOKENIZER, 64, ("chosen", "rejected"))


def test_how_many_are_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "p" * count, "chosen": "c"} for count in (3, 12, 14)]
    with caplog.at_level("INFO", "thalweg"):
        AnswerDataset(rows, TOKENIZER, 10)
        PromptSource(rows, TOKENIZER, 12, seed=0)
        AnswerDataset(rows, TOKENIZER, 20)
    assert caplog.messages == [
        "2 of 3 examples leave no room in max_seq_len 10: left out",
        "1 of 3 prompts do not fit max_prompt_seq_len 12: left out",
    ]


def test_a_pair_of_conversations_follows_what_they_have_in_common() -> None:
    """Also where they part before the last message: only then does a user's turn count, as TRL's."""
    same = {"prompt": "a", "chosen": talk("a", "b"), "rejected": talk("a", "c")}
    early = {"chosen": talk("a", "b", "c", "d"), "rejected": talk("a", "x", "y", "z")}
    rows = AnswerDataset([same, early], TOKENIZER, 99, ("chosen", "rejected")).rows
    assert [{name: _text(tokens) for name, tokens in row.items()} for row in rows] == [
        {"prompt": "<user>a<assistant>", "chosen": "b<|end|>", "rejected": "c<|end|>"},
        {
            "prompt": "<user>a<assistant>", "chosen": "b<|end|><user>c<assistant>d<|end|>",
            "rejected": "x<|end|><user>y<assistant>z<|end|>",
        },
    ]  # fmt: skip


def make_tokenizer_with_a_beginning() -> Any:
    """A tokenizer that puts a token of the beginning in front of a text, as Llama's."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=begin)
    assert _text(tokenizer("a")["input_ids"][1:]) == "a"
    return tokenizer


@pytest.mark.parametrize(
    ("example", "prompt"),
    [
        ({"prompt": "Q:", "chosen": "yes"}, "<s>Q:"),
        ({"prompt": "<s>Q:", "chosen": "yes"}, "<s>Q:"),
        ({"text": "all of it"}, "<s>"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "<user>a<assistant>"),
    ],
)
def test_a_text_begins_as_the_tokenizer_begins_one_and_a_template_s_chat_does_not(example: Any, prompt: str) -> None:
    tokenizer = make_tokenizer_with_a_beginning()
    assert tokenizer.decode(encode_example(tokenizer, example)[0]) == prompt
    assert tokenizer.decode(encode_prompt(tokenizer, example)) == prompt


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_an_answer_is_whole_where_a_template_begins_generation_otherwise_than_history() -> None:
    """As reasoning models' do; both answers of a pair follow the same prompt."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    user, answer = ({"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "four.")))
    example = {"messages": [user, answer]}
    assert tuple(map(_text, encode_example(tokenizer, example))) == ("<user>2+2?", "<assistant>four.<|end|>")
    assert _text(encode_prompt(tokenizer, example)) == "<user>2+2?<assistant><think>"  # of what generates
    thought = {"role": "assistant", "content": "<think>so, four."}
    pair = {"prompt": [user], "chosen": [thought], "rejected": [answer]}
    (row,) = AnswerDataset([pair], tokenizer, 64, ("chosen", "rejected")).rows
    assert {name: _text(tokens) for name, tokens in row.items()} == {
        "prompt": "<user>2+2?", "chosen": "<assistant><think>so, four.<|end|>", "rejected": "<assistant>four.<|end|>"
    }  # fmt: skip
    tokenizer.chat_template = "{{ messages | length }}" + THINKING
    with pytest.raises(ValueError, match="chat template writes messages otherwise"):
        encode_example(tokenizer, example)


def test_parts_are_apart_and_blends_hold_all(tmp_path: Path) -> None:
    paths = [str(make_data(tmp_path / f"{n}.jsonl", count)) for n, count in enumerate((40, 10))]
    rows = [json.loads(line) | {"file": path} for path in paths for line in Path(path).read_text().splitlines()]
    parts = [load_examples(paths, "2,4,4", step, seed=3) for step in ("sft", "reward", "ppo")]
    assert [len(part) for part in parts] == [10, 20, 20]
    assert sorted(json.dumps(x) for part in parts for x in part) == sorted(
        json.dumps({k: v for k, v in row.items() if k != "file"}) for row in rows
    )
    assert (
        parts[1] == load_examples(paths, "2,4,4", "reward", seed=3) != load_examples(paths, "2,4,4", "reward", seed=4)
    )
    with pytest.raises(ValueError, match="give a file that exists"):
        load_examples([str(tmp_path / "none.jsonl")], "2,4,4", "sft", 0)
    with pytest.raises(ValueError, match="leaves no example"):
        load_examples(paths, "0,4,4", "sft", 0)


def test_columns_that_a_row_of_a_file_does_not_have_are_not_there(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "Q", "chosen": "A"}, {"messages": messages})))
    assert sorted(load_examples([str(path)], "1,0,0", "sft", 0), key=len) == [
        {"messages": messages}, {"prompt": "Q", "chosen": "A"}
    ]  # fmt: skip


def test_whole_datasets_go_to_one_step_and_a_name_says_which_of_a_hub_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(make_data(tmp_path / f"{n}.jsonl", count)) for n, count in enumerate((40, 10))]
    part, blend = (load_examples(paths[:1], "2,4,4", "sft", 3, whole=whole) for whole in ((), paths[1:]))
    own = load_examples((), "0,4,4", "sft", 3, whole=paths[1:])
    assert [len(part), len(own), len(blend)] == [8, 10, 18]
    assert sorted(map(json.dumps, blend)) == sorted(map(json.dumps, part + own))
    asked: list[Any] = []
    monkeypatch.setattr("datasets.load_dataset", lambda *given, split: (asked.append(given), [{"text": "a"}])[1])
    load_examples(("wikitext",), "1,0,0", "sft", 0, config_name="wikitext-2-raw-v1")
    load_examples(("wikitext",), "1,0,0", "sft", 0)
    assert asked == [("wikitext", "wikitext-2-raw-v1"), ("wikitext", None)]


def test_a_step_that_has_a_part_of_the_data_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(make_data(tmp_path / "chats.jsonl", 20))
    with caplog.at_level("INFO", "thalweg"):
        assert len(load_examples((path,), "2,4,4", "sft", 0)) == 4
        load_examples((path,), "2,4,4", "dpo", 0, whole=(path,))
        load_examples((path,), "0,0,1", "dpo", 0)
    first, second = caplog.messages
    assert first == f"sft: 4 of 20 examples of {path} (data_split 2,4,4; --data_split 1,0,0 takes all)"
    assert second == f"dpo: 28 of 40 examples of {path}, {path} (data_split 2,4,4; --data_split 0,0,1 takes all)"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("broken.jsonl", '{"text": "a"}\n{"text": \n', "in row 1"), ("words.jsonl", "hello\n", "in row 0"),
        ("empty.jsonl", "", "it is empty"), ("empty.csv", "", "No columns"),
    ],
)  # fmt: skip
def test_a_file_without_rows_that_can_be_read_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}: no rows to read: .*{why}"):
        load_examples((str(tmp_path / name),), "1,0,0", "sft", 0)


def test_long_answers_are_cut_and_long_prompts_left_out() -> None:
    examples = [{"prompt": "p" * 6, "chosen": "c" * 9}, {"prompt": "p" * 12, "chosen": "c"}]
    data = AnswerDataset(examples, TOKENIZER, 10)
    assert [len(row["prompt"]) + len(row["chosen"]) for row in data.rows] == [10]
    with pytest.raises(ValueError, match="no example has room for an answer in max_seq_len 6"):
        AnswerDataset(examples, TOKENIZER, 6)


def test_packed_examples_are_all_there_once() -> None:
    data = AnswerDataset([{"prompt": "p" * n, "chosen": "abc" * n} for n in range(5)], TOKENIZER, 24)
    packed = PackedAnswers(data, 24)
    assert len(packed) < len(data)
    batch = packed.collate([packed[i] for i in range(len(packed))])
    seen = [ids[kept].tolist() for ids, kept in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert sorted(seen) == sorted(row["prompt"] + row["chosen"] for row in data.rows)


def test_prompts_of_an_iteration_depend_on_its_number_alone() -> None:
    prompts = PromptSource([{"prompt": "ab" * n} for n in range(1, 8)] + [{"prompt": ""}], TOKENIZER, 12, seed=1)
    assert len(prompts.items) == 6  # an empty one and one that is too long are left out
    taken = [[p for rank in range(2) for p, _ in prompts.take(i, 1, rank, 2)] for i in range(6)]
    assert taken[4] == [p for rank in range(2) for p, _ in prompts.take(4, 1, rank, 2)]
    first, second = ([p for each in half for p in each] for half in (taken[:3], taken[3:]))
    assert sorted(first) == sorted(second) == sorted(p for p, _ in prompts.items)  # each once in a pass
    assert first != second


def test_rows_without_a_prompt_are_left_out_and_none_with_one_is_an_error_that_names_the_columns() -> None:
    rows = [{"text": "a"}, {"prompt": "b", "word": "x"}, {"prompt": "c", "answer": "y"}]
    taken = PromptSource(rows, make_tokenizer_with_a_beginning(), 8, seed=0).take(0, 2, 0, 1)
    assert sorted(example["prompt"] for _, example in taken) == ["b", "c"]
    assert all(example.keys() == {"prompt", "word", "answer", "text"} for _, example in taken)
    with pytest.raises(
        ValueError, match="no example has prompt, messages or chosen messages: they have question, answer"
    ):
        PromptSource([{"question": "a", "answer": "b"}], TOKENIZER, 8, seed=0)
