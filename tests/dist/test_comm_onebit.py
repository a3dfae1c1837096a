"""The mean in one bit: its code, its errors, its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.comm import CommsLog
from thalweg.comm.collectives import onebit
from thalweg.comm.collectives.onebit import (
    BLOCK_SIZE,
    OneBitAllReduce,
    OneBitCode,
    pack_signs,
    payload_bytes,
    unpack_signs,
)
from thalweg.comm.topology import HostTopology
from thalweg.ops import cpu_kernels
from thalweg.ops.onebit import GeneratedOneBitCode, get_onebit_code

REUSE_RANKS = True
ISAS = cpu_kernels.supported_isas() if not cpu_kernels.unsupported_reason() else []

SHAPES = [(3, 700), (5,), (1024,), (0,), (40, 40), (1,)]


def test_signs_come_back_from_their_bits() -> None:
    """Every byte that there is, and zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    every_byte = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    values = torch.cat([1.0 - 2.0 * every_byte.flatten(), torch.randn(4096, generator=generator), torch.zeros(4)])
    values = torch.cat([values, -torch.zeros(4)])
    codes = pack_signs(values)
    assert codes.dtype == torch.uint8 and codes.numel() == values.numel() // 8
    assert codes[:256].tolist() == list(range(256))
    assert torch.equal(unpack_signs(codes).bool(), torch.signbit(values))
    # What an accelerator does.
    words = torch.signbit(values).view(torch.int64)
    assert torch.equal(words.mul(onebit._GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8), codes)
    spread = codes.to(torch.int64).mul_(onebit._SPREAD).bitwise_and_(onebit._BIT_MASKS).view(torch.uint8).ne(0)
    assert torch.equal(spread, torch.signbit(values))


CODES = [OneBitCode(), get_onebit_code(torch.device("cpu"))]


@pytest.mark.parametrize("code", CODES, ids=lambda code: type(code).__name__)
def test_a_code_and_what_it_leaves_out_are_the_numbers(code: OneBitCode) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200 * BLOCK_SIZE, generator=generator)
    values[-BLOCK_SIZE + 10 :] = 0.0
    counts = torch.full((200,), float(BLOCK_SIZE))
    counts[-1] = 10
    error, payload = values.clone(), torch.empty(payload_bytes(200), dtype=torch.uint8)
    code.compress_(error, counts, payload, [(0, torch.zeros(199 * BLOCK_SIZE + 10))])
    decoded = torch.empty_like(values)
    code.decompress(payload.unsqueeze(0), decoded)
    owed = (values - decoded)[: -BLOCK_SIZE + 10]
    assert torch.equal(owed, error[: -BLOCK_SIZE + 10]) and not error[-BLOCK_SIZE + 10 :].any()
    magnitudes = values.view(200, -1).abs().sum(1) / counts
    assert torch.allclose(decoded.view(200, -1)[:, 0].abs(), magnitudes)
    # The mean of magnitudes is the best multiple of the signs: any other leaves more out.
    for factor in (0.9, 1.1):
        assert (values - factor * decoded).norm() > (values - decoded).norm()
    same = torch.empty_like(values)
    code.decompress(payload.repeat(2, 1), same)
    assert torch.equal(same, decoded)


