"""Few rows times int8 or int4 weights in one Triton kernel, which reads each weight once, as the bytes that it is.
For many rows another turns the bytes into numbers, at memory's speed, for the device's own product.

    x (M, K) bf16, fp16 or fp32     packed (N, K / HALVES) int8     table, in x's dtype     y (M, N), x's dtype

int8 (HALVES 1): ``table`` (N,) is the scale of each output.  int4 (HALVES 2): the high four bits of a row's bytes are
its first K / 2 numbers, the low ones its last, both signed, so that either half meets neighbouring inputs; ``table``
(2, N, K / 32) has a scale and an offset for each group of 32, which K / 2 must be a multiple of.

A program computes ``n`` outputs for ``rows`` rows, with sums in fp32.  One row at a time (``rows`` 1) needs no tensor
cores: products are added up where the bytes were loaded.  More rows go through ``tl.dot`` with the weights on the
left, whose tiles are full however few rows there are.  Narrow weights make too few programs for a large GPU: they
share the inputs among ``split_k``, whose sums are added up in a fixed order.

Not differentiable.  This module alone imports Triton: import it where that is known to be there.
"""

# No postponed annotations: Triton's interpreter reads them.
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

GROUP_SIZE = 32


class Blocks(NamedTuple):
    """How a product is cut: for up to ``max_rows``, ``rows`` x ``n`` results a program, ``k`` bytes a turn."""

    max_rows: int
    rows: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


# By HALVES, then by rows.  fp32 rows end with the first line: tensor cores would round them.
# One row: with 256 bytes for each warp, and for int4 fewer than four outputs, what is loaded needs to change no threads
# (in Triton 3.6's code for sm_90; others are right, and slower).  The rest by bench/gpu/packed.py on an H200.
BLOCKS = {
    1: (
        Blocks(4, 1, 4, 1024, 4, 1), Blocks(16, 16, 32, 256, 4, 3),
        Blocks(32, 32, 64, 128, 4, 3, 4), Blocks(128, 64, 64, 128, 4, 3, 4),
    ),
    2: (
        Blocks(4, 1, 2, 1024, 4, 1), Blocks(16, 16, 64, 64, 4, 3, 4),
        Blocks(32, 32, 64, 64, 4, 3, 4), Blocks(64, 64, 64, 64, 4, 3, 4),
    ),
}  # fmt: skip
MIN_PROGRAMS = 256  # below this, inputs are shared: two for each of 132 processors


