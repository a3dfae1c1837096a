"""Which update an engine uses, from where the optimiser's state and the parameters are.

parameters    state        update
in memory     in memory    InMemoryStep
any           on NVMe      NvmeStep (MmapStep, if the optimiser is not elementwise)
on NVMe       in memory    NvmeStep, with the state where it is

Around it goes :class:`.step_in_backward.StepInBackward` where the state is offloaded and its rule allows: in place
on the host, and double-buffered (:class:`.step_in_backward.DoubleBufferedStep`) for masters that lie on NVMe with
their state.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.error_agreement import all_ranks_or_raise
from thalweg.config import Config
from thalweg.config.schema.zero import OffloadOptimizer
from thalweg.optim.accumulation import AccumulationWindow, StepCallbacks
from thalweg.optim.algorithms.zenflow import ZenFlowAdam
from thalweg.optim.dtensor_local import to_local, trainable_params
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.offload.mmap_step import MmapStep
from thalweg.optim.offload.nvme_step import NvmeStep, is_elementwise, optimizer_state_bytes
from thalweg.optim.offload.step_in_backward import DoubleBufferedStep, GradOffload, StepInBackward, double_buffer_bytes
from thalweg.optim.site_sync import SiteSync
from thalweg.optim.step import EngineOptimizer, InMemoryStep, StepGuard
from thalweg.parallel.pipeline.tied_weights import TiedWeights
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.swap_file import MAX_SWAP_BYTES, SwapFile
from thalweg.utils.log import get_logger
from thalweg.zero.shard import ShardedModel

_log = get_logger("optim")
# Beyond this a larger buffer gains nothing: a transfer is cut into blocks anyway.
_BUFFER_BYTES = 32 << 20
_MIN_BUFFER_BYTES = 1 << 20


def buffer_ring_args(section: OffloadOptimizer) -> tuple[int, int]:
    """Buffers that pass state on from and to NVMe, and bytes of each."""
    size = min(_BUFFER_BYTES, max(1, section.buffer_size) * 4)
    return max(2, section.buffer_count), max(size, _MIN_BUFFER_BYTES)


def may_step_in_backward(config: Config, *, on_cpu: bool) -> bool:
    """Whether updates may run within the backward pass, of ranks that compute on the CPU or not.

    Nothing later in a step (clipping) can then change them; nor, in place on the host, is it likely that they must be
    taken back (as with a loss scale); nor has an outer optimizer to see what they begin with, or a site, or a
    pipeline's stage with a tied weight, to hear of the others' gradients.  What stops or goes back at a bad gradient
    has updated nothing by it.
    """
    if config.health.non_finite != "skip" or config.health.rejects_spikes or config.pipeline.stages != 1:
        return False
    if config.gradient_clipping > 0 or config.outer_optimizer is not None or config.gradient_compression is not None:
        return False
    # On the host beside a GPU they would be waited for, unit by unit, and could not be taken back.
    return config.zero_optimization.offload_optimizer.device == "nvme" or (on_cpu and not config.fp16.enabled)


def build_engine_optimizer(
    inner: torch.optim.Optimizer,
    sharded: ShardedModel,
    config: Config,
    window: AccumulationWindow,
    scaler: LossScaler,
    replicate_group: dist.ProcessGroup | None,
    pipeline_peers: TiedWeights | None = None,
    site_sync: SiteSync | None = None,
) -> EngineOptimizer:
    """The optimizer that users hold, with its state where the config wants it."""
    section = config.zero_optimization.offload_optimizer

    def build_strategy() -> tuple[InMemoryStep, SwapFile | None]:
        """The update, and the swap file if one was made here.

        Raises:
            ValueError: the swap file's folder or disk does not do.
        """
        steps_early = may_step_in_backward(config, on_cpu=sharded.device.type == "cpu")
        elementwise, on_disk = is_elementwise(inner), section.device == "nvme"
        swap, new_swap = sharded.swap, None
        in_memory_params = _params_with_state_in_memory(inner, section.ratio) if on_disk else frozenset()
        if on_disk:
            size = optimizer_state_bytes if elementwise else _max_state_bytes
            grad_bytes = sum(round_up(to_local(p).numel() * p.dtype.itemsize) for p in trainable_params(inner))
            needed = size(inner, in_memory_params) + grad_bytes
            if swap is None:
                swap = new_swap = SwapFile(section.nvme_path or "", needed, capacity=needed + MAX_SWAP_BYTES)
            else:
                swap.extend(needed)
        where: dict[str, Any] = {"state_in_memory": not on_disk, "in_memory_params": in_memory_params}
        where["compute_copies"] = sharded.get_compute_copies()
        double_buffered = None
        if swap is None:
            strategy = InMemoryStep(inner)
        elif elementwise:
            ring = BufferRing(*buffer_ring_args(section), pin=section.pin_memory)
            strategy = NvmeStep(inner, swap, ring, **where)
            double_buffered = _make_double_buffered_step(strategy) if on_disk and steps_early else None
        else:
            strategy = MmapStep(inner, swap, step_together=isinstance(inner, ZenFlowAdam), **where)
        in_place = section.device == "cpu" and steps_early and elementwise
        grad_offload = GradOffload(swap) if on_disk and swap is not None else None
        if in_place or grad_offload is not None:
            sharded.adopt_writes_early()
            strategy = StepInBackward(
                strategy,
                window,
                sharded.mark_params_updated,
                in_place=in_place,
                double_buffered=double_buffered,
                grad_offload=grad_offload,
                use_thread=swap is not None and (in_place or double_buffered is not None),
                group=replicate_group,
            )
        return strategy, new_swap

    ranks = replicate_group if section.device == "nvme" else None
    strategy, swap = all_ranks_or_raise(build_strategy, "a swap file for its optimiser state", ranks)
    if isinstance(strategy, StepInBackward):
        sharded.add_reduction_callbacks(strategy.before_reduce, strategy.after_reduce)
        window.add_listener(strategy)
    if swap is not None:
        window.add_listener(StepCallbacks(on_close=swap.close))
    more: dict[str, Any] = {"replicate_group": replicate_group, "pipeline_peers": pipeline_peers}
    more |= {"site_sync": site_sync, "guard": StepGuard(config.health, scales_loss=scaler.dynamic)}
    return EngineOptimizer(inner, sharded, window, scaler, max_norm=config.gradient_clipping, strategy=strategy, **more)


def _make_double_buffered_step(nvme_step: NvmeStep) -> DoubleBufferedStep | None:
    """Second places for what an update writes; None where there is nothing to gain, or no room."""
    double_buffered, swap = DoubleBufferedStep(nvme_step), nvme_step.swap
    if not any(map(double_buffered.can_step, trainable_params(nvme_step.optimizer))) or not swap.can_swap_ranges():
        return None
    needed = double_buffer_bytes(nvme_step)
    # As much is left for others (checkpoints) as is taken.
    if swap.extend_if_free(needed, 2 * needed):
        return double_buffered
    _log.info(
        "updates wait for step(), and gradients rest on the disk meanwhile: within the backward pass "
        "they would need %.1f MiB more of %s",
        needed / 2**20,
        swap.folder,
    )
    return None


def _params_with_state_in_memory(optimizer: torch.optim.Optimizer, ratio: float) -> frozenset[Tensor]:
    """The parameters whose state stays in memory: the first of the model that ``1 - ratio`` of the elements
    have room for, as the backward pass comes to them last and their transfers would be waited for."""
    params = trainable_params(optimizer)
    budget = (1.0 - ratio) * sum(p.numel() for p in params)
    chosen: set[Tensor] = set()
    for param in params:
        if param.numel() <= budget:
            chosen.add(param)
            budget -= param.numel()
    return frozenset(chosen)


def _max_state_bytes(optimizer: torch.optim.Optimizer, in_memory_params: Collection[Tensor]) -> int:
    """Bytes for state of an optimiser that is not elementwise: two fp32 tensors like each parameter."""
    params = [p for p in trainable_params(optimizer) if p not in in_memory_params]
    return sum(2 * round_up(to_local(p).numel() * max(4, p.dtype.itemsize)) for p in params)
