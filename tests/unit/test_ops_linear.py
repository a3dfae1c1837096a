"""The products of a linear layer against torch's own, in every situation that a training loop meets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thalweg.ops.linear import functional, kernels
from thalweg.ops.linear.functional import conv1d, linear
from thalweg.ops.linear.kernels import (
    KERNELS,
    MATMUL_KINDS,
    REFERENCE,
    SUPPORTED_DTYPES,
    is_usable,
    make_operands,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Forced:
    """A table that always answers with one kind of candidate and counts the questions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    def best_kernel(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
        self.asked.append(kind)
        return self.name if is_usable(kind, self.name, dtype) else REFERENCE


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    if not is_usable("nt", "onednn", torch.float32):
        pytest.skip("this torch build has no mkldnn::_linear_pointwise")

    def force(name: str = "onednn") -> Forced:
        table = Forced(name)
        monkeypatch.setattr(functional, "get_autotune_cache", lambda: table)
        monkeypatch.setattr(functional, "MIN_FLOPS", 0.0)
        return table

    return force


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def fused_node(y: Tensor) -> bool:
    """Whether the linear layer behind ``y`` is ours (through any reshape on top)."""
    node = y.grad_fn
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("_LinearFunction")


def layer(
    shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    k = shape[-1]
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter((torch.randn((n, k), generator=generator) / k**0.5).to(dtype))
    return x, weight, nn.Parameter(torch.randn(n, generator=generator).to(dtype)) if bias else None


def gradients(function, *tensors: Tensor | None, seed: int = 5) -> list[Tensor | None]:
    for tensor in tensors:
        if tensor is not None:
            tensor.grad = None
    y = function(*tensors)
    generator = torch.Generator().manual_seed(seed)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), *(None if tensor is None else tensor.grad for tensor in tensors)]


def compare(function, reference, *tensors: Tensor | None, tolerance: float = 2e-6) -> None:
    got, want = gradients(function, *tensors), gradients(reference, *tensors)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.is_contiguous() == theirs.is_contiguous()
            assert relative(mine, theirs) < tolerance


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MATMUL_KINDS for name in KERNELS[kind]])
def test_every_usable_candidate_is_the_product(kind: str, name: str, dtype: torch.dtype) -> None:
    if not is_usable(kind, name, dtype):
        pytest.skip(f"{name} is not offered for {kind} in {dtype} on this machine")
    for rows, k, n in ((1, 7, 5), (33, 129, 65), (64, 256, 31)):
        args = make_operands(kind, rows, k, n, dtype, seed=rows)
        want = KERNELS[kind][REFERENCE](*(arg.double() for arg in args))
        got = KERNELS[kind][name](*args)
        assert got.is_contiguous() and got.dtype == dtype
        assert relative(got.double(), want) < TOLERANCE[dtype]


def test_the_probe_refuses_a_wrong_kernel_and_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {kind: dict(KERNELS[kind]) for kind in MATMUL_KINDS}
    broken["nt"]["onednn"] = lambda a, b, bias=None: F.linear(a, b, bias) * 1.0001

    def missing(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        raise RuntimeError("could not create a primitive")

    broken["nn"]["onednn"] = missing
    monkeypatch.setattr(kernels, "KERNELS", broken)
    is_usable.cache_clear()
    try:
        assert not is_usable("nt", "onednn", torch.float32)
        assert not is_usable("nn", "onednn", torch.float32)
        assert not is_usable("nt", "no such candidate", torch.float32)
        assert is_usable("nt", REFERENCE, torch.float32)
    finally:
        is_usable.cache_clear()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", [(37, 24), (3, 5, 24), (2, 3, 4, 24), (1, 24)], ids=str)
@pytest.mark.parametrize("name", ["onednn", "convolution", "fp32"])
def test_linear_equals_torch(forced, name: str, shape: tuple[int, ...], bias: bool) -> None:
    forced(name)
    compare(linear, F.linear, *layer(shape, 40, bias=bias))


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["onednn", "fp32", "fp32_onednn"])
def test_linear_in_each_dtype(forced, name: str, dtype: torch.dtype) -> None:
    forced(name)
    compare(linear, F.linear, *layer((64, 96), 80, dtype), tolerance=TOLERANCE[dtype])


