"""A mean over ranks that sends one bit for each number, and makes up for what the bits leave out.

1-bit Adam's error-compensated all-reduce (Tang et al. 2021, arXiv 2102.02888, algorithm 1).  Each rank is a worker,
and the server of one row of the flat buffer::

    worker   e_i += x_i;  send C[e_i];  e_i -= C[e_i]               all-to-all: row r goes to rank r
    server   s_r += mean over i of C[e_i];  send C[s_r];  s_r -= C[s_r]        all-gather
    result   C[s], with the same bits on every rank

    C[x] = mean|x| sign(x) over blocks of 1,024 numbers: 1,024 bits and an fp32 scale, 1/31 of the bytes of fp32

Blocks begin anew with each tensor, so that a bias is not measured by the matrix beside it.  Of all multiples of the
signs, the mean of magnitudes comes closest to ``x`` (as in 0/1 Adam, arXiv 2202.06009), so errors cannot build up.

Invariant: what was given and has not come out is what the errors hold: over any number of calls,
sum of mean(x_i) = sum of results + mean(e_i) + s.  :meth:`OneBitAllReduce.load_errors` keeps it for other ranks, too.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives.reducer import CHUNK_NUMEL
from thalweg.comm.collectives.wire import AllReduceSum, SiteExchange, all_gather_flat
from thalweg.comm.comms_logger import CommsLog
from thalweg.comm.topology import HostTopology

BLOCK_SIZE = 1024
_BLOCK_BYTES = BLOCK_SIZE // 8
# Multiplied with 8 bytes that are 0 or 1, this brings byte i to bit 56 + i; no two products meet.
_GATHER_BITS = 0x0102040810204080
# 8 copies of a byte, of which copy i keeps its bit i.
_SPREAD, _BIT_MASKS = 0x0101010101010101, -0x7FBFDFEFF7FBFDFF  # 0x8040201008040201 as a signed number


def pack_signs(values: Tensor) -> Tensor:
    """The sign bits of ``values`` (fp32, contiguous, a multiple of 8), eight to a byte: uint8, 1-D."""
    if values.device.type == "cpu":  # 10 us for 65,536 numbers; torch's way, which a device takes, 89
        return torch.from_numpy(np.packbits(np.signbit(values.numpy()).reshape(-1), bitorder="little"))
    words = torch.signbit(values).view(-1).view(torch.int64)
    return words.mul(_GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_signs(codes: Tensor) -> Tensor:
    """Undo :func:`pack_signs`: uint8, 1-D, 1 where a number is negative and else 0."""
    if codes.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(codes.numpy(), bitorder="little"))
    words = codes.to(torch.int64).mul_(_SPREAD).bitwise_and_(_BIT_MASKS)
    return words.view(torch.uint8).ne(0).view(torch.uint8)


def payload_bytes(num_blocks: int) -> int:
    """Bytes of so many encoded blocks."""
    return num_blocks * (4 + _BLOCK_BYTES)


class OneBitCode:
    """The code by torch's operators, on any device; ``ops/onebit.py`` gives the same bits in one pass over memory."""

    def compress_(self, errors: Tensor, counts: Tensor, payload: Tensor, numbers: Sequence[tuple[int, Tensor]]) -> None:
        """Add numbers to ``errors`` (1-D fp32), encode the sums into ``payload`` (uint8), leave what it leaves out.

        ``numbers``: 1-D fp32 tensors, each with the place where it begins, the start of a block.  Blocks that none
        reaches may be left out: their errors and their part of ``payload`` must be 0.  ``counts``: how many numbers
        each block has (fp32); behind a tensor's last number errors are 0, and stay so.
        """
        for start, tensor in numbers:
            errors[start : start + tensor.numel()].add_(tensor)
        scales, codes = split_payload(payload)
        for first, last in _iter_blocks(errors):
            rows = errors[first * BLOCK_SIZE : last * BLOCK_SIZE].view(-1, BLOCK_SIZE)
            magnitudes = rows.abs()
            scale = _sum_pairwise(magnitudes).div_(counts[first:last])
            scales[first:last] = scale
            codes[first * _BLOCK_BYTES : last * _BLOCK_BYTES] = pack_signs(rows)
            rows.sub_(torch.copysign(scale.unsqueeze(1), rows, out=magnitudes))
        for start, tensor in numbers:
            errors[start + tensor.numel() :][: -tensor.numel() % BLOCK_SIZE] = 0.0

    def decompress(self, payloads: Tensor, out: Tensor) -> None:
        """Write the mean of ``payloads`` (uint8, one a row) to ``out`` (1-D fp32)."""
        for first, last in _iter_blocks(out):
            rows = out[first * BLOCK_SIZE : last * BLOCK_SIZE].view(-1, BLOCK_SIZE)
            for number, payload in enumerate(payloads):
                scales, codes = split_payload(payload)
                scale = scales[first:last].unsqueeze(1)
                signs = unpack_signs(codes[first * _BLOCK_BYTES : last * _BLOCK_BYTES])
                values = torch.empty_like(rows) if number else rows
                values.copy_(signs.view_as(rows)).mul_(-2.0).add_(1.0).mul_(scale)
                if number:
                    rows.add_(values)
            if len(payloads) > 1:
                rows.div_(len(payloads))


def _sum_pairwise(rows: Tensor) -> Tensor:
    """The sums of rows of 1,024 numbers, in an order that is the same everywhere and needs registers of 16 alone."""
    total = rows.view(len(rows), -1, 16)
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    total = total.squeeze(1)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.squeeze(1)


