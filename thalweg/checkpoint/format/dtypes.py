"""The tensor dtypes of the format: their names in the manifest and in safetensors headers."""

from __future__ import annotations

import torch

# torch dtype name: the name that safetensors gives it, None where it has none (stored as U8 bytes)
_SAFETENSORS_DTYPES: dict[str, str | None] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": None,
    "float8_e5m2fnuz": None,
    "float8_e8m0fnu": None,
    "complex64": None,
    "complex128": None,
}

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _SAFETENSORS_DTYPES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def safetensors_dtype_and_shape(name: str, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The safetensors dtype and shape under which a piece of ``shape`` elements is filed."""
    safetensors_dtype = _SAFETENSORS_DTYPES[name]
    if safetensors_dtype is None:
        return "U8", [*shape, DTYPES[name].itemsize]
    return safetensors_dtype, list(shape)
