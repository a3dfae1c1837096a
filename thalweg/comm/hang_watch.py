"""A hang that explains itself: which rank the others wait for, where it is, and what they wait in.

A thread of each rank looks at the main thread's stack some times in ``hang_seconds`` and tells the process group's
store, through a connection of its own, what it sees: where the rank is in the user's code, whether it waits for others,
how many steps and collectives it has done, for how long nothing of this has changed, and a beat, which stops with the
process.  The first of the ranks that have waited for ``hang_seconds`` compares what all have told and says it in the
log.  Nothing is ended: the process group's timeout does that, and the log has by then said why.

A rank waits for others where a frame of torch's or of Thalweg's collectives is on the stack, another thread (a
device's, in the backward pass) is in one, or the device has not done the last one that was queued: the host is past it
and waits where it reads from the device.  Ranks that begin different collectives are told so by ``CollectiveOrder``.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

import thalweg
from thalweg.comm.comms_logger import CommsLog
from thalweg.device import enter_device
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_LOOKS = 4  # in hang_seconds
_LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, thalweg))
# Whose code waits for other ranks.
_WAITING = (
    os.path.join(_LIBRARIES[0], "distributed", ""),
    os.path.join(_LIBRARIES[1], "comm", ""),
    os.path.join(_LIBRARIES[1], "zero", "fsdp2", "async_reduce.py"),
)
# Whose code may be called by it and computes again: a pipeline's stage, a checkpoint wrapper's module.
_COMPUTING = tuple(os.path.join(_LIBRARIES[0], *names) for names in (("nn", "modules", ""), ("autograd", "")))
_numbers = itertools.count()  # of a process' watches, which all ranks begin in the same order
_NO_NAMES = ("wrapper", "wait", "_wait_with_backoff", "_find_failure")


class HangWatch:
    """Watches this rank among those of ``group``, until :meth:`close`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: CommsLog,
        device: torch.device,
        hang_seconds: float,
        heartbeat_seconds: float | None = None,
    ) -> None:
        self._ledger = ledger
        ledger.marks_device = device.type != "cpu"
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._hang_seconds, self._interval = hang_seconds, heartbeat_seconds or hang_seconds / _LOOKS
        # Its own connection: the main thread may wait in the other one.
        self._store = dist.PrefixStore(f"hang_watch/{next(_numbers)}", group.get_group_store().clone())  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        self._main_thread = threading.main_thread().ident
        self._num_steps, self._beat, self._since = 0, 0, time.monotonic()
        self._seen: tuple[Any, ...] = ()
        self._peers: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when it came
        self._reported = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, args=(device,), name="thalweg-hang-watch", daemon=True).start()

    def count_step(self) -> None:
        """One step more."""
        self._num_steps += 1

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _watch(self, device: torch.device) -> None:
        enter_device(device)
        try:
            while not self._closed.is_set():
                state = self._look()
                self._store.set(str(self._rank), json.dumps(state))
                if state["waits_in"] and state["seconds"] >= self._hang_seconds / 2:
                    self._compare(state["seconds"] >= self._hang_seconds)
                elif self._reported:
                    self._reported = False
                    _log.warning("rank %d goes on", self._rank)
                self._closed.wait(self._interval)
        except RuntimeError as error:  # the store is gone, and with it the job
            _log.debug("the hang watch ends: %s", error)

    def _look(self) -> dict[str, Any]:
        """Where the main thread is, and for how many seconds it has been there."""
        frame = sys._current_frames().get(self._main_thread or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        first = max((index for index, one in enumerate(stack) if one.filename.startswith(_COMPUTING)), default=0)
        waits = [index for index, one in enumerate(stack) if one.filename.startswith(_WAITING) and index >= first]
        names = [stack[index].name for index in waits if stack[index].name not in _NO_NAMES]
        waits_in = self._ledger.pending() or "".join(names[-1:])
        if names:
            del stack[waits[-1] :]  # what waiting calls (it asks now and then whether others live) is no place to be
        users = [entry for entry in stack if not entry.filename.startswith(_LIBRARIES)]
        shown = [*users[-1:], *(stack[-1:] if not waits_in and users[-1:] != stack[-1:] else [])]
        where = " > ".join(f"{os.path.basename(one.filename)}:{one.lineno} in {one.name}" for one in shown)
        seen = (where, 0 if waits_in else len(stack), self._num_steps, self._ledger.total().num_calls)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        self._beat += 1
        known = {"host": socket.gethostname(), "beat": self._beat, "steps": self._num_steps, "where": where}
        return {**known, "waits_in": waits_in, "seconds": time.monotonic() - self._since}

    def _compare(self, is_hang: bool) -> None:
        """Take in what all ranks tell; report it once if ``is_hang``, where this is the first of those that wait."""
        states: dict[int, dict[str, Any]] = {}
        for rank in range(self._world):
            if not self._store.check([str(rank)]):
                continue
            states[rank] = state = json.loads(self._store.get(str(rank)))
            if self._peers.get(rank, (None,))[0] != state["beat"]:
                self._peers[rank] = (state["beat"], time.monotonic())
        longest = max(0.4 * self._hang_seconds, 1.6 * self._interval)  # without a beat
        silent = {rank for rank, (_, when) in self._peers.items() if time.monotonic() - when > longest}
        speaker = next(rank for rank, state in states.items() if state["waits_in"] and rank not in silent)
        if self._reported or not is_hang or speaker != self._rank:
            return
        self._reported = True
        lines = []
        for rank in range(self._world):
            if (state := states.get(rank)) is None:
                lines.append(f"rank {rank}: NEVER CAME")
                continue
            label = f"rank {rank} on {state['host']}, after {state['steps']} steps"
            since, where = f"since {state['seconds']:.0f} s", state["where"]
            if rank in silent:
                lines.append(f"{label}: NO SIGN OF LIFE, last seen at {where}")
            elif state["waits_in"]:
                lines.append(f"{label}: waits in {state['waits_in']} {since}, from {where}")
            else:
                lines.append(f"{label}: NOT THERE, at {where} {since}")
        _log.error("ranks have waited for others for %g s:\n  %s", self._hang_seconds, "\n  ".join(lines))
