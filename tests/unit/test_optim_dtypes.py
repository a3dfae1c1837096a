"""Names of dtypes."""

from __future__ import annotations

import pytest
import torch

from thalweg.utils.dtypes import dtype_name, parse_dtype


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.bfloat16, ("bf16", "bfloat16", " BF16 ", "torch.bfloat16")),
        (torch.float16, ("fp16", "float16", "half")),
        (torch.float32, ("fp32", "float32", "float")),
    ],
)
def test_names_go_both_ways(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    assert {parse_dtype(name) for name in names} == {dtype} == {parse_dtype(dtype)}
    assert parse_dtype(dtype_name(dtype)) == dtype and dtype_name(dtype) == names[0]


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="'bfloat16'"):
        parse_dtype("bflot16")
    with pytest.raises(ValueError, match="by its name"):
        parse_dtype(16)  # pyright: ignore
    assert dtype_name(torch.int64) == "int64"
