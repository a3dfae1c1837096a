"""Hugging Face layout: what is exported, transformers' from_pretrained loads as the equal model."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.checkpoint_support import (
    NoFsyncFileSystem,
    fail_at,
    list_names,
    record_operations,
    small_model,
)
from thalweg.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    Snapshot,
    build_snapshot,
    save_snapshot,
)
from thalweg.checkpoint.export_hf import export_hf, save_16bit
from thalweg.cli import main

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def build(kind: str, tie: bool, seed: int = 0):
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, n_positions=16, tie_word_embeddings=tie, **COMMON
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tie, **COMMON
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        tie_word_embeddings=tie, decoder_start_token_id=0, **COMMON
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def logits(model) -> torch.Tensor:
    tokens = torch.arange(12).view(2, 6)
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=tokens, **extra).logits


KINDS = [(kind, tie) for kind in ("gpt2", "llama", "t5") for tie in (True, False)]


@pytest.mark.parametrize("limit", [5e9, 3000.0], ids=["one file", "shards"])
@pytest.mark.parametrize(("kind", "tie"), KINDS)
def test_row34_an_export_loads_equal_with_ties_on_and_off(tmp_path, kind, tie, limit):
    model = build(kind, tie)
    save_snapshot(tmp_path / "c", "t", build_snapshot(model), step=0, io=NoFsyncFileSystem())
    export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "hf", max_shard_bytes=limit, io=NoFsyncFileSystem())
    back, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(logits(back.eval()), logits(model))
    expected = model.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    assert back.config.architectures == [type(model).__name__]
    auto = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert type(auto) is type(model.config)
    assert ("model.safetensors.index.json" in list_names(tmp_path / "hf")) == (limit < 5e9)


def test_the_comparison_can_fail():
    assert not torch.equal(logits(build("gpt2", True)), logits(build("gpt2", True, seed=1)))


@pytest.mark.parametrize(("kind", "tie"), KINDS[:4])
def test_a_16_bit_save_is_the_cast_model(tmp_path, kind, tie):
    model = build(kind, tie)
    save_16bit(model, tmp_path, torch.bfloat16, io=NoFsyncFileSystem())
    back = type(model).from_pretrained(tmp_path, dtype="auto")
    assert back.dtype == torch.bfloat16
    expected = model.bfloat16().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())


def test_dtypes_and_layout_of_an_export(tmp_path):
    model = small_model()
    save_snapshot(
        tmp_path / "c",
        "t",
        build_snapshot(model, state={"hf_config": {"model_type": "x", "torch_dtype": "y"}}),
        step=0,
    )
    checkpoint = Checkpoint.open(tmp_path / "c")
    export_hf(checkpoint, tmp_path / "hf", dtype=torch.float16)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name.removeprefix("model/") for name in checkpoint.tensor_names("model/")} == found.keys()
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert found["low.weight"].dtype == torch.float16 and found["scale"].shape == ()
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {
        "model_type": "x",
        "dtype": "float16",
    }

    (tmp_path / "hf" / "note.txt").write_text("mine")
    export_hf(checkpoint, tmp_path / "hf", max_shard_bytes=100)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 2 and "model.safetensors" not in list_names(tmp_path / "hf")
    assert list_names(tmp_path / "hf") == {*names, "config.json", "model.safetensors.index.json", "note.txt"}
    total = sum(t.nbytes for file in names for t in load_file(tmp_path / "hf" / file).values())
    assert index["metadata"]["total_size"] == total
    export_hf(checkpoint, tmp_path / "hf", config={"model_type": "z"})
    assert list_names(tmp_path / "hf") == {"model.safetensors", "config.json", "note.txt"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "z"


def test_a_failing_disk_leaves_no_half_export(tmp_path):
    model = small_model()
    save_snapshot(tmp_path / "c", "t", build_snapshot(model), step=0)
    checkpoint = Checkpoint.open(tmp_path / "c")
    export_hf(checkpoint, tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    log = record_operations(lambda io: export_hf(checkpoint, tmp_path / "hf", io=io)).calls
    renamed = [operation for operation, _ in log].index("rename")
    assert renamed > 4
    for k in range(2, renamed + 1):
        with pytest.raises(OSError, match="No space"):
            export_hf(checkpoint, tmp_path / "hf", io=fail_at(k, errno.ENOSPC))
        with pytest.raises(CheckpointError, match="No space"):
            save_16bit(model, tmp_path / "hf", io=fail_at(k, errno.ENOSPC))
        assert list_names(tmp_path / "hf") <= {"model.safetensors"}
        assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def test_an_export_leaves_the_users_own_files_alone(tmp_path):
    save_snapshot(tmp_path / "c", "t", build_snapshot(small_model()), step=0, io=NoFsyncFileSystem())
    checkpoint, own = (
        Checkpoint.open(tmp_path / "c"),
        {"model_ema.safetensors", "model-best.safetensors", "modelB.safetensors"},
    )
    export_hf(checkpoint, tmp_path / "hf", max_shard_bytes=100.0, io=NoFsyncFileSystem())
    for name in own:
        (tmp_path / "hf" / name).write_bytes(b"mine")
    export_hf(checkpoint, tmp_path / "hf", io=NoFsyncFileSystem())
    assert list_names(tmp_path / "hf") == own | {"model.safetensors"}


def test_a_reader_never_takes_shards_of_two_exports_for_one(tmp_path):
    """Wherever the second of two sharded exports ends: all of one, or an error."""
    for step in range(2):
        model = build("gpt2", True, seed=step)
        save_snapshot(tmp_path / "c", f"t{step}", build_snapshot(model), step=step, io=NoFsyncFileSystem())
    old, new = (Checkpoint.open(tmp_path / "c", f"t{step}") for step in range(2))
    config = build("gpt2", True).config.to_dict()
    expected = [logits(build("gpt2", True, seed=step)) for step in range(2)]

    def export(checkpoint, io) -> None:
        export_hf(checkpoint, tmp_path / "hf", config=config, max_shard_bytes=3000.0, io=io)

    export(old, NoFsyncFileSystem())
    calls = record_operations(partial(export, old)).calls
    first = [operation for operation, _ in calls].index("rename")
    found = []
    for k in range(first - 2, len(calls)):
        export(old, NoFsyncFileSystem())
        with pytest.raises(OSError, match="Input/output"):
            export(new, fail_at(k, forever=True))
        try:
            read = logits(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval())
        except OSError:
            found.append("refused")
            continue
        found.append(next((f"t{step}" for step in range(2) if torch.equal(read, expected[step])), "mixed"))
    assert "mixed" not in found and {"t0", "refused", "t1"} == set(found), found


def test_damage_is_not_exported(tmp_path):
    path = save_snapshot(tmp_path / "c", "t", build_snapshot(small_model()), step=0)
    file = next(path.glob("*.model.*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "hf")
    assert not list_names(tmp_path / "hf")
    save_snapshot(tmp_path / "c", "empty", Snapshot({"other/x": torch.zeros(1)}), step=1)
    with pytest.raises(CheckpointMismatchError, match="to export"):
        export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "hf")


def test_ckpt_export(tmp_path, capsys):
    model = build("gpt2", True)
    save_snapshot(tmp_path / "c", "t", build_snapshot(model), step=0)
    assert main(["ckpt", "export", str(tmp_path / "c"), "--out", str(tmp_path / "hf"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["files"]) == {"model.safetensors", "config.json"}
    back = transformers.GPT2LMHeadModel.from_pretrained(report["out"])
    assert torch.equal(logits(back.eval()), logits(model))
    assert main(["ckpt", "export", str(tmp_path / "c" / "t"), str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert load_file(tmp_path / "half" / "model.safetensors")["transformer.wte.weight"].dtype == torch.bfloat16
    assert main(["ckpt", "export", str(tmp_path / "c")]) == 0
    assert (tmp_path / "c" / "hf" / "model.safetensors").exists()
    assert main(["ckpt", "export", str(tmp_path / "c"), "--dtype", "float3"]) == 2
    assert Checkpoint.open(tmp_path / "c").tag == "t"


def test_the_export_beside_the_checkpoints_does_not_disturb_them(tmp_path):
    save_snapshot(tmp_path, "t", build_snapshot(small_model()), step=0)
    export_hf(Checkpoint.open(tmp_path), tmp_path / "hf")
    save_snapshot(tmp_path, "u", build_snapshot(small_model()), step=1, keep_latest_k=1)
    assert list_names(tmp_path) == {"u", "latest", "hf"}
    assert Path(tmp_path / "hf" / "model.safetensors").exists()


def lora_model():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("gpt2", True), peft.LoraConfig(r=2, target_modules=["c_attn"]))


def test_lora_without_its_base_is_no_export(tmp_path: Path) -> None:
    model = lora_model()
    snapshot = build_snapshot(model, include_frozen=False)
    save_snapshot(tmp_path / "c", "t", snapshot, step=0, io=NoFsyncFileSystem())
    with pytest.raises(CheckpointMismatchError, match=r"without the layers.*save_pretrained.*merge_and_unload"):
        export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_peft_models_weights_are_no_model_of_its_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the base's config.json from_pretrained would take them, and begin with random weights."""
    model = lora_model()
    save_16bit(model, tmp_path / "all", io=NoFsyncFileSystem())
    assert "PEFT's names" in caplog.text and "merge_and_unload" in caplog.text
    save_16bit(model, tmp_path / "trained", io=NoFsyncFileSystem(), include_frozen=False)
    assert "without the layers" in caplog.text
    save_snapshot(tmp_path / "c", "t", build_snapshot(model), step=0, io=NoFsyncFileSystem())
    export_hf(Checkpoint.open(tmp_path / "c"), tmp_path / "exported")
    for name in ("all", "trained", "exported"):
        assert list_names(tmp_path / name) == {"model.safetensors"}
    caplog.clear()
    save_16bit(model.merge_and_unload(), tmp_path / "merged", io=NoFsyncFileSystem())
    assert not caplog.text and (tmp_path / "merged" / "config.json").exists()
