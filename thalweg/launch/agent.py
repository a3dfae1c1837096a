"""torch's elastic agent, told to be quick: what it does late or not at all is mended here (torch 2.13).

- Once a rank has failed, it waits 30 s for one that ignores SIGTERM, whatever time it was given.
- It does not tell the ranks that failed from those that it ended itself.
- Its barrier at the end waits 300 s in C++: deaf to signals, to a failure on another host, and giving up on a
  host that takes longer.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

_BARRIER_TIMEOUT = 7 * 86400.0  # seconds; a lost host is noticed by its heartbeat
_LOGGER = "torch.distributed.elastic"


class Agent(LocalElasticAgent):
    """One host's ranks: starts them, ends all when one fails, leaves ``grace`` seconds from SIGTERM to SIGKILL."""

    def __init__(self, spec: WorkerSpec, log_dir: str, grace: float) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir), exit_barrier_timeout=_BARRIER_TIMEOUT)
        self._grace = grace
        self.pids: dict[int, int] = {}
        """By local rank; each rank leads a session of its own."""
        self.exited: set[int] = set()
        """Ranks of the job that had ended before this agent ended any."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.pids = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close, first_rank = context.close, worker_group.workers[0].global_rank

        def close_in_time(death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
            if not self.exited:
                handlers = context.subprocess_handlers.items()
                self.exited = {first_rank + local for local, handler in handlers if handler.proc.poll() is not None}
            close(death_sig, min(timeout, self._grace))

        context.close = close_in_time
        return self.pids

    def _exit_barrier(self) -> None:
        barrier = threading.Thread(target=super()._exit_barrier, daemon=True)
        barrier.start()
        while barrier.is_alive():
            self._worker_group.spec.rdzv_handler.num_nodes_waiting()  # raises when another host fails
            barrier.join(0.1)


@contextlib.contextmanager
def mute_agent_log() -> Iterator[None]:
    """Keep the agent's pages of warnings to ourselves; our report says what they say."""
    logger, handler = logging.getLogger(_LOGGER), logging.NullHandler()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
