"""What people give the plan as a model: odd configs are errors in words, and the right class is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thalweg
from thalweg.plan.inputs.input_spec import infer_input_spec, input_spec_from_example
from thalweg.plan.inputs.model_loader import load_meta_model
from thalweg.plan.spec.run_spec import RankTopology, RunSpec
from thalweg.plan.trace.step import trace_step
from thalweg.utils.trees import copy_to_meta
from thalweg.zero.policy import ZeroPolicy

pytest.importorskip("transformers")
SMALL = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100}
SMALL |= {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1, "decoder_start_token_id": 2}
SMALL |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "bos_token_id": 3, "eos_token_id": 4}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"model_type": "gpt2", "n_embd": "abc"}, "n_embd"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 3, "n_layer": 1}, "num_heads"),
        ({"vocab_size": 64, "n_layer": 1, "n_head": 4, "n_embd": 66}, "not a multiple of n_head"),
        ({"vocab_size": "many", "n_layer": 1, "n_head": 4, "n_embd": 64}, "no model can be made"),
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": ["llama"]}, "no model_type ['llama']"),
        ({"model_type": "mine-7b", "auto_map": {"AutoModel": "m.Mine"}}, "own code (auto_map) is not run"),
        ({}, "no model_type"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_meta_model(fields)
    assert words in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "whisper", **SMALL}, "WhisperForConditionalGeneration"),
        ({"model_type": "bart", **SMALL}, "BartForConditionalGeneration"),
        (
            {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "OPTFor",
        ),
        ({"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "ViT"),
    ],
)
def test_the_class_that_is_trained_is_taken(fields: dict[str, Any], name: str) -> None:
    assert type(load_meta_model(fields).model).__name__.startswith(name)


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("names", [["AutoTokenizer"], [3], "LlamaModel"])
def test_architectures_that_name_no_model_are_passed_over(names: Any) -> None:
    fields = {"model_type": "llama", "architectures": names, "vocab_size": 64, **TINY}
    assert type(load_meta_model(fields).model).__name__ == "LlamaForCausalLM"


def _inputs(fields: dict[str, Any], length: int | None = None) -> dict[str, tuple[int, ...]]:
    model = load_meta_model(fields).model
    return {name: field.shape for name, field in infer_input_spec(model, 2, length).kwargs.items()}


def test_sounds_are_planned_as_they_are_heard() -> None:
    spoken = {"max_source_positions": 30, "num_mel_bins": 8, "max_target_positions": 20}
    whisper = {"model_type": "whisper", **SMALL, **spoken}
    assert _inputs(whisper) == {"input_features": (2, 8, 60), "labels": (2, 20)}
    assert _inputs(whisper, 7)["labels"] == (2, 7)
    with pytest.raises(ValueError, match="20 positions"):
        _inputs(whisper, 21)
    samples = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
    wave = {"model_type": "wav2vec2", "num_feat_extract_layers": 2, **samples, **TINY}
    wave |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    assert _inputs({"architectures": ["Wav2Vec2ForCTC"], **wave}, 40)["input_values"][1] >= 400
    found = thalweg.plan(whisper, {"train_micro_batch_size_per_gpu": 2}, device="h100", suggest=False)
    assert found.per_rank.activations > 0


class Reads(torch.nn.Module):
    """Its control flow reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.sum() if y.sum() > 0 else y.mean()


def test_a_model_that_does_not_run_on_shapes_is_an_error_in_words() -> None:
    with pytest.raises(ValueError, match=r"Reads cannot run under fake tensors with 0 \[2, 4\] float32"):
        thalweg.plan(Reads(), {"train_micro_batch_size_per_gpu": 2}, batch=torch.ones(2, 4), device="h100")


class Steps(torch.nn.Module):
    """Goes token by token, as recurrent models do without a kernel of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = self.layer(x)
        return x.sum()


def test_a_trace_has_an_end() -> None:
    setting = RunSpec(ZeroPolicy(0), topology=RankTopology())
    with pytest.raises(ValueError, match="the step was not over"):
        trace_step(copy_to_meta(Steps()), input_spec_from_example(torch.ones(2, 4)), setting, cpu_budget_s=0.0)
    assert (
        trace_step(copy_to_meta(Steps()), input_spec_from_example(torch.ones(2, 4)), setting, cpu_budget_s=60.0).num_ops
        > 600
    )
