"""``deepspeed.runtime.sequence_parallel.ulysses_sp`` as accelerate and Trainer use it.

The picture: accelerate asks for a group of ranks (:class:`SequenceParallelState`), hands it to ``initialize(mpu=...)``,
which sets ``sequence_parallel_size``, and wraps its loaders.  A wrapped loader takes a batch of each rank of the group
and gives them out one after the other, to each rank its tokens, with the labels shifted before the cut.  The program
then weighs the ranks' losses itself, so the model's is that of a rank's own tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thalweg.observe.step_meter import SEQUENCE_META_KEY
from thalweg.parallel.sequence.batch_split import BatchSplitter, ForwardSignature
from thalweg.parallel.sequence.partition import SequencePartition
from thalweg.parallel_dims import init_distributed
from thalweg.utils.trees import map_tensors


class SequenceParallelState:
    """Megatron's names (``mpu``) for the neighbouring ranks that share a sequence; made by all ranks of the job.

    ``is_whole_in_eval``: a model in evaluation has a batch of each rank's own, whole.

    Raises:
        ValueError: ``size`` does not divide the job's ranks.
    """

    def __init__(self, size: int, is_whole_in_eval: bool = False) -> None:
        init_distributed()
        if dist.get_world_size() % size:
            raise ValueError(f"sequence_parallel_size = {size} does not divide the {dist.get_world_size()} ranks")
        self.size, self.is_whole_in_eval = size, is_whole_in_eval
        self._group: Any = dist.new_subgroups(size)[0]

    def get_sequence_parallel_group(self) -> Any:
        """The group."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        """Its number of ranks."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """This rank in it."""
        return dist.get_rank(self._group)


class UlyssesSPAttentionHF:
    """Not to be made: ``initialize`` splits the attention of any model that it can."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            'UlyssesSPAttentionHF() is not offered by Thalweg: set "sequence_parallel_size" in the config, and '
            "thalweg.initialize splits the attention"
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int | None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallelState | None:
        """What ``initialize(mpu=...)`` takes; None for a size of 1.  The engine takes any length and attention."""
        return None if sequence_parallel_size == 1 else SequenceParallelState(sequence_parallel_size, disable_in_eval)


class UlyssesSPDataLoaderAdapter:
    """The batches of ``dl`` on all ranks of the group, one after the other; of each, this rank's tokens."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self._group, self._size, self._device = dl, sp_group, sp_world_size, device
        signature = ForwardSignature([], is_hugging_face=True, accepts_kwargs=True)
        self._splitter = BatchSplitter(SequencePartition(1, sp_world_size, sp_rank), signature, shifts_labels=True)

    def __len__(self) -> int:
        return len(self.dl) * self._size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for own in self.dl:
            gathered: list[Any] = [None] * self._size
            dist.all_gather_object(gathered, map_tensors(own, Tensor.cpu), self._group)
            for batch in gathered:
                local = self._splitter.split_batch(batch)
                sequence_meta = replace(local.pop(SEQUENCE_META_KEY), has_own_loss=True)
                kept = {key: value for key, value in local.items() if key not in ("labels", "use_cache")}
                moved = map_tensors(kept, lambda value: value.to(self._device))
                yield {**moved, SEQUENCE_META_KEY: sequence_meta.to(self._device)}
