"""The tensor dtypes of the format: their names in the manifest and in safetensors headers."""

import torch

# torch dtype name: the name that safetensors gives it, None where it has none (stored as U8 bytes)
_SAFETENSORS_DTYPES: dict[str, str | None] = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128")),
}

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _SAFETENSORS_DTYPES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def safetensors_dtype_and_shape(name: str, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The safetensors dtype and shape under which a piece of ``shape`` elements is filed."""
    safetensors_dtype = _SAFETENSORS_DTYPES[name]
    if safetensors_dtype is None:
        return "U8", [*shape, DTYPES[name].itemsize]
    return safetensors_dtype, list(shape)
