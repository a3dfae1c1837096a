"""Random-LTD: a layer over some tokens is the layer whose other tokens nobody sees, in values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thalweg
from thalweg.config.schema.data import DataEfficiency, RandomLTD
from thalweg.nn.random_ltd import TokenDraw, apply_random_ltd
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.parallel.tensor.layers import replace_forward

T, VOCAB = 12, 64


def _section(layers: list[int], keep: int = 5, **options: Any) -> RandomLTD:
    pace = {"require_steps": 4, "seq_per_step": 1}
    schedule = {"min_value": keep, "max_value": T, "schedule_config": pace}
    return RandomLTD.model_validate(
        {"enabled": True, "random_ltd_layer_id": layers, "random_ltd_schedule": schedule, **options}
    )


def _apply(model: nn.Module, section: RandomLTD, seed: int, dp_rank: int, global_step: Callable[[], int]) -> None:
    routing = {"enabled": True, "random_ltd": section}
    config = DataEfficiency.model_validate({"enabled": True, "seed": seed, "data_routing": routing})
    apply_random_ltd(model, config, dp_rank, global_step)


def _gpt(n_layer: int = 4) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCAB, n_layer=n_layer, n_head=2, n_embd=16, block_size=T))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def _kept(seed: int, layer: int, num_sequences: int) -> Tensor:
    """Which tokens the layer sees in the first forward pass: bool (B, T)."""
    draw = TokenDraw(_section([layer]), seed, 0, lambda: 0)
    draw.begin_forward()
    return torch.zeros(num_sequences, T).scatter(1, draw.draw(layer, num_sequences, T), 1.0).bool()


def _grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True))


def _distance(first: list[Tensor], second: list[Tensor]) -> float:
    assert [g is None for g in first] == [g is None for g in second]
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a is not None)


def _one_sequence_after_another(inner: Callable[..., Any], kept_BT: Tensor) -> Callable[..., Any]:
    def forward(self: Any, x_BTD: Tensor) -> Tensor:
        rows = []
        for x_TD, kept in zip(x_BTD, kept_BT, strict=True):
            row = x_TD.clone()
            row[kept] = inner(self, x_TD[kept][None])[0]
            rows.append(row)
        return torch.stack(rows)

    return forward


def test_values_and_gradients_of_the_reference_gpt() -> None:
    tokens = torch.randint(VOCAB, (3, T), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    model = _gpt()
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    _apply(model, _section([1, 2]), 7, 0, lambda: 0)
    for seed, reference in ((7, plain), (8, other)):
        for number in (1, 2):
            block = reference.blocks[number]
            replace_forward(block, _one_sequence_after_another(type(block).forward, _kept(seed, number, 3)))
    losses = [one(tokens, labels) for one in (model, plain, other)]
    grads = [_grads(one, loss) for one, loss in zip((model, plain, other), losses, strict=True)]
    assert abs(losses[0] - losses[1]) < 1e-6 and _distance(grads[0], grads[1]) < 1e-6
    assert abs(losses[0] - losses[2]) > 1e-4 and _distance(grads[0], grads[2]) > 1e-4  # the control: other tokens


def _masked(inner: Callable[..., Any], kept_BT: Tensor, causal: bool, padding: Tensor | None) -> Callable[..., Any]:
    """The whole layer, in which no token sees those that are left out, and these keep what they were."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen = kept_BT[:, None, None, :].expand(-1, 1, T, T).clone()
        if causal:
            seen &= torch.ones(T, T, dtype=torch.bool).tril()
        if padding is not None:
            seen &= padding[:, None, None, :].bool()
        mask = torch.zeros(seen.shape).masked_fill(~(seen | torch.eye(T, dtype=torch.bool)), -1e9)
        args, named = ((mask, *args[1:]), {}) if args else ((), {"attention_mask": mask})
        output = inner(self, hidden_states, *args, **kwargs | named)
        first = output[0] if isinstance(output, tuple) else output
        whole = torch.where(kept_BT[..., None], first, hidden_states)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return forward


def _llama(transformers: Any) -> tuple[nn.Module, Any, bool]:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **shape))
    return model, model.model.layers, True


def _bert(transformers: Any) -> tuple[nn.Module, Any, bool]:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=T, **shape
    )
    model = transformers.BertForMaskedLM(config)
    return model, model.bert.encoder.layer, False