def _blocks_of(packed: Tensor, dtype: torch.dtype, inputs: int) -> tuple[Blocks, ...]:
    return BLOCKS[inputs // packed.shape[1]][: 1 if dtype == torch.float32 else None]


def row_counts(packed: Tensor, dtype: torch.dtype, inputs: int) -> tuple[int, ...]:
    """Return numbers of rows that are computed in different ways; () where :func:`linear` does not take the weights."""
    if inputs == 2 * packed.shape[1] and packed.shape[1] % GROUP_SIZE:
        return ()
    found = [one.max_rows for one in _blocks_of(packed, dtype, inputs)]
    return (*found, found[-1] + 1)


def linear(x: Tensor, packed: Tensor, table: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Return x (M, K) @ weight.T, (M, N); many rows by the device's own product, which any M takes with ``blocks``."""
    num_rows, (num_outputs, row_bytes) = len(x), packed.shape
    halves = x.shape[1] // row_bytes
    if blocks is None:
        known = _blocks_of(packed, x.dtype, x.shape[1])
        blocks = next((one for one in known if 0 < num_rows <= one.max_rows), None)
    if blocks is None:
        return F.linear(x, unpack(packed, table, x.shape[1]))
    tiles = -(-num_outputs // blocks.n), -(-num_rows // blocks.rows)  # triton.cdiv takes the host 3 us
    split_k = blocks.split_k if tiles[0] * tiles[1] < MIN_PROGRAMS else 1
    shape, dtype = (split_k, num_rows, num_outputs), x.dtype if split_k == 1 else torch.float32
    y = torch.empty(shape, dtype=dtype, device=x.device)
    kernel: Any = _linear_kernel
    with torch.cuda.device_of(x):
        kernel[(*tiles, split_k)](
            x.contiguous(), packed, table, y, num_rows, num_outputs, row_bytes, halves, blocks.rows, blocks.n, blocks.k,
            num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
    return y[0] if split_k == 1 else y.sum(0).to(x.dtype)


def unpack(packed: Tensor, table: Tensor, inputs: int) -> Tensor:
    """Return the numbers (N, K) that the bytes are, in the table's dtype: each byte read once, each number written."""
    num_outputs, row_bytes = packed.shape
    out = torch.empty(num_outputs, inputs, dtype=table.dtype, device=packed.device)
    kernel: Any = _unpack_kernel
    with torch.cuda.device_of(packed):
        grid = -(-num_outputs // 4), -(-row_bytes // 512)
        kernel[grid](packed, table, out, num_outputs, row_bytes, inputs // row_bytes, 4, 512, num_warps=4)
    return out


@triton.jit
def _to_fp32(numbers):
    """Small int32 as the last bits of 1.5 * 2 ** 23: an H100 converts integers at a fourth of the speed of this."""
    return (numbers + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _int4_numbers(
    codes, table, n, start, row_bytes, num_outputs,
    HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return one half of the numbers, fp32, of codes (BLOCK_N, BLOCK_K) that begin at byte ``start`` of their rows."""
    first, groups = start // 32 + tl.arange(0, BLOCK_K // 32)[None, :], row_bytes // 16
    table_at = table + n.to(tl.int64) * groups + HALF * (row_bytes // 32) + first
    there = (n < num_outputs) & (first < row_bytes // 32)
    scale = tl.load(table_at, mask=there, other=0).to(tl.float32)[:, :, None]
    offset = tl.load(table_at + num_outputs * groups, mask=there, other=0).to(tl.float32)[:, :, None]
    numbers = codes.to(tl.int32)
    numbers = _to_fp32(numbers >> 4 if HALF == 0 else (numbers << 28) >> 28)
    return (numbers.reshape(BLOCK_N, BLOCK_K // 32, 32) * scale + offset).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _unpack_kernel(
    packed, table, out, num_outputs, row_bytes,
    HALVES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, start = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], tl.program_id(1) * BLOCK_K
    k, n_64 = start + tl.arange(0, BLOCK_K)[None, :], n.to(tl.int64)
    there = (n < num_outputs) & (k < row_bytes)
    codes = tl.load(packed + n_64 * row_bytes + k, mask=there, other=0)
    for half in tl.static_range(HALVES):
        if HALVES == 1:
            scale = tl.load(table + n, mask=n < num_outputs, other=0).to(tl.float32)
            weights = _to_fp32(codes.to(tl.int32)) * scale
        else:
            weights = _int4_numbers(codes, table, n, start, row_bytes, num_outputs, half, BLOCK_N, BLOCK_K)
        tl.store(out + (n_64 * HALVES + half) * row_bytes + k, weights, mask=there)


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _linear_kernel(
    x, packed, table, y, num_rows, num_outputs, row_bytes,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    split = tl.program_id(2)
    n_64 = n.to(tl.int64)  # large vocabularies have more than 2 ** 31 weights
    total = tl.zeros((BLOCK_N, BLOCK_K if BLOCK_M == 1 else BLOCK_M), tl.float32)
    for start in range(split * BLOCK_K, row_bytes, tl.num_programs(2) * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        codes_at = packed + n_64 * row_bytes + k
        if BLOCK_M == 1:  # a thread has as many neighbours as of x: else all weights change threads
            codes_at = tl.max_contiguous(codes_at, [1, 128 // x.dtype.element_ty.primitive_bitwidth])
        codes = tl.load(codes_at, mask=(n < num_outputs) & (k < row_bytes), other=0)
        for half in tl.static_range(HALVES):
            x_at = x + m * (HALVES * row_bytes) + half * row_bytes + k
            rows = tl.load(x_at, mask=(m < num_rows) & (k < row_bytes), other=0)
            if HALVES == 1:
                weights = codes
            else:
                weights = _int4_numbers(codes, table, n, start, row_bytes, num_outputs, half, BLOCK_N, BLOCK_K)
            if BLOCK_M == 1:
                if HALVES == 1:
                    weights = _to_fp32(codes.to(tl.int32))
                total += weights * rows.to(tl.float32)
            else:
                total = tl.dot(weights.to(rows.dtype), tl.trans(rows), total)
    if BLOCK_M == 1:
        total = tl.sum(total, 1)[:, None]
    if HALVES == 1:
        total *= tl.load(table + n, mask=n < num_outputs, other=0).to(tl.float32)
    m = tl.trans(m)
    tl.store(y + (split * num_rows + m) * num_outputs + n, total, mask=(n < num_outputs) & (m < num_rows))
