"""Compression: rounding by its formulas, masks, schedules, what a config's names reach, plain models after it."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.infer_models import tiny_decoder
from thalweg.compression import distillation_loss, init_compression, redundancy_clean
from thalweg.compression.layers import Mask, iter_compressed, keep_largest
from thalweg.compression.quantize import fake_quantize, quantize
from thalweg.compression.schedule import BlockEigenvalues, CompressionSchedule
from thalweg.config import load
from thalweg.config.errors import ConfigError
from thalweg.ops.linear.packed import pack_linear
from thalweg.optim.accumulation import StepResult

STEP = StepResult(torch.ones(()))


def technique(name: str, modules: list[str], params: dict[str, Any], related: Any = None, **shared: Any) -> Any:
    """A config with one technique and one group."""
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    block = {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g1": group}}
    return {"compression_training": {name: block}}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def tick(model: nn.Module, steps: int = 1) -> None:
    schedule = CompressionSchedule(iter_compressed(model), None, None)
    for _ in range(steps):
        schedule.after_step(STEP)


# Rounding


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_error_is_at_most_half_a_scale(bits: int, symmetric: bool) -> None:
    torch.manual_seed(bits)
    x = torch.randn(8, 12) + 0.3
    codes, scale, zero = quantized = quantize(x, bits, 8, symmetric)
    assert float((quantized.dequantize() - x).abs().max() / scale.max()) <= 0.5 + 1e-5
    assert torch.equal(codes, codes.round()) and len(codes.unique()) <= 2**bits
    assert (quantize(x, bits + 1, 8, symmetric).dequantize() - x).abs().mean() < (
        quantized.dequantize() - x
    ).abs().mean()
    assert bool(zero.any()) is not symmetric


def test_one_and_two_bits_by_their_papers() -> None:
    x = torch.tensor([[4.0, -2.0, 0.1, -1.9]])
    assert torch.equal(fake_quantize(x, 1), torch.tensor([[2.0, -2.0, 2.0, -2.0]]))
    kept = (4 + 2 + 1.9) / 3  # above 0.7 of the mean, which is 2
    torch.testing.assert_close(fake_quantize(x, 2), torch.tensor([[kept, -kept, 0.0, -kept]]))
    with pytest.raises(ValueError, match="symmetrically"):
        fake_quantize(x, 2, symmetric=False)


def test_rounding_by_chance_keeps_the_mean_and_to_the_nearest_does_not() -> None:
    x = torch.full((1, 4000), 0.3)
    x[0, 0] = 1.0
    noise = torch.rand(1, 4000, generator=torch.Generator().manual_seed(1))
    assert float(fake_quantize(x, 3, noise=noise)[0, 1:].mean()) == pytest.approx(0.3, abs=0.01)
    assert float(fake_quantize(x, 3)[0, 1:].mean()) == pytest.approx(1 / 3)


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    fake_quantize(x, 3).mul(torch.arange(16.0).view(4, 4)).sum().backward()
    assert torch.equal(x.grad, torch.arange(16.0).view(4, 4))  # type: ignore[arg-type]


def test_eight_bits_by_output_are_those_that_inference_packs() -> None:
    """What was trained is packed without another rounding."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 64), torch.randn(5, 64)
    packed = [
        pack_linear(w, None, "int8")(x) for w in (weight, fake_quantize(weight, 8, 32), fake_quantize(weight, 8, 1))
    ]
    torch.testing.assert_close(packed[0], packed[1])
    assert float((packed[0] - packed[2]).abs().max()) > 1e-3  # the control: another grid is rounded again


# Masks


