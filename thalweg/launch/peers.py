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

from thalweg.launch.meeting import Meeting
from thalweg.launch.outcome import Outcome

_BEAT = 1.0
_ANSWER = 2.0  # seconds in which the store on host 0 must answer
_TELLING = 10.0  # seconds that host 0 waits for others to read what is wrong
_EARLY = 30.0  # seconds from the start in which a launcher too many ends the job
_ALIKE = {  # what every host must say alike, and what sets it
    "num_hosts": "--num-nodes",
    "target": "the script",
    "thalweg": "thalweg's version",
    "torch": "torch's version",
}


@dataclass(frozen=True)
class Place:
    """Which host of a job this is; host 0 listens at ``meeting``'s address."""

    index: int
    num_hosts: int
    meeting: Meeting
    patience: float = 600.0  # seconds to wait for hosts that are started by hand
    silence: float = 5.0  # seconds without a beat after which a host is gone


class Peers(threading.Thread):
    """One host's side of it; ``lost`` is set by whoever notices that a rank of this host failed."""

    def __init__(self, place: Place, lost: threading.Event, ended: Callable[[], bool]) -> None:
        super().__init__(name="thalweg-peers", daemon=True)
        self._place, self._lost, self._ended = place, lost, ended
        self._store = place.meeting.client(place.patience)
        self._store.set_timeout(timedelta(seconds=_ANSWER))
        self._done = threading.Event()
        self._cards: list[dict[str, Any]] = []
        self.verdict: Outcome | None = None
        self.stopping = False
        self._began = 0.0
        self._silent: set[int] = set()

    def arrive(self, card: Mapping[str, Any], note: Callable[[str], object]) -> list[dict[str, Any]]:
        """Lay down this host's ``card`` and wait for everyone's.

        Raises:
            ValueError: two hosts claim one place, contradict each other, or one never comes.
        """
        try:
            return self._arrive(card, note)
        except DistError as error:
            where = f"{self._place.meeting.addr}, port {self._place.meeting.port}"
            raise ValueError(
                f"{card['host']} lost its line to the first host of the job, at {where}, before all hosts "
                "had come: see what that host says"
            ) from error

    def _arrive(self, card: Mapping[str, Any], note: Callable[[str], object]) -> list[dict[str, Any]]:
        place, store = self._place, self._store
        number = store.add("arrived", 1) - 1
        mine = {**card, "index": place.index, "num_hosts": place.num_hosts, "number": number}
        store.set(f"card/{number}", json.dumps(mine))
        began, told = time.monotonic(), False
        while (ruling := self._ruling()) is None:
            waited = time.monotonic() - began
            missing = sorted(set(range(place.num_hosts)) - {one["index"] for one in self._read_cards()})
            if waited > place.patience:
                raise ValueError(
                    f"--node-rank {', '.join(map(str, missing))} did not come within {place.patience:.0f} "
                    "s: start "
                    f"`thalweg run` there too, with --master-addr {place.meeting.addr} "
                    f"--master-port {place.meeting.port}"
                )
            if waited > 10 and not told:
                note(f"waiting for --node-rank {', '.join(map(str, missing))}")
                told = True
            time.sleep(0.1)
        cards, problem = ruling["cards"], ruling["problem"]
        if not problem and number not in [one["number"] for one in cards]:
            problem = contradiction([*cards, mine])
        if problem:
            store.add("told", 1)
            if place.index == 0:
                self._wait_until_told(max(one["num_hosts"] for one in cards))
            raise ValueError(problem)
        self._cards = cards
        first = 0
        for one in cards:
            one["first_rank"], first = first, first + one["nproc"]
        self._began = time.monotonic()
        return cards

    def _ruling(self) -> dict[str, Any] | None:
        """What host 0 has made of the cards, once: what is wrong with them, or all of them in order."""
        if self._place.index == 0:
            cards = self._read_cards()
            problem = contradiction(cards)
            if problem or len(cards) == self._place.num_hosts:
                cards.sort(key=lambda one: one["index"])
                self._store.compare_set("ruling", "", json.dumps({"problem": problem, "cards": cards}))
        return json.loads(self._store.get("ruling")) if self._store.check(["ruling"]) else None

    def _wait_until_told(self, num_hosts: int) -> None:
        """The others read the ruling from this host's store, some of them a little later."""
        deadline = time.monotonic() + _TELLING
        while time.monotonic() < deadline:
            if self._store.add("told", 0) >= max(num_hosts, self._store.add("arrived", 0)):
                return
            time.sleep(0.05)

    def _read_cards(self) -> list[dict[str, Any]]:
        """Cards that can be read; a host has its number a moment before its card is there."""
        count, cards = self._store.add("arrived", 0), []
        while len(cards) < count and self._store.check([f"card/{len(cards)}"]):
            cards.append(json.loads(self._store.get(f"card/{len(cards)}")))
        return cards

    def run(self) -> None:
        place = self._place
        heard = {index: (0, time.monotonic()) for index in range(place.num_hosts) if index != place.index}
        answered = time.monotonic()
        while not self._done.wait(_BEAT if not self._lost.is_set() else 0.1):
            try:
                self._beat(heard)
                answered = time.monotonic()
            except Exception:
                # Host 0 leaves first at the end of a good job; at any other time it is gone.
                if self._ended() or self.stopping or self._done.is_set():
                    return
                if not self._reconnect(answered + place.silence):
                    self.verdict = self._gone(0)
                    self._stop_ranks()
                    return

    def _reconnect(self, deadline: float) -> bool:
        """A line that broke, or an answer that was late, is no proof yet."""
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                if not self._place.meeting.answers(1.0):
                    self._done.wait(0.2)  # refused at once where host 0's process is gone
                    continue
                self._store = self._place.meeting.client(1.0)
                self._store.set_timeout(timedelta(seconds=_ANSWER))
                return True
        return False

    def _beat(self, heard: dict[int, tuple[int, float]]) -> None:
        self._store.add(f"beat/{self._place.index}", 1)
        if self.stopping:
            return
        if self._lost.is_set():
            self.stopping = True
            self._store.set("stop", "1")
        elif self._store.check(["stop"]):
            self._stop_ranks()
        elif self._place.index == 0:
            self._listen(heard)

    def _listen(self, heard: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        young = now - self._began < _EARLY
        too_many = young and self._store.add("arrived", 0) > self._place.num_hosts
        if too_many and (problem := contradiction(self._read_cards())):
            self._publish(Outcome(2, f"thalweg run: {problem}\n"))
            self._store.set("stop", "1")
            self._stop_ranks()
            return
        for index, (beat, when) in heard.items():
            count = self._store.add(f"beat/{index}", 0)
            if count != beat:
                heard[index] = (count, now)
            elif now - when > self._place.silence:
                self._silent.add(index)
                self._publish(self._gone(index))
                self._store.set("stop", "1")
                self._stop_ranks()
                return

    def _gone(self, index: int) -> Outcome:
        card = self._cards[index]
        first, last = card["first_rank"], card["first_rank"] + card["nproc"] - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return Outcome(
            1,
            f"thalweg run: host {card['host']} ({ranks}) is gone: no sign of life for "
            f"{self._place.silence:.0f} s; the ranks of the other hosts were stopped\n",
        )

    def _stop_ranks(self) -> None:
        self.stopping = True
        os.kill(os.getpid(), signal.SIGTERM)  # the agent in the main thread ends its ranks and returns

    def _publish(self, verdict: Outcome) -> Outcome:
        """Make this the job's verdict unless there is one; returns the one there is."""
        text = self._store.compare_set("verdict", "", json.dumps([verdict.code, verdict.report]))
        return Outcome(*json.loads(text))

    def settle(self, own: Outcome | None, is_peer_loss: bool, patience: float) -> Outcome | None:
        """The job's verdict.  ``own`` is None where this host's ranks were only stopped."""
        self._done.set()
        if self.verdict is not None:
            return self.verdict
        try:
            deadline = time.monotonic() + (patience if own is None or is_peer_loss else 0.0)
            while time.monotonic() < deadline and not self._store.check(["verdict"]):
                time.sleep(0.05)
            if own is not None:
                found = self._publish(own)
            elif self._store.check(["verdict"]):
                found = Outcome(*json.loads(self._store.get("verdict")))
            else:
                return None
            self._store.add("read", 1)
            self._linger()
            return found
        except Exception:  # host 0 and its store are gone
            return own or self._gone(0)

    def _linger(self) -> None:
        """Host 0 keeps the store until the others have read the verdict, for a while."""
        deadline = time.monotonic() + 2.0
        while self._place.index == 0 and time.monotonic() < deadline:
            if self._store.add("read", 0) >= self._place.num_hosts - len(self._silent):
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        if self.is_alive():
            self.join()


def contradiction(cards: list[dict[str, Any]]) -> str | None:
    """What is wrong between hosts, in one sentence with the option and both hosts; None if nothing is."""
    by_index: dict[int, dict[str, Any]] = {}
    for card in cards:
        other = by_index.setdefault(card["index"], card)
        if other is not card:
            return (
                f"--node-rank {card['index']} is given on {other['host']} and on {card['host']}: number "
                "the hosts "
                f"from 0 to {card['num_hosts'] - 1}, each once"
            )
    first = cards[0] if cards else {}
    for card in cards[1:]:
        for key, option in _ALIKE.items():
            if card.get(key) != first.get(key):
                return (
                    f"{option} is {first.get(key)} on {first['host']} and {card.get(key)} on {card['host']}: "
                    "make them equal"
                )
    for card in cards:
        if not 0 <= card["index"] < card["num_hosts"]:
            return (
                f"--node-rank {card['index']} on {card['host']} must be from 0 to "
                f"{card['num_hosts'] - 1}, as "
                f"--num-nodes is {card['num_hosts']}"
            )
    return None