def test_a_wrong_kernel_would_be_seen(forced, monkeypatch: pytest.MonkeyPatch) -> None:
    forced()
    for kind in MATMUL_KINDS:
        wrong = {**KERNELS[kind], "onednn": lambda *args, k=kind: KERNELS[k][REFERENCE](*args) * 1.001}
        with monkeypatch.context() as patch:
            patch.setattr(functional, "KERNELS", {**KERNELS, kind: wrong})
            with pytest.raises(AssertionError):
                compare(linear, F.linear, *layer((37, 24), 40))


@pytest.mark.parametrize("shape", [(37, 24), (3, 5, 24)], ids=str)
def test_conv1d_equals_hugging_face(forced, shape: tuple[int, ...]) -> None:
    forced()
    x, weight, bias = layer(shape, 40)
    weight = nn.Parameter(weight.detach().t().contiguous())

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    assert fused_node(conv1d(x, weight, bias))
    compare(conv1d, reference, x, weight, bias)


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    bias=st.booleans(),
    frozen=st.sets(st.sampled_from(["x", "weight", "bias"])),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
)
def test_any_shape_layout_and_frozen_part(shape, k, n, bias, frozen, layout) -> None:
    if not is_usable("nt", "onednn", torch.float32):
        pytest.skip("this torch build has no mkldnn::_linear_pointwise")
    generator = torch.Generator().manual_seed(k * 100 + n)
    if layout == "transposed":
        x = torch.randn((k, *reversed(shape)), generator=generator).permute(*reversed(range(len(shape) + 1)))
    elif layout == "sliced":
        x = torch.randn((*shape, 2 * k + 1), generator=generator)[..., 1::2]
    elif layout == "expanded":
        x = torch.randn(k, generator=generator).expand(*shape, k)
    else:
        x = torch.randn((*shape, k), generator=generator)
    _, weight, b = layer((1, k), n, bias=bias)
    weight.requires_grad_("weight" not in frozen)
    if b is not None:
        b.requires_grad_("bias" not in frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "get_autotune_cache", lambda: Forced("onednn"))
        patch.setattr(functional, "MIN_FLOPS", 0.0)
        results = []
        for function in (linear, F.linear):
            leaf = x.detach().requires_grad_("x" not in frozen)
            y = function(leaf, weight, b)
            wanted = [t for t in (leaf, weight, b) if t is not None and t.requires_grad]
            grads = torch.autograd.grad(y.square().sum(), wanted) if wanted else ()
            results.append([y.detach(), *grads])
    for mine, theirs in zip(*results, strict=True):
        assert relative(mine, theirs) < 5e-6


def test_a_result_without_gradients_may_be_changed_in_place_later(forced) -> None:
    forced()
    x, weight, bias = layer((4, 4, 24), 40)
    with torch.no_grad():
        y = linear(x, weight, bias)
    y += weight.sum()
    y.sum().backward()
    assert weight.grad is not None


def test_only_what_the_backward_needs_is_saved(forced) -> None:
    forced()
    x, weight, bias = layer((16, 24), 40)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for frozen, expected in ((x, {x.data_ptr()}), (weight, {weight.data_ptr()})):
        saved.clear()
        frozen.requires_grad_(False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            linear(x, weight, bias).sum().backward()
        frozen.requires_grad_(True)
        assert {tensor.data_ptr() for tensor in saved} == expected


def test_double_backward(forced) -> None:
    forced()
    results = []
    for function in (linear, F.linear):
        x, weight, bias = layer((16, 24), 40)
        y = function(x, weight, bias).tanh()
        (gx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append([gx, *torch.autograd.grad(gx.square().sum(), (x, weight, bias))])
    for mine, theirs in zip(*results, strict=True):
        assert relative(mine, theirs) < 5e-6
    x, weight, bias = (t.detach().double().requires_grad_() for t in layer((4, 3), 5))
    assert torch.autograd.gradgradcheck(linear, (x, weight, bias))


def test_batched_gradients_and_transforms(forced) -> None:
    forced()
    x, weight, bias = layer((6, 8), 5)
    y, reference = linear(x, weight, bias), F.linear(x, weight, bias)
    assert fused_node(y)
    basis = torch.randn(4, 6, 5)
    (got,) = torch.autograd.grad(y, weight, basis, is_grads_batched=True)
    (want,) = torch.autograd.grad(reference, weight, basis, is_grads_batched=True)
    assert relative(got, want) < 5e-6
    stack = torch.randn(3, 6, 8)
    assert relative(torch.func.vmap(lambda a: linear(a, weight, bias))(stack), F.linear(stack, weight, bias)) < 5e-6
    jacobian = torch.func.jacrev(lambda w: linear(x, w, bias))(weight)
    assert relative(jacobian, torch.func.jacrev(lambda w: F.linear(x, w, bias))(weight)) < 5e-6
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight, bias)).tangent
    assert relative(tangent, torch.ones_like(x) @ weight.t()) < 5e-6


