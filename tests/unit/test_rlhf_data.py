"""Data of RLHF: forms of examples, parts and blends, packed rows, prompts that depend on the iteration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rlhf_support import make_data, make_tokenizer
from thalweg.rlhf.data import (
    AnswerDataset,
    PackedAnswers,
    PromptSource,
    encode_example,
    encode_prompt,
    load_examples,
)

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


def test_a_pair_of_conversations_follows_what_they_have_in_common() -> None:
    """Also where they part before the last message: only then does a user's turn count, as TRL's."""

    def talk(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

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