@pytest.mark.parametrize("isa", [isa.name if i in (0, 2) else nightly(isa.name) for i, isa in enumerate(ISAS)])
@pytest.mark.parametrize("threads", [1, 2])
def test_generated_kernels_give_the_bits_of_torch_s_operators(isa: str, threads: int) -> None:
    """Tensors of all lengths that do not begin on a register's boundary; zeros of both signs, subnormals, infinities,
    NaN; enough blocks for two threads, and blocks that no tensor reaches."""
    code = GeneratedOneBitCode(cpu_kernels.KernelSet(cpu_kernels.ISAS[isa]))
    generator = torch.Generator().manual_seed(2)
    errors, counts, numbers, at = torch.zeros(90 * BLOCK_SIZE), torch.ones(90), [], 0
    for numel in (66 * BLOCK_SIZE, 1, 15 * BLOCK_SIZE + 7, 1023, 1024, 17):
        numbers.append((at, torch.randn(numel + 1, generator=generator)[1:]))
        errors[at : at + numel] = torch.randn(numel, generator=generator)
        blocks = -(-numel // BLOCK_SIZE)
        counts[at // BLOCK_SIZE :][:blocks] = (numel - torch.arange(blocks) * BLOCK_SIZE).clamp(max=BLOCK_SIZE).float()
        at += blocks * BLOCK_SIZE
    errors[:2048], numbers[0][1][:1024], numbers[0][1][1024:2048] = -0.0, -0.0, 0.0
    numbers[0][1][[3000, 5000, 9000]] = torch.tensor([float("nan"), float("-inf"), -1e-41])
    errors[8192:10240] *= 1e-40
    plain_payload, payload = torch.zeros(2, payload_bytes(90), dtype=torch.uint8)
    plain_errors = errors.clone()
    OneBitCode().compress_(plain_errors, counts, plain_payload, numbers)
    with _threads(threads):
        code.compress_(errors, counts, payload, numbers)
        assert torch.equal(payload, plain_payload) and payload.any()
        assert _same_bits(errors, plain_errors)
        for rows in (1, 2, 3):
            payloads = payload.repeat(rows, 1)
            signs = payloads[:, 4 * 90 :]
            signs.copy_(torch.randint(256, signs.shape, generator=generator))
            plain_mean, mean = torch.empty(2, 90 * BLOCK_SIZE)
            OneBitCode().decompress(payloads, plain_mean)
            code.decompress(payloads, mean)
            assert _same_bits(mean, plain_mean)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Of all but NaN, which has many."""
    return torch.equal(a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def _given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i - 3) for i, shape in enumerate(SHAPES)]


def _no_mass_is_lost(rank: int, world: int, steps: int) -> tuple[list[Tensor], float, float]:
    """The last result; how far sum of means is from results + errors; how far from the results alone."""
    topology = HostTopology.discover(dist.group.WORLD)
    reducer = OneBitAllReduce(
        [torch.Size(s).numel() for s in SHAPES], dist.group.WORLD, topology, CommsLog(), torch.device("cpu")
    )
    means = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    results = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    given: list[Tensor] = []
    for step in range(steps):
        given = _given(rank, step)
        for mean, exact in zip(means, reducer.exact_mean(given), strict=True):
            mean += exact
        reducer(given)
        for result, value in zip(results, given, strict=True):
            result += value
    servers = reducer.gather_server_errors()
    workers = reducer.exact_mean(reducer.worker_errors)
    kept, without = 0.0, 0.0
    for i, mean in enumerate(means):
        if not mean.numel():
            continue
        scale = float(mean.abs().max())
        owed = (workers[i] + servers[i]).view_as(mean)
        kept = max(kept, float((mean - results[i] - owed).abs().max()) / scale)
        without = max(without, float((mean - results[i]).abs().max()) / scale)
    return given, kept, without


@pytest.mark.parametrize(("world", "steps"), [(2, 12), (3, 5), nightly(4, 60)])
def test_what_is_given_comes_out_or_is_owed(world: int, steps: int) -> None:
    ranks = run_ranks(_no_mass_is_lost, world, steps)
    for given, kept, without in ranks:
        assert kept < 1e-5 < 1e-2 < without  # without the errors the sum is another one
        assert all(map(torch.equal, given, ranks[0][0]))  # every rank has the same bits


def _bytes(rank: int, world: int) -> tuple[int, int]:
    ledger = CommsLog()
    reducer = OneBitAllReduce([1 << 20], dist.group.WORLD, HostTopology((0, 1), rank), ledger, torch.device("cpu"))
    reducer([torch.randn(1 << 20)])
    return ledger.total("all_reduce").inter_bytes, ledger.total("all_reduce").intra_bytes


def test_bytes_are_a_thirty_first_of_fp32() -> None:
    fp32 = 4 << 20  # half there, half back
    assert run_ranks(_bytes, 2) == [(fp32 * 33 // 1024, 0)] * 2


def _other_ranks(rank: int, world: int, owed: Any) -> list[Tensor]:
    topology = HostTopology.discover(dist.group.WORLD)
    numels = [torch.Size(s).numel() for s in SHAPES]
    reducer = OneBitAllReduce(numels, dist.group.WORLD, topology, CommsLog(), torch.device("cpu"))
    reducer.load_errors(owed, owed)
    return reducer.gather_server_errors() + reducer.exact_mean(reducer.worker_errors)


def test_errors_are_loaded_whole() -> None:
    owed = _given(0, 0)
    for given in run_ranks(_other_ranks, 3, owed):
        for got, expected in zip(given, owed + owed, strict=True):
            assert torch.allclose(got.flatten(), expected.flatten(), atol=1e-7)
