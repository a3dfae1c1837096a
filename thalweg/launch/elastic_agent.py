"""torch's elastic agent, told to be quick: what it does late or not at all is mended here (torch 2.13).

- Once a rank has failed, or a signal has come, it waits 30 s for ranks to end, whatever time it was given.
- It does not tell the ranks that failed from those that it ended itself.
- It waits for other hosts in C++, deaf to signals and to a failure there; at the end 300 s and no longer.
- It starts one host's ranks anew, among the remains of their last start.  ``local.py`` starts a whole job instead, with
  an agent for each start; torch's variables count these.
"""

import contextlib
import functools
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from thalweg.launch.rendezvous import in_thread

_BARRIER_TIMEOUT = 7 * 86400.0  # seconds; a lost host is noticed by its heartbeat
_log = logging.getLogger("torch.distributed.elastic")
_log.addHandler(logging.NullHandler())  # without one, what does not propagate is written to standard error
T = TypeVar("T")


class Agent(LocalElasticAgent):
    """One host's ranks: starts them once, as start ``restart`` of the job, ends all when one fails, leaves ``grace``
    seconds from SIGTERM to SIGKILL."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, grace: float, restart: int) -> None:
        super().__init__(spec, logs_specs, exit_barrier_timeout=_BARRIER_TIMEOUT)
        self._grace, self._restart = grace, restart
        self.pids: dict[int, int] = {}  # by local rank; each rank leads a session of its own
        self.exited: set[int] = set()  # ranks of the job that had ended before this agent ended any

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        start: Any = super()._start_workers  # torch's decorator hides its signature
        self._remaining_restarts = worker_group.spec.max_restarts - self._restart  # for TORCHELASTIC_RESTART_COUNT
        self.pids = start(worker_group)
        self._remaining_restarts = 0
        context: Any = self._pcontext
        close, first_rank = context.close, worker_group.workers[0].global_rank

        def close_in_time(death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
            if not self.exited:
                handlers = context.subprocess_handlers.items()
                self.exited = {first_rank + local for local, handler in handlers if handler.proc.poll() is not None}
            close(death_sig, self._grace)

        context.close = close_in_time
        return self.pids

    def _assign_worker_ranks(self, *args: Any) -> list[Worker]:
        assign: Any = super()._assign_worker_ranks
        return self._watched(functools.partial(assign, *args))

    def _exit_barrier(self) -> None:
        self._watched(super()._exit_barrier)

    def _watched(self, wait_for_hosts: Callable[[], T]) -> T:
        """Wait for other hosts, and look meanwhile whether they are still there."""
        future = in_thread(wait_for_hosts)
        while wait([future], timeout=0.05).not_done:
            self._rdzv_handler.num_nodes_waiting()  # raises when another host has failed
        return future.result()


@contextlib.contextmanager
def mute_agent_log() -> Iterator[None]:
    """Keep the agent's pages of warnings to ourselves; our report says what they say."""
    before, _log.propagate = _log.propagate, False
    try:
        yield
    finally:
        _log.propagate = before
