"""zero.Init: shapes without memory, values as those of an ordinary build, nothing patched."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero_init_support import (
    SMALL_SIZES,
    build_plain_and_recorded,
    matches_plain,
    materialized_values,
)
from thalweg.deferred_init.context import has_meta_tensors, materialize_module
from thalweg.deferred_init.record_mode import RecordMode
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.zero import Init

torch.set_num_threads(1)


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=96, n_layer=2, n_head=2, n_embd=32, block_size=16))


LAYERS = {
    "gpt": gpt,
    "linear": lambda: nn.Linear(70, 90),
    "embedding": lambda: nn.Embedding(90, 70, padding_idx=3),
    "bag": lambda: nn.EmbeddingBag.from_pretrained(torch.randn(90, 70)),
    "conv": lambda: nn.Conv2d(8, 50, 5, groups=2),
    "norms": lambda: nn.Sequential(nn.LayerNorm(5000), nn.BatchNorm2d(5000), nn.GroupNorm(4, 5000)),
    "lstm": lambda: nn.LSTM(40, 50, 2, bidirectional=True),
    "gru": lambda: nn.GRU(40, 50, 2),
    "attention": lambda: nn.MultiheadAttention(40, 4, kdim=30, vdim=20, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64),
    "bilinear": lambda: nn.Bilinear(20, 20, 20),
    "double": lambda: nn.Linear(70, 90, dtype=torch.float64),
    "half": lambda: nn.Linear(70, 90).half(),
    "skip_init": lambda: nn.Sequential(nn.Linear(4, 4), nn.utils.skip_init(nn.Linear, 70, 90)),
}


@pytest.mark.parametrize("small", SMALL_SIZES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "skip_init"])
def test_layers_get_the_values_of_an_ordinary_build(name: str, small: int) -> None:
    plain, model = build_plain_and_recorded(LAYERS[name], small)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert q.is_meta and q.device.type == "cpu" and isinstance(q, nn.Parameter) and q.is_leaf
        for fact in ("shape", "dtype", "requires_grad"):
            assert getattr(p, fact) == getattr(q, fact)
        assert p.numel() == q.numel() and p.stride() == q.stride()
    assert has_meta_tensors(model) and matches_plain(plain, model)


def test_another_seed_gives_other_values() -> None:  # negative control
    _, model = build_plain_and_recorded(LAYERS["gpt"], 64)
    torch.manual_seed(8)
    assert not matches_plain(gpt(), model)


class Filled(nn.Module):
    def __init__(self, fill: object) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(60, 70), nn.Linear(70, 60)
        self.c = nn.Parameter(torch.randn(77))
        for layer in (self.a, self.b):
            fill(layer.weight)  # type: ignore[operator]


FILLS = {
    "orthogonal": nn.init.orthogonal_,
    "trunc_normal": nn.init.trunc_normal_,  # rejection sampling: a loop that looks at the values
    "trunc_normal_narrow": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "trunc_normal_tail": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.9, 2.0),
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "eye": nn.init.eye_,
    "constant": lambda w: nn.init.constant_(w, 2.5),
}


@pytest.mark.parametrize("small", SMALL_SIZES)
@pytest.mark.parametrize("fill", FILLS)
def test_initialisers_inside_and_after_the_context(fill: str, small: int) -> None:
    assert matches_plain(*build_plain_and_recorded(lambda: Filled(FILLS[fill]), small))

    def later(model: Filled) -> None:
        FILLS[fill](model.a.weight)
        model.b.weight.data.normal_()

    assert matches_plain(*build_plain_and_recorded(lambda: Filled(nn.init.zeros_), small, after_build=later))


class Awkward(nn.Module):
    """Views, lists as indices, values that steer the constructor, buffers, other generators."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(20, 30))
        self.w.data[[0, 2]] = 1.0
        self.w.data[1] = torch.arange(30.0)
        self.w.data[:, 3] *= 2
        self.w.data[torch.tensor([True] * 10 + [False] * 10)] = 5
        width = 40 if torch.rand(1) > 0.5 else 50
        self.first = nn.Linear(30, width)
        if self.first.weight.abs().max() > 0.1:
            self.second = nn.Linear(int(torch.randint(1, 9, ())) * 7, 20)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64))
        self.register_buffer("cos", torch.outer(torch.arange(200.0), self.inv_freq).cos(), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(80, 80)).view(1, 1, 80, 80).bool())
        self.rates = [x.item() for x in torch.linspace(0, 1, 100)]
        assert self.rates == torch.linspace(0, 1, 100).tolist()
        source = torch.Generator().manual_seed(5)
        self.other = nn.Parameter(torch.randn(70, 80, generator=source))
        self.like = nn.Parameter(torch.rand_like(self.other))
        self.coin = nn.Parameter(torch.empty(70, 80).bernoulli_(0.2))
        self.late = nn.Parameter(torch.empty(70, 80).exponential_())
        self.slanted = nn.Parameter(torch.empty(90, 50).t().normal_())
        self.around = nn.Parameter(torch.normal(self.other.data, 0.1))
        with torch.random.fork_rng():
            self.forked = nn.Linear(70, 80)
        torch.manual_seed(11)
        self.seeded = nn.Parameter(torch.randn(70, 80).to(self.first.weight))
        both = torch.randn(100, 60)
        self.top, self.bottom = nn.Parameter(both[:50]), nn.Parameter(both[50:])
        both.mul_(3)
        self.embedding, self.head = nn.Embedding(40, 30), nn.Linear(30, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(copy.deepcopy(nn.Linear(30, 40)) for _ in range(3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(30, 40))
        self.frozen = nn.Parameter(torch.randn(80, 80), requires_grad=False)
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.old = nn.Parameter(torch.Tensor(80, 80).uniform_(-1, 1))
        self.cast = nn.Parameter(torch.empty(30, 40))
        self.cast.data = torch.randn(80, 60, device=self.w.device)
        self.shrunk = nn.Parameter(torch.empty(80, 60))
        self.shrunk.data = torch.randn(7, 3)
        loaded = nn.Linear(70, 80).state_dict()
        self.loaded = nn.Linear(70, 80)
        self.loaded.load_state_dict(loaded)
        with torch.no_grad():
            torch._foreach_mul_([self.frozen, self.old], 2.0)


@pytest.mark.parametrize("small", SMALL_SIZES)
def test_awkward_constructors(small: int) -> None:
    plain, model = build_plain_and_recorded(Awkward, small)
    assert model.head.weight is model.embedding.weight
    assert matches_plain(plain, model)


@pytest.mark.parametrize("small", SMALL_SIZES)
def test_changes_after_the_context_count(small: int) -> None:
    def later(model: nn.Module) -> None:
        model.apply(lambda m: m.weight.data.mul_(2) if isinstance(m, nn.Linear) else None)
        model.load_state_dict({**model.state_dict(), "norm.weight": torch.arange(32.0)})
        for block in model.blocks:  # type: ignore[union-attr]
            nn.init.trunc_normal_(block.mlp.up.weight)
        model.half()

    assert matches_plain(*build_plain_and_recorded(gpt, small, after_build=later))


def test_deepcopy_and_state_dict_have_the_values() -> None:
    plain, model = build_plain_and_recorded(gpt, 64)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(model.state_dict()[name].cpu(), tensor)
    assert twin.head.weight is twin.wte.weight and twin.wte.weight is not model.wte.weight
    twin.wte.weight.data.zero_()
    assert matches_plain(plain, model)
    assert (materialized_values(twin)["wte.weight"] == 0).all()


def test_numpy_is_read_only_and_a_forward_pass_is_refused() -> None:
    plain, model = build_plain_and_recorded(gpt, 64)
    assert (model.wte.weight.detach().numpy() == plain.wte.weight.detach().numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        model.wte.weight.detach().numpy()[0] = 1.0
    for guard in (torch.no_grad, torch.enable_grad):
        with guard(), pytest.raises(ValueError, match=r"thalweg\.initialize"):
            model(torch.tensor([[1, 2, 3]]))
    assert model.cpu() is model and has_meta_tensors(model)
    assert model.wte.weight.detach().norm().item() == plain.wte.weight.detach().norm().item()


def test_real_tensors_on_request() -> None:
    plain, model = build_plain_and_recorded(gpt, 64)
    assert torch.equal(model.wpe.weight.to("cpu", torch.float64), plain.wpe.weight.double())
    zeros = torch.zeros_like(model.wpe.weight, device="cpu")
    assert type(zeros) is Tensor and not zeros.is_meta and not zeros.any()
    assert torch.zeros_like(model.wpe.weight).is_meta
    target = torch.empty(16, 32)
    target.copy_(model.wpe.weight.detach())
    assert torch.equal(target, plain.wpe.weight)
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    assert not has_meta_tensors(model)
    assert torch.equal(model(torch.tensor([[1, 2]])), plain(torch.tensor([[1, 2]])))


def test_a_layer_that_is_moved_to_where_the_model_is_keeps_its_values() -> None:
    _, model = build_plain_and_recorded(gpt, 64)
    layer, weight = nn.Linear(32, 4), model.wte.weight
    values = layer.weight.detach().clone()
    model.head = layer.to(weight.device)
    assert weight.is_cpu and torch.equal(layer.weight, values)
    assert torch.equal(materialized_values(model)["head.weight"], values)


def test_row10_true_shapes_and_effective_initialisation() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(100, 70), nn.Embedding(90, 80))
    assert [tuple(p.shape) for p in model.parameters()] == [(70, 100), (70,), (90, 80)]
    assert sum(p.numel() for p in model.parameters()) == 7000 + 70 + 7200
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    with torch.no_grad():
        model[1].weight[3:5] = 7.0  # type: ignore[index]
    found = materialized_values(model)
    assert (found["0.weight"] == 1).all() and (found["1.weight"][3:5] == 7).all()
    assert found["1.weight"][5:].std() > 0.9


def _torch_identities() -> dict[str, int]:
    spaces = [torch, torch.nn.init, torch.nn.functional, torch.Tensor]
    spaces += [nn.Module, nn.Linear, nn.Embedding, nn.Parameter]
    return {f"{space.__name__}.{key}": id(value) for space in spaces for key, value in vars(space).items()}


def test_row13_nothing_of_torch_is_patched_and_other_models_stay_plain() -> None:
    outside = nn.Linear(100, 70)
    before = _torch_identities()
    hooks = len(torch.nn.modules.module._global_parameter_registration_hooks)
    results: dict[str, Tensor] = {}

    def elsewhere() -> None:
        results["thread"] = nn.Linear(100, 70).weight

    with Init():
        assert _torch_identities() == before
        inside = nn.ModuleList([nn.Linear(100, 70), outside])
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        outside.weight.data.fill_(3.0)
    after = nn.Linear(100, 70)
    assert _torch_identities() == before
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == hooks
    assert inside[0].weight.is_meta
    for weight in (outside.weight, after.weight, results["thread"], inside[1].weight):
        assert type(weight) is nn.Parameter and not weight.is_meta
    assert outside(torch.ones(1, 100)).shape == (1, 70) and (outside.weight == 3).all()


def test_nested_contexts_exceptions_and_disabled() -> None:
    def build(enabled: bool = False) -> nn.Module:
        first = nn.Linear(80, 60)
        with Init(enabled=enabled), Init(enabled=enabled):
            second = nn.Linear(60, 80)
        return nn.Sequential(first, second, nn.Linear(80, 60))

    def fail() -> None:
        with Init(dtype=torch.bfloat16):
            nn.Linear(80, 60)
            raise RuntimeError("boom")

    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    with Init():
        model = build(enabled=True)
    assert all(p.is_meta for p in model.parameters()) and matches_plain(plain, model)
    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert torch.get_default_dtype() is torch.float32
    assert not nn.Linear(80, 60).weight.is_meta
    with Init(enabled=False):
        assert not nn.Linear(80, 60).weight.is_meta
    context = Init()
    for _ in range(2):
        with context:
            assert nn.Linear(80, 60).weight.shape == (60, 80)


def test_dtype_is_that_of_an_ordinary_build_in_it() -> None:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain = gpt()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(3)
    with Init(dtype=torch.bfloat16):
        model = gpt()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert matches_plain(plain, model)
    for wrong in (torch.int64, "bf16"):
        with pytest.raises(ValueError, match="floating dtype"):
            Init(dtype=wrong)  # type: ignore[arg-type]


def test_unknown_options_of_deepspeed_are_taken() -> None:
    with Init(config_dict_or_path={"zero_optimization": {}}, remote_device="cpu", zero_quantized_weights=False):
        model = nn.Linear(100, 70)
    assert model.weight.is_meta


def test_materialize_settles_and_lets_the_record_go() -> None:
    with RecordMode(64):
        model = nn.Linear(100, 70)
    weight = model.weight
    weight.tag = "kept"  # type: ignore[attr-defined]
    seen: dict[str, Tensor] = {}
    materialize_module(model, lambda name, meta, value: seen.update({name: meta}))
    assert seen.keys() == {"weight", "bias"} and seen["weight"] is weight
    seen.clear()
    assert model.weight is weight and type(weight) is nn.Parameter and weight.is_meta and weight.requires_grad
    assert vars(weight) == {"tag": "kept"}
    alive = weakref.ref(weight)
    del model, weight
    assert alive() is None


@pytest.mark.parametrize(
    "build",
    [gpt, LAYERS["lstm"], LAYERS["attention"], LAYERS["norms"], lambda: Tied()],
    ids=["gpt", "lstm", "attention", "norms", "tied"],
)
def test_meta_device_models_are_initialised_by_their_modules(build: object) -> None:
    torch.manual_seed(5)
    plain = build()  # type: ignore[operator]
    torch.manual_seed(5)
    with torch.device("meta"):
        model = build()  # type: ignore[operator]
    assert matches_plain(plain, model)


class Tied(nn.Module):
    """Ties without initialising again: the embedding's own values count."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"embedding": nn.Embedding(30, 20, padding_idx=1)})
        self.head = nn.Linear(20, 30)
        self.head.weight = self.body["embedding"].weight


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


def test_meta_device_model_without_a_way_to_initialise() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), NoReset())
    with pytest.raises(ValueError, match=r"1\.scale \(NoReset\).*zero\.Init"):
        materialize_module(model, lambda *_: pytest.fail("called before the check"))
    assert type(model[0].weight) is nn.Parameter
    with torch.no_grad():
        model[1].scale = nn.Parameter(torch.ones(4))  # type: ignore[assignment]
    assert len(materialized_values(model)) == 5


def test_mixing_with_meta_tensors_without_values_is_an_error() -> None:
    with Init():
        model = nn.Linear(100, 70)
    with pytest.raises(ValueError, match="without a value"), torch.no_grad():
        model.weight.copy_(torch.empty(70, 100, device="meta"))
    with pytest.raises(ValueError, match="without a value"), torch.no_grad():
        torch.empty(70, 100, device="meta").copy_(model.weight)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has transparent huge pages")
def test_building_a_model_asks_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in ((None, "1"), ("0", "0")):
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given or "")
        if given is None:
            monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
        with Init():
            nn.Linear(4, 4)
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == wanted


_COUNT_FAULTS = """
import resource, torch, thalweg
with thalweg.zero.Init():
    torch.nn.Linear(4, 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not (THP := Path("/sys/kernel/mm/transparent_hugepage/enabled")).exists() or "[madvise]" not in THP.read_text(),
    reason="huge pages are not what this system gives on request",
)
def test_a_program_without_the_launcher_has_huge_pages() -> None:
    """64 MiB: 16,384 faults of 4 KiB, or some 500 where the ends of the block fill no 2 MiB."""
    environ = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    counts = [
        int(subprocess.check_output([sys.executable, "-c", _COUNT_FAULTS], env={**environ, **more}, text=True))
        for more in ({}, {"THP_MEM_ALLOC_ENABLE": "0"})
    ]
    assert counts[0] < 2000 < 16000 < counts[1], counts