def split_payload(payload: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 scales and the signs of an encoded row."""
    num_blocks = payload.numel() // payload_bytes(1)
    return payload[: 4 * num_blocks].view(torch.float32), payload[4 * num_blocks :]


def _iter_blocks(values: Tensor) -> Iterator[tuple[int, int]]:
    """(first, end) of blocks that fit a core's cache together."""
    num_blocks = values.numel() // BLOCK_SIZE
    step = CHUNK_NUMEL // BLOCK_SIZE if values.device.type == "cpu" else max(1, num_blocks)
    for first in range(0, num_blocks, step):
        yield first, min(first + step, num_blocks)


class OneBitAllReduce:
    """The mean over ``group`` of tensors of ``numels`` elements, in one bit each; see the head of this file.

    ``topology``: where the group's ranks are, for the ledger.  Errors are fp32 on ``device``: ``worker_errors``, a
    1-D view for each tensor, are this rank's own; of the server's each rank holds one row.
    ``code`` encodes and decodes.  ``within``: the ranks that give the same numbers to other groups like this one, a
    host's.  Each then sends a part of the bits, and they gather among themselves what comes back.
    """

    def __init__(
        self,
        numels: Sequence[int],
        group: dist.ProcessGroup,
        topology: HostTopology,
        ledger: CommsLog,
        device: torch.device,
        code: OneBitCode | None = None,
        within: dist.ProcessGroup | None = None,
    ) -> None:
        self._code = code or OneBitCode()
        self._links = SiteExchange(AllReduceSum(group, topology), within, device, ledger)
        self._numels, self._group, self._ledger = list(numels), group, ledger
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        num_blocks = [-(-numel // BLOCK_SIZE) for numel in self._numels]
        self._offsets = [0, *(end * BLOCK_SIZE for end in accumulate(num_blocks))]
        blocks_per_row = max(1, -(-sum(num_blocks) // self._world_size))
        self._row_numel = blocks_per_row * BLOCK_SIZE
        self._worker_error = torch.zeros(self._world_size * self._row_numel, device=device)
        self._server_error = torch.zeros(self._row_numel, device=device)
        self.worker_errors = self._views(self._worker_error)
        # Of each row its pieces of tensors: where in the row, which tensor, from where to where in it.
        self._pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self._world_size)]
        counts = torch.ones(self._world_size * blocks_per_row)
        for i, (start, numel) in enumerate(zip(self._offsets, self._numels, strict=False)):
            counts[start // BLOCK_SIZE : (start + numel) // BLOCK_SIZE] = BLOCK_SIZE
            if numel % BLOCK_SIZE:
                counts[(start + numel) // BLOCK_SIZE] = numel % BLOCK_SIZE
            at = start
            while at < start + numel:
                row, place = divmod(at, self._row_numel)
                end = min(start + numel, (row + 1) * self._row_numel)
                self._pieces[row].append((place, i, at - start, end - start))
                at = end
        self._counts = counts.view(self._world_size, -1).to(device)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], name: str = "momentum") -> None:
        """Replace ``tensors`` (any shape, contiguous) by their means; collective."""
        row_bytes = payload_bytes(self._counts.shape[1])
        with self._ledger.timed("all_reduce", name, "onebit", self._world_size * row_bytes, self._world_size) as call:
            payload = self._worker_error.new_zeros(self._world_size, row_bytes, dtype=torch.uint8)
            flat_tensors = [tensor.reshape(-1).float() for tensor in tensors]
            errors = self._worker_error.view(self._world_size, -1)
            for row, counts, codes, pieces in zip(errors, self._counts, payload, self._pieces, strict=True):
                numbers = [(place, flat_tensors[i][start:end]) for place, i, start, end in pieces]
                self._code.compress_(row, counts, codes, numbers)
            received = self._links.send_rows(payload, name, call)
            mean = torch.empty_like(self._server_error)
            self._code.decompress(received, mean)
            numbers = [(place, mean[place : place + end - start]) for place, _, start, end in self._pieces[self._rank]]
            self._code.compress_(self._server_error, self._counts[self._rank], payload[0].zero_(), numbers)
            received = self._links.send_rows(payload[:1], name, call)
            flat = torch.empty_like(self._worker_error)
            for codes, row in zip(received, flat.view(self._world_size, -1), strict=True):
                self._code.decompress(codes.unsqueeze(0), row)
            for tensor, view in zip(tensors, self._views(flat), strict=True):
                tensor.copy_(view.view_as(tensor))

    @torch.no_grad()
    def exact_mean(self, tensors: Sequence[Tensor], name: str = "gradient") -> list[Tensor]:
        """The means of ``tensors`` in fp32, as they are: fp32, in their shapes; collective."""
        means = [tensor.to(torch.float32, copy=True) for tensor in tensors]
        self._links.mean_(means, name)
        return means

    def gather_server_errors(self) -> list[Tensor]:
        """The server's errors, whole: 1-D, one for each tensor; collective."""
        flat = torch.empty_like(self._worker_error)
        all_gather_flat(flat, self._server_error, self._group)
        return self._views(flat)

    def load_errors(self, worker_errors: Sequence[Tensor], server_errors: Sequence[Tensor]) -> None:
        """Go on with errors (any shape, one for each tensor): this rank's own as a worker, and the server's, whole."""
        whole = torch.zeros_like(self._worker_error)
        for views, errors in ((self.worker_errors, worker_errors), (self._views(whole), server_errors)):
            for view, error in zip(views, errors, strict=True):
                view.copy_(error.reshape(-1))
        self._server_error.copy_(whole.view(self._world_size, -1)[self._rank])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + numel] for start, numel in zip(self._offsets, self._numels, strict=False)]
