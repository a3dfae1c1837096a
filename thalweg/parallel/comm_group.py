"""The ranks that compute one layer together, and the collectives they do it with.

Megatron's pairs (Shoeybi et al. 2019, "Megatron-LM", section 3), each a function whose
backward is the other half:

    function   forward           backward          where
    enter      identity          all-reduce        the input of column-parallel layers
    leave      all-reduce        identity          the output of row-parallel layers
    whole      all-gather        own slice         logits that somebody wants whole
    gather     all-gather        reduce-scatter    rows that several ranks use parts of
    summed     identity          all-reduce        a whole parameter that is used on a part

Between ``enter`` and ``leave`` activations differ by rank; everywhere else they are equal,
to the bit.  So random numbers come from two streams: the common one outside, and inside
one that each rank derives from a common draw, which makes recomputation see it again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm import CommsLog
from thalweg.comm.collectives.wire import pad_to_length
from thalweg.device import RngState, get_rng_state, seed_rng, set_rng_state
from thalweg.ops.autograd import with_backward
from thalweg.parallel_dims import control_group


class ParallelGroup:
    """One rank's view of its group; ``ledger`` counts what it communicates, as ``axis``'s."""

    comm: Any = dist  # what moves bytes

    def __init__(self, process_group: dist.ProcessGroup, axis: str = "tensor", ledger: CommsLog | None = None) -> None:
        self.process_group, self.axis = process_group, axis
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.ledger = ledger or CommsLog()
        self.has_dropout = False  # whether the model draws random numbers inside its split layers
        self._cached_inputs: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # with the input, whose id stays taken
        self._saved_rng: RngState | None = None
        self.num_batches_to_check = 2  # that are still to be compared

    def copy_to_region(self, x: Tensor, name: str) -> Tensor:
        """``x`` for split layers; siblings that take the same tensor share one reduction of its gradient."""
        key = id(x), torch.is_grad_enabled()
        if key not in self._cached_inputs:
            self._cached_inputs[key] = x, sum_grads_over(x, self, name) if x.requires_grad else x
        return self._cached_inputs[key][1]

    def reduce_from_region(self, x: Tensor, name: str) -> Tensor:
        """The sum of all ranks' ``x``."""
        self.reset()
        return with_backward(x, lambda x: self.all_reduce_copy(x, name), lambda grad: grad)

    def reset(self) -> None:
        """Let go of the region's inputs, and of its stream, which an exception may have left behind."""
        self._cached_inputs.clear()
        self.use_shared_rng()

    def verify_same_batch(self, x: Tensor, shared: str) -> None:
        """See that all ranks were given the same first batches; collective.  ``shared``: what they divide.

        Raises:
            ValueError: they were not.
        """
        if self.num_batches_to_check == 0:
            return
        self.num_batches_to_check -= 1
        positions = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
        checksum = torch.stack([(x.detach().reshape(-1).double() * positions.sin()).sum(), positions[-1]])
        bounds = torch.stack([checksum, -checksum])  # the least of both: the smallest, and the largest negated
        self.comm.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self.group_for(bounds))
        if not torch.allclose(bounds[0], -bounds[1], rtol=1e-9):
            raise ValueError(
                f"ranks that share a {shared} must get identical batches, and these were given different batches: "
                f"pass training_data= to initialize(), or let the sampler count only the ranks of other {shared}s"
            )

    # Random numbers

    def use_local_rng(self) -> None:
        """Draw from this rank's own stream until :meth:`use_shared_rng`."""
        if not self.has_dropout or self._saved_rng is not None:
            return
        seed = int(torch.randint(1 << 62, ()))
        self._saved_rng = get_rng_state()
        seed_rng((seed + 0x9E3779B97F4A7C15 * (self.rank + 1)) % (1 << 63))

    def use_shared_rng(self) -> None:
        """Draw from the stream that all ranks of the team share."""
        if self._saved_rng is not None:
            set_rng_state(self._saved_rng)
            self._saved_rng = None

    # Collectives, counted

    def group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """These ranks, as a group that takes tensors from where ``tensor`` is."""
        return control_group(self.process_group, tensor.device)

    def all_reduce(self, tensor: Tensor, name: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place; returns the tensor."""
        with self.ledger.timed("all_reduce", name, self.axis, tensor.nbytes, self.size):
            self.comm.all_reduce(tensor, op=op, group=self.group_for(tensor))
        return tensor

    def all_reduce_copy(self, tensor: Tensor, name: str) -> Tensor:
        """The sum of all ranks' ``tensor``, which stays as it is."""
        return self.all_reduce(tensor.clone(memory_format=torch.contiguous_format), name)

    def all_gather(self, tensor: Tensor, dim: int, sizes: list[int], name: str) -> Tensor:
        """Concatenate every rank's ``tensor`` along ``dim``; ``sizes`` are their lengths there."""
        longest = max(sizes)
        sent = pad_to_length(tensor, dim, longest).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with self.ledger.timed("all_gather", name, self.axis, sent.nbytes * self.size, self.size):
            self.comm.all_gather(received, sent, group=self.group_for(sent))
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(received, sizes, strict=True)], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: list[int], name: str) -> Tensor:
        """This rank's part along ``dim`` of the sum; ``sizes`` are all ranks' lengths there."""
        longest = max(sizes)
        chunks = [pad_to_length(part, dim, longest).contiguous() for part in tensor.split(sizes, dim)]
        received = torch.empty(self.size, *chunks[0].shape, dtype=tensor.dtype, device=tensor.device)
        with self.ledger.timed("reduce_scatter", name, self.axis, received.nbytes, self.size):
            # gloo has no reduce-scatter; an all-to-all and a sum in rank order move as much
            self.comm.all_to_all_single(received, torch.stack(chunks), group=self.group_for(tensor))
            total = received.sum(0)
        return total.narrow(dim, 0, sizes[self.rank])

    def all_to_all(self, sent: Tensor, send_counts: list[int], recv_counts: list[int], name: str) -> Tensor:
        """Send ``send_counts[rank]`` elements of the flat ``sent`` to each rank; ``recv_counts`` come back."""
        received = sent.new_empty(sum(recv_counts))
        with self.ledger.timed("all_to_all", name, self.axis, sent.nbytes, self.size):
            self.comm.all_to_all_single(received, sent, recv_counts, send_counts, group=self.group_for(sent))
        return received


