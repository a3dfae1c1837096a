"""What the stages of a pipeline know of each other: names, shared weights, norms.

Each rank holds some of the model's parameters, under the names of the whole model.  A weight
that several stages use (a tied embedding) lies on each of them; its gradient is their sum, and
the copies, which start equal and are updated alike, stay equal.  Its *canonical* name is the
first that the whole model has for it: under that one it is stored, whoever writes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thalweg.comm import CommsLog
from thalweg.parallel_dims import control_group
from thalweg.zero.whole_parameter import named_shards


@dataclass(frozen=True)
class TiedWeight:
    """One shared weight: its names, the canonical one first, and the places in the pipeline that have it."""

    names: tuple[str, ...]
    pp_ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParamNaming:
    """How this rank's names stand to the whole model's.

    ``canonical``: by local name the name that it is stored under, where that is another; ``excluded``:
    parameters that are no part of the model; ``group``: the ranks of this pipeline, None for no others.
    """

    canonical: Mapping[str, str] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    group: dist.ProcessGroup | None = None


IDENTITY_NAMING = ParamNaming()


def find_tied_weights(alias_groups: Iterable[Sequence[str]], rank_by_name: Mapping[str, int]) -> list[TiedWeight]:
    """The shared weights that lie in several places; ``rank_by_name`` tells the place of each name."""
    tied_weights = []
    for names in alias_groups:
        placed_names = [name for name in names if name in rank_by_name]
        pp_ranks = tuple(sorted({rank_by_name[name] for name in placed_names}))
        if len(pp_ranks) > 1:
            tied_weights.append(TiedWeight(tuple(placed_names), pp_ranks))
    return tied_weights


def find_alias_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


class TiedWeights:
    """This rank's copies of weights that other stages have too; ``pp_rank`` is its place in ``pp``.

    Copies meet by messages over the pipeline's own group: a group for each tie would have to be made by
    ranks that do not know of it.  Collective over the places of each tie.
    """

    def __init__(self, tied_weights: Sequence[TiedWeight], pp_rank: int, pp: DeviceMesh) -> None:
        self._group, self._device_type, self._pp_rank = pp.get_group(), pp.device_type, pp_rank
        self._tied_weights = [tie for tie in tied_weights if pp_rank in tie.pp_ranks]
        self._local_copies: list[tuple[nn.Parameter, TiedWeight]] = []
        self.ledger = CommsLog()

    @torch.no_grad()
    def sync_values(self, model: nn.Module) -> None:
        """Give all copies the value that the first place has; before sharding."""
        for parameter, tie in self._find_local_copies(model):
            if not parameter.is_meta:
                # By the host: NCCL's first messages in a group want all its ranks, and these are of some stages alone.
                parameter.copy_(self._exchange_copies(parameter.detach().cpu().contiguous(), tie)[0])

    def _exchange_copies(self, value: Tensor, tie: TiedWeight) -> list[Tensor]:
        """The values at all places of the tie, in their order."""
        other_ranks = [place for place in tie.pp_ranks if place != self._pp_rank]
        values = {place: torch.empty_like(value) for place in other_ranks} | {self._pp_rank: value}
        # In one batch: on CUDA a send in front of a receive would wait for the peer's, which does likewise.
        group = control_group(self._group, value.device)
        messages = [dist.P2POp(dist.isend, value, group=group, group_peer=place) for place in other_ranks]
        messages += [dist.P2POp(dist.irecv, values[rank], group=group, group_peer=rank) for rank in other_ranks]
        nbytes = len(other_ranks) * value.nbytes
        self.ledger.record("send", "shared weights", "pipeline", full_bytes=nbytes, world_size=2)
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return [values[place] for place in tie.pp_ranks]

    def bind(self, model: nn.Module) -> None:
        """Take the parameters that training updates; after sharding."""
        self._local_copies = [(p, tie) for p, tie in self._find_local_copies(model) if p.requires_grad]

    def _find_local_copies(self, model: nn.Module) -> list[tuple[nn.Parameter, TiedWeight]]:
        named = dict(named_shards(model, remove_duplicate=False))
        copies = []
        for tie in self._tied_weights:
            name = next(name for name in tie.names if name in named)
            copies.append((named[name], tie))
        return copies

    @torch.no_grad()
    def sum_grad(self) -> None:
        """Sum the reduced gradients of each weight over its copies; once an update."""
        for parameter, tie in self._local_copies:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            # Added in the order of the places, so that all copies get the same bits.
            first, *others = self._exchange_copies(local.contiguous(), tie)
            total = first.clone()
            for other in others:
                total += other
            local.copy_(total)

    def owned_for_norm(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``parameters`` that this rank adds to the global norm: of copies, the first place's."""
        not_counted = {id(p) for p, tie in self._local_copies if tie.pp_ranks[0] != self._pp_rank}
        return [parameter for parameter in parameters if id(parameter) not in not_counted]

    def norm(self, local_norm: Tensor) -> Tensor:
        """The 2-norm over all stages, the same bits everywhere; ``local_norm`` (0-dim) is that of this stage."""
        total = local_norm.square().to(self._device_type)  # a stage without parameters has its zero on the host
        dist.all_reduce(total, group=control_group(self._group, total.device))
        return total.sqrt().to(local_norm.device)
