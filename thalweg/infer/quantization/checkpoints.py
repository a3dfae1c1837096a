"""Checkpoints whose weights somebody else has quantised: read as numbers, without the kernels they are for.

A linear layer ``name`` is there as several tensors; each format is a function that makes ``name.weight``,
(outputs, inputs) in fp32, of them.  The model is then loaded as if its weights had been stored like that;
``quantize`` packs them in our own formats again (int4 in groups of 32 holds what 4 bits in wider groups said,
up to a rounding).

- GPTQ (Frantar et al. 2023): ``qweight`` packs inputs, ``qzeros`` outputs, lowest bits first; ``g_idx`` names
  each input's group.  The zeros of the first version are stored less 1.
- AWQ (Lin et al. 2024), version ``gemm``: both pack outputs, of each eight in the order 0 2 4 6 1 3 5 7.
- compressed-tensors: whole numbers, floats of 8 bits, or 2 to 8 bits packed along the inputs, signed.
- fp8: floats of 8 bits with a scale for each block (DeepSeek-V3's form) or each tensor.
- bitsandbytes: 8 bits with a scale for each output; 4 bits by a table of 16 values, a scale for each block.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TensorMap = Mapping[str, Tensor]
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def get_quant_method(config: Any) -> str | None:
    """Return what has quantised the weights, as a model's config tells, or None."""
    quant_config = _get_quant_config(config)
    if quant_config is None:
        return None
    return str(quant_config.get("quant_method", "something unnamed")).rpartition(".")[2].lower().replace("_", "-")


def is_supported(config: Any) -> bool:
    """Whether the weights are in one of the formats above."""
    return get_quant_method(config) in _DEQUANTIZERS


def _get_quant_config(config: Any) -> dict[str, Any] | None:
    quant_config = getattr(config, "quantization_config", None)
    if quant_config is None:
        return None
    return dict(quant_config if isinstance(quant_config, Mapping) else quant_config.to_dict())