def test_retained_graph_and_accumulation(forced) -> None:
    forced()
    x, weight, bias = layer((16, 24), 40)
    y = linear(x, weight, bias).square().sum()
    y.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, weight, bias)]
    y.backward()
    for tensor, grad in zip((x, weight, bias), once, strict=True):
        assert torch.equal(tensor.grad, 2 * grad)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_changed_weight_is_noticed(forced) -> None:
    forced()
    x, weight, bias = layer((16, 24), 40)
    y = linear(x, weight, bias).sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_result_may_be_changed_in_place(forced) -> None:
    forced()
    for shape in ((16, 24), (4, 4, 24)):
        results = []
        for function in (linear, F.linear):
            x, weight, bias = layer(shape, 40)
            y = function(x, weight, bias)
            y += 1.0
            torch.relu_(y)
            y.square().sum().backward()
            results.append([x.grad, weight.grad, bias.grad])
        for mine, theirs in zip(*results, strict=True):
            assert relative(mine, theirs) < 5e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoint(forced, reentrant: bool) -> None:
    forced()
    x, weight, bias = layer((3, 16, 24), 24)

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(linear(x, weight, bias).tanh(), weight, bias)

    def recomputed(*args: Tensor) -> Tensor:
        return checkpoint(twice, *args, use_reentrant=reentrant)

    got, want = gradients(recomputed, x, weight, bias), gradients(twice, x, weight, bias)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


def test_under_autocast_torch_computes(forced) -> None:
    table = forced()
    x, weight, bias = layer((16, 24), 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight, bias)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, F.linear(x, weight, bias))
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert not table.asked


def test_compiled(forced) -> None:
    table = forced()
    x, weight, bias = layer((16, 24), 40)
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    compare(compiled, F.linear, x, weight, bias)
    assert not table.asked


def test_a_weight_tied_with_an_embedding(forced) -> None:
    forced()
    results = []
    tokens = torch.arange(30).view(5, 6) % 11
    for function in (linear, F.linear):
        _, weight, _ = layer((1, 24), 11)
        x = F.embedding(tokens, weight)
        F.cross_entropy(function(x, weight).flatten(0, 1), tokens.flatten()).backward()
        results.append(weight.grad)
    assert relative(*results) < 5e-6


def test_without_gradients(forced) -> None:
    table = forced()
    x, weight, bias = layer((16, 24), 40)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = linear(x, weight, bias)
            assert not y.requires_grad and relative(y, F.linear(x, weight, bias)) < 2e-6
    assert set(table.asked) == {"nt"}


def test_what_is_not_known_to_be_safe_goes_to_torch(forced) -> None:
    table = forced()

    class Sub(Tensor):
        pass

    x, weight, bias = layer((16, 24), 40)
    assert isinstance(linear(x.detach().as_subclass(Sub), weight, bias), Sub)
    empty = linear(x[:0], weight, bias)
    assert empty.shape == (0, 40)
    assert linear(x[0], weight, bias).shape == (40,)
    assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    assert linear(x.to("meta"), weight.to("meta"), bias.to("meta")).device.type == "meta"
    assert not table.asked
    for wrong in (x[:, :20], x.double()):
        with pytest.raises(RuntimeError) as mine:
            linear(wrong, weight, bias)
        with pytest.raises(RuntimeError) as theirs:
            F.linear(wrong, weight, bias)
        assert str(mine.value) == str(theirs.value)


def test_a_small_product_is_not_worth_a_question(forced, monkeypatch: pytest.MonkeyPatch) -> None:
    table = forced()
    monkeypatch.setattr(functional, "MIN_FLOPS", 4e6)
    x, weight, bias = layer((16, 24), 40)
    assert not fused_node(linear(x, weight, bias))
    x, weight, bias = layer((256, 128), 128)
    assert fused_node(linear(x, weight, bias))
    assert table.asked == ["nt", "nn", "tn"]


def test_all_torch_is_torch_bit_for_bit(forced) -> None:
    forced(REFERENCE)
    x, weight, bias = layer((16, 24), 40)
    assert not fused_node(linear(x, weight, bias))
    got, want = gradients(linear, x, weight, bias), gradients(F.linear, x, weight, bias)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
