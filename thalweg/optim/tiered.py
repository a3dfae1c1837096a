"""Which update an engine uses, from where the optimiser's state and the parameters are.

parameters    state        update
in memory     in memory    plain, or none of this module's business
any           on NVMe      streamed (mapped, if the optimiser is not elementwise)
on NVMe       in memory    streamed, with the state where it is

Around it goes :class:`.leaving.Leaving` where the state is offloaded and its rule allows: in place on the
host, and tentatively (:mod:`.tentative`) for masters that lie on NVMe with their state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.verdict import all_or_none
from thalweg.config import Config
from thalweg.optim.delayed import DelayedAdam
from thalweg.optim.leaving import Leaving
from thalweg.optim.local import local
from thalweg.optim.managed import ManagedOptimizer, UpdateHooks
from thalweg.optim.mapped import MappedUpdate
from thalweg.optim.scaler import LossScaler
from thalweg.optim.spill import GradSpill, spill_bytes
from thalweg.optim.streamed import StreamedUpdate, state_bytes
from thalweg.optim.tentative import Tentative, tentative_bytes
from thalweg.optim.update import PlainUpdate, Update
from thalweg.optim.window import Window
from thalweg.optim.worker import is_elementwise
from thalweg.store import Ring, SwapFile
from thalweg.store.regions import round_up
from thalweg.utils.log import get_logger
from thalweg.zero.offload import CAPACITY_TO_COME
from thalweg.zero.shard import Sharded

_log = get_logger("optim")
# Beyond this a larger buffer gains nothing: a transfer is cut into blocks anyway.
_BUFFER_BYTES = 32 << 20
_LEAST_BUFFER = 1 << 20


@dataclass(frozen=True)
class StateTier:
    """Where the optimiser's state rests; ``buffers`` of ``buffer_elements`` (at most) pass it on.  On NVMe
    that is the state of at least ``ratio`` of the elements.

    ``early``: updates may run within the backward pass, since nothing later in a step (clipping) can change
    them; ``in_place``: nor is it likely that they must be taken back (as with a loss scale).
    """

    device: Literal["none", "cpu", "nvme"] = "none"
    folder: str = ""
    buffers: int = 4
    buffer_elements: int = 100_000_000
    pin: bool = True
    ratio: float = 1.0
    early: bool = False
    in_place: bool = False

    @property
    def ring(self) -> tuple[int, int]:
        """Buffers, and bytes of each."""
        size = min(_BUFFER_BYTES, max(1, self.buffer_elements) * 4)
        return max(2, self.buffers), max(size, _LEAST_BUFFER)


def manage(
    inner: torch.optim.Optimizer,
    sharded: Sharded,
    config: Config,
    window: Window,
    scaler: LossScaler,
    replicate_group: dist.ProcessGroup | None,
) -> ManagedOptimizer:
    """The optimizer that users hold, with its state where the config wants it."""
    tier = state_tier(config, on_cpu=sharded.device.type == "cpu")
    build = partial(
        build_update,
        inner,
        tier,
        window,
        swap=sharded.swap,
        copies=sharded.copies(),
        changed=sharded.changed,
        group=replicate_group,
    )
    ranks = replicate_group if tier.device == "nvme" else None
    update, swap = all_or_none(build, "a swap file for its optimiser state", ranks)
    if swap is not None:
        sharded.on_close(swap.close)
    leaving = update if isinstance(update, Leaving) else None

    def drop_gradients() -> None:
        if leaving is not None:
            leaving.drop()
        sharded.drop_gradients()

    managed = ManagedOptimizer(
        inner,
        UpdateHooks(sharded.finish_window, sharded.set_loss_scale, drop_gradients),
        window,
        scaler,
        max_norm=config.gradient_clipping,
        replicate_group=replicate_group,
        update=update,
    )
    if leaving is not None:
        sharded.on_reduced(leaving.reducing, leaving.reduced)
        managed.after_step(leaving.close_step)
    managed.after_step(sharded.changed)
    return managed


def state_tier(config: Config, *, on_cpu: bool) -> StateTier:
    """The tier that a config asks for, of ranks that compute on the CPU or not."""
    section = config.zero_optimization.offload_optimizer
    # Gradients on their way from a GPU arrive when the backward pass is over.
    waits = config.gradient_clipping > 0 or not on_cpu
    return StateTier(
        device=section.device,
        folder=section.nvme_path or "",
        buffers=section.buffer_count,
        buffer_elements=section.buffer_size,
        pin=section.pin_memory,
        ratio=section.ratio,
        early=not waits,
        in_place=not waits and not config.fp16.enabled,
    )


def build_update(
    optimizer: torch.optim.Optimizer,
    tier: StateTier,
    window: Window,
    *,
    swap: SwapFile | None = None,
    copies: Mapping[Tensor, Tensor] | None = None,
    changed: Callable[[list[str]], None] = lambda units: None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Update, SwapFile | None]:
    """The update, and the swap file if one was made here.

    ``swap``: where masters lie, if they are on NVMe; ``copies``: see :class:`.streamed.StreamedUpdate`;
    ``changed``, ``group``: see :class:`.leaving.Leaving`.

    Raises:
        ValueError: the swap file's folder or disk does not do.
    """
    elementwise, made = is_elementwise(optimizer), None
    on_disk = tier.device == "nvme"
    resident = _resident(optimizer, tier.ratio) if on_disk else frozenset()
    if on_disk:
        size = state_bytes if elementwise else _bound
        needed = size(optimizer, resident) + spill_bytes(optimizer)
        if swap is None:
            swap = made = SwapFile(tier.folder, needed, capacity=needed + CAPACITY_TO_COME)
        else:
            swap.extend(needed)
    if swap is None:
        update: Update = PlainUpdate(optimizer)
    elif elementwise:
        ring, keeps = Ring(*tier.ring, pin=tier.pin), not on_disk
        update = StreamedUpdate(
            optimizer, swap, ring, copies=copies, state_in_memory=keeps, resident=resident
        )
    else:
        update = MappedUpdate(
            optimizer,
            swap,
            copies=dict(copies or {}),
            state_in_memory=not on_disk,
            resident=resident,
            at_once=isinstance(optimizer, DelayedAdam),
        )
    early = tier.device == "cpu" and tier.in_place and elementwise
    spill = GradSpill(swap) if on_disk and swap is not None else None
    tentative = None
    if on_disk and tier.early and isinstance(update, StreamedUpdate):
        tentative = _tentative(update, optimizer)
    if early or spill is not None:
        update = Leaving(
            update,
            optimizer,
            window,
            changed,
            early=early,
            tentative=tentative,
            spill=spill,
            background=swap is not None and (early or tentative is not None),
            group=group,
        )
    return update, made


def _tentative(update: StreamedUpdate, optimizer: torch.optim.Optimizer) -> Tentative | None:
    """Second places for what an update writes; None where there is nothing to gain, or no room."""
    swap = update.swap
    assert swap is not None
    tentative = Tentative(update, swap)
    if not any(map(tentative.takes, _trained(optimizer))) or not swap.can_exchange():
        return None
    needed = tentative_bytes(optimizer, swap, update.copies)
    # As much is left for others (checkpoints) as is taken.
    if not swap.extend_if_free(needed, 2 * needed):
        _log.info(
            "updates wait for step(), and gradients rest on the disk meanwhile: within the backward pass "
            "they would need %.1f MiB more of %s",
            needed / 2**20,
            swap.folder,
        )
        return None
    return tentative


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _resident(optimizer: torch.optim.Optimizer, ratio: float) -> frozenset[Tensor]:
    """The parameters whose state stays in memory: the first of the model that ``1 - ratio`` of the elements
    have room for, as the backward pass comes to them last and their transfers would be waited for."""
    params = _trained(optimizer)
    budget = (1.0 - ratio) * sum(p.numel() for p in params)
    chosen: set[Tensor] = set()
    for param in params:
        if param.numel() <= budget:
            chosen.add(param)
            budget -= param.numel()
    return frozenset(chosen)


def _bound(optimizer: torch.optim.Optimizer, resident: Collection[Tensor]) -> int:
    """Bytes for state of an optimiser that is not elementwise: two fp32 tensors like each parameter."""
    params = [p for p in _trained(optimizer) if p not in resident]
    return sum(2 * round_up(local(p).numel() * max(4, p.dtype.itemsize)) for p in params)
