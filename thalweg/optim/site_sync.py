"""What is between sites: runs of ranks (those of a host, say) that reduce gradients and shard states among themselves.

A :class:`SiteSync` says what crosses from one to the other, and has the state that this takes.  A checkpoint has rows
of it, ``sites.exp_avg`` say, of (sites, *shape): a job of as many sites takes its rows, any other job their mean.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.comm.collectives.wire import SiteExchange
from thalweg.optim.accumulation import StepListener
from thalweg.optim.dtensor_local import as_dtensor_like, get_worker_rows, to_local
from thalweg.utils.buckets import iter_buckets
from thalweg.zero.collectives import build_replica_sum
from thalweg.zero.shard import ShardedModel

ROWS = "sites."
# State that only a SiteSync understands.
OUTER_MOMENTUM, GRAD_ERROR, POWERSGD_Q = "outer_momentum", "grad_error", "powersgd_q"
# Elements that are exchanged at once: 32 MiB of fp32, beside as much for what arrives.
_BUCKET_NUMEL = 8 << 20


class SiteSync(StepListener):
    """Base: the sites of ``sharded``, whose parameters ``inner`` steps."""

    def __init__(self, inner: torch.optim.Optimizer, sharded: ShardedModel, *, in_few_bits: bool = False) -> None:
        assert sharded.sites is not None
        self._inner = inner
        self.num_sites, self.site = sharded.sites.size(0), sharded.sites.get_local_rank(0)
        # The ranks of a site hold the same numbers, or a shard each.
        within = None if sharded.options.policy.shards_optimizer_states else sharded.sites.get_group(1)
        total = build_replica_sum(sharded.sites, sharded.device, in_few_bits)
        self._exchange = SiteExchange(total, within, sharded.device, sharded.ledger)

    def owns(self, key: str) -> bool:
        """Whether each site goes on with a row of its own of this state."""
        raise NotImplementedError

    def reduce_grads(self, factor: float | Tensor) -> float | Tensor:
        """The gradients of a window are those of this site, to be multiplied by ``factor``; returns by what they are to
        be after this; collective."""
        return factor

    def consolidate_state_dict(self) -> bool:
        """Show the state of all sites; collective.  Whether parameters have changed."""
        raise NotImplementedError

    def adopt_state(self) -> None:
        """State or parameters were loaded."""
        raise NotImplementedError

    def _params(self) -> list[Tensor]:
        """What trains; a 0-dim parameter follows the gradients of all ranks at each step."""
        return [p for group in self._inner.param_groups for p in group["params"] if p.requires_grad and p.dim() > 0]

    def _iter_buckets(self, params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        return iter_buckets(params, lambda param: to_local(param).numel(), _BUCKET_NUMEL)


@torch.no_grad()
def adopt_site_rows(params: Sequence[Tensor], state: Any, sync: SiteSync | None) -> None:
    """Make of the rows of sites in a loaded ``state`` what this rank goes on with, and drop what ``sync`` does not
    know; collective."""
    for param in params:
        entries = state.get(param, {})
        for name in [name for name in entries if name.startswith(ROWS)]:
            rows, key = get_worker_rows(entries.pop(name), param), name.removeprefix(ROWS)
            is_own = sync is not None and sync.owns(key) and len(rows) == sync.num_sites
            own = rows[sync.site].clone() if sync is not None and is_own else rows.mean(0)
            entries[key] = as_dtensor_like(own.to(to_local(param).device), param)
    if sync is not None:
        sync.adopt_state()
    for param in params:
        for key in (OUTER_MOMENTUM, GRAD_ERROR, POWERSGD_Q):
            state.get(param, {}).pop(key, None)
