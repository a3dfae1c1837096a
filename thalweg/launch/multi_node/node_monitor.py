"""The launchers of a job on several hosts, as they see each other through the store on host 0.

    arrive    each host lays down a card (who it is, how many ranks, which versions); host 0 reads them and
              lays down one ruling, so a contradiction is the same error everywhere, with the host and the
              option.  Who comes after a ruling that has no place for it gets that error, and so have the
              others if it comes early: a job that is under way is not stopped by a stray launcher
    beat      once a second each host counts its beat up; host 0 reads all beats, the others hear from host 0
    stop      the first host that loses a rank, or sees another gone silent, tells all at once
    verdict   one report of the job, the first failure's; a host whose ranks only lost their peers waits for
              another's before it gives its own

A host that is killed, cut off or stopped is noticed after ``silence`` seconds by host 0; if it is host 0, by
everyone.  Times are of this host's monotonic clock alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError

from thalweg.launch.job_result import JobResult
from thalweg.launch.rendezvous import StaticRendezvous

_HEARTBEAT_INTERVAL = 1.0
_STORE_TIMEOUT = 2.0  # seconds in which the store on host 0 must answer
_READ_TIMEOUT = 10.0  # seconds that host 0 waits for others to read what is wrong
_STARTUP_SECONDS = 30.0  # seconds from the start in which a launcher too many ends the job
_MUST_MATCH = {  # what every host must say alike, and what sets it
    "num_hosts": "--num-nodes",
    "target": "the script",
    "thalweg": "thalweg's version",
    "torch": "torch's version",
}


@dataclass(frozen=True)
class NodeSpec:
    """Which host of a job this is; host 0 listens at ``meeting``'s address."""

    node_rank: int
    num_nodes: int
    rendezvous: StaticRendezvous
    join_timeout: float = 600.0  # seconds to wait for hosts that are started by hand
    heartbeat_timeout: float = 5.0  # seconds without a beat after which a host is gone