def test_trained_scores_choose_other_weights_and_fixed_masks_do_not() -> None:
    weight = torch.tensor([[3.0, 2.0, 1.0, 0.5]])
    moving, fixed = Mask(weight, 0.5, "topk", 0), Mask(weight, 0.5, "l1", 0)
    want = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert torch.equal(moving().float(), want) and torch.equal(fixed().float(), want)
    (moving() * torch.tensor([[1.0, 1.0, -1.0, 1.0]])).sum().backward()
    assert moving.scores is not None and torch.equal(moving.scores.grad, torch.tensor([[1.0, 1.0, -1.0, 1.0]]))
    with torch.no_grad():
        moving.scores -= moving.scores.grad
    assert torch.equal(moving().float(), torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    assert not list(fixed.parameters())


def test_equal_scores_keep_the_exact_number() -> None:
    assert keep_largest(torch.ones(10), 0.3).tolist() == [True] * 3 + [False] * 7
    assert int(keep_largest(torch.ones(10), 0.001).sum()) == 1


# From a config


def test_a_wrong_name_a_layer_twice_and_a_missing_value_are_errors() -> None:
    config = technique("sparse_pruning", ["nowhere"], {"dense_ratio": 0.5}, method="l1")
    with pytest.raises(ValueError, match='no layer is called "nowhere"'):
        init_compression(mlp(), config)
    twice = technique("sparse_pruning", ["0", "*"], {"dense_ratio": 0.5}, method="l1")
    with pytest.raises(ValueError, match="0 is in g1 already"):
        init_compression(mlp(), twice)
    with pytest.raises(ValueError, match="has no dense_ratio"):
        init_compression(mlp(), technique("sparse_pruning", ["0"], {}, method="l1"))
    with pytest.raises(ConfigError, match="dense_ration"):
        init_compression(mlp(), technique("sparse_pruning", ["0"], {"dense_ration": 0.5}, method="l1"))
    groups = technique("weight_quantization", ["0"], {"start_bits": 8, "target_bits": 8}, quantize_groups=5)
    with pytest.raises(ValueError, match="5 quantize_groups do not divide"):
        init_compression(mlp(), groups)
    with pytest.raises(ValueError, match="no layer of this Sequential is compressed"):
        redundancy_clean(mlp(), {})


def test_bits_fall_at_the_period_and_twice_as_late_each_time() -> None:
    params = {"start_bits": 8, "target_bits": 5, "quantization_period": 3}
    model = init_compression(mlp(), technique("weight_quantization", ["0"], params, schedule_offset=2))
    compression = iter_compressed(model)["0"].compression
    plain, seen = mlp()(torch.ones(1, 6)), []
    for _ in range(16):
        seen.append(compression.bits if not torch.equal(model(torch.ones(1, 6)), plain) else 32)
        tick(model)
    assert seen == [32] * 2 + [8] * 3 + [7] * 3 + [6] * 6 + [5] * 2  # switches at 2 + 3, 2 + 6, 2 + 12


def test_the_whole_weights_share_falls_to_nothing() -> None:
    params, mixed = {"start_bits": 3, "target_bits": 3}, {"enabled": True, "quantize_change_ratio": 0.25}
    model = init_compression(mlp(), technique("weight_quantization", ["0"], params, fp16_mixed_quantize=mixed))
    x, rounded = torch.ones(1, 6), fake_quantize(mlp()[0].weight, 3)
    for share in (0.75, 0.5, 0.25, 0.0, 0.0):
        weight, _ = model[0].compression.rows_and_bias(model[0].weight, None)
        torch.testing.assert_close(weight, share * model[0].weight + (1 - share) * rounded)
        assert torch.isfinite(model(x)).all()
        cleaned = redundancy_clean(copy.deepcopy(model))  # rounded whatever the share is
        torch.testing.assert_close(cleaned[0].weight, rounded)
        tick(model)


def test_static_ranges_follow_training_and_dynamic_ones_each_token() -> None:
    config = technique("activation_quantization", ["0"], {"bits": 8}, range_calibration="static")
    model = init_compression(mlp(), config)
    x = torch.linspace(-1, 3, 12).view(2, 6)
    assert torch.equal(model(x), mlp()(x))  # calibration
    tick(model)
    compression = model[0].compression
    assert compression.range.tolist() == [-1, 3]
    assert not torch.equal(model(2 * x), mlp()(2 * x)) and float((model(x) - mlp()(x)).detach().abs().max()) < 0.05
    assert compression.inputs(100 * x).abs().max() == pytest.approx(3, rel=0.01)  # out of the range: clipped
    tick(model)
    assert compression.range.tolist() == pytest.approx([0.95 * -1 + 0.05 * -100, 0.95 * 3 + 0.05 * 300])
    model.eval()
    model(1000 * x)
    tick(model)
    assert float(compression.range[1]) < 20  # evaluation teaches nothing
    dynamic = init_compression(mlp(), technique("activation_quantization", ["0"], {"bits": 8}))
    y = dynamic[0].compression.inputs(torch.stack([x[0], 100 * x[0]]))
    torch.testing.assert_close(y[1], 100 * y[0])


def test_the_extra_state_goes_on_where_it_was() -> None:
    params = {"start_bits": 8, "target_bits": 4, "quantization_period": 1}
    config = technique("weight_quantization", ["*"], params, rounding="stochastic")
    model, resumed = init_compression(mlp(), config), init_compression(mlp(), config)
    tick(model, 5)
    x = torch.randn(3, 6)
    assert not torch.equal(model(x), resumed(x))
    resumed.load_state_dict(model.state_dict())
    assert torch.equal(model(x), resumed(x)) and resumed[0].compression.bits == 5
    tick(model, 3), tick(resumed, 3)
    assert torch.equal(model(x), resumed(x)) and resumed[2].compression.bits == 4


def test_compressed_layers_are_copied_and_pickled_as_what_they_are() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 16), Conv1D(4, 16))
    plain, ids = copy.deepcopy(model), torch.arange(9)
    init_compression(model, technique("weight_quantization", ["*"], {"start_bits": 4, "target_bits": 4}))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for made in copies:
        assert [type(layer) for layer in made] == [type(layer) for layer in model]
        assert torch.equal(made(ids), model(ids)) and not torch.equal(made(ids), plain(ids))


