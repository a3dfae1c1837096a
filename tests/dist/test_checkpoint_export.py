"""The Hugging Face layout written from sharded models: gathered tensor by tensor, one error for all ranks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import thalweg
from tests.harness import run_ranks
from tests.unit.checkpoint_support import NoFsyncFileSystem, fail_at, list_names
from thalweg.checkpoint import Checkpoint, CheckpointError, build_snapshot, save_snapshot
from thalweg.checkpoint.export_hf import export_hf, save_16bit

transformers = pytest.importorskip("transformers")


def build(seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sharded(seed: int = 0):
    model = build(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def write(rank: int, world: int, folder: str) -> list[str]:
    model = sharded()
    save_16bit(model, f"{folder}/16", torch.bfloat16, io=NoFsyncFileSystem(), max_shard_bytes=4000)
    save_snapshot(f"{folder}/c", "t", build_snapshot(model), step=0, io=NoFsyncFileSystem())
    texts = []
    for k in (2, 3, 5, 6):
        with pytest.raises(CheckpointError) as caught:
            save_16bit(model, f"{folder}/bad", io=fail_at(k, errno.ENOSPC) if rank == 0 else NoFsyncFileSystem())
        texts.append(str(caught.value))
        assert not Path(f"{folder}/bad").exists() or list_names(Path(f"{folder}/bad")) <= {"model.safetensors"}
    return texts


def write_by_engine(rank: int, world: int, folder: str) -> tuple[str, list[str]]:
    model = build()
    model.model.embed_tokens.weight.requires_grad_(False)
    engine, *_ = thalweg.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW"},
        },
    )
    kept = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    engine.save_16bit_model(f"{folder}/whole")
    engine.save_16bit_model(f"{folder}/trained", exclude_frozen_parameters=True)
    engine.save_checkpoint(f"{folder}/c")
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(ValueError, match=r"custom_load_fn is not supported.*Checkpoint.open") as caught:
        engine.load_checkpoint(f"{folder}/c", custom_load_fn=lambda src, dst: None)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()
    return str(caught.value), kept


def test_arguments_of_the_engine_work_or_are_an_error(tmp_path):
    (_, kept), _ = run_ranks(write_by_engine, 2, str(tmp_path))
    whole, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "trained"))
    assert whole.keys() - trained.keys() == {"model.embed_tokens.weight"}
    assert sorted(trained) == sorted(kept)
    assert all(torch.equal(value, whole[name]) for name, value in trained.items())


def test_sharded_models_are_written_as_the_whole_ones(tmp_path):
    first, second = run_ranks(write, 2, str(tmp_path))
    assert first == second and all("rank 0: OSError" in text for text in first)
    expected = build().state_dict()
    export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "hf")
    for folder, cast in (("16", torch.bfloat16), ("hf", torch.float32)):
        back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert back.config.architectures == ["LlamaForCausalLM"]
        state = back.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name].to(cast)) for name in expected)
