"""The text of a config: JSON with the habits of hand-written files, and each fault with its line."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from thalweg.config import ConfigError, load_config
from thalweg.config.hjson import parse


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('// c\n{"a": 1 // d\n}', {"a": 1}),
        ('{"a": 1 # d\n}', {"a": 1}),
        ('{/* "b": 2, */ "a": 1}', {"a": 1}),
        ('{"a": "// no comment # here"}', {"a": "// no comment # here"}),
        ('{\n a: 1\n b: "x"\n}', {"a": 1, "b": "x"}),
        ("a: 1\nb: {c: true}\n", {"a": 1, "b": {"c": True}}),
        ("{type: AdamW, x: null}", {"type": "AdamW", "x": None}),
        ("{type: AdamW # the usual\n}", {"type": "AdamW"}),
        ("{a: 'it'}", {"a": "it"}),
        ("{a: '''two\nlines'''}", {"a": "two\nlines"}),
        ('{"a": 5e8, "b": 1e-5, "c": -2, "d": 0.5}', {"a": 5e8, "b": 1e-5, "c": -2, "d": 0.5}),
        ('{"a": "\\u00e9\\n"}', {"a": "é\n"}),
        ('{"a.b": 1, "a": {"b": 2}}', {"a.b": 1, "a": {"b": 2}}),
        ("{}", {}),
    ],
)
def test_reads(text: str, tree: Any) -> None:
    document = parse(text)
    assert not document.problems
    assert document.tree == tree


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 1, "empty"),
        ("// only this", 1, "empty"),
        ('{"a": 1', 1, "}"),
        ('{"a": 1}}', 1, "nothing after"),
        ('{\n"a" 1}', 2, ":"),
        ('{"a": 1,,}', 1, "key"),
        ("{,}", 1, "key"),
        ('{"a": 1 "b": 2}', 1, "end of the value"),
        ('{"a": [1 2]}', 1, None),
        ('{"a":\n\n}', 3, "a value"),
        ('{"a": "open\n}', 1, "closed"),
        ("{a: 'open\n'}", 1, "closed"),
        ("{/* open", 1, "*/"),
        ("{a: http://x}", 1, "double quotes"),
        ('{"a": x{y}', 1, "double quotes"),
        ("[" * 100, 1, "levels"),
    ],
)
def test_refuses_with_the_line(text: str, line: int, word: str | None) -> None:
    document = parse(text)
    if word is None:  # `1 2` is one word, which the schema then refuses
        assert document.tree == {"a": ["1 2"]}
        return
    assert document.tree is None
    assert document.problems[-1].line == line
    assert word in str(document.problems[-1])


def test_a_duplicate_key_is_told_with_both_lines() -> None:
    document = parse('{\n"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3\n}')
    told = [(p.path, p.expected, p.line) for p in document.problems]
    assert told == [
        ("b.c", "the key once; it is on lines 3 and 4", 4),
        ("a", "the key once; it is on lines 2 and 5", 5),
    ]


def test_a_key_three_times_is_one_problem_with_three_lines() -> None:
    document = parse('{"a": 1,\n"a": 2,\n"a": 3}')
    assert [p.expected for p in document.problems] == ["the key once; it is on lines 1 and 2 and 3"]


def test_duplicates_in_a_list_of_blocks_and_in_comments() -> None:
    document = parse('{"a": [{"b": 1}, {"b": 2}], /* "a": 0 */ "c": {"a": 1}}')
    assert not document.problems


def test_lines_of_all_paths() -> None:
    document = parse('{\n"a": {\n"b": [1,\n2]}}')
    assert document.lines["a"] == 2
    assert document.lines["a.b"] == 3
    assert document.lines["a.b[1]"] == 4


def test_a_number_too_long_for_an_integer_is_no_crash() -> None:
    assert parse('{"a": ' + "9" * 10_000 + "}").tree == {"a": float("inf")}


@pytest.mark.alone
def test_time_is_linear_in_the_text() -> None:
    text = "{" + ",\n".join(f'"k{i}": [1, 2, {{"x": "y"}}]' for i in range(3_000)) + "}"
    document = parse(text)
    assert document.tree == json.loads(text)
    assert document.lines["k2999"] == 3_000


HOSTILE = {
    "values": '{"a":[' + "1," * 300_000 + "]}",
    "duplicates": "{" + ",\n".join('"a": 1' for _ in range(15_000)) + "}",
    "unknown keys": "{" + ",\n".join(f'"k{i}": 1' for i in range(15_000)) + "}",
    "comments": "{" + "/*" * 300_000,
    "blanks": "{" + " " * 900_000 + "x",
    "levels": '{"a":' * 100_000,
    "quotes": '{"a": "' + '\\"' * 400_000,
    "words": "{a: " + "x " * 400_000 + "}",
    "length": '{"a": "' + "x" * 3_000_000 + '"}',
}


@pytest.mark.parametrize("name", list(HOSTILE))
@pytest.mark.alone
def test_hostile_texts_are_refused_within_a_second_of_work(name: str) -> None:
    # Of this thread: others of the process may be at work for tests that came before.
    start = time.thread_time()
    with pytest.raises(ConfigError):
        load_config(HOSTILE[name])
    assert time.thread_time() - start < 1.0