# Cleaning


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_go_and_the_function_stays(method: str) -> None:
    config = technique("row_pruning", ["0"], {"dense_ratio": 0.25}, [["2"]], method=method)
    model = init_compression(mlp(), config)
    x = torch.randn(5, 6)
    want = model(x).detach()
    assert not torch.allclose(want, mlp()(x))
    plain = redundancy_clean(model, config)
    assert type(plain[0]) is nn.Linear and plain[0].weight.shape == (4, 6) and plain[2].weight.shape == (4, 4)
    assert (plain[0].out_features, plain[2].in_features) == (4, 4) and "compression" not in "".join(plain.state_dict())
    torch.testing.assert_close(plain(x), want)


def test_without_related_modules_rows_are_zero_and_stay() -> None:
    model = init_compression(mlp(), technique("row_pruning", ["0"], {"dense_ratio": 0.25}))
    want = model(torch.ones(1, 6)).detach()
    plain = redundancy_clean(model)
    assert int((plain[0].weight.abs().sum(1) == 0).sum()) == 12 and plain[0].weight.shape == (16, 6)
    torch.testing.assert_close(plain(torch.ones(1, 6)), want)


def test_channels_go_with_the_norm_and_the_next_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2)
    ).eval()
    config = technique("channel_pruning", ["^0$"], {"dense_ratio": 0.5}, [["^1$", "^3$"]])
    model, x = init_compression(model, config), torch.randn(2, 3, 8, 8)
    want = model(x).detach()
    plain = redundancy_clean(model, config)
    assert plain[0].weight.shape[0] == plain[1].running_mean.numel() == plain[3].weight.shape[1] == 4
    torch.testing.assert_close(plain(x), want)


def test_several_techniques_together_are_what_was_computed() -> None:
    config = technique("row_pruning", ["0"], {"dense_ratio": 0.5}, [["2"]])
    for other in (
        technique("weight_quantization", ["*"], {"start_bits": 4, "target_bits": 4}, quantize_groups=2),
        technique("sparse_pruning", ["0", "2"], {"dense_ratio": 0.5}, method="topk"),
    ):
        config["compression_training"] |= other["compression_training"]
    model, x = init_compression(mlp(), config), torch.randn(5, 6)
    want = model(x).detach()
    plain = redundancy_clean(model, config)
    torch.testing.assert_close(plain(x), want)
    assert plain[0].weight.shape == (8, 6) and 0.3 < float((plain[0].weight == 0).float().mean()) < 0.8


