"""Switching a model's linear layers: same model, same numbers, no trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.ops import patch_linear_layers
from thalweg.ops.linear import functional
from thalweg.ops.linear.kernels import REFERENCE, is_usable

pytestmark = pytest.mark.skipif(
    not is_usable("nt", "onednn", torch.float32), reason="this torch build has no mkldnn::_linear_pointwise"
)


class Always:
    """A table that answers ``onednn`` and counts."""

    def __init__(self) -> None:
        self.asked = 0

    def best_kernel(self, kind: str, dtype: torch.dtype, *_dims: int) -> str:
        self.asked += 1
        return "onednn" if is_usable(kind, "onednn", dtype) else REFERENCE


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Always:
    torch.set_num_threads(1)
    always = Always()
    monkeypatch.setattr(functional, "get_autotune_cache", lambda: always)
    monkeypatch.setattr(functional, "MIN_FLOPS", 0.0)
    return always


def small(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=97, n_layer=2, n_head=2, n_embd=32, block_size=16, tied=tied))


def train(model: nn.Module, steps: int = 5) -> tuple[list[float], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(97, (3, 17), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("tied", [True, False])
def test_training_is_the_same_to_1e_5(table: Always, tied: bool) -> None:
    plain, switched = small(tied), small(tied)
    assert patch_linear_layers(switched) == 9
    (want, end), (got, mine) = train(plain), train(switched)
    assert table.asked
    assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 1e-5
    for a, b in zip(end, mine, strict=True):
        assert (a - b).norm() < 1e-5 * a.norm().clamp_min(1.0)


def test_mode_torch_is_bit_for_bit_torch(table: Always) -> None:
    plain, switched = small(), small()
    assert patch_linear_layers(switched, "torch") == 0
    (want, end), (got, mine) = train(plain), train(switched)
    assert want == got and not table.asked
    assert all(torch.equal(a, b) for a, b in zip(end, mine, strict=True))


def test_the_model_looks_the_same(table: Always) -> None:
    plain, switched = small(), small()
    patch_linear_layers(switched)
    assert repr(switched) == repr(plain)
    assert [name for name, _ in switched.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(switched.state_dict()) == list(plain.state_dict())
    assert isinstance(switched.head, nn.Linear) and type(switched.head).__name__ == "Linear"
    assert "forward" not in switched.head.__dict__
    assert type(plain.head) is nn.Linear and nn.Linear.forward.__module__ == "torch.nn.modules.linear"
    plain.load_state_dict(switched.state_dict())
    switched.load_state_dict(plain.state_dict())


def test_a_layer_is_switched_once(table: Always) -> None:
    model = small()
    assert patch_linear_layers(model) == 9
    kinds = [type(module) for module in model.modules()]
    assert patch_linear_layers(model) == 0
    assert [type(module) for module in model.modules()] == kinds


def test_a_deep_copy_is_switched_and_its_own(table: Always) -> None:
    model = small()
    patch_linear_layers(model)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.wte.weight and twin.head.weight is not model.head.weight
    tokens = torch.arange(16).view(1, 16)
    before = model(tokens)
    with torch.no_grad():
        twin.head.weight.zero_()
    asked = table.asked
    assert twin(tokens).abs().sum() == 0 and table.asked > asked
    assert torch.equal(model(tokens), before)


def test_a_pickle_holds_the_plain_model(table: Always) -> None:
    model = small()
    patch_linear_layers(model)
    data = pickle.dumps(model)
    assert b"thalweg.ops" not in data
    twin = pickle.loads(data)
    assert type(twin.head) is nn.Linear
    tokens = torch.arange(16).view(1, 16)
    assert torch.allclose(twin(tokens), model(tokens), atol=1e-5)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert b"thalweg" not in buffer.getvalue()


def test_the_model_dies_with_its_last_reference(table: Always) -> None:
    gc.collect()
    gc.disable()
    try:
        model = small()
        patch_linear_layers(model)
        train(model, 1)
        watch = weakref.ref(model.head)
        del model
        assert watch() is None
    finally:
        gc.enable()


def test_others_classes_hooks_and_computed_weights_are_left_alone(table: Always) -> None:
    class Own(nn.Linear):
        pass

    replaced, hooked, plain = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    fired: list[int] = []
    hooked.register_forward_hook(lambda *_: fired.append(1))
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    old_normed = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(Own(4, 4), replaced, hooked, normed, old_normed, nn.Bilinear(4, 4, 4), plain)
    kinds = [type(module) for module in model]
    assert patch_linear_layers(model) == 1
    assert [type(module) for module in list(model)[:-1]] == kinds[:-1]
    model[2](torch.ones(2, 4))
    assert fired == [1]
    attention = nn.MultiheadAttention(8, 2)
    assert patch_linear_layers(attention) == 0
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    want = encoder(x)
    assert patch_linear_layers(encoder) == 2
    assert torch.allclose(encoder(x), want, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(encoder.eval()(x), want, atol=1e-5)


def test_hooks_and_parametrizations_come_after_switching_too(table: Always) -> None:
    layer = nn.Linear(8, 8)
    patch_linear_layers(layer)
    fired: list[int] = []
    handle = layer.register_forward_hook(lambda *_: fired.append(1))
    layer(torch.ones(2, 8))
    handle.remove()
    assert fired == [1]
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(4, 8)
    asked = table.asked
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)
    assert table.asked > asked
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert functional.is_patched(layer) and torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)


def test_off_the_cpu_nothing_happens(table: Always) -> None:
    with torch.device("meta"):
        model = small()
    patch_linear_layers(model)
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, 97)
    assert not table.asked


def test_compiled(table: Always) -> None:
    torch._dynamo.reset()
    model = small()
    patch_linear_layers(model)
    tokens = torch.arange(16).view(1, 16)
    want = model(tokens, tokens)
    asked = table.asked
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens, tokens)
    assert table.asked == asked
    assert abs(got.item() - want.item()) < 1e-5


def test_flops_are_counted_as_before(table: Always) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for mode in ("torch", "auto"):
        model = small()
        patch_linear_layers(model, mode)
        with FlopCounterMode(display=False) as counter:
            model(*(torch.zeros(2, 16, dtype=torch.long),) * 2).backward()
        totals.append(counter.get_total_flops())
    assert table.asked and totals[0] == totals[1] > 0


def test_exported_and_traced(table: Always) -> None:
    layer = nn.Linear(8, 8)
    patch_linear_layers(layer)
    x = torch.randn(4, 8)
    asked = table.asked
    program = torch.export.export(layer, (x,))
    assert "mkldnn" not in str(program.graph)
    assert table.asked == asked
    traced = torch.jit.trace(layer, x)
    assert "linear" in str(traced.inlined_graph) and "mkldnn" not in str(traced.inlined_graph)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_models(table: Always, family: str) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=16)
        plain, expected = hf.GPT2LMHeadModel(config), 9
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
        config = hf.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
        plain, expected = hf.LlamaForCausalLM(config), 15
    plain.eval()
    switched = copy.deepcopy(plain)
    assert patch_linear_layers(switched) == expected
    assert repr(switched) == repr(plain)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (plain, switched):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    assert table.asked == 3 * expected
    assert abs(losses[0] - losses[1]) < 1e-5
    for (name, a), b in zip(plain.named_parameters(), switched.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 1e-5 * a.grad.norm().clamp_min(1e-3), name
