"""Activation checkpointing: on and off bitwise equal, less memory, no trace on the model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.marks import nightly
from thalweg.activation_checkpointing import checkpoint_wrapper
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.ops import patch_linear_layers
from thalweg.ops.dynamic_subclass import DynamicSubclass
from thalweg.ops.linear import functional

FULL = ActivationCheckpointPolicy("full")
POLICIES = [
    FULL,
    ActivationCheckpointPolicy("selective"),
    ActivationCheckpointPolicy("selective", every=2),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small(dropout: float = 0.0, layers: int = 4) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=97, n_layer=layers, n_head=2, n_embd=32, block_size=16, dropout=dropout))


def checkpointed(policy: ActivationCheckpointPolicy, **shape: float) -> GPT:
    model = small(**shape)  # type: ignore[arg-type]
    apply_activation_checkpointing(model, list(model.blocks), policy)
    return model


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, steps: int = 3, context: Callable[[], object] | None = None) -> list[Tensor]:
    """Losses, then the gradients of the last step, from one random state."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if context is None:
            loss = model(*batch(step))
        else:
            with context():  # type: ignore[attr-defined]
                loss = model(*batch(step))
        loss.backward()
        losses.append(loss.detach())
        if step < steps - 1:
            optimizer.step()
    return [*losses, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def runs_of(model: nn.Module, checkpoint_wrapper: list[nn.Module]) -> list[int]:
    """How often each unit's inner norm runs in one forward and backward."""
    counts = [0] * len(checkpoint_wrapper)
    for index, unit in enumerate(checkpoint_wrapper):

        def count(*_args: object, i: int = index) -> None:
            counts[i] += 1

        unit.norm1.register_forward_hook(count)
    model(*batch()).backward()
    return counts


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bitwise_equal_on_and_off(policy: ActivationCheckpointPolicy, dropout: float) -> None:
    assert same(train(checkpointed(policy, dropout=dropout)), train(small(dropout)))


def test_dropout_would_differ_if_the_random_state_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checkpoint_wrapper.checkpoint

    def careless(*args: object, **kwargs: object) -> object:
        return plain(*args, **{**kwargs, "preserve_rng_state": False})

    monkeypatch.setattr(checkpoint_wrapper, "checkpoint", careless)
    assert not same(train(checkpointed(FULL, dropout=0.3)), train(small(0.3)))
    assert same(train(checkpointed(FULL)), train(small()))


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
@pytest.mark.parametrize("policy", [FULL, ActivationCheckpointPolicy("selective")], ids=str)
def test_under_autocast(policy: ActivationCheckpointPolicy, context: Callable[[], object]) -> None:
    want = train(small(0.1), context=context)
    assert same(train(checkpointed(policy, dropout=0.1), context=context), want)
    assert not same(train(small(0.1)), want)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ActivationCheckpointPolicy(), [1, 1, 1, 1]),
        (FULL, [2, 2, 2, 2]),
        (ActivationCheckpointPolicy("selective", every=2), [2, 1, 2, 1]),
        (ActivationCheckpointPolicy("selective", every=3), [2, 1, 1, 2]),
        (ActivationCheckpointPolicy("selective"), [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_which_units_run_twice(policy: ActivationCheckpointPolicy, expected: list[int]) -> None:
    model = checkpointed(policy)
    assert runs_of(model, list(model.blocks)) == expected


def operators_in_backward(model: nn.Module) -> dict[str, int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            counts[str(func)] = counts.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    loss = model(*batch())
    with Count():
        loss.backward()
    return counts


def test_saved_operators_are_not_run_again() -> None:
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    everything = operators_in_backward(checkpointed(FULL))
    assert everything[attention] == 4 and everything["aten.addmm.default"] >= 12
    keeps_both = operators_in_backward(checkpointed(ActivationCheckpointPolicy("selective")))
    assert attention not in keeps_both and "aten.addmm.default" not in keeps_both
    assert keeps_both["aten.gelu.default"] == 4
    assert attention not in operators_in_backward(small())


class DropsTwice(nn.Module):
    """A fused attention with dropout, as GPUs have and no processor, and a dropout after it."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.attention = nn.Linear(8, 8), attention

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.dropout(self.attention(y, y, y, 0.3), 0.4)


@pytest.fixture
def fused_attention() -> Iterator[torch._ops.OpOverload]:
    """An operator that draws, and gives the backward pass what it drew, as those of CUDA do."""
    with torch.library._scoped_library("thalweg_tests", "FRAGMENT") as library:
        library.define("attend(Tensor query, Tensor key, Tensor value, float dropout_p) -> (Tensor, Tensor)")
        operator = torch.ops.thalweg_tests.attend.default

        def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
            kept = (torch.rand_like(v) >= dropout_p).to(v.dtype) / (1 - dropout_p)
            return v * kept, kept

        library.impl("attend", attend, "CPU")
        torch.library.register_autograd(
            "thalweg_tests::attend",
            lambda ctx, grad, _: (None, None, grad * ctx.saved_tensors[0], None),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
            lib=library,
        )
        yield operator


@pytest.mark.parametrize("knows_it", [True, False], ids=["", "negative control"])
def test_what_follows_an_attention_with_dropout_draws_the_same(
    fused_attention: torch._ops.OpOverload, knows_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept results draw nothing when the unit is computed again: on an H200 the gradients were wrong, in silence."""
    arguments = [argument.name for argument in fused_attention._schema.arguments] if knows_it else []
    monkeypatch.setattr(checkpoint_wrapper, "_saved_ops", lambda: {fused_attention: arguments})
    grads = []
    for policy in (ActivationCheckpointPolicy(), ActivationCheckpointPolicy("selective")):
        model = nn.Sequential(DropsTwice(lambda *args: fused_attention(*args)[0]))
        apply_activation_checkpointing(model, list(model), policy)
        torch.manual_seed(3)
        model(torch.ones(4, 8)).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert same(*grads) == knows_it


@pytest.mark.parametrize("policy", [FULL, ActivationCheckpointPolicy("selective")], ids=str)
def test_with_switched_linear_layers(policy: ActivationCheckpointPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Always:
        def best_kernel(self, *_args: object) -> str:
            return "onednn"

    monkeypatch.setattr(functional, "get_autotune_cache", Always)
    monkeypatch.setattr(functional, "MIN_FLOPS", 0.0)
    plain = small(0.2)
    if not patch_linear_layers(plain):
        pytest.skip("this torch build has no mkldnn::_linear_pointwise")
    model = small(0.2)
    patch_linear_layers(model)
    apply_activation_checkpointing(model, list(model.blocks), policy)
    assert same(train(model), train(plain))
    # 17 products belong to the backward itself; full recomputation adds the forward's.
    counts = operators_in_backward(model)["mkldnn._linear_pointwise.default"]
    assert counts == operators_in_backward(plain)["mkldnn._linear_pointwise.default"] + (16 if policy is FULL else 0)


def saved_bytes(model: nn.Module) -> int:
    """Bytes that the autograd graph keeps alive after a forward, parameters not counted."""
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch())
    size = sum(kept.values())
    del loss
    return size


def test_fewer_bytes_are_kept() -> None:
    plain = saved_bytes(small())
    full = saved_bytes(checkpointed(FULL))
    every_second = saved_bytes(checkpointed(ActivationCheckpointPolicy("selective", every=2)))
    assert full < every_second < plain
    assert full < 0.4 * plain


def test_eval_and_no_grad_run_plain() -> None:
    model = checkpointed(FULL)
    model.eval()
    assert runs_of(model, list(model.blocks)) == [1, 1, 1, 1]
    model = checkpointed(FULL)
    with torch.no_grad():
        assert torch.equal(model(*batch()), small()(*batch()))


class Odd(nn.Module):
    """A unit with everything that a forward may take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(
        self,
        x: Tensor,
        scale: float,
        flags: dict[str, bool],
        *,
        bias: Tensor | None = None,
        debug: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor], str, None]:
        self.calls += 1
        assert debug is True
        y = self.inner(x).tanh() * scale
        if bias is not None and flags["add"]:
            y = y + bias
        return y, {"twice": 2 * y}, "label", None


def test_keyword_arguments_other_types_and_structured_results() -> None:
    results = []
    for policy in (ActivationCheckpointPolicy(), FULL):
        torch.manual_seed(0)
        unit = Odd()
        apply_activation_checkpointing(unit, [unit], policy)
        x = torch.ones(2, 8, requires_grad=True)
        bias = torch.ones(8, requires_grad=True)
        y, extra, label, nothing = unit(x, 0.5, {"add": True}, bias=bias, debug=True)
        assert (label, nothing) == ("label", None)
        (y.square().sum() + extra["twice"].sum()).backward()
        results.append([x.grad, bias.grad, unit.inner.weight.grad])
        assert unit.calls == (2 if policy is FULL else 1)
    assert same(*results)


def test_inputs_without_gradients_and_a_frozen_base_with_adapters() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.drop = base.requires_grad_(False), nn.Dropout(0.2)
            self.a, self.b = (
                nn.Linear(base.in_features, 4, bias=False),
                nn.Linear(4, base.out_features, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(self.drop(x)))

    def build() -> GPT:
        model = small(0.2).requires_grad_(False)
        for block in model.blocks:
            block.mlp.up, block.attention.qkv = Lora(block.mlp.up), Lora(block.attention.qkv)
        return model

    for policy in (FULL, ActivationCheckpointPolicy("selective")):
        plain, model = build(), build()
        apply_activation_checkpointing(model, list(model.blocks), policy)
        grads = train(model)
        assert same(grads, train(plain)) and len(grads) == 3 + 4 * 4


def test_the_model_looks_the_same() -> None:
    plain, model = small(), small()
    blocks = list(model.blocks)
    kind = type(blocks[0])
    apply_activation_checkpointing(model, blocks, FULL)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    assert isinstance(blocks[0], kind) and type(blocks[0]).__name__ == "Block"
    assert type(blocks[0]) is type(blocks[1])
    apply_activation_checkpointing(model, blocks, FULL)  # once more changes nothing
    assert runs_of(model, blocks) == [2, 2, 2, 2]


def test_copies_and_pickles() -> None:
    model = checkpointed(FULL, dropout=0.2)
    twin = copy.deepcopy(model)
    assert same(train(twin), train(small(0.2)))
    assert runs_of(twin, list(twin.blocks)) == [2, 2, 2, 2]
    data = pickle.dumps(model)
    assert b"remat" not in data
    plain = pickle.loads(data)
    assert runs_of(plain, list(plain.blocks)) == [1, 1, 1, 1]


def test_the_model_dies_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        model = checkpointed(FULL)
        model(*batch()).backward()
        watch = weakref.ref(model.blocks[0])
        del model
        assert watch() is None
    finally:
        gc.enable()


def test_other_instances_of_the_class_stay_plain() -> None:
    checkpointed(FULL)
    other = small()
    assert runs_of(other, list(other.blocks)) == [1, 1, 1, 1]


@pytest.mark.parametrize("policy", [FULL, nightly(ActivationCheckpointPolicy("selective"))], ids=str)
def test_compiled_after(policy: ActivationCheckpointPolicy) -> None:
    torch._dynamo.reset()
    want = train(small(layers=2))
    model = checkpointed(policy, layers=2)
    got = train(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=1e-5)
    torch._dynamo.reset()
    by_unit = checkpointed(policy, layers=2)
    for block in by_unit.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(train(by_unit), want, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=1e-5)


def test_retained_graph_two_losses_and_nested_units() -> None:
    want = None
    for nested in (False, True):
        model = small(0.1)
        if nested:
            apply_activation_checkpointing(model, [*model.blocks, model.blocks[0].mlp], FULL)
        torch.manual_seed(3)
        tokens, labels = batch()
        logits = model(tokens)
        first = logits.square().mean()
        second = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        first.backward(retain_graph=True)
        second.backward()
        grads = [p.grad for p in model.parameters()]
        assert want is None or same(grads, want)
        want = grads


def test_units_that_cannot_be_checkpointed() -> None:
    model, other = small(), small()
    with pytest.raises(ValueError, match="not a module of the model"):
        apply_activation_checkpointing(model, [other.blocks[0]], FULL)
    replaced = small()
    replaced.blocks[1].forward = lambda x: x
    with pytest.raises(ValueError, match="replaced forward"):
        apply_activation_checkpointing(replaced, list(replaced.blocks), FULL)
    assert not any(isinstance(unit, DynamicSubclass) for unit in replaced.modules())
