"""The 1-bit code by generated kernels: one pass over memory where torch's operators take six."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from thalweg.comm.collectives.onebit import BLOCK_SIZE, OneBitCode, split_payload
from thalweg.ops import cpu_kernels

_MIN_BLOCKS_PER_THREAD = 32


class GeneratedOneBitCode(OneBitCode):
    """:class:`OneBitCode` for tensors in the host's memory."""

    def __init__(self, kernels: cpu_kernels.KernelSet) -> None:
        self._compress, self._decompress = kernels.compress_signs(), kernels.decompress_signs()
        self._compiled = kernels.compile()

    def compress_(self, errors: Tensor, counts: Tensor, payload: Tensor, numbers: Sequence[tuple[int, Tensor]]) -> None:
        """See :class:`OneBitCode`."""
        scales, signs = split_payload(payload)
        items = []
        for start, tensor in numbers:
            first, blocks = start // BLOCK_SIZE, -(-tensor.numel() // BLOCK_SIZE)
            places = errors[start:], tensor, counts[first:], scales[first:], signs[first * BLOCK_SIZE // 8 :]
            assert all(place.is_contiguous() for place in places) and tensor.dtype == torch.float32
            items.append([*(place.data_ptr() for place in places), blocks])
        if items:
            table = torch.tensor(items, device="cpu")
            self._run(self._compress, [table, len(items)], int(table[:, -1].sum()))

    def decompress(self, payloads: Tensor, out: Tensor) -> None:
        """See :class:`OneBitCode`."""
        scales, signs = split_payload(payloads[0])
        blocks = out.numel() // BLOCK_SIZE
        self._run(self._decompress, [scales, signs, payloads.stride(0), len(payloads), out, blocks], blocks)

    def _run(self, kernel: str, arguments: list[Tensor | int], blocks: int) -> None:
        threads = min(torch.get_num_threads(), -(-blocks // _MIN_BLOCKS_PER_THREAD))
        instruction = cpu_kernels.Instruction(kernel, arguments)
        cpu_kernels.build_program([instruction], self._compiled, [], max(threads, 1)).run()


@cache
def _generate() -> OneBitCode:
    return OneBitCode() if cpu_kernels.unsupported_reason() else GeneratedOneBitCode(cpu_kernels.KernelSet())


def get_onebit_code(device: torch.device) -> OneBitCode:
    """Return the fastest code for tensors on ``device``."""
    return _generate() if device.type == "cpu" else OneBitCode()
