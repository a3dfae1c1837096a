"""What people do with tensor, sequence, expert and pipeline ranks: it is right, or refused in words on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thalweg
from tests.dist.models import make_batch
from tests.dist.pipeline_parity import WIDTH, ResidualBlock, token_loss
from tests.harness import run_ranks
from tests.unit.infer_models import tiny_decoder
from thalweg.compat.deepspeed.initialization import initialize as initialize_like_deepspeed
from thalweg.parallel.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

REUSE_RANKS = True
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def _config(**extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "cpu_kernels": "torch", "log_level": "error", **extra,
    }  # fmt: skip


def _tokens(step: int, rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, config: dict[str, Any], num_steps: int = 3) -> list[float]:
    engine = thalweg.initialize(model=model.train(), config=config)[0]
    losses = []
    for step in range(num_steps):
        tokens = _tokens(step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


def _dropped_in_attention(rank: int, world: int) -> list[list[float]]:
    found = []
    for policy, p in (("none", 0.5), ("full", 0.5), ("none", 0.0)):
        model = tiny_decoder("llama", attention_dropout=p)
        remat = {"activation_checkpointing": {"policy": policy}, "tensor_parallel": {"autotp_size": 2}}
        found.append(_train(model, _config(seed=3, **remat)))
    return found


def test_dropout_within_split_layers_is_recomputed_as_it_was() -> None:
    """Of attention alone: a recomputation that stopped early stopped before the split layers' end."""
    for plain, recomputed, other in run_ranks(_dropped_in_attention, 2):
        assert plain == recomputed
        assert other[0] != plain[0]


def _given_other_batches(rank: int, world: int) -> tuple[str, list[float]]:
    engine = thalweg.initialize(model=tiny_decoder("llama"), config=_config(tensor_parallel={"autotp_size": 2}))[0]
    with pytest.raises(ValueError, match="that share a layer must get identical batches") as caught:
        engine(input_ids=_tokens(rank))
    engine.close()
    return str(caught.value), _train(tiny_decoder("llama"), _config(tensor_parallel={"autotp_size": 2}))


def test_tensor_ranks_that_are_given_other_batches_are_told() -> None:
    (first, losses), (second, same) = run_ranks(_given_other_batches, 2)
    assert first == second and losses == same


def _classified(rank: int, world: int) -> list[str]:
    found = []
    for kind in ("SequenceClassification", "QuestionAnswering"):
        config = tiny_decoder("llama").config
        model = getattr(transformers, f"LlamaFor{kind}")(config)
        with pytest.raises(ValueError, match="whose loss needs the whole sequence") as caught:
            thalweg.initialize(model=model, config=_config(sequence_parallel_size=2))
        found.append(str(caught.value))
    return found


def test_losses_of_whole_sequences_refuse_parts_of_them() -> None:
    first, second = run_ranks(_classified, 2)
    assert first == second and len(first) == 2


def _decoder_by_another_name(rank: int, world: int, sizes: list[int]) -> list[list[float]]:
    found = []
    for size in sizes:
        model = tiny_decoder("llama")
        model.loss_type = "ForConditionalGeneration"  # Gemma3, Mistral3, Llava: decoders for all that
        found.append(_train(model, _config(sequence_parallel_size=size)))
    return found


def test_a_decoder_for_conditional_generation_predicts_over_the_parts_borders() -> None:
    ((alone,),) = run_ranks(_decoder_by_another_name, 1, [1])
    for (divided,) in run_ranks(_decoder_by_another_name, 2, [2]):
        assert divided == pytest.approx(alone, rel=1e-5)


def _two_sequences_at_once(rank: int, world: int) -> list[list[float]]:
    """Losses of steps over two forward passes each, of other lengths, and one that is not trained on in between."""
    found = []
    for policy in ("none", "full"):
        config = _config(sequence_parallel_size=2, activation_checkpointing={"policy": policy})
        engine = thalweg.initialize(model=tiny_decoder("llama").train(), config=config)[0]
        losses = []
        for step in range(3):
            first, second = _tokens(step, length=12), _tokens(step + 10, length=9)
            loss = engine(input_ids=first, labels=first).loss + engine(input_ids=second, labels=second).loss
            with torch.no_grad():
                engine(input_ids=_tokens(20, length=7))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        found.append(losses)
    return found


def test_a_recomputation_is_of_its_own_sequence_whatever_came_after_it() -> None:
    for plain, recomputed in run_ranks(_two_sequences_at_once, 2):
        assert recomputed == pytest.approx(plain, rel=1e-6)


