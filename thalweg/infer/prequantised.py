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

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def method_of(config: Any) -> str | None:
    """Return what has quantised the weights, as a model's config tells, or None."""
    given = _settings(config)
    if given is None:
        return None
    return str(given.get("quant_method", "something unnamed")).rpartition(".")[2].lower().replace("_", "-")


def readable(config: Any) -> bool:
    """Whether the weights are in one of the formats above."""
    return method_of(config) in _READERS


def _settings(config: Any) -> dict[str, Any] | None:
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    return dict(given if isinstance(given, Mapping) else given.to_dict())


def load_quantised(auto: Any, folder: Path, config: Any, dtype: torch.dtype, remote: bool) -> Any:
    """Return the model in ``folder`` in plain numbers of ``dtype``, by a Hugging Face auto class.

    Raises ValueError where the files are not what the config says.
    """
    given, method = _settings(config), method_of(config)
    assert given is not None and method is not None, "only for a model whose config tells of a quantisation"
    read, files = _READERS[method], sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: its weights are quantised by {method}, and there is no safetensors file")
    stored = _load(files)
    plain: dict[str, Tensor] = {}
    for owner, parts in _by_owner(stored).items():
        try:
            weight = read(parts, given)
        except ValueError as error:
            raise ValueError(f"{folder}: {owner}: {error}") from None
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(f"{folder}: the tensors of {owner} do not fit {method}: {error}") from error
        if weight is None:
            plain |= {f"{owner}.{name}" if owner else name: tensor for name, tensor in parts.items()}
        else:
            plain[f"{owner}.weight"] = weight.to(dtype)
            if "bias" in parts:
                plain[f"{owner}.bias"] = parts["bias"]
    unquantised = copy.deepcopy(config)
    del unquantised.quantization_config
    with torch.device("meta"):  # for its class alone
        kind: Any = type(auto.from_config(unquantised, trust_remote_code=remote))
    made, about = kind.from_pretrained(
        None, config=unquantised, state_dict=plain, dtype=dtype, output_loading_info=True
    )
    check_complete(folder, about)
    return made


def check_complete(model: str | Path, about: Any) -> None:
    """Raise ValueError where weights were not in the files: the library fills them with random numbers.

    ``about``: what its loader says.  An encoder's pooler may be missing: nobody asks for its result.
    """
    wrong = sorted(f"{name} {tuple(has)} not {tuple(wants)}" for name, has, wants in about["mismatched_keys"])
    missing = sorted(name for name in about["missing_keys"] if "pooler" not in name.split("."))
    for names, problem in ((wrong, "other shapes than its config asks for"), (missing, "nothing")):
        if names:
            some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(
                f"{model}: its files have {problem} for {len(names)} of the model's tensors: {some}. Download"
                " or save it again, or mend its config.json"
            )