def load_quantized(auto: Any, folder: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return the model in ``folder`` in plain numbers of ``dtype``, by a Hugging Face auto class.

    Raises ValueError where the files are not what the config says.
    """
    import transformers

    quant_config, method = _get_quant_config(config), get_quant_method(config)
    assert quant_config is not None and method is not None, "only for a model whose config tells of a quantisation"
    (marker, dequantize), files = _DEQUANTIZERS[method], _weight_files(folder)
    if not files:
        raise ValueError(f"{folder}: its weights are quantised by {method}, and there is no safetensors file")
    stored_tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    dequantized: dict[str, Tensor] = {}
    for owner, tensors in _group_by_module(stored_tensors).items():
        try:
            weight = dequantize(tensors, quant_config) if marker in tensors else None
        except ValueError as error:
            raise ValueError(f"{folder}: {owner}: {error}") from None
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(f"{folder}: the tensors of {owner} do not fit {method}: {error}") from error
        if weight is None:
            dequantized |= {f"{owner}.{name}" if owner else name: tensor for name, tensor in tensors.items()}
        else:
            dequantized[f"{owner}.weight"] = weight.to(dtype)
            if "bias" in tensors:
                dequantized[f"{owner}.bias"] = tensors["bias"]
    unquantised = copy.deepcopy(config)
    del unquantised.quantization_config
    with torch.device("meta"):  # for its class alone
        model_class: Any = type(auto.from_config(unquantised, trust_remote_code=trust_remote_code))
    model, loading_info = model_class.from_pretrained(
        None, config=unquantised, state_dict=dequantized, dtype=dtype, output_loading_info=True
    )
    check_all_loaded(folder, loading_info)
    if (folder / "generation_config.json").is_file():  # which the library reads where it has a folder
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a directory's weights, as the library chooses them: others may be there beside,
    such as Mistral's ``consolidated.safetensors``."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def check_all_loaded(model: str | Path, loading_info: Any) -> None:
    """Raise ValueError where weights were not in the files: the library fills them with random numbers.

    ``about``: what its loader says.  An encoder's pooler may be missing: nobody asks for its result.
    """
    mismatched = sorted(
        f"{name} {tuple(actual)} not {tuple(expected)}" for name, actual, expected in loading_info["mismatched_keys"]
    )
    missing = sorted(name for name in loading_info["missing_keys"] if "pooler" not in name.split("."))
    for names, problem in ((mismatched, "other shapes than its config asks for"), (missing, "nothing")):
        if names:
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(
                f"{model}: its files have {problem} for {len(names)} of the model's tensors: {shown}. Download"
                " or save it again, or mend its config.json"
            )


def _group_by_module(stored: TensorMap) -> dict[str, dict[str, Tensor]]:
    """Gather the tensors of each module."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        owner, inner = name.rpartition(".")[::2]
        if ".weight." in name:  # bitsandbytes puts what belongs to a weight below its name
            owner, _, inner = name.rpartition(".weight.")
            inner = f"weight.{inner}"
        groups.setdefault(owner, {})[inner] = tensor
    return groups


def _unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Take the numbers out of int32 (rows, words), lowest bits first: (rows, words * 32 / bits)."""
    if bits not in (2, 4, 8):
        raise ValueError(f"weights of {bits} bits are not known here; 2, 4 and 8 are")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _dequantize_gptq(tensors: TensorMap, quant_config: Mapping[str, Any]) -> Tensor:
    bits = int(quant_config.get("bits", 4))
    values = _unpack_int32(tensors["qweight"].t(), bits)  # (outputs, inputs)
    zeros = _unpack_int32(tensors["qzeros"], bits)[:, : len(values)]
    if quant_config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    inputs, groups = values.shape[1], len(zeros)
    group = tensors.get("g_idx")
    if group is None or group.numel() != inputs:
        group = torch.arange(inputs) // -(-inputs // groups)
    scales = tensors["scales"].float()
    group = group.long() % groups  # negative ones count from the end
    return (values - zeros.t()[:, group]).float() * scales.t()[:, group]


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _dequantize_awq(tensors: TensorMap, quant_config: Mapping[str, Any]) -> Tensor:
    bits, version = (int(quant_config.get("bits", quant_config.get("w_bit", 4))), quant_config.get("version", "gemm"))
    if bits != 4 or str(version).lower() != "gemm":
        raise ValueError(f"AWQ weights of {bits} bits in version {version} are not known here; 4 bits, gemm are")
    values, zeros = (
        _unpack_int32(tensors[name], bits).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    return ((values - _expand_scale(zeros, values)).float() * _expand_scale(tensors["scales"].float(), values)).t()


def _dequantize_compressed_tensors(tensors: TensorMap, quant_config: Mapping[str, Any]) -> Tensor:
    scale, zero = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
    if "weight_packed" in tensors:
        outputs, inputs = (int(size) for size in tensors["weight_shape"])
        words = tensors["weight_packed"]
        if words.dtype != torch.int32:
            raise ValueError("compressed-tensors weights of 4-bit floats are not known here")
        bits = _infer_bits(quant_config, outputs, inputs, words)
        weight = (_unpack_int32(words, bits)[:, :inputs] - 2 ** (bits - 1)).float()
        if zero is not None and zero.dtype == torch.int32:
            zero = _unpack_int32(zero.t(), bits).t()[:outputs] - 2 ** (bits - 1)
    else:
        weight = tensors["weight"].float()
    group = tensors.get("weight_g_idx")
    if group is not None and group.numel() == weight.shape[1] and int(group.min()) >= 0:
        scale, zero = scale[:, group.long()], None if zero is None else zero[:, group.long()]
    groups = quant_config.get("config_groups", {}).values()
    structures = [g["weights"].get("block_structure") for g in groups if g.get("weights")]
    block = re.findall(r"\d+", str(next(filter(None, structures), "")))  # [128, 128], in older files "128x128"
    if zero is not None:
        weight = weight - _expand_scale(zero.float(), weight, block)
    return weight * _expand_scale(scale, weight, block)


def _infer_bits(quant_config: Mapping[str, Any], out_features: int, in_features: int, words: Tensor) -> int:
    """Return how many bits a packed weight has: of those that somebody names, what fits its shape."""
    named = {int(g["weights"]["num_bits"]) for g in quant_config.get("config_groups", {}).values() if g.get("weights")}
    for bits in sorted(named or {4, 8}):
        if words.shape[-1] == -(-in_features * bits // 32):
            return bits
    raise ValueError(f"{tuple(words.shape)} words do not hold {out_features} x {in_features} numbers of {named} bits")


def _expand_scale(scale: Tensor, weight: Tensor, block: Sequence[Any] = ()) -> Tensor:
    """Return scales of blocks (of all, of rows, of groups of columns) as wide as the weight.

    ``block``: outputs and inputs of a block, where they are known: the last one may be smaller than the others.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    for dim in (0, 1):
        size, count = weight.shape[dim], scale.shape[dim]
        if count not in (1, size):
            each = size // count
            if block and -(-size // int(block[dim])) == count:
                each = int(block[dim])
            elif size % count:
                raise ValueError(f"{count} scales do not divide {size} numbers into blocks of one size")
            scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scale


def _dequantize_fp8(tensors: TensorMap, quant_config: Mapping[str, Any]) -> Tensor | None:
    if tensors["weight"].dtype not in _FP8_DTYPES:
        return None
    inverse = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if inverse is None:
        raise KeyError("weight_scale_inv")
    values = tensors["weight"].float()
    return values * _expand_scale(inverse.float(), values, quant_config.get("weight_block_size") or ())


def _dequantize_bitsandbytes(tensors: TensorMap, quant_config: Mapping[str, Any]) -> Tensor | None:
    if "SCB" in tensors:
        return tensors["weight"].float() * tensors["SCB"].float()[:, None] / 127
    state = next((key for key in tensors if key.startswith("weight.quant_state.bitsandbytes")), None)
    if state is None:
        return None
    quant_state = json.loads(bytes(tensors[state].tolist()))
    packed = tensors["weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        nested, size = tensors["weight.nested_absmax"].float(), int(quant_state["nested_blocksize"])
        table = tensors["weight.nested_quant_map"].float()
        absmax = table[absmax.long()] * nested.repeat_interleave(size)[: len(absmax)]
        absmax = absmax + float(quant_state["nested_offset"])
    count = math.prod(quant_state["shape"])
    scale = absmax.float().repeat_interleave(int(quant_state["blocksize"]))[:count]
    return (tensors["weight.quant_map"].float()[codes[:count]] * scale).view(*quant_state["shape"])


# By method: a tensor that each of its modules has, and what makes the weight; None where it is stored as it is.
_DEQUANTIZERS: dict[str, tuple[str, Callable[[TensorMap, Mapping[str, Any]], Tensor | None]]] = {
    "gptq": ("qweight", _dequantize_gptq),
    "awq": ("qweight", _dequantize_awq),
    "compressed-tensors": ("weight_scale", _dequantize_compressed_tensors),
    "fp8": ("weight", _dequantize_fp8),
    "bitsandbytes": ("weight", _dequantize_bitsandbytes),
}