def sum_grads_over(parameter: Tensor, group: ParallelGroup, name: str) -> Tensor:
    """A whole parameter that each rank uses on its own part of the activations."""
    # A copy: the gradient may belong to another branch as well.
    return with_backward(parameter, lambda x: x.view_as(x), lambda grad: group.all_reduce_copy(grad, name))


def gather_from_region(x: Tensor, dim: int, sizes: list[int], group: ParallelGroup, name: str) -> Tensor:
    """Every rank's ``x`` along ``dim``, for a computation that all ranks then do alike."""
    start, length = sum(sizes[: group.rank]), sizes[group.rank]
    return with_backward(x, lambda x: group.all_gather(x, dim, sizes, name), lambda g: g.narrow(dim, start, length))


def gather_params(x: Tensor, dim: int, sizes: list[int], group: ParallelGroup, name: str) -> Tensor:
    """Every rank's ``x`` along ``dim``, for computations that differ by rank."""
    return with_backward(
        x, lambda x: group.all_gather(x, dim, sizes, name), lambda grad: group.reduce_scatter(grad, dim, sizes, name)
    )


def all_to_all(sent: Tensor, send_counts: list[int], recv_counts: list[int], group: ParallelGroup, name: str) -> Tensor:
    """:meth:`ParallelGroup.all_to_all`, whose gradients go back the way that the elements came."""
    return with_backward(
        sent,
        lambda x: group.all_to_all(x.contiguous(), send_counts, recv_counts, name),
        lambda grad: group.all_to_all(grad.contiguous(), recv_counts, send_counts, name),
    )
