"""Boxes: cut, tile, intersect; whatever is cut covers what it was cut from, exactly once."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint_support import list_names
from thalweg.checkpoint import Snapshot, save_snapshot
from thalweg.checkpoint.format.chunks import (
    TensorChunk,
    _intersect_intervals,
    covers_exactly,
    split_chunk,
)

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def grids(draw):
    """A shape and the boxes of a random grid over it."""
    shape = draw(shapes)
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=2)) - {n}) for n in shape]
    spans = [list(itertools.pairwise([0, *inner, n])) for inner, n in zip(cuts, shape, strict=True)]
    boxes = [
        TensorChunk(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)) for spans in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@settings(deadline=None)
@given(shapes, st.integers(1, 8), st.integers(1, 300))
def test_pieces_of_a_split_cover_the_box_within_the_limit(shape, itemsize, limit):
    whole = TensorChunk((0,) * len(shape), tuple(shape))
    pieces = split_chunk(whole, itemsize, limit)
    assert covers_exactly(pieces, shape)
    assert all(piece.numel * itemsize <= max(limit, itemsize) for piece in pieces)
    full = torch.arange(whole.numel).reshape(shape)
    seen = torch.cat([full[piece.slices((0,) * len(shape))].reshape(-1) for piece in pieces])
    assert sorted(seen.tolist()) == full.reshape(-1).tolist()


@settings(deadline=None)
@given(grids(), st.data())
def test_grids_tile_and_broken_grids_do_not(grid, data):
    shape, boxes = grid
    assert covers_exactly(boxes, shape)
    victim = data.draw(st.sampled_from(boxes))
    assert not covers_exactly([box for box in boxes if box is not victim], shape)
    assert not covers_exactly([*boxes, victim], shape)
    if shape and len(boxes) > 1:
        dim = data.draw(st.integers(0, len(shape) - 1))
        step = tuple(int(d == dim) for d in range(len(shape)))
        moved = TensorChunk(tuple(a + b for a, b in zip(victim.offset, step, strict=True)), victim.size)
        assert not covers_exactly([moved if box is victim else box for box in boxes], shape)


def test_equal_volume_is_not_enough():
    assert not covers_exactly([TensorChunk((0, 0), (2, 1)), TensorChunk((0, 0), (2, 1))], (2, 2))
    assert not covers_exactly([TensorChunk((0, 0), (1, 2)), TensorChunk((0, 0), (2, 1))], (2, 2))
    assert covers_exactly(
        [TensorChunk((0, 0), (1, 2)), TensorChunk((1, 0), (1, 1)), TensorChunk((1, 1), (1, 1))], (2, 2)
    )
    assert covers_exactly([], (0, 3)) and not covers_exactly([], ()) and covers_exactly([TensorChunk((), ())], ())


@settings(deadline=None, max_examples=40)
@given(grids(), grids())
def test_intersections_are_those_of_index_sets(a, b):
    for x, y in itertools.product(a[1], b[1]):
        if len(x.size) != len(y.size):
            continue
        both = indices(x) & indices(y)
        found = x.intersect(y)
        assert (indices(found) if found else set()) == both


def indices(box: TensorChunk) -> set[tuple[int, ...]]:
    spans = [range(o, o + n) for o, n in zip(box.offset, box.size, strict=True)]
    return set(itertools.product(*spans))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_cutting_interval_lists_is_slicing_their_concatenation(lengths, start, stop):
    spans, position = [], 0
    for gap, length in lengths:
        spans.append((position + gap, position + gap + length))
        position += gap + length
    flat = [i for a, b in spans for i in range(a, b)]
    assert [i for a, b in _intersect_intervals(spans, start, stop) for i in range(a, b)] == flat[start:stop]


def test_a_snapshot_that_leaves_no_tensor_is_a_checkpoint_too(tmp_path):
    path = save_snapshot(tmp_path, "t", Snapshot(state={"a": 1}), step=0)
    assert list_names(path) == {"manifest.json"}