class NodeMonitor(threading.Thread):
    """One host's side of it; ``lost`` is set by whoever notices that a rank of this host failed."""

    def __init__(self, node: NodeSpec, failed: threading.Event, succeeded: Callable[[], bool]) -> None:
        super().__init__(name="thalweg-peers", daemon=True)
        self._node, self._failed, self._succeeded = node, failed, succeeded
        self._store = node.rendezvous.connect(node.join_timeout)
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
        self._done = threading.Event()
        self._node_infos: list[dict[str, Any]] = []
        self.result: JobResult | None = None
        self.stopping = False
        self._start_time = 0.0
        self._lost_nodes: set[int] = set()

    def join_job(self, node_info: Mapping[str, Any], on_wait: Callable[[str], object]) -> list[dict[str, Any]]:
        """Lay down this host's ``card`` and wait for everyone's.

        Raises:
            ValueError: two hosts claim one place, contradict each other, or one never comes.
        """
        try:
            return self._join_job(node_info, on_wait)
        except DistError as error:
            where = f"{self._node.rendezvous.addr}, port {self._node.rendezvous.port}"
            raise ValueError(
                f"{node_info['host']} lost its line to the first host of the job, at {where}, before all hosts "
                "had come: see what that host says"
            ) from error

    def _join_job(self, node_info: Mapping[str, Any], on_wait: Callable[[str], object]) -> list[dict[str, Any]]:
        node, store = self._node, self._store
        number = store.add("arrived", 1) - 1
        message = {**node_info, "index": node.node_rank, "num_hosts": node.num_nodes, "number": number}
        store.set(f"card/{number}", json.dumps(message))
        start, notified = time.monotonic(), False
        while (admission := self._get_admission()) is None:
            waited = time.monotonic() - start
            missing = sorted(set(range(node.num_nodes)) - {info["index"] for info in self._read_node_infos()})
            if waited > node.join_timeout:
                raise ValueError(
                    f"--node-rank {', '.join(map(str, missing))} did not come within {node.join_timeout:.0f} "
                    "s: start "
                    f"`thalweg run` there too, with --master-addr {node.rendezvous.addr} "
                    f"--master-port {node.rendezvous.port}"
                )
            if waited > 10 and not notified:
                on_wait(f"waiting for --node-rank {', '.join(map(str, missing))}")
                notified = True
            time.sleep(0.1)
        node_infos, problem = admission["cards"], admission["problem"]
        if not problem and number not in [one["number"] for one in node_infos]:
            problem = find_mismatch([*node_infos, message])
        if problem:
            store.add("told", 1)
            if node.node_rank == 0:
                self._wait_until_problem_read(max(one["num_hosts"] for one in node_infos))
            raise ValueError(problem)
        self._node_infos = node_infos
        first = 0
        for one in node_infos:
            one["first_rank"], first = first, first + one["nproc"]
        self._start_time = time.monotonic()
        return node_infos

    def _get_admission(self) -> dict[str, Any] | None:
        """What host 0 has made of the cards, once: what is wrong with them, or all of them in order."""
        if self._node.node_rank == 0:
            node_infos = self._read_node_infos()
            problem = find_mismatch(node_infos)
            if problem or len(node_infos) == self._node.num_nodes:
                node_infos.sort(key=lambda one: one["index"])
                self._store.compare_set("ruling", "", json.dumps({"problem": problem, "cards": node_infos}))
        return json.loads(self._store.get("ruling")) if self._store.check(["ruling"]) else None

    def _wait_until_problem_read(self, num_nodes: int) -> None:
        """The others read the ruling from this host's store, some of them a little later."""
        deadline = time.monotonic() + _READ_TIMEOUT
        while time.monotonic() < deadline:
            if self._store.add("told", 0) >= max(num_nodes, self._store.add("arrived", 0)):
                return
            time.sleep(0.05)

    def _read_node_infos(self) -> list[dict[str, Any]]:
        """Cards that can be read; a host has its number a moment before its card is there."""
        count, node_infos = self._store.add("arrived", 0), []
        while len(node_infos) < count and self._store.check([f"card/{len(node_infos)}"]):
            node_infos.append(json.loads(self._store.get(f"card/{len(node_infos)}")))
        return node_infos

    def run(self) -> None:
        node = self._node
        last_beats = {index: (0, time.monotonic()) for index in range(node.num_nodes) if index != node.node_rank}
        last_answer = time.monotonic()
        while not self._done.wait(_HEARTBEAT_INTERVAL if not self._failed.is_set() else 0.1):
            try:
                self._heartbeat(last_beats)
                last_answer = time.monotonic()
            except Exception:
                # Host 0 leaves first at the end of a good job; at any other time it is gone.
                if self._succeeded() or self.stopping or self._done.is_set():
                    return
                if not self._reconnect(last_answer + node.heartbeat_timeout):
                    self.result = self._lost_result(0)
                    self._stop_ranks()
                    return

    def _reconnect(self, deadline: float) -> bool:
        """A line that broke, or an answer that was late, is no proof yet."""
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                if not self._node.rendezvous.is_reachable(1.0):
                    self._done.wait(0.2)  # refused at once where host 0's process is gone
                    continue
                self._store = self._node.rendezvous.connect(1.0)
                self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
                return True
        return False

    def _heartbeat(self, last_beats: dict[int, tuple[int, float]]) -> None:
        self._store.add(f"beat/{self._node.node_rank}", 1)
        if self.stopping:
            return
        if self._failed.is_set():
            self.stopping = True
            self._store.set("stop", "1")
        elif self._store.check(["stop"]):
            self._stop_ranks()
        elif self._node.node_rank == 0:
            self._check_heartbeats(last_beats)

    def _check_heartbeats(self, last_beats: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        is_starting = now - self._start_time < _STARTUP_SECONDS
        too_many = is_starting and self._store.add("arrived", 0) > self._node.num_nodes
        if too_many and (problem := find_mismatch(self._read_node_infos())):
            self._publish_result(JobResult(2, f"thalweg run: {problem}\n"))
            self._store.set("stop", "1")
            self._stop_ranks()
            return
        for index, (beat, last_time) in last_beats.items():
            count = self._store.add(f"beat/{index}", 0)
            if count != beat:
                last_beats[index] = (count, now)
            elif now - last_time > self._node.heartbeat_timeout:
                self._lost_nodes.add(index)
                self._publish_result(self._lost_result(index))
                self._store.set("stop", "1")
                self._stop_ranks()
                return

    def _lost_result(self, node_rank: int) -> JobResult:
        node_info = self._node_infos[node_rank]
        first, last = node_info["first_rank"], node_info["first_rank"] + node_info["nproc"] - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return JobResult(
            1,
            f"thalweg run: host {node_info['host']} ({ranks}) is gone: no sign of life for "
            f"{self._node.heartbeat_timeout:.0f} s; the ranks of the other hosts were stopped\n",
        )

    def _stop_ranks(self) -> None:
        self.stopping = True
        os.kill(os.getpid(), signal.SIGTERM)  # the agent in the main thread ends its ranks and returns

    def _publish_result(self, result: JobResult) -> JobResult:
        """Make this the job's verdict unless there is one; returns the one there is."""
        text = self._store.compare_set("verdict", "", json.dumps([result.exit_code, result.report]))
        return JobResult(*json.loads(text))

    def agree_result(self, local_result: JobResult | None, is_peer_loss: bool, timeout: float) -> JobResult | None:
        """The job's verdict.  ``own`` is None where this host's ranks were only stopped."""
        self._done.set()
        if self.result is not None:
            return self.result
        try:
            deadline = time.monotonic() + (timeout if local_result is None or is_peer_loss else 0.0)
            while time.monotonic() < deadline and not self._store.check(["verdict"]):
                time.sleep(0.05)
            if local_result is not None:
                agreed = self._publish_result(local_result)
            elif self._store.check(["verdict"]):
                agreed = JobResult(*json.loads(self._store.get("verdict")))
            else:
                return None
            self._store.add("read", 1)
            self._wait_for_readers()
            return agreed
        except Exception:  # host 0 and its store are gone
            return local_result or self._lost_result(0)

    def _wait_for_readers(self) -> None:
        """Host 0 keeps the store until the others have read the verdict, for a while."""
        deadline = time.monotonic() + 2.0
        while self._node.node_rank == 0 and time.monotonic() < deadline:
            if self._store.add("read", 0) >= self._node.num_nodes - len(self._lost_nodes):
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        if self.is_alive():
            self.join()


def find_mismatch(node_infos: list[dict[str, Any]]) -> str | None:
    """What is wrong between hosts, in one sentence with the option and both hosts; None if nothing is."""
    by_node_rank: dict[int, dict[str, Any]] = {}
    for info in node_infos:
        other = by_node_rank.setdefault(info["index"], info)
        if other is not info:
            return (
                f"--node-rank {info['index']} is given on {other['host']} and on {info['host']}: number "
                "the hosts "
                f"from 0 to {info['num_hosts'] - 1}, each once"
            )
    first = node_infos[0] if node_infos else {}
    for info in node_infos[1:]:
        for key, option in _MUST_MATCH.items():
            if info.get(key) != first.get(key):
                return (
                    f"{option} is {first.get(key)} on {first['host']} and {info.get(key)} on {info['host']}: "
                    "make them equal"
                )
    for info in node_infos:
        if not 0 <= info["index"] < info["num_hosts"]:
            return (
                f"--node-rank {info['index']} on {info['host']} must be from 0 to "
                f"{info['num_hosts'] - 1}, as "
                f"--num-nodes is {info['num_hosts']}"
            )
    return None
