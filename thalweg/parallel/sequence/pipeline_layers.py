"""A list of layers on parts of sequences: what a model's own forward does, for one that has none.

A micro-batch is ``(inputs, labels)``, whole and alike on all ranks that share sequences, on every stage.
``inputs`` is a mapping that names its ``position_ids``: layers cannot count positions that are not their
own.  What is by token (dim 1) is cut, labels too; they are the *next* tokens already.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from thalweg.parallel.sequence.batch_split import BatchSplitter, ForwardSignature, SequenceMeta, get_tokens
from thalweg.parallel.sequence.loss import SequenceParallelLoss, mean_over_group
from thalweg.parallel.sequence.sequence_parallel import SequenceGroups, SequenceParallelAttention, install_attention
from thalweg.utils.trees import map_tensors

_LAYER_SIGNATURE = ForwardSignature([], is_hugging_face=False)


class LayerSequenceParallel:
    """Lets attention in ``layers`` be over whole sequences, cuts their micro-batches and brings the parts' losses
    together."""

    def __init__(
        self, layers: Sequence[nn.Module], groups: SequenceGroups, on_token_count: Callable[[Tensor], None] | None
    ) -> None:
        self.attention = SequenceParallelAttention(groups, on_token_count)
        install_attention(layers, self.attention)
        self._splitter = BatchSplitter(self.attention.partition, _LAYER_SIGNATURE)

    def find_batch_error(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is."""
        if isinstance(batch[0], Mapping) and isinstance(batch[0].get("position_ids"), Tensor):
            return None
        return (
            "with sequence_parallel_size or context_parallel_size above 1 the inputs of a PipelineModule are "
            "a mapping with position_ids, as each rank has a part of the positions: let the data iterator "
            "yield ({'input_ids': tokens, 'position_ids': positions}, labels)"
        )

    def split_batch(self, batch: Any) -> tuple[Mapping[str, Any], Any]:
        """This rank's part of ``(inputs, labels)``; attention is from now on over the whole of it."""
        inputs, labels = batch
        tokens = get_tokens(inputs, _LAYER_SIGNATURE)
        # Positions that begin again are no documents to layers that see none in one process.
        sequence_meta = self.attention.sequence_meta = SequenceMeta(tokens.shape[1])
        self.attention.groups.sp_group.verify_same_batch(tokens, "sequence")
        length = sequence_meta.length

        def local_labels(labels: Tensor) -> Tensor:
            by_token = labels.dim() > 1 and labels.shape[1] == length
            return self._splitter.partition.local_tokens(labels) if by_token else labels

        return self._splitter.local_batch(inputs, length), map_tensors(labels, local_labels)

    def loss_mode(self) -> SequenceParallelLoss:
        """A function mode, on while a loss is computed."""
        return SequenceParallelLoss(self.attention.groups.sp_group, self.attention.on_token_count)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The loss of the whole sequences (0-dim)."""
        return mean_over_group(loss, self.attention.groups.sp_group)
