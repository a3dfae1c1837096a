"""A list of layers on parts of sequences: what a model's own forward does, for one that has none.

A micro-batch is ``(inputs, labels)``, whole and alike on all ranks that share sequences, on every stage.
``inputs`` is a mapping that names its ``position_ids``: layers cannot count positions that are not their
own.  What is by token (dim 1) is cut, labels too; they are the *next* tokens already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from thalweg.parallel.losses import TeamLosses, averaged
from thalweg.parallel.parts import Signature, Splitter, Whole, tokens_of
from thalweg.parallel.sequence import Attention, SequenceTeams, attend_together

_LAYERS = Signature([], hugging_face=False)


class LayerSequences:
    """Cuts the micro-batches of one model's layers, and brings the parts' losses together."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self._splitter = Splitter(attention.shares, _LAYERS)

    @classmethod
    def of(cls, layers: Iterable[nn.Module], teams: SequenceTeams) -> LayerSequences:
        """Let attention in these layers be over whole sequences."""
        attention = Attention(teams)
        attend_together(list(layers), attention)
        return cls(attention)

    def problem(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is."""
        if isinstance(batch[0], Mapping) and isinstance(batch[0].get("position_ids"), Tensor):
            return None
        return (
            "with sequence_parallel_size or context_parallel_size above 1 the inputs of a PipelineModule are "
            "a mapping with position_ids, as each rank has a part of the positions: let the data iterator "
            "yield ({'input_ids': tokens, 'position_ids': positions}, labels)"
        )

    def part(self, batch: Any) -> tuple[Mapping[str, Any], Any]:
        """This rank's part of ``(inputs, labels)``; attention is from now on over the whole of it."""
        inputs, labels = batch
        tokens = tokens_of(inputs, _LAYERS)
        # Positions that begin again are no documents to layers that see none in one process.
        whole = self.attention.whole = Whole(tokens.shape[1])
        self.attention.check_rows(tokens)
        return self._splitter.part(inputs, whole.length), self._cut(labels, whole.length)

    def _cut(self, labels: Any, length: int) -> Any:
        if isinstance(labels, Mapping):
            return {key: self._cut(value, length) for key, value in labels.items()}
        if isinstance(labels, tuple | list):
            return type(labels)(self._cut(value, length) for value in labels)
        if isinstance(labels, Tensor) and labels.dim() > 1 and labels.shape[1] == length:
            return self._splitter.shares.take(labels)
        return labels

    def losses(self) -> TeamLosses:
        """A function mode, on while a loss is computed."""
        return TeamLosses(self.attention.teams.everyone, self.attention.tell)

    def averaged(self, loss: Tensor) -> Tensor:
        """The loss of the whole sequences (0-dim)."""
        return averaged(loss, self.attention.teams.everyone)
