"""The pages are true to the code: each command, option, Python name, key and variable in them exists."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.repo.source import ROOT
from thalweg import cli
from thalweg.config import load

PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
FOREIGN = {
    "--accelerator_config",
    "--config_file",
    "--use_cpu",
    "--shm-size",
    "--write",
    "--master_port",
    "--deepspeed",
}
"""Options of other programs."""


@cache
def parser_of(name: str) -> tuple[argparse.ArgumentParser, Any]:
    _, module, own = cli._build_parser(name)
    return own, module


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found |= options_of(inner)
    return found


def faults_of_command(words: list[str]) -> Iterator[str]:
    """What is wrong with the words after ``thalweg``."""
    names = [word for word in words[:1] if not word.startswith("-")]
    if not names:
        return
    if names[0] not in cli.COMMANDS:
        yield f"no subcommand {names[0]}"
        return
    own, module = parser_of(names[0])
    mine, passed = words[1:], []
    if hasattr(module, "split_passthrough"):
        mine, passed = module.split_passthrough(own, mine)
    known = options_of(own)
    given = [word.partition("=")[0] for word in mine if word.startswith("-")]
    yield from (f"{names[0]} has no {word}" for word in given if word not in known)
    if passed[:1] == ["thalweg"]:
        yield from faults_of_command(passed[1:])


def code_of(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(language, text) of each fence, and the inline code."""
    fences = re.findall(r"^```(\w*)\n([\s\S]*?)^```", text, re.MULTILINE)
    rest = re.sub(r"^```[\s\S]*?^```", "", text, flags=re.MULTILINE)
    return fences, re.findall(r"`([^`\n]+)`", rest)


def commands_of(text: str) -> Iterator[list[str]]:
    fences, inline = code_of(text)
    lines = [line for _, body in fences for line in body.replace("\\\n", " ").splitlines()]
    for line in [*lines, *inline]:
        if line.startswith("thalweg "):
            yield shlex.split(line.replace("\\|", " "), comments=True)[1:]


def faults_of_names(code: str) -> Iterator[str]:
    """Dotted names of ours in a piece of Python that do not exist."""
    for module, names in re.findall(r"from (thalweg[\w.]*) import ([\w, ]+)", code):
        for name in filter(None, re.split(r"[ ,]+", names)):
            yield from faults_of_names(f"{module}.{name}")
    for dotted in set(re.findall(r"(?<![\w./-])thalweg(?:\.[A-Za-z_]\w*)+", code)):
        found: Any = importlib.import_module("thalweg")
        parts = dotted.split(".")[1:]
        for number, part in enumerate(parts):
            try:
                found = getattr(found, part)
            except AttributeError:
                try:
                    found = importlib.import_module(".".join(["thalweg", *parts[: number + 1]]))
                except ImportError:
                    yield f"{dotted} does not exist"
                    break


def configs_of(fences: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for language, body in fences:
        if language == "json":
            yield json.loads(body)
        elif language == "python":
            for node in ast.walk(ast.parse(body)):
                if isinstance(node, ast.Dict) and any(
                    isinstance(key, ast.Constant) and key.value in ("zero_optimization", "optimizer")
                    for key in node.keys
                ):
                    yield ast.literal_eval(node)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    faults = [fault for words in commands_of(text) for fault in faults_of_command(words)]
    known = {option for name in cli.COMMANDS for option in options_of(parser_of(name)[0])} | FOREIGN
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        known |= set(re.findall(r"""["'](--[\w-]+)["']""", path.read_text()))
    for word in (word for span in code_of(text)[1] for word in span.split()):
        if re.fullmatch(r"--[a-z][\w-]*", word) and word not in known:
            faults.append(f"nothing has {word}")
    assert not faults


@pytest.mark.parametrize("page", PAGES)
def test_python_names_keys_and_variables_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    fences, inline = code_of(text)
    code = "\n".join([body for language, body in fences if language == "python"] + inline)
    faults = list(faults_of_names(code))
    sources = "\n".join(path.read_text() for path in (ROOT / "thalweg").rglob("*.py"))
    for name in set(re.findall(r"\bengine\.(?!py\b)([a-z]\w*)", code)):
        if not re.search(rf"\bdef {name}\b|self\.{name}\b", sources):
            faults.append(f"no engine has {name}")
    for name in set(re.findall(r"\bTHALWEG_\w*[A-Z]\b", text)):
        if name not in sources:
            faults.append(f"nobody reads {name}")
    for path in set(re.findall(r"`((?:tests|bench|examples|thalweg|results)/[\w./-]+\w)`", text)):
        if not (ROOT / path).exists():
            faults.append(f"{path} is not there")
    for config in configs_of(fences):
        load({"train_micro_batch_size_per_gpu": 1, **config})
    assert not faults


def faults_of_messages(text: str) -> list[str]:
    """Parts of the messages that a page's tables explain and that no source has; ``...`` stands for what varies."""
    sources = "\n".join(path.read_text() for path in (ROOT / "thalweg").rglob("*.py"))
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    parts = [part.strip() for table in tables for row in table.splitlines() for part in row.split("|")[1].split("...")]
    return [part for part in parts if part not in sources]


def test_messages_that_a_page_explains_exist() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert faults_of_messages(page) == []
    assert faults_of_messages(page.replace("| the ranks name ", "| no rank names ")) == ["no rank names different tags"]


def test_the_checks_can_fail() -> None:
    assert list(faults_of_command(["serve", "m", "--port", "1"])) == []
    assert list(faults_of_command(["serve", "m", "--prot", "1"])) == ["serve has no --prot"]
    assert list(faults_of_command(["run", "--nproc", "2", "-m", "thalweg", "serve", "m", "--no"]))
    assert list(faults_of_command(["run", "--nproc", "2", "train.py", "--its-own"])) == []
    assert list(faults_of_command(["serf"])) and list(faults_of_names("thalweg.initialise()"))
    assert list(faults_of_names("from thalweg.pipe import LayerSpec")) == []
    assert list(faults_of_names("from thalweg.pipe import LayerSpecs"))


def test_every_page_is_in_the_book_and_on_its_first_page() -> None:
    book, first = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f" {path.name}\n" in book, f"mkdocs.yml does not name {path.name}"
        assert path.name == "index.md" or f"({path.name})" in first, f"index.md does not name {path.name}"
