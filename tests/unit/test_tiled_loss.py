"""The tiled cross-entropy against the plain one: values, gradients, every option, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thalweg.nn import tiled_cross_entropy
from thalweg.nn.losses.tiled_cross_entropy import tile_rows


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def case(rows: int = 37, width: int = 8, vocabulary: int = 53, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    hidden = torch.randn(rows, width, generator=g).to(dtype)
    weight = torch.randn(vocabulary, width, generator=g).to(dtype)
    labels = torch.randint(vocabulary, (rows,), generator=g)
    return [hidden, weight, labels]


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    logit_transform: Callable[[Tensor], Tensor] | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The definition, over full logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logit_transform is not None:
        logits = logit_transform(logits)
    losses = F.cross_entropy(
        logits, labels, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if reduction == "none":
        return losses
    return losses.sum() / (labels != ignore_index).sum() if reduction == "mean" else losses.sum()


def softcap(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


def gradients(
    loss: Callable[..., Tensor], tensors: list[Tensor], *, again: bool = False, **options: Any
) -> list[Tensor]:
    """Loss and the gradients of hidden, weight and bias, for an incoming gradient that is not 1.

    ``again``: those of a second backward pass of the retained graph, which computes the tiles anew.
    """
    hidden, weight = (t.clone().requires_grad_() for t in tensors[:2])
    bias = tensors[3].clone().requires_grad_() if len(tensors) > 3 else None
    value = loss(hidden, weight, tensors[2], bias, **options)
    g = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    if again:
        value.backward(torch.zeros_like(g), retain_graph=True)
    value.backward(g)
    return [value.detach(), hidden.grad, weight.grad, *([] if bias is None else [bias.grad])]  # type: ignore[list-item]


def close(mine: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-6) -> bool:
    worst = max(
        (a.double() - b.double()).abs().max().item() / max(1.0, b.double().abs().max().item())
        for a, b in zip(mine, theirs, strict=True)
    )
    return worst < tolerance


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"logit_transform": softcap},
    {"logit_transform": softcap, "label_smoothing": 0.2, "reduction": "sum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain")
@pytest.mark.parametrize("tile", [1, 5, 37, 100])
@pytest.mark.parametrize("again", [False, True])
def test_equal_to_full_logits(options: dict[str, Any], tile: int, again: bool) -> None:
    tensors = case()
    tensors[2][::4] = -100
    tensors.append(torch.linspace(-1, 1, 53))
    mine = gradients(tiled_cross_entropy, tensors, tile_tokens=tile, again=again, **options)
    assert close(mine, gradients(plain, tensors, **options))


def test_a_wrong_option_would_be_seen() -> None:
    tensors = case()
    base = gradients(plain, tensors)
    for options in OPTIONS[1:]:
        if options != {"reduction": "none"}:
            assert not close(gradients(tiled_cross_entropy, tensors, tile_tokens=5, **options), base, 1e-3)


def test_shapes_and_the_ignored_label() -> None:
    hidden, weight, labels = case(rows=36)
    labels[3:9] = 7  # ignored below
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "ignore_index": 7}
        want = gradients(plain, [hidden, weight, labels], **options)

        def loss(h: Tensor, w: Tensor, y: Tensor, b: Tensor | None, o: dict[str, Any] = options) -> Tensor:
            value = tiled_cross_entropy(h.view(4, 9, 8), w, y.view(4, 9), b, tile_tokens=7, **o)
            return value.flatten() if o["reduction"] == "none" else value

        got = gradients(loss, [hidden, weight, labels])
        assert close(got, want)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(1, 40),
    tile=st.integers(1, 50),
    ignored=st.floats(0, 1),
    options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, vocabulary: int, tile: int, ignored: float, options: dict[str, Any], seed: int) -> None:
    hidden, weight, labels = case(rows, 3, vocabulary)
    labels[torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < ignored] = -100
    if bool((labels == -100).all()) and options.get("reduction", "mean") == "mean":
        assert tiled_cross_entropy(hidden, weight, labels, tile_tokens=tile, **options).isnan()
        return
    tensors = [hidden, weight, labels]
    mine = gradients(tiled_cross_entropy, tensors, tile_tokens=tile, **options)
    assert close(mine, gradients(plain, tensors, **options), 1e-5)


def test_gradcheck_in_fp64() -> None:
    hidden, weight, labels = case(7, 3, 5, torch.float64)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return tiled_cross_entropy(h, w, labels, b, tile_tokens=3, logit_transform=softcap, label_smoothing=0.1)

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_(), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(512, 16, 31, dtype)
    exact = gradients(plain, [hidden.double(), weight.double(), labels], reduction="sum")
    tiled = gradients(tiled_cross_entropy, [hidden, weight, labels], reduction="sum", tile_tokens=8)
    untiled = gradients(plain, [hidden, weight, labels], reduction="sum")
    assert tiled[0].dtype == torch.float32 and tiled[2].dtype == dtype
    for mine, theirs, true in zip(tiled, untiled, exact, strict=True):
        scale = true.abs().max()
        assert (mine - true).abs().max() / scale <= 1.5 * (theirs - true).abs().max() / scale + 1e-3


def test_fp16_gradients_do_not_underflow() -> None:
    hidden, weight, labels = case(64, 8, 40, torch.float16)
    loss_scale = 2.0**14
    found = []
    for loss in (tiled_cross_entropy, plain):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (loss(h, w, labels) * 1e-4 * loss_scale).backward()
        found.append([h.grad.double(), w.grad.double()])
    assert close(*found, tolerance=2e-3)
    assert (found[0][0] != 0).all()


def test_a_graph_that_is_kept_and_gradients_that_are_kept() -> None:
    hidden, weight, labels = case()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = tiled_cross_entropy(h, w, labels, tile_tokens=9)
    first = torch.autograd.grad(3 * loss, (h, w), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert all(torch.allclose(a, 3 * b, atol=1e-7) for a, b in zip(first, second, strict=True))


def test_frozen_parts_and_no_grad() -> None:
    hidden, weight, labels = case()
    h = hidden.clone().requires_grad_()
    tiled_cross_entropy(h, weight, labels, tile_tokens=9).backward()
    assert h.grad is not None and weight.grad is None
    w = weight.clone().requires_grad_()
    with torch.no_grad():
        loss = tiled_cross_entropy(hidden, w, labels, tile_tokens=9)
    assert not loss.requires_grad
    assert torch.allclose(loss, F.cross_entropy(hidden @ weight.T, labels))


def test_under_autocast() -> None:
    hidden, weight, labels = case(64)
    found = []
    for mine in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if mine:
                loss = tiled_cross_entropy(h, w, labels, tile_tokens=11)
            else:
                loss = F.cross_entropy(F.linear(h, w).float(), labels)
        loss.backward()
        found.append([loss.detach(), h.grad, w.grad])
    assert close(*found, tolerance=1e-2)
    assert abs(float(found[0][0]) - float(found[1][0])) < 1e-5


def peak_of(run: Callable[[], Any]) -> int:
    """Most bytes of CPU tensors alive at once beyond those at the start, by torch's allocator."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    level = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def test_the_peak_is_that_of_a_tile() -> None:
    rows, width, vocabulary, tile = 1024, 16, 2000, 64
    hidden, weight, labels = case(rows, width, vocabulary)

    def run(loss: Callable[..., Tensor], **options: Any) -> Callable[[], None]:
        def call() -> None:
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss(h, w, labels, **options).sum().backward()

        return call

    logits = 4 * rows * vocabulary
    full = peak_of(run(plain))
    operands = 4 * (rows * width + vocabulary * width)
    for reduction in ("mean", "none"):  # gradients in the forward pass, in the backward pass
        tiled = peak_of(run(tiled_cross_entropy, tile_tokens=tile, reduction=reduction))
        assert tiled < 4 * operands + 2.5 * logits * tile / rows
    assert full > 2 * logits


def test_tiles_are_sized_by_the_vocabulary() -> None:
    assert tile_rows(10**6, 50_257, "cpu") == 83
    assert tile_rows(10**6, 10**6, "cpu") == 64
    assert tile_rows(10, 50_257, "cpu") == 10
    assert tile_rows(10**6, 128_000, "cuda") == 524


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 9)}, "do not multiply"),
        ({"labels": torch.zeros(36, dtype=torch.long)}, "labels"),
        ({"labels": torch.zeros(37)}, "class numbers"),
        ({"bias": torch.zeros(7)}, "bias"),
        ({"reduction": "max"}, "'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, "from 0 to 1"),
        ({"tile_tokens": 0}, "at least 1"),
    ],
)
def test_what_does_not_belong_together(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels = case()
    given = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(ValueError, match=message):
        tiled_cross_entropy(**given)