def _other_axes(rank: int, world: int) -> list[str]:
    found = []
    for names in (("tp", "dp"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        config = _config(tensor_parallel={"autotp_size": 2})
        try:
            thalweg.initialize(model=tiny_decoder("llama"), config=config, mesh=mesh)[0].close()
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_mesh_of_another_order_is_refused() -> None:
    for other, same in run_ranks(_other_axes, 4):
        assert "give them in the order ['dp', 'tp']" in other and not same


class _Embedding(nn.Module):
    """As Megatron's programs have it: the weight is a child's, and shown by a property."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(100, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


def _head(embedding: _Embedding, value: Any) -> Tensor:
    return F.linear(value[0], embedding.word_embeddings.weight)


def _tied(rank: int, world: int, attr: str) -> tuple[list[float], list[str]]:
    layers = [
        TiedLayerSpec("embed", _Embedding, tied_weight_attr=attr),
        *(LayerSpec(ResidualBlock, i) for i in range(2)),
        TiedLayerSpec("embed", _Embedding, forward_fn=_head, tied_weight_attr=attr),
    ]
    model = PipelineModule(layers, num_stages=world, loss_fn=token_loss)
    engine = thalweg.initialize(model=model, config=_config(gradient_accumulation_steps=2))[0]
    losses = [float(engine.train_batch(iter([make_batch(s + i, 2) for i in range(2)]))) for s in range(3)]
    state = engine.state_dict()
    engine.close()
    shared = [name for name in state if "word" in name]
    assert all(torch.equal(state[name], state[shared[0]]) for name in shared)
    return losses, shared


@pytest.mark.parametrize("attr", ["word_embeddings_weight", "word_embeddings.weight"])
def test_a_tied_weight_may_be_a_childs_or_a_propertys(attr: str) -> None:
    ((alone, _),) = run_ranks(_tied, 1, attr)
    for losses, names in run_ranks(_tied, 2, attr):
        assert losses == pytest.approx(alone, rel=1e-5) and alone[0] != alone[-1]
        assert names == ["layers.0.word_embeddings.weight", "layers.3.word_embeddings.weight"]


def _evaluated(rank: int, world: int) -> list[Any]:
    """Under DeepSpeed's name: what an iterator gives becomes a batch; more batches than a window has."""
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=F.mse_loss)
    engine = initialize_like_deepspeed(model=model, config=_config(gradient_accumulation_steps=2))[0]
    engine.set_batch_fn(lambda row: (row["x"], row["y"]))
    rows = [{"x": torch.full((2, 4), float(i)), "y": torch.zeros(2, 4)} for i in range(4)]
    weight, bias = (engine.state_dict()[f"layers.0.{name}"] for name in ("weight", "bias"))
    wanted = [float(F.mse_loss(F.linear(row["x"], weight, bias), row["y"])) for row in rows]
    loss = float(engine.eval_batch(iter(rows), num_micro_batches=4))
    with pytest.raises(ValueError, match="leave out what asks for outputs"):
        engine.eval_batch(iter(rows), return_logits=True)
    engine.train()
    with pytest.raises(StopIteration):
        engine.eval_batch(iter([]))
    is_training = engine.training
    engine.close()
    return [loss, sum(wanted) / 4, is_training]


def test_evaluation_takes_so_many_batches_and_leaves_the_mode_as_it_was() -> None:
    ((loss, wanted, is_training),) = run_ranks(_evaluated, 1)
    assert loss == pytest.approx(wanted, rel=1e-5) and is_training


def _dense_then_experts(rank: int, world: int) -> list[float]:
    fields: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 512, "moe_intermediate_size": 16, "head_dim": 8,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "mlp_only_layers": [0, 1],
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    config = _config(
        pipeline={"stages": 2}, expert_parallel={"enabled": True, "autoep_size": 2}, gradient_accumulation_steps=2
    )
    engine = thalweg.initialize(model=model, config=config)[0]
    batches = [{"input_ids": _tokens(i), "labels": _tokens(i)} for i in range(2)]
    losses = [float(engine.train_batch(iter(batches))) for _ in range(3)]
    engine.close()
    return losses


def test_a_stage_of_dense_layers_alone_goes_beside_one_of_experts() -> None:
    first, *others = run_ranks(_dense_then_experts, 4)
    assert first[0] > first[-1] and all(losses == first for losses in others)
