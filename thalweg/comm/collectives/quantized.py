"""Collectives in few bits: ZeRO++'s qwZ and qgZ (Wang et al. 2023, arXiv 2306.10209).

*Weights* (qwZ): each rank encodes its shard once, the codes are gathered, and every rank,
the sender too, computes with what it decodes, so all hold the same bits.

*Gradients* (qgZ): a ring would encode and decode at every hop and let the errors pile up;
instead rows go straight to their owners, who decode and add in fp32.  Over two levels it
is done twice, first inside the host, then the hosts' partial sums between hosts:

    rows of all ranks --inside the host--> partial sums --between hosts--> shard

Where the ranks of a host share memory the first level needs no codes and is exact
(:mod:`.hierarchical`); where it goes over links it takes 8 bits, as those links are not
the narrow place and half of the paper's error is made there.  Between hosts it is 4 bits.

*Error feedback* (LoCo, Xie et al. 2024, arXiv 2407.04480): what rounding took from a row is
averaged over the steps and added to the next one, so that it is late and not lost.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives.reducer import GradDivisor, ReduceOptions, Reducer
from thalweg.comm.collectives.wire import AllReduceSum, AllToAllReduce, WireAllGather, all_gather_flat, all_to_all_rows
from thalweg.comm.comms_logger import CollectiveCall, CommsLog
from thalweg.comm.quantization import BLOCK_SIZE, BlockQuantizer, PayloadFormat
from thalweg.comm.topology import HostTopology

# The payload format of a shard of so many elements in such a dtype, or None to send it as it is.
PayloadFormatFn = Callable[[int, torch.dtype], PayloadFormat | None]

WEIGHT_QUANTIZER = BlockQuantizer(8)
GRADIENT_QUANTIZER = BlockQuantizer(4)
INTRA_HOST_GRADIENT_QUANTIZER = BlockQuantizer(8)


def make_payload_format(
    segments: list[tuple[int, bool]], numel: int, dtype: torch.dtype, quantizer: BlockQuantizer
) -> PayloadFormat | None:
    """The form of ``numel`` numbers in ``segments`` (elements, whether in codes); None where they go as they are."""
    is_quantizable = dtype in (torch.float32, torch.bfloat16, torch.float16)
    fits = sum(length for length, _ in segments) == numel
    if not (is_quantizable and fits and any(is_quantized for _, is_quantized in segments)):
        return None
    # Neighbours as one, where no block would hold numbers of both: a device has as many kernels to launch.
    joined: list[tuple[int, bool]] = []
    for length, in_few_bits in segments:
        whole = quantizer.block_size if in_few_bits else 1
        if joined and joined[-1][1] == in_few_bits and joined[-1][0] % whole == 0:
            length += joined.pop()[0]
        joined.append((length, in_few_bits))
    return PayloadFormat(tuple(joined), quantizer, dtype)


def single_segment_format(quantizer: BlockQuantizer) -> PayloadFormatFn:
    """Encode any buffer of 16 or 32-bit floats as one run of blocks."""
    return lambda numel, dtype: make_payload_format([(numel, True)], numel, dtype, quantizer)


class ErrorFeedback:
    """The error that a sender still owes: an exponential average, kept in bf16, begun anew now and then."""

    def __init__(self, beta: float, reset_every: int) -> None:
        self._beta, self._reset_every = beta, reset_every
        self._residual: Tensor | None = None
        self._num_calls = 0

    def reset(self) -> None:
        """Forget what is owed."""
        self._residual = None

    def compensate(self, rows: Tensor, loss_scale: float) -> Tensor:
        """``rows`` in fp32 with what is owed; ``loss_scale``: errors are kept without it."""
        self._num_calls += 1
        if self._residual is None or self._residual.shape != rows.shape or self._num_calls > self._reset_every:
            self._residual, self._num_calls = torch.zeros_like(rows, dtype=torch.bfloat16), 1
            return rows.float()
        return self._residual.float().mul_(loss_scale).add_(rows)

    def update(self, target: Tensor, sent: Tensor, loss_scale: float) -> None:
        """Remember the difference between the rows as they should be and as they were sent."""
        assert self._residual is not None
        error = torch.sub(target, sent).mul_((1.0 - self._beta) / loss_scale)
        error.add_(self._residual, alpha=self._beta)
        self._residual.copy_(error.nan_to_num_(0.0, 0.0, 0.0))


class QuantizedAllToAllReduce(AllToAllReduce):
    """:class:`~thalweg.comm.collectives.wire.AllToAllReduce` with rows in few bits."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: HostTopology,
        payload_format_fn: PayloadFormatFn,
        error_feedback: ErrorFeedback | None = None,
        divisor: GradDivisor | None = None,
    ) -> None:
        """``divisor``: the loss scale, which ``error_feedback`` keeps errors without."""
        super().__init__(group, topology)
        self._payload_format_fn, self._error_feedback = payload_format_fn, error_feedback
        self._divisor = divisor or GradDivisor()

    def reset_error_feedback(self) -> None:
        """Be as in a new process."""
        if self._error_feedback is not None:
            self._error_feedback.reset()

    def reduce_rows(
        self, rows: Tensor, out: Tensor, scale: float, call: CollectiveCall, wire_dtype: torch.dtype
    ) -> None:
        """Encode, all-to-all, decode, add in fp32."""
        payload_format = self._payload_format_fn(rows.shape[1], wire_dtype)
        if payload_format is None:
            super().reduce_rows(rows, out, scale, call, wire_dtype)
            return
        if self._error_feedback is not None:
            rows = self._error_feedback.compensate(rows, self._divisor.value)
        payload = torch.empty(len(rows), payload_format.num_bytes, dtype=torch.uint8, device=rows.device)
        for row, row_payload in zip(rows.unbind(0), payload.unbind(0), strict=True):
            payload_format.pack(row, row_payload)
        if self._error_feedback is not None:
            sent = torch.empty_like(rows)
            for row, row_payload in zip(sent.unbind(0), payload.unbind(0), strict=True):
                payload_format.unpack(row_payload, row)
            self._error_feedback.update(rows, sent, self._divisor.value)
        received = all_to_all_rows(payload, self.group)
        call.add_bytes(*self.topology.all_to_all_bytes(payload_format.num_bytes))
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for index, row_payload in enumerate(received.unbind(0)):
            payload_format.unpack(row_payload, total, add=index > 0)
        torch.mul(total, scale, out=out)


