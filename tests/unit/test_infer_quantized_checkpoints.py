"""Checkpoints that others have quantised: what is read is what their definitions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.marks import nightly
from tests.unit.infer_models import greedy_generate, tiny_decoder
from thalweg.infer import EngineConfig, load_engine
from thalweg.infer.quantization.checkpoints import _dequantize_compressed_tensors
from thalweg.infer.quantization.zeroquant import save_quantized

pytestmark = pytest.mark.usefixtures("one_thread")
Made = tuple[dict[str, Tensor], Tensor]
"""A format's tensors of a layer, and the weight (outputs, inputs) that they mean."""
GROUP = 32


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack whole numbers (rows, n) into int32 along the columns, one after the other, number by number."""
    each = 32 // bits
    packed = torch.zeros(len(values), -(-values.shape[1] // each), dtype=torch.int64)
    for column in range(values.shape[1]):
        word, place = divmod(column, each)
        shift = place if order is None else order.index(place)
        packed[:, word] |= values[:, column].long() << (shift * bits)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def numbers(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise in groups along the inputs: whole numbers from 0, scales and zeros (outputs, groups)."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1).to(torch.int32)
    values = (groups / scale.float()[..., None]).round() + zero[..., None]
    return values.clamp(0, 2**bits - 1).to(torch.int32).view_as(weight), scale, zero


def means(values: Tensor, scale: Tensor, zero: Tensor, group: Tensor | None = None) -> Tensor:
    group = torch.arange(values.shape[1]) // GROUP if group is None else group
    return (values - zero[:, group]).float() * scale.float()[:, group]


def gptq(weight: Tensor, bits: int = 4, shuffled: bool = False, second: bool = False) -> Made:
    values, scale, zero = numbers(weight, bits)
    inputs = weight.shape[1]
    group = torch.arange(inputs) // GROUP
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    stored = zero if second else zero - 1
    parts = {
        "qweight": words(values, bits).t().contiguous(), "qzeros": words(stored.t(), bits),
        "scales": scale.t().contiguous(), "g_idx": group.to(torch.int32),
    }  # fmt: skip
    return parts, means(values, scale, zero, group)


def awq(weight: Tensor) -> Made:
    values, scale, zero = numbers(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(values.t(), 4, order), "qzeros": words(zero.t(), 4, order),
        "scales": scale.t().contiguous(),
    }  # fmt: skip
    return parts, means(values, scale, zero)


def packed(weight: Tensor, bits: int = 4, zeros: bool = False) -> Made:
    half = 2 ** (bits - 1)
    values, scale, zero = numbers(weight, bits)
    zero = zero if zeros else torch.full_like(zero, half)
    parts = {
        "weight_packed": words(values, bits), "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if zeros:
        parts["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    return parts, means(values, scale, zero)


def channels(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def blocks(weight: Tensor) -> Made:
    rows, columns = (-(-size // 16) for size in weight.shape)
    inverse = torch.rand(rows, columns, generator=torch.Generator().manual_seed(2)) + 0.5
    spread = inverse.repeat_interleave(16, 0).repeat_interleave(16, 1)[: len(weight), : weight.shape[1]]
    small = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": inverse}, small.float() * spread


def eight(weight: Tensor) -> Made:
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": values, "SCB": largest}, values.float() * largest[:, None] / 127


def nibbles(weight: Tensor, nested: bool = True) -> Made:
    table = torch.linspace(-1, 1, 16)
    flat = weight.flatten().view(-1, 64)
    absmax = flat.abs().amax(1)
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    parts: dict[str, Tensor] = {}
    if nested:
        offset, size = float(absmax.mean()), 256
        steps = torch.linspace(-1, 1, 256)
        apart = absmax - offset
        inner = torch.stack([piece.abs().amax() for piece in apart.split(size)])
        wide = inner.repeat_interleave(size)[: len(absmax)]
        chosen = (apart / wide)[:, None].sub(steps).abs().argmin(1)
        absmax = steps[chosen] * wide + offset
        parts = {
            "weight.absmax": chosen.to(torch.uint8), "weight.nested_absmax": inner,
            "weight.nested_quant_map": steps,
        }  # fmt: skip
        about |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts = {"weight.absmax": absmax}
    places = (flat / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
    pairs = places.flatten().view(-1, 2)
    parts |= {
        "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8), "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(about).encode()]).byte(),
    }  # fmt: skip
    return parts, (table[places] * absmax[:, None]).view_as(weight)


def grouped(bits: int) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq_order": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, shuffled=True)),
    "gptq_8": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8)),
    "gptq_2_v2": (
        {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 2, second=True)
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "packed": ({"quant_method": "compressed-tensors", **grouped(4)}, packed),
    "packed_zeros": ({"quant_method": "compressed-tensors", **grouped(4)}, lambda w: packed(w, zeros=True)),
    "packed_8": ({"quant_method": "compressed-tensors", **grouped(8)}, lambda w: packed(w, 8)),
    "channels": ({"quant_method": "compressed-tensors", **grouped(8)}, channels),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, blocks),
    "bnb8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight),
    "bnb4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nibbles),
    "bnb4_flat": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w: nibbles(w, nested=False)),
}  # fmt: skip


def quantised(folder: Path, given: dict[str, Any], make: Callable[[Tensor], Made]) -> Any:
    """Save a model with its linear layers quantised; return one with what they mean."""
    model = tiny_decoder("qwen2")
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
                parts, meant = make(stored.pop(f"{name}.weight"))
                stored |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
                module.weight.copy_(meant)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    return model


PROMPTS = [[1, 2, 3, 4], list(range(40, 70))]


@pytest.mark.parametrize("name", [n if i % 3 == 0 else nightly(n) for i, n in enumerate(sorted(FORMATS))])
def test_what_is_read_is_what_was_meant(name: str, tmp_path: Path) -> None:
    given, make = FORMATS[name]
    meant = quantised(tmp_path, given, make)
    options = EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=64)
    engine = load_engine(tmp_path, options)
    want = [meant.generate(torch.tensor([p]), max_new_tokens=8)[0, len(p) :].tolist() for p in PROMPTS]
    assert type(engine.runner).__name__ != "TransformersRunner"
    assert greedy_generate(engine, PROMPTS, 8) == want
    # Negative control: the scales of one layer, out of order.
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    key = next(k for k in sorted(stored) if k.endswith(("scales", "scale", "scale_inv", "SCB", "quant_map")))
    stored[key] = stored[key].flip(0)
    save_file(stored, file, {"format": "pt"})
    assert greedy_generate(load_engine(tmp_path, options), PROMPTS, 8) != want


@pytest.mark.parametrize("form", ["one file", "an index", "a name of its own"])
def test_of_two_copies_of_the_weights_the_librarys_is_read(form: str, tmp_path: Path) -> None:
    """Beside Mistral's own copy, and an older one whose name comes later."""
    meant = quantised(tmp_path, *FORMATS["fp8"])
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    key = "model.layers.0.self_attn.q_proj.weight"
    if form == "an index":
        names = {name: f"model-0000{1 + (name == key)}-of-00002.safetensors" for name in stored}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        for part in set(names.values()):
            save_file({name: stored[name] for name in stored if names[name] == part}, tmp_path / part)
        file.unlink()
    elif form == "a name of its own":  # as AutoGPTQ's, and the control: such a file is read where there is no other
        file = file.rename(tmp_path / "quantised.safetensors")
    if form != "a name of its own":
        other = {"layers.0.attention.wq.weight": stored[key], "layers.0.attention.wq.qscale_weight": torch.ones(1)}
        save_file(other, tmp_path / "consolidated.safetensors")
        save_file({name: tensor.flip(0) for name, tensor in stored.items()}, tmp_path / "z-old.safetensors")
    engine = load_engine(tmp_path, EngineConfig(dtype="fp32", max_num_seqs=2, max_model_len=64))
    want = [meant.generate(torch.tensor([p]), max_new_tokens=8)[0, len(p) :].tolist() for p in PROMPTS]
    assert greedy_generate(engine, PROMPTS, 8) == want


