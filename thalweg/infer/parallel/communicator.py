"""What the ranks of one pipeline stage compute together, as a runner sees it.

Every stage has as many ranks.  After a step all ranks of a stage have the same activations, bit for bit: each sends
them to the rank of its number in the next stage, and the last stage's first rank sends the result to rank 0.  Within a
stage partial sums are added up in the order of ranks.

:class:`StageCommunicator` does all of it by sends and receives of the process group; on accelerators by the device's
own library, whose sums are the same bits on all ranks too and never pass through the host.  The CPU kernels cannot
wait for sends between two instructions of a program; for them ``shm_comm.py`` adds an all-reduce in shared memory.
"""

import torch
from torch import Tensor

from thalweg.infer.parallel.process_group import InferenceGroup
from thalweg.infer.parallel.shard import vocab_range


class StageCommunicator:
    """One rank's view of its stage: ``rank`` of the ``world_size`` ranks of the ``stage``."""

    def __init__(
        self, group: InferenceGroup, *, num_stages: int, max_num_batched_tokens: int, hidden_size: int, vocab_size: int
    ) -> None:
        self.group, self.num_stages = group, num_stages
        self.world_size = group.num_ranks // num_stages
        self.stage, self.rank = divmod(group.rank, self.world_size)
        self.is_first_stage, self.is_last_stage = self.stage == 0, self.stage == num_stages - 1
        # The stage's ranks, as the group counts them.
        self.ranks = range(self.stage * self.world_size, (self.stage + 1) * self.world_size)
        self.max_num_batched_tokens, self.hidden_size, self.vocab_size = max_num_batched_tokens, hidden_size, vocab_size

    # From stage to stage

    def receive_activations(self, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Return what the stage before has computed, fp32 (num_tokens, hidden_size)."""
        out = torch.empty(num_tokens, self.hidden_size, device=device)
        return self.group.receive_tensor(out, self.group.rank - self.world_size)

    def send_activations(self, activations: Tensor) -> None:
        """Send activations (num_tokens, hidden_size) to the next stage."""
        self._send(activations, self.group.rank + self.world_size)

    def return_result(self, result: Tensor) -> Tensor:
        """Return the last stage's result on rank 0, fp32; elsewhere what this rank has, of that shape."""
        if self.num_stages > 1 and self.rank == 0 and len(result):
            if self.is_last_stage:
                self._send(result, 0)
            elif self.is_first_stage:
                return self.group.receive_tensor(torch.empty_like(result), self.group.num_ranks - self.world_size)
        return result

    def _send(self, x: Tensor, to: int) -> None:
        """Send a tensor as fp32, where it is."""
        self.group.send_tensor(x.float().contiguous(), [to])

    # Within a stage

    @property
    def vocab_start(self) -> int:
        """Where this rank's part of the vocabulary begins."""
        return vocab_range(self.vocab_size, self.rank, self.world_size)[0]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (tokens, width), the same bits on each."""
        if self.world_size == 1:
            return x
        if self.group.device_groups is not None:
            x = x.contiguous()
            self.group.device_groups[1].allreduce([x]).wait()
            return x
        first, *others = self.group.exchange(x.float().contiguous(), self.ranks)
        return sum(others, first).to(x.dtype)

    def gather_logits(self, partial: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocab) on the stage's first rank, put together from all ranks' columns."""
        partial = partial.float().contiguous()
        if self.rank:
            if partial.numel():
                self._send(partial, self.ranks[0])
            return partial
        parts = [partial]
        for rank in range(1, self.world_size):
            start, stop = vocab_range(self.vocab_size, rank, self.world_size)
            if stop > start:
                part = partial.new_empty(len(partial), stop - start)
                parts.append(self.group.receive_tensor(part, self.ranks[rank]))
        return torch.cat(parts, 1)

    # Ends

    @property
    def failed_rank(self) -> int | None:
        """A rank that has ended: results are void."""
        return self.group.failed_rank

    def close(self) -> None:
        """Leave the group."""
        self.group.close()