@pytest.mark.parametrize("modules", [["*"], ["lm_head"]])
@pytest.mark.parametrize("pruned", [{}, {"method": "l1"}, {"method": "topk"}])
def test_an_embedding_that_is_the_head_is_in_the_end_what_was_computed_with(
    modules: list[str], pruned: dict[str, Any]
) -> None:
    """One weight, rounded and masked once, also where one of its two layers is named alone; trained for three steps."""
    config = technique("weight_quantization", modules, {"start_bits": 4, "target_bits": 4})
    if pruned:
        config["compression_training"] |= technique("sparse_pruning", modules, {"dense_ratio": 0.4}, **pruned)[
            "compression_training"
        ]
    model = tiny_decoder("llama", tie_word_embeddings=True)
    with torch.no_grad():  # rows of other sizes, as those of frequent and rare tokens
        model.lm_head.weight.mul_(torch.logspace(-1, 1, len(model.lm_head.weight))[:, None])
    model = init_compression(model, config)
    tokens, optimizer = torch.arange(24).view(2, 12), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tick(model)
    head = iter_compressed(model)["lm_head"].compression
    assert head.steps == 3 and head is iter_compressed(model)["model.embed_tokens"].compression
    want, weight = model(tokens).logits.detach(), model.lm_head.weight.detach().clone()
    plain = redundancy_clean(model, config)
    torch.testing.assert_close(plain(tokens).logits, want)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert not torch.equal(plain.lm_head.weight, weight)
    if pruned:
        assert float((plain.lm_head.weight == 0).float().mean()) > 0.55


def _bert() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=50, max_position_embeddings=16, num_labels=3, initializer_range=0.3, **sizes, **drop
    )
    return transformers.BertForSequenceClassification(config).eval()


def _gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def _llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes, **heads)
    return transformers.LlamaForCausalLM(config).eval()


