"""Parts of a batch: what each rank of a sequence team gets, with labels and positions right."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
_BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels")


def documents_of(position_ids: Tensor) -> Tensor | None:
    """The number of the document of each token (B, T), from positions that begin again; None if none do."""
    begins = position_ids.diff(dim=-1) != 1
    if not bool(begins.any()):
        return None
    return F.pad(begins.long().cumsum(-1), (1, 0))


def sequence_sizes(length: int, world: int) -> list[int]:
    """Lengths of the shards of a sequence: they differ by at most one."""
    base, rest = divmod(length, world)
    return [base + (rank < rest) for rank in range(world)]


@dataclass(frozen=True)
class Splitter:
    """Hands each rank its part of a batch; ``shifts``: the model's loss shifts labels by itself."""

    rank: int
    size: int
    shifts: bool = False
    positions: bool = True

    def span(self, length: int) -> tuple[int, int]:
        """This rank's tokens of a sequence of ``length``.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        if length < self.size:
            raise ValueError(
                f"a sequence of {length} token{'s' * (length != 1)} cannot be divided among {self.size} "
                "ranks: pad it, or set sequence_parallel_size to 1"
            )
        sizes = sequence_sizes(length, self.size)
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def part(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Own tokens of everything in ``batch`` that is by token (dim 1), with positions and labels right."""
        start, stop = self.span(length)

        def own(value: Tensor) -> Tensor:
            return value[:, start:stop].contiguous()

        part = {
            key: own(value) if key in _BY_TOKEN and isinstance(value, Tensor) and value.dim() > 1 else value
            for key, value in batch.items()
        }
        reference = next(value for key, value in batch.items() if key in _BY_TOKEN and value is not None)
        if self.positions and part.get("position_ids") is None:
            part["position_ids"] = torch.arange(start, stop, device=reference.device)[None]
        labels = batch.get("labels")
        if self.shifts and isinstance(labels, Tensor) and "shift_labels" not in batch:
            part["shift_labels"] = own(F.pad(labels, (0, 1), value=IGNORED)[:, 1:])
        elif isinstance(batch.get("shift_labels"), Tensor):
            part["shift_labels"] = own(batch["shift_labels"])
        return part


@dataclass
class Signature:
    """How a model takes its arguments."""

    names: list[str]
    hugging_face: bool
    open_ended: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        parameters = inspect.signature(type(model).forward).parameters
        kinds = {p.kind for p in parameters.values()}
        names = [name for name in parameters if name != "self"]
        return cls(names, hasattr(model, "main_input_name"), inspect.Parameter.VAR_KEYWORD in kinds)
