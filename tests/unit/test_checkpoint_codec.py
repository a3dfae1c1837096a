"""State trees: whatever goes in comes back equal and of the same type, or is refused by its path."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import threading
import types
import uuid

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.checkpoint import CorruptCheckpointError, UnserializableStateError
from thalweg.checkpoint.format.codec import TAG_KEY, decode_tree, encode_tree


def round_trip(value):
    node, tensors = encode_tree(value, "state")
    text = json.dumps(node, allow_nan=False)
    return decode_tree(json.loads(text), lambda name: tensors[name].clone())


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float | numpy.floating) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict):
        keys = zip(a, b, strict=True) if len(a) == len(b) else [(0, 1)]
        return all(same(x, y) for x, y in keys) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


VALUES = [
    None,
    True,
    0,
    -1,
    1 << 80,
    -(1 << 5000),
    0.1,
    -0.0,
    1e-310,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "text",
    "\ud800 lone",
    "\x00\n\u2028",
    b"",
    b"\x80\x04",
    b"x" * 5000,
    bytearray(b"ab"),
    1 + 2j,
    [],
    (),
    {},
    set(),
    frozenset(),
    (1,),
    [1, (2, [3])],
    {1, 2, "a"},
    frozenset({(1, 2)}),
    {"a": 1, "b": {"c": (1, 2)}},
    {1: "x", (2, 3): "y", None: 0, 1.5: True, "k": 2},
    {TAG_KEY: "tuple", "v": []},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("hello"),
    collections.deque([1, 2], maxlen=3),
    range(2, 9, 3),
    slice(1, None, 2),
    pathlib.Path("/tmp/x"),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.UTC),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2),
    datetime.timedelta(days=-1, microseconds=3),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
    types.SimpleNamespace(a=[1]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    numpy.float32(0.1),
    numpy.int64(-3),
    numpy.bool_(True),
    numpy.float64("nan"),
    numpy.str_("abc"),
    numpy.str_(""),
    numpy.datetime64("2024-01-01"),
    numpy.arange(6).reshape(2, 3),
    numpy.array(3.5),
    numpy.zeros((0, 3), "float16"),
    numpy.array(["ab", "c"]),
    numpy.arange(3, dtype=">i4"),
    numpy.arange(9).reshape(3, 3).T,
    numpy.arange(4)[::-1],
    torch.arange(3),
    torch.tensor(2.0, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.linspace(-1, 1, 12).view(3, 4).t(),
    torch.tensor([1 + 1j]),
    torch.tensor([True, False]),
    torch.linspace(-1, 1, 4).to(torch.float8_e4m3fn).view(torch.uint8),
]


# By their place: a set's text depends on the process's hash seed, and workers must collect the same names.
@pytest.mark.parametrize("value", VALUES, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(VALUES)])
def test_values_come_back_equal_and_of_their_type(value):
    back = round_trip({"deep": [value, (value,)]})
    assert same(back["deep"][0], value)
    assert same(back["deep"][1][0], value)


def test_the_comparison_of_this_file_can_fail():
    assert not same([1, (2,)], [1, [2]])
    assert not same({"a": 1}, {"a": 1.0})
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(st.integers(), max_size=4),
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_any_tree_comes_back(tree):
    assert same(round_trip({"tree": tree})["tree"], tree)


class Colour(enum.IntEnum):
    RED = 1


class Weekday(str, enum.Enum):  # noqa: UP042
    MONDAY = "mon"


def test_enum_members_that_are_plain_values_come_back_equal():
    assert round_trip({"a": Colour.RED, "b": Weekday.MONDAY}) == {"a": Colour.RED, "b": Weekday.MONDAY}


def test_a_namespace_may_hold_tensors():
    back = round_trip({"args": argparse.Namespace(ema=torch.arange(3), deep={"x": (torch.ones(2),)})})
    assert torch.equal(back["args"].ema, torch.arange(3))
    assert torch.equal(back["args"].deep["x"][0], torch.ones(2))


class Custom:
    pass


Point = collections.namedtuple("Point", "x y")


class Subclass(torch.Tensor):
    pass


REFUSED = [
    Custom(),
    lambda: 0,
    Custom,
    threading.Lock(),
    open,
    iter([]),
    Point(1, 2),
    torch.nn.Linear(1, 1),
    enum.Enum,
    numpy.array([object()], dtype=object),
    numpy.zeros(1, [("a", "i4")]),
    numpy.ma.array([1], mask=[True]),
    numpy.random.default_rng(0),
    torch.zeros(2, device="meta"),
    torch.eye(2).to_sparse(),
    torch.zeros(2).as_subclass(Subclass),
    torch.Generator(),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_what_cannot_be_kept_is_refused_with_its_path(value):
    with pytest.raises(UnserializableStateError, match=r"state\['client'\]\['list'\]\['1'\]"):
        encode_tree({"client": {"list": [0, value]}}, "state")


def test_cycles_and_bottomless_trees_are_refused():
    loop: list = [1]
    loop.append({"again": loop})
    with pytest.raises(UnserializableStateError, match="contains itself"):
        encode_tree({"a": loop}, "state")
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnserializableStateError, match="nested deeper"):
        encode_tree(deep, "state")
    shallow: list = []
    for _ in range(150):
        shallow = [(shallow,)] if len(str(shallow)) % 2 else [shallow]
    assert round_trip(shallow) == shallow


def test_one_object_twice_is_no_cycle():
    part = {"x": torch.ones(2)}
    back = round_trip({"a": part, "b": part, "a/x": torch.zeros(1)})
    assert torch.equal(back["a"]["x"], back["b"]["x"])
    assert torch.equal(back["a/x"], torch.zeros(1))


@pytest.mark.parametrize(
    "node",
    [
        {TAG_KEY: "os.system", "v": "true"},
        {TAG_KEY: "tuple", "v": 3},
        {TAG_KEY: "tuple"},
        {TAG_KEY: ["x"], "v": 0},
        {TAG_KEY: "numpy", "v": "AAAA", "dtype": "O"},
        {TAG_KEY: "numpy", "v": "", "dtype": "f8"},
        {TAG_KEY: "ndarray", "v": None, "dtype": "f8", "shape": [1 << 60]},
        {TAG_KEY: "ndarray", "v": None, "dtype": "O", "shape": [0]},
        {TAG_KEY: "set", "v": [[1]]},
        {TAG_KEY: "bytes", "v": "!!"},
        {TAG_KEY: "decimal", "v": "x"},
        {TAG_KEY: "dtype", "v": "load"},
        {TAG_KEY: "namespace", "v": [1]},
        {TAG_KEY: "fraction", "v": [1, 0]},
        {TAG_KEY: "float", "v": "1e3"},
        {TAG_KEY: "dict", "v": [[1]]},
    ],
)
def test_a_crafted_tree_is_an_error_and_nothing_else(node):
    def fetch(name):
        raise AssertionError(name)

    with pytest.raises(CorruptCheckpointError, match="state tree"):
        decode_tree({"a": [node]}, fetch)
