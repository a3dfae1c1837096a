"""Names of floating-point types: what users write in a config, and what Thalweg prints."""

import difflib

import torch

_DTYPES_BY_NAME: dict[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp64", "float64", "double"), torch.float64),
}

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}

HALF_DTYPES: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype that ``name`` stands for; a dtype is returned as it is.

    Case, surrounding blanks and a leading ``torch.`` do not matter. Raises ``ValueError`` with the
    nearest known name for anything else.
    """
    if isinstance(name, torch.dtype):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a dtype is given by its name, such as 'bf16'; got {name!r}")
    key = name.strip().lower().removeprefix("torch.")
    if key in _DTYPES_BY_NAME:
        return _DTYPES_BY_NAME[key]
    nearest = difflib.get_close_matches(key, _DTYPES_BY_NAME, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown dtype {name!r}{hint} (known: {', '.join(_DTYPES_BY_NAME)})")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of ``dtype``: ``fp32``, ``bf16``, ``fp16``, ``fp64``, else torch's own."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))
