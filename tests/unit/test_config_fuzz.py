"""Damaged configs: never a raw error, never an unknown key accepted, every fault at once (R18).

``THALWEG_MUTATIONS=100000 pytest tests/unit/test_config_fuzz.py`` runs the long form, ``THALWEG_SEED=n``
another sequence; a failure names its seed and number.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config_mutations import BASE_CONFIGS, misspell, mutate, mutate_text
from thalweg.config import Config, ConfigError, load, load_config, resolve
from thalweg.config.aliases import DEPRECATED_KEYS
from thalweg.config.hjson import parse
from thalweg.config.schema.base import Section, get_section_type, union_members
from thalweg.config.schema.optimizer import get_params_schema

SEED = int(os.environ.get("THALWEG_SEED", "20"))
COUNT = int(os.environ.get("THALWEG_MUTATIONS", "600"))
OLDER = {name.rpartition(".")[2] for name in DEPRECATED_KEYS} | {"cpu_offload", "zero_optimization"}


def outcome(source: Any, world_size: int = 1) -> Config | ConfigError:
    """What loading gives; anything but a config or a ``ConfigError`` fails the test by being raised."""
    try:
        config = load_config(source, world_size=world_size)
    except ConfigError as error:
        refused = error
    else:
        return checked(config, world_size)
    assert refused.problems
    assert str(refused).encode()
    assert all(problem.expected and isinstance(problem.path, str) for problem in refused.problems)
    return refused


def checked(config: Config, world_size: int) -> Config:
    """The config, after what must hold of every config."""
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert load(json.loads(text)) == config
    assert resolve(config, world_size=world_size) == config
    assert config.describe().encode()
    return config


def unknown_keys(tree: Any, section: type[Section], path: str = "") -> list[str]:
    """The keys of ``tree`` that the schema does not have: a second, independent reading of the rules."""
    if not isinstance(tree, dict):
        return []
    found = []
    for key, value in tree.items():
        if not isinstance(key, str) or (key not in section.model_fields and key not in OLDER):
            found.append(f"{path}{key}")
            continue
        field = section.model_fields.get(key)
        inner = get_section_type(field.annotation) if field else None
        if path in ("optimizer.", "scheduler.") and key == "params":
            inner = get_params_schema(path[:-1], tree.get("type"))
        if inner:
            found += unknown_keys(value, inner, f"{path}{key}.")
    return found


def test_damaged_mappings_are_refused_in_words() -> None:
    rng = random.Random(SEED)
    accepted = 0
    slowest = 0.0
    for number in range(COUNT):
        tree, damages = mutate(rng, rng.choice(BASE_CONFIGS))
        before = copy.copy(tree)
        start = time.process_time()
        result = outcome(tree, world_size=rng.choice((1, 2, 16)))
        slowest = max(slowest, time.process_time() - start)
        assert tree.keys() == before.keys(), "loading changed the caller's mapping"
        if isinstance(result, Config):
            accepted += 1
            assert not unknown_keys(tree, Config), (SEED, number, damages)
    assert 0 < accepted < COUNT
    assert slowest < 1.0


def test_damaged_texts_are_refused_in_words() -> None:
    rng = random.Random(SEED + 1)
    for _ in range(COUNT // 3):
        outcome(mutate_text(rng, rng.choice(BASE_CONFIGS)))


def test_several_misspelt_keys_are_all_reported_at_once() -> None:
    rng = random.Random(SEED + 2)
    for _ in range(COUNT // 10):
        tree = copy.deepcopy(rng.choice(BASE_CONFIGS))
        blocks = [(path, block) for path, block in _blocks(tree) if block]
        wrong = set()
        for path, block in rng.sample(blocks, min(len(blocks), 3)):
            key = misspell(rng, rng.choice(list(block)))
            if key not in block:
                block[key] = 1
                wrong.add(f"{path}{key}")
        result = outcome(tree)
        assert isinstance(result, ConfigError)
        assert wrong <= {problem.path for problem in result.problems}


def _blocks(tree: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [("", tree)]
    for name in ("zero_optimization", "activation_checkpointing", "csv_monitor", "fp16", "aio", "elasticity"):
        if isinstance(tree.get(name), dict):
            found.append((f"{name}.", tree[name]))
    if isinstance(tree.get("optimizer"), dict):
        found.append(("optimizer.params.", tree["optimizer"]["params"]))
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*Config.model_fields, "bfloat16"])


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_any_value_under_any_key(tree: dict[str, Any]) -> None:
    outcome(tree)


@st.composite
def typed_blocks(draw: st.DrawFn) -> dict[str, Any]:
    """Blocks with their own keys and any values: what passes the shape but not the types."""
    tree: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(list(Config.model_fields)), max_size=3)):
        inner = get_section_type(Config.model_fields[name].annotation)
        if inner:
            tree[name] = draw(st.dictionaries(st.sampled_from(list(inner.model_fields)), JSON, max_size=4))
    return tree


@settings(deadline=None, max_examples=200)
@given(typed_blocks())
def test_any_value_under_the_keys_of_a_block(tree: dict[str, Any]) -> None:
    outcome(tree)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=80))
def test_any_text_parses_or_is_refused(text: str) -> None:
    document = parse(text)
    assert document.problems or document.tree is not None


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_json_means_what_json_means(tree: dict[str, Any]) -> None:
    if "nan" in repr(tree):
        return
    for indent in (None, 2):
        document = parse(json.dumps(tree, indent=indent))
        assert not document.problems
        assert document.tree == tree


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_string_as_a_source(raw: bytes) -> None:
    assert isinstance(outcome(raw.decode("latin-1")), Config | ConfigError)


@pytest.mark.parametrize(
    "option", ["seed", "gradient_clipping", "train_batch_size", "zero_optimization.sub_group_size"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_not_finite(option: str, value: float) -> None:
    head, _, leaf = option.partition(".")
    result = outcome({head: {leaf: value} if leaf else value})
    assert isinstance(result, ConfigError)
    assert [problem.path for problem in result.problems] == [option]


def test_the_walk_of_annotations_sees_unions() -> None:
    assert list(union_members(int | None)) == [int, type(None)]