def test_packed_again_and_what_cannot_be_read(tmp_path: Path) -> None:
    quantised(tmp_path, *FORMATS["gptq"])
    engine = load_engine(tmp_path, EngineConfig(quantization="int4", max_num_seqs=2, max_model_len=64))
    assert engine.metadata.quantize == "int4" and len(greedy_generate(engine, PROMPTS, 8)[1]) == 8
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for given, said in (
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "aqlm"}, "quantised by aqlm"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quantised by torchao"),
    ):
        path.write_text(json.dumps(config | {"quantization_config": given}))
        with pytest.raises(ValueError, match=said):
            load_engine(tmp_path, EngineConfig(dtype="fp32"))


def test_ends_are_those_of_the_generation_config(tmp_path: Path) -> None:
    """As of plain weights: its config alone knows one of them."""
    model = tiny_decoder("llama", eos_token_id=2)
    model.generation_config.eos_token_id = [2, 7, 9]
    model.save_pretrained(tmp_path / "plain")
    save_quantized(model, tmp_path / "int8")
    for folder in ("plain", "int8"):
        assert load_engine(tmp_path / folder, EngineConfig(dtype="fp32")).metadata.eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize("strategy", [{"block_structure": [128, 128]}, {"block_structure": "128x128"}])
def test_blocks_that_the_size_is_no_multiple_of(strategy: dict[str, Any]) -> None:
    """The last block is a small one: dividing the size by the number of blocks gives other ones."""
    weight, scale = torch.randn(192, 320).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :320]
    config = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "block", **strategy}}}}
    tensors = {"weight": weight, "weight_scale": scale}
    assert torch.equal(_dequantize_compressed_tensors(tensors, config), weight.float() * spread)
    channels = {"weight": weight, "weight_scale": scale.flatten()[:1].expand(192, 1)}  # another group's layer
    assert torch.equal(_dequantize_compressed_tensors(channels, config), weight.float() * scale[0, 0])
