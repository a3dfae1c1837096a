"""A save that a thread finishes while training goes on.

::

    save_checkpoint   plan, copy_to_host | start                   ... the next one: wait, plan, ...
    thread                               | write, hash, fsync, commit |
    training                             | steps ...

One at a time in a process, which has one copy of the state at most; so what ``directory.py`` finds of a save of its own
process is left over.  The ranks' threads meet in a process group of their own, as
collectives of training come in no order that theirs could keep.  The thread is no daemon: an interpreter that ends
waits for it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from thalweg.checkpoint.rank_group import RankGroup
from thalweg.device import can_pin, synchronize
from thalweg.parallel_dims import new_subgroup
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import EvictableMemory
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_THREAD_NAME = "thalweg-checkpoint"


def join_saves() -> None:
    """Return when no thread of this process writes a checkpoint."""
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join()


class BackgroundSave:
    """What an engine's asynchronous saves share, and the failure of the last one until somebody is told."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._ranks: RankGroup | None = None
        self._memory: EvictableMemory | None = None  # stays, as fresh pages take three times as long as the copying

    def copy_to_host(self, shards: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Put copies in host memory in place of these views of live state; valid until the save is over."""
        pieces = [values for by_key in shards.values() for values in by_key.values()]
        nbytes = sum(round_up(values.nbytes, 64) for values in pieces if values.device.type == "cpu")
        if self._memory is None or self._memory.num_bytes < nbytes:
            self._memory = EvictableMemory(nbytes)
        offset = 0
        for by_key in shards.values():
            for key, values in by_key.items():
                if values.device.type == "cpu":
                    host = self._memory.tensor(offset, (values.nbytes,), torch.uint8)
                    host = host.view(values.dtype).view(values.shape)
                    offset += round_up(values.nbytes, 64)
                else:  # torch keeps page-locked memory for the next save
                    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=can_pin())
                by_key[key] = host.copy_(values, non_blocking=True)
        for device in {values.device for values in pieces}:
            synchronize(device)

    def start(self, write: Callable[[RankGroup], Any], ranks: RankGroup) -> None:
        """Run ``write`` in a thread, for the same ranks in a group of the threads' own; collective.

        None may be under way.
        """
        if self._ranks is None:
            self._ranks = ranks
            if ranks.world_size > 1:
                members = dist.get_process_group_ranks(ranks.group)
                self._ranks = replace(ranks, group=new_subgroup(members, ranks.group, "gloo", "background save"))
        threading.Thread(target=self._run, args=(write, self._ranks), name=_THREAD_NAME, daemon=False).start()

    def _run(self, write: Callable[[RankGroup], Any], ranks: RankGroup) -> None:
        try:
            write(ranks)
        except Exception as error:
            self._error = error
            _log.error("%s; the checkpoints before it are intact", error)
        finally:
            if self._memory is not None:
                self._memory.release()

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            CheckpointError: this engine's last one failed, here and on every other rank.
        """
        join_saves()
        error, self._error = self._error, None
        if error is not None:
            raise error