def _bloom(transformers: Any) -> tuple[nn.Module, Any, bool]:
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=3, n_head=2)
    )
    return model, model.transformer.h, True


@pytest.mark.parametrize("build", [_llama, _bert, _bloom])
@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_layers_get_the_masks_and_positions_of_their_tokens(build: Any, padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, layers, causal = build(transformers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    plain = copy.deepcopy(model)
    untouched = copy.deepcopy(model)
    plain_layers: Any = plain.get_submodule(next(name for name, one in model.named_modules() if one is layers))
    ids = torch.randint(VOCAB, (3, T))
    padding = torch.ones(3, T, dtype=torch.long)
    padding[1, 8:] = 0
    batch = {"input_ids": ids, "labels": ids, **({"attention_mask": padding} if padded else {})}
    _apply(model.train(), _section([1]), 7, 0, lambda: 0)
    loss = model(**batch).loss
    whole = plain.train()(**batch).loss
    kept = _kept(7, 1, 3)
    replace_forward(plain_layers[1], _masked(type(plain_layers[1]).forward, kept, causal, padding if padded else None))
    expected = plain(**batch).loss
    assert abs(loss - expected) < 2e-6 and _distance(_grads(model, loss), _grads(plain, expected)) < 2e-6
    assert abs(loss - whole) > 1e-4  # the control
    assert torch.allclose(model.eval()(**batch).logits, untouched.eval()(**batch).logits, atol=1e-6)


class Stack(nn.Module):
    """Torch's own layers, sequence first or batch first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=batch_first)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x if self.batch_first else x.transpose(0, 1)


def test_the_order_of_the_hidden_state_is_the_configs() -> None:
    x = torch.randn(3, T, 16)
    outputs = []
    for batch_first in (True, False):
        model = Stack(batch_first)
        order = "batch_seq_dim" if batch_first else "seq_batch_dim"
        _apply(model, _section([1], hidden_state_order=order), 7, 0, lambda: 0)
        outputs.append(model(x))
    assert torch.allclose(*outputs, atol=1e-6) and not torch.allclose(outputs[0], Stack(True)(x), atol=1e-3)


def test_the_number_of_tokens_rises_until_all_are_seen() -> None:
    model, steps = _gpt(), iter(range(6))
    now = [0]
    _apply(model, _section([1], keep=4), 7, 0, lambda: now[0])
    lengths: list[int] = []
    model.blocks[1].attention.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for now[0] in steps:
        model(torch.zeros(2, T, dtype=torch.long))
    model.eval()(torch.zeros(2, T, dtype=torch.long))
    assert lengths == [4, 6, 8, 10, 12, 12, 12]


def test_what_is_drawn_differs_by_rank_layer_forward_and_step_and_is_ascending() -> None:
    drawn = []
    for rank, layer, step, forwards in ((0, 1, 0, 1), (1, 1, 0, 1), (0, 2, 0, 1), (0, 1, 1, 1), (0, 1, 0, 2)):
        draw = TokenDraw(_section([1, 2], keep=5), 3, rank, lambda step=step: step)
        for _ in range(forwards):
            draw.begin_forward()
        drawn.append(draw.draw(layer, 4, T)[:, :5])
    assert all((d.diff(dim=1) > 0).all() for d in drawn)
    assert len({d.numpy().tobytes() for d in drawn}) == 5


def test_layers_that_are_not_there_and_keys_that_are_missing_are_said() -> None:
    with pytest.raises(ValueError, match="GPT has 4 layers, 0 to 3; the config has total_layer_num 6"):
        _apply(_gpt(), _section([1], total_layer_num=6), 7, 0, lambda: 0)
    with pytest.raises(ValueError, match="does not know the layers of Linear"):
        _apply(nn.Linear(2, 2), _section([1]), 7, 0, lambda: 0)
    routing = {"enabled": True, "random_ltd": {"enabled": True, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1]}}
    with pytest.raises(thalweg.config.errors.ConfigError) as caught:  # type: ignore[attr-defined]
        thalweg.load_config({"data_efficiency": {"enabled": True, "data_routing": routing}})
    keys = {problem.path.rpartition("random_ltd.")[2] for problem in caught.value.problems}
    assert {"random_ltd_layer_num", "random_ltd_schedule.min_value"} <= keys