class QuantizedAllReduceSum(AllReduceSum):
    """A sum over one group that every rank gets with the same bits: codes up, finer codes down."""

    def __call__(self, tensor: Tensor, call: CollectiveCall, scale: float = 1.0) -> None:
        """Replace ``tensor`` (1-D) by ``scale`` times the sum over the group."""
        world_size = len(self.topology.host_ids)
        length = -(-tensor.numel() // (world_size * BLOCK_SIZE)) * BLOCK_SIZE
        rows = torch.zeros(world_size, length, dtype=torch.float32, device=tensor.device)
        rows.view(-1)[: tensor.numel()].copy_(tensor)
        local_sum = torch.empty(length, dtype=torch.float32, device=tensor.device)
        QuantizedAllToAllReduce(self.group, self.topology, single_segment_format(GRADIENT_QUANTIZER)).reduce_rows(
            rows, local_sum, scale, call, torch.float32
        )
        gather_format = PayloadFormat(((length, True),), WEIGHT_QUANTIZER, torch.float32)
        num_bytes = all_gather_packed(local_sum, gather_format, rows, self.group)
        call.add_bytes(*self.topology.ring_bytes(num_bytes))
        tensor.copy_(rows.view(-1)[: tensor.numel()])


def all_gather_payloads(payload: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """Every rank's ``payload`` as rows."""
    gathered = torch.empty(size * payload.numel(), dtype=torch.uint8, device=payload.device)
    all_gather_flat(gathered, payload, group)
    return gathered.view(size, -1)


def pack_values(values: Tensor, payload_format: PayloadFormat | None) -> Tensor:
    """The bytes in which 1-D ``values`` travel: their codes, or themselves."""
    if payload_format is None:
        return values.contiguous().view(torch.uint8)
    payload = torch.empty(payload_format.num_bytes, dtype=torch.uint8, device=values.device)
    payload_format.pack(values, payload)
    return payload


def unpack_values(payload: Tensor, payload_format: PayloadFormat | None, out: Tensor) -> None:
    """Write to ``out`` what :func:`pack_values` has made of another rank's values."""
    if payload_format is None:
        out.copy_(payload.view(out.dtype))
    else:
        payload_format.unpack(payload, out)


def all_gather_packed(
    values: Tensor, payload_format: PayloadFormat | None, rows: Sequence[Tensor] | Tensor, group: dist.ProcessGroup
) -> int:
    """Fill ``rows``, one for each rank, with the ranks' ``values``; returns the bytes that a rank sends."""
    payload = pack_values(values, payload_format)
    for row, rank_payload in zip(rows, all_gather_payloads(payload, group, len(rows)), strict=True):
        unpack_values(rank_payload, payload_format, row)
    return payload.numel()


class QuantizedAllGather(WireAllGather):
    """All-gather over one group in few bits; a group of another size (hpZ's) gets whole values."""

    def __init__(
        self,
        name: str,
        ledger: CommsLog | None,
        topology: HostTopology,
        payload_format_fn: PayloadFormatFn,
        world_size: int,
    ) -> None:
        super().__init__(name, ledger, topology)
        self._payload_format_fn, self._world_size = payload_format_fn, world_size

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size = group.size()
        payload_format = self._payload_format_fn(input_tensor.numel(), input_tensor.dtype)
        if payload_format is None or size != self._world_size:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with self._logged("all_gather", output_tensor, payload_format.num_bytes, group):
            all_gather_packed(input_tensor, payload_format, output_tensor.view(size, -1), group)
        return None


class TwoLevelReduceScatter(Reducer):
    """Reduce-scatter over links at both levels: inside each host, then the partial sums between hosts."""

    def __init__(
        self,
        inner: AllToAllReduce,
        outer: AllToAllReduce,
        ranks_by_local_rank: Sequence[Sequence[int]],
        name: str,
        options: ReduceOptions | None = None,
    ) -> None:
        """``ranks_by_local_rank[l][h]`` is the rank that is the ``l``-th of host ``h``."""
        super().__init__(name, options)
        self._inner_all_to_all, self._outer_all_to_all = inner, outer
        self._num_hosts = len(ranks_by_local_rank[0])
        self._rank_order = [rank for host_ranks in ranks_by_local_rank for rank in host_ranks]
        self._error_feedback = outer

    def sum_shards(self, rows: Tensor, output: Tensor, scale: float, call: CollectiveCall) -> None:
        """Two all-to-alls; rows are put in the order of local ranks first."""
        numel = rows.shape[1]
        sorted_rows = torch.stack([rows[rank] for rank in self._rank_order])  # a list of indices would cross the link
        rows_by_local_rank = sorted_rows.view(len(rows) // self._num_hosts, self._num_hosts * numel)
        partial_sums = torch.empty(self._num_hosts * numel, dtype=torch.float32, device=rows.device)
        self._inner_all_to_all.reduce_rows(rows_by_local_rank, partial_sums, 1.0, call, rows.dtype)
        self._outer_all_to_all.reduce_rows(partial_sums.view(self._num_hosts, numel), output, scale, call, rows.dtype)
