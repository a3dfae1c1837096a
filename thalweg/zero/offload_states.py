"""What training keeps on a device rests on the host for a while, when its memory is wanted for something else.

RLHF does so between updates, for an engine that generates on the same device.  Storages are emptied in place and
filled again: each view of them (parameters, the optimizer's state, what FSDP2 holds) stays what it is, and must not be
read meanwhile.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from thalweg.accelerator import get_accelerator
from thalweg.zero.storage.base import ShardStorage
from thalweg.zero.whole_parameter import get_shard

OPTIMIZER_STATES, MASTERS, PARAMETERS, GRADIENTS = "optim_states", "hp_params", "lp_params", "lp_grads"
STATES = (OPTIMIZER_STATES, MASTERS, PARAMETERS, GRADIENTS, "contiguous_grad_buffer")  # DeepSpeed's names
FORWARD_STATES = STATES[1:]  # those that a forward and backward pass may use


class StatesOnHost:
    """The states of one model that are on the host, each until :meth:`reload`."""

    def __init__(self, module: nn.Module, shards: Collection[ShardStorage], optimizer_state: Mapping[Any, Any]) -> None:
        self._module, self._shards, self._optimizer_state = module, shards, optimizer_state
        self._held: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}

    def offload(self, states: Collection[str], *, pin_memory: bool, non_blocking: bool) -> None:
        """Copy the device's memory under these states to the host, page-locked or not, and give it back."""
        tensors = self._find_tensors()
        for state in states:
            held = self._held.setdefault(state, [])
            for tensor in tensors[state]:
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                if storage.device.type in ("cpu", "meta") or not storage.nbytes():
                    continue
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory)
                held.append((storage, host.copy_(_as_bytes(storage), non_blocking=non_blocking)))
                storage.resize_(0)  # whoever gets this memory writes to it later in the device's order than that copy
        get_accelerator().empty_cache()

    def reload(self, states: Collection[str], *, non_blocking: bool) -> None:
        """Fill the device's memory under these states again."""
        for state in states:
            for storage, host in self._held.pop(state, ()):
                storage.resize_(host.numel())
                _as_bytes(storage).copy_(host, non_blocking=non_blocking)

    def _find_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors of each state.  Masters that are computed with, or gathered from, count as parameters."""
        found: dict[str, list[Tensor]] = {state: [] for state in STATES}
        found[OPTIMIZER_STATES] += [t for t in tree_leaves([*self._optimizer_state.values()]) if isinstance(t, Tensor)]
        for storage in self._shards:
            copies = [copy for copy in (storage.unsharded, storage.cast_dest) if copy is not None]
            found[PARAMETERS] += copies
            found[MASTERS if copies else PARAMETERS].append(storage.shard)
        for param in self._module.parameters():
            for one in (param, get_shard(param)):
                found[PARAMETERS].append(one.detach())
                if one.grad is not None:
                    found[GRADIENTS].append(one.grad)
        return found


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