def _load(files: list[Path]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    return found


def _by_owner(stored: Tensors) -> dict[str, dict[str, Tensor]]:
    """Gather the tensors of each module."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        owner, inner = name.rpartition(".")[::2]
        if ".weight." in name:  # bitsandbytes puts what belongs to a weight below its name
            owner, _, inner = name.rpartition(".weight.")
            inner = f"weight.{inner}"
        found.setdefault(owner, {})[inner] = tensor
    return found


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Take the numbers out of int32 (rows, words), lowest bits first: (rows, words * 32 / bits)."""
    if bits not in (2, 4, 8):
        raise ValueError(f"weights of {bits} bits are not known here; 2, 4 and 8 are")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _gptq(parts: Tensors, given: Mapping[str, Any]) -> Tensor | None:
    if "qweight" not in parts:
        return None
    bits = int(given.get("bits", 4))
    values = _unpacked(parts["qweight"].t(), bits)  # (outputs, inputs)
    zeros = _unpacked(parts["qzeros"], bits)[:, : len(values)]
    if given.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    inputs, groups = values.shape[1], len(zeros)
    group = parts.get("g_idx")
    if group is None or group.numel() != inputs:
        group = torch.arange(inputs) // -(-inputs // groups)
    scales = parts["scales"].float()
    group = group.long() % groups  # negative ones count from the end
    return (values - zeros.t()[:, group]).float() * scales.t()[:, group]


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq(parts: Tensors, given: Mapping[str, Any]) -> Tensor | None:
    if "qweight" not in parts:
        return None
    bits, version = int(given.get("bits", given.get("w_bit", 4))), given.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise ValueError(
            f"AWQ weights of {bits} bits in version {version} are not known here; 4 bits, gemm are"
        )
    values, zeros = (
        _unpacked(parts[name], bits).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    each = len(values) // len(zeros)
    scales = parts["scales"].float().repeat_interleave(each, 0)
    return ((values - zeros.repeat_interleave(each, 0)).float() * scales).t()


def _compressed(parts: Tensors, given: Mapping[str, Any]) -> Tensor | None:
    if "weight_scale" not in parts:
        return None
    scale, zero = parts["weight_scale"].float(), parts.get("weight_zero_point")
    if "weight_packed" in parts:
        outputs, inputs = (int(size) for size in parts["weight_shape"])
        words = parts["weight_packed"]
        if words.dtype != torch.int32:
            raise ValueError("compressed-tensors weights of 4-bit floats are not known here")
        bits = _bits(given, outputs, inputs, words)
        weight = (_unpacked(words, bits)[:, :inputs] - 2 ** (bits - 1)).float()
        if zero is not None and zero.dtype == torch.int32:
            zero = _unpacked(zero.t(), bits).t()[:outputs] - 2 ** (bits - 1)
    else:
        weight = parts["weight"].float()
    group = parts.get("weight_g_idx")
    if group is not None and group.numel() == weight.shape[1] and int(group.min()) >= 0:
        chosen = group.long()
        zeros = 0.0 if zero is None else zero.float()[:, chosen]
        return (weight - zeros) * scale[:, chosen]
    if zero is not None:
        weight = weight - _spread(zero.float(), weight)
    return weight * _spread(scale, weight)


def _bits(given: Mapping[str, Any], outputs: int, inputs: int, words: Tensor) -> int:
    """Return how many bits a packed weight has: of those that somebody names, what fits its shape."""
    named = {
        int(g["weights"]["num_bits"]) for g in given.get("config_groups", {}).values() if g.get("weights")
    }
    for bits in sorted(named or {4, 8}):
        if words.shape[-1] == -(-inputs * bits // 32):
            return bits
    raise ValueError(f"{tuple(words.shape)} words do not hold {outputs} x {inputs} numbers of {named} bits")


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Return scales of blocks (of all, of rows, of groups of columns) as wide as the weight."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    for dim in (0, 1):
        size, count = weight.shape[dim], scale.shape[dim]
        if count not in (1, size):
            each = -(-size // count)
            scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scale


def _fp8(parts: Tensors, given: Mapping[str, Any]) -> Tensor | None:
    weight = parts.get("weight")
    if weight is None or weight.dtype not in _SMALL:
        return None
    inverse = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if inverse is None:
        raise KeyError("weight_scale_inv")
    block = given.get("weight_block_size")
    wide = weight.float()
    if not block or inverse.numel() == 1:
        return wide * _spread(inverse.float(), wide)
    scale = inverse.float().repeat_interleave(int(block[0]), 0).repeat_interleave(int(block[1]), 1)
    return wide * scale[: wide.shape[0], : wide.shape[1]]


def _bitsandbytes(parts: Tensors, given: Mapping[str, Any]) -> Tensor | None:
    if "SCB" in parts:
        return parts["weight"].float() * parts["SCB"].float()[:, None] / 127
    state = next((key for key in parts if key.startswith("weight.quant_state.bitsandbytes")), None)
    if state is None:
        return None
    about = json.loads(bytes(parts[state].tolist()))
    packed = parts["weight"].flatten()
    places = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    absmax = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        nested, size = parts["weight.nested_absmax"].float(), int(about["nested_blocksize"])
        table = parts["weight.nested_quant_map"].float()
        absmax = table[absmax.long()] * nested.repeat_interleave(size)[: len(absmax)]
        absmax = absmax + float(about["nested_offset"])
    count = 1
    for length in about["shape"]:
        count *= length
    scale = absmax.float().repeat_interleave(int(about["blocksize"]))[:count]
    return (parts["weight.quant_map"].float()[places[:count]] * scale).view(*about["shape"])


_READERS: dict[str, Callable[[Tensors, Mapping[str, Any]], Tensor | None]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "bitsandbytes": _bitsandbytes,
}  # fmt: skip
