"""What the stages of a pipeline know of each other: names, shared weights, norms.

Each rank holds some of the model's parameters, under the names of the whole model.  A weight
that several stages use (a tied embedding) lies on each of them; its gradient is their sum, and
the copies, which start equal and are updated alike, stay equal.  Its *canonical* name is the
first that the whole model has for it: under that one it is stored, whoever writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thalweg.comm import Ledger


@dataclass(frozen=True)
class Tie:
    """One shared weight: its names, the canonical one first, and the places in the pipeline that have it."""

    names: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Naming:
    """How this rank's names stand to the whole model's.

    ``canonical``: by local name the name that it is stored under, where that is another; ``hidden``:
    parameters that are no part of the model; ``group``: the ranks of this pipeline, None for no others.
    """

    canonical: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    group: dist.ProcessGroup | None = None


WHOLE = Naming()


def ties_of(shared: Iterable[Sequence[str]], places_of: Mapping[str, int]) -> list[Tie]:
    """The shared weights that lie in several places; ``places_of`` tells the place of each name."""
    found = []
    for names in shared:
        known = [name for name in names if name in places_of]
        places = tuple(sorted({places_of[name] for name in known}))
        if len(places) > 1:
            found.append(Tie(tuple(known), places))
    return found


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


class SharedWeights:
    """This rank's copies of weights that other stages have too; ``here`` is its place in ``group``.

    Copies meet by messages over the pipeline's own group: a group for each tie would have to be made by
    ranks that do not know of it.  Collective over the places of each tie.
    """

    def __init__(self, ties: Sequence[Tie], here: int, group: dist.ProcessGroup) -> None:
        self._group, self._here = group, here
        self._ties = [tie for tie in ties if here in tie.places]
        self._copies: list[tuple[nn.Parameter, Tie]] = []
        self.ledger = Ledger()

    @torch.no_grad()
    def agree(self, model: nn.Module) -> None:
        """Give all copies the value that the first place has; before sharding."""
        for parameter, tie in self._find(model):
            if not parameter.is_meta:
                parameter.copy_(self._exchange(parameter.detach().contiguous(), tie)[0])

    def _exchange(self, value: Tensor, tie: Tie) -> list[Tensor]:
        """The values at all places of the tie, in their order."""
        others = [place for place in tie.places if place != self._here]
        found = {place: torch.empty_like(value) for place in others} | {self._here: value}
        # In one batch: on CUDA a send in front of a receive would wait for the peer's, which does likewise.
        messages = [dist.P2POp(dist.isend, value, group=self._group, group_peer=place) for place in others]
        messages += [
            dist.P2POp(dist.irecv, found[place], group=self._group, group_peer=place) for place in others
        ]
        nbytes = len(others) * value.nbytes
        self.ledger.record("send", "shared weights", "pipeline", full_bytes=nbytes, world_size=2)
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return [found[place] for place in tie.places]

    def settle(self, model: nn.Module) -> None:
        """Take the parameters that training updates; after sharding."""
        self._copies = [(p, tie) for p, tie in self._find(model) if p.requires_grad]

    def _find(self, model: nn.Module) -> list[tuple[nn.Parameter, Tie]]:
        named = dict(model.named_parameters(remove_duplicate=False))
        found = []
        for tie in self._ties:
            name = next(name for name in tie.names if name in named)
            found.append((named[name], tie))
        return found

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the reduced gradients of each weight over its copies; once an update."""
        for parameter, tie in self._copies:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            # Added in the order of the places, so that all copies get the same bits.
            first, *others = self._exchange(local.contiguous(), tie)
            total = first.clone()
            for other in others:
                total += other
            local.copy_(total)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``parameters`` that this rank adds to the global norm: of copies, the first place's."""
        others = {id(p) for p, tie in self._copies if tie.places[0] != self._here}
        return [parameter for parameter in parameters if id(parameter) not in others]

    def norm(self, own: float) -> float:
        """The 2-norm over all stages, the same bits everywhere; ``own`` is that of this stage."""
        total = torch.tensor([own * own], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return math.sqrt(value) if math.isfinite(value := total.item()) and value >= 0 else math.nan