# Family: the model, rows and what goes with them, heads and what goes with them.
FAMILIES: dict[str, Any] = {
    "bert": (
        _bert,
        ("intermediate.dense", [r"\d\.output.dense"]),
        ("attention.output.dense", ["self.query", "self.key", "self.value"]),
        4,
    ),
    "gpt2": (_gpt2, ("mlp.c_fc", ["mlp.c_proj"]), ("attn.c_proj", ["attn.c_attn"]), 4),
    "llama": (
        _llama,
        ("mlp.gate_proj", ["mlp.up_proj", "mlp.down_proj"]),
        ("self_attn.o_proj", ["q_proj", "k_proj", "v_proj"]),
        8,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_loads_in_plain_hugging_face(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build, (rows, row_partners), (heads, head_partners), num_heads = FAMILIES[family]
    config = technique("row_pruning", [rows], {"dense_ratio": 0.5}, [row_partners], method="topk")
    heads_config = technique("head_pruning", [heads], {"dense_ratio": 0.5}, [head_partners], num_heads=num_heads)
    config["compression_training"] |= heads_config["compression_training"]
    model = init_compression(build(), config)
    with torch.no_grad():
        for layer in iter_compressed(model).values():
            for name, score in layer.compression.named_parameters():
                score.copy_(torch.rand(score.shape, generator=torch.Generator().manual_seed(len(name))))
    tokens = torch.arange(24).view(2, 12)
    want, whole = model(tokens).logits.detach(), build()
    assert not torch.allclose(want, whole(tokens).logits, atol=1e-3)
    plain = redundancy_clean(model, config)
    torch.testing.assert_close(plain(tokens).logits, want, atol=1e-5, rtol=1e-4)
    plain.save_pretrained(tmp_path)
    loaded, said = type(whole).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values()), said
    torch.testing.assert_close(loaded.eval()(tokens).logits, want, atol=1e-5, rtol=1e-4)
    assert loaded.num_parameters() < whole.num_parameters()
    if family == "llama":
        assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (4, 2)
        assert loaded.config.intermediate_size == 24
    else:
        assert "cannot say that heads are fewer" in caplog.text


def test_rows_of_some_layers_alone_are_set_to_zero(caplog: pytest.LogCaptureFixture) -> None:
    config = technique("row_pruning", ["0.intermediate.dense"], {"dense_ratio": 0.5}, [[r"0\.output.dense"]])
    model, tokens = init_compression(_bert(), config), torch.arange(24).view(2, 12)
    want = model(tokens).logits.detach()
    plain = redundancy_clean(model, config)
    assert plain.config.intermediate_size == 48 and "cannot say that rows are fewer" in caplog.text
    torch.testing.assert_close(plain(tokens).logits, want)


# Layers


def _reduction(layers: list[int], **more: Any) -> dict[str, Any]:
    block = {"enabled": True, "keep_number_layer": len(layers), "teacher_layer": layers, **more}
    return {"compression_training": {"layer_reduction": {"module_name_prefix": "transformer.h", **block}}}


@pytest.mark.parametrize("with_teacher", [True, False])
def test_a_student_has_the_chosen_layers_of_its_teacher(with_teacher: bool, tmp_path: Path) -> None:
    teacher = _gpt2()
    student = _gpt2()
    if with_teacher:
        for param in student.parameters():
            nn.init.normal_(param)
    others = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    config = _reduction([1], other_module_name=others)
    student = init_compression(student, config, teacher_model=teacher if with_teacher else None)
    assert len(student.transformer.h) == student.config.num_hidden_layers == 1
    want = copy.deepcopy(teacher)
    del want.transformer.h[0]
    want.transformer.h[0].attn.layer_idx = 0
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(student(tokens).logits, want(tokens).logits)
    assert not torch.allclose(student(tokens).logits, teacher(tokens).logits)
    student.save_pretrained(tmp_path)
    assert len(type(teacher).from_pretrained(tmp_path).transformer.h) == 1
    with pytest.raises(ValueError, match="the teacher has 2 layers"):
        init_compression(_gpt2(), _reduction([2]), teacher_model=teacher)


@pytest.mark.parametrize("chosen", [[0, 2], [2]])
def test_layers_that_are_kept_keep_their_kind_of_attention(chosen: list[int], tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    whole, tokens = tiny_decoder("gemma3", layer_types=kinds), torch.arange(24)[None]
    want = copy.deepcopy(whole)
    want.model.layers = nn.ModuleList(want.model.layers[i] for i in chosen)
    want.config.num_hidden_layers, want.config.layer_types = len(chosen), [kinds[i] for i in chosen]
    student = init_compression(whole, _reduction(chosen, module_name_prefix="model.layers"))
    assert student.config.layer_types == want.config.layer_types
    logits = want(tokens, use_cache=False).logits
    torch.testing.assert_close(student(tokens).logits, logits)
    student.save_pretrained(tmp_path)
    torch.testing.assert_close(type(student).from_pretrained(tmp_path)(tokens).logits, logits)


def test_the_distillation_loss_is_its_formula_and_zero_at_the_teacher() -> None:
    model, tokens = _gpt2(), torch.arange(12)[None]
    out = model(tokens, output_hidden_states=True)
    same = distillation_loss(out, out, temperature=2.0)
    entropy = torch.distributions.Categorical(logits=out.logits / 2).entropy().mean() * 4
    torch.testing.assert_close(same, entropy)
    student = init_compression(_gpt2(), _reduction([1]))(tokens, output_hidden_states=True)
    loss = distillation_loss(student, out, hidden_weight=0.5)
    pairs = zip(student.hidden_states, (out.hidden_states[0], out.hidden_states[2]), strict=True)
    want = sum(F.mse_loss(a, b) for a, b in pairs) / 2 * 0.5
    want = want - (out.logits.softmax(-1) * student.logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, want)


def test_a_batch_that_is_padded_has_the_distillation_loss_of_its_rows() -> None:
    teacher, student, rows = _gpt2(), init_compression(_gpt2(), _reduction([1])), [[5, 9, 2, 7, 7, 1], [3, 8]]
    how: Any = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    weights = {"temperature": 2.0, "hidden_weight": 0.5, "attention_weight": 0.0}
    for model in (teacher, student):
        model.set_attn_implementation("eager")

    def loss(ids: Tensor, mask: Tensor | None, **weights: Any) -> Tensor:
        out, target = (model(ids, attention_mask=mask, **how) for model in (student, teacher))
        return distillation_loss(out, target, **weights, mask=None if mask is None else mask.bool())

    padded = torch.tensor([rows[0], rows[1] + [0] * 4])
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    alone = [loss(torch.tensor([row]), None, **weights) * len(row) for row in rows]
    torch.testing.assert_close(loss(padded, mask, **weights), sum(alone) / 8)
    assert abs(loss(padded, None, **weights) - sum(alone) / 8) > 1e-3  # the control
    weights |= {"hidden_weight": 0.0, "attention_weight": 1.0}  # the queries of padding do not count
    before = loss(padded, mask, **weights)
    padded[1, 2:] = 9
    torch.testing.assert_close(loss(padded, mask, **weights), before)


# MoQ's eigenvalues


class _Bowl(nn.Module):
    """A loss whose Hessian by each block's weight is known: curvature times the outer product of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(3)])
        self.curvature = (1.0, 5.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return sum(c * block(x).square().mean() for c, block in zip(self.curvature, self.blocks, strict=True))


def test_power_iteration_finds_the_known_eigenvalues_and_sets_the_periods() -> None:
    torch.manual_seed(0)
    section = load({"eigenvalue": {"enabled": True, "layer_name": "blocks", "layer_num": 3, "tol": 1e-4}}).eigenvalue
    bits = {"start_bits": 16, "target_bits": 8, "quantization_period": 2}
    model = init_compression(_Bowl(), technique("weight_quantization", ["*"], bits))
    probe = BlockEigenvalues(model, section, None)
    x = torch.tensor([[1.0, 2.0, 2.0]])
    model(x)
    found = probe.compute()
    want = [2 * c * 9 for c in model.curvature]  # 2 c |x|^2
    assert list(found.values()) == pytest.approx(want, rel=1e-2)
    schedule = CompressionSchedule(iter_compressed(model), None, probe)
    for _ in range(2):
        schedule.after_step(STEP)
    periods = [layer.compression.next_switch for layer in iter_compressed(model).values()]
    assert periods == [2 * 2 * (1 + math.floor(4 * c / 5)) for c in model.curvature] == [4, 20, 8]
    assert all(param.grad is None for param in model.parameters())


# Old configs


def test_a_config_of_deepspeed_0_9_works_unchanged() -> None:
    """The keys of XTC's recipe for BERT, as its tutorial has them; every one is known, and what is on acts."""
    shared = {
        "enabled": True, "quantizer_kernel": False, "schedule_offset": 0, "quantize_groups": 1,
        "quantize_verbose": False, "quantization_type": "symmetric", "quantize_weight_in_forward": True,
        "rounding": "nearest", "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
    }  # fmt: skip
    off = {"shared_parameters": {"enabled": False, "schedule_offset": 1000, "method": "topk"}}
    modules = ["attention.self", "intermediate", "word_embeddings", "output.dense", "pooler.dense"]
    params = {"start_bits": 2, "target_bits": 2, "quantization_period": 0}
    tree = {
        "train_batch_size": 1,
        "compression_training": {
            "layer_reduction": {
                "enabled": True, "keep_number_layer": 1, "module_name_prefix": "bert.encoder.layer",
                "teacher_layer": [1], "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
            },
            "weight_quantization": {
                "shared_parameters": shared, "different_groups": {"wq1": {"params": params, "modules": modules}},
            },
            "activation_quantization": {
                "shared_parameters": {
                    "enabled": True, "quantization_type": "asymmetric", "range_calibration": "dynamic",
                    "schedule_offset": 0,
                },
                "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.self", "intermediate"]}},
            },
            **{name: {**off, "different_groups": {}} for name in ("sparse_pruning", "row_pruning", "channel_pruning")},
            "head_pruning": {"shared_parameters": {**off["shared_parameters"], "num_heads": 12}},
        },
    }  # fmt: skip
    student = init_compression(_bert(), tree, teacher_model=_bert())
    layers = iter_compressed(student)
    assert len(layers) == 8 and "bert.embeddings.word_embeddings" in layers and student.config.num_hidden_layers == 1
    query = student.bert.encoder.layer[0].attention.self.query
    plain = redundancy_clean(student, tree)
    assert len(query.weight.unique()) == 3 and len(plain.bert.embeddings.word_embeddings.weight[5].unique()) <= 3


@pytest.mark.parametrize("axis", [{"tensor_parallel": {"autotp_size": 2}}, {"pipeline": {"stages": 2}}])
def test_split_layers_are_refused_by_the_config(axis: dict[str, Any]) -> None:
    moq = {"quantize_training": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"quantize_training\.enabled"):
        load({"train_batch_size": 8, **axis, **moq})
    load({"train_batch_size": 8, **axis})
    load({"train_batch_size": 8, **moq})


def test_the_names_that_programs_import_from_deepspeed_are_there() -> None:
    import importlib

    from thalweg.compat.deepspeed.surface import SURFACE

    for place in ("deepspeed.compression.compress", "deepspeed.compression.helper"):
        for name, target in SURFACE[place].items():
            assert isinstance(target, str)
            module, _, attribute = target.partition(":")
            assert callable(getattr(importlib.import_module(module), attribute)), name
