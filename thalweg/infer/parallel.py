"""Several processes that compute the steps of one engine: parts of layers, stages of them, experts.

The picture: rank 0 has the scheduler, the sampler and the callers, and a :class:`Lead` for a runner.  For
each step it tells the others which tokens to compute (a frame of JSON on a socket), and all ranks run their
part (``shard.py``) and meet in shared memory (``team.py``), twice a layer and once for the logits, or wait
for the states of the stage before theirs.  The others (``ranks.py``) are in :meth:`Follower.work` meanwhile.

Ends: each rank watches the sockets it has.  When one closes, it says so in the shared memory, waiting ends,
and the step fails with an error that says which process ended and how.  A rank that rank 0 has started ends
with its socket, so nothing is left behind by a SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.api import EngineOptions
from thalweg.infer.batch import Batch, Runner, Source, Span
from thalweg.infer.describe import Decoder, Unsupported
from thalweg.infer.eager import EagerRunner
from thalweg.infer.models import describe
from thalweg.infer.ranks import Line, Peers, RankLost, hung_up
from thalweg.infer.shard import Degrees, part
from thalweg.infer.source import map_model
from thalweg.infer.team import Shape, Team, shared_handle

_BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """What all ranks must agree on to lay down their runners."""

    native: bool
    form: str
    cache: str
    num_blocks: int
    num_slots: int
    max_length: int
    max_tokens: int
    tensor: int
    stages: int = 1
    experts: int = 1

    @property
    def degrees(self) -> Degrees:
        """Into how many parts the model is cut."""
        return Degrees(self.tensor, self.stages, self.experts)


class Lead:
    """Rank 0's runner: tells the others what to compute, and computes its own shard."""

    def __init__(self, inner: Runner, team: Team, peers: Peers) -> None:
        self.inner, self.team, self.peers = inner, team, peers
        self.num_blocks, self.block_size, self.tables = inner.num_blocks, inner.block_size, inner.tables
        self.sources, self.source_lengths = inner.sources, inner.source_lengths
        self.adapter_of = inner.adapter_of
        self.weight_bytes = getattr(inner, "weight_bytes", None)
        fds = [line.sock.fileno() for line in peers.lines]
        self._end = weakref.finalize(self, _end_lead, team, peers)
        _watch(team, weakref.ref(self), fds)

    def encode(self, sources: Sequence[Source]) -> None:
        """No model that listens is shared out."""
        raise NotImplementedError

    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits of the batch's rows.  Raises RankLost."""
        self._tell("run", batch)
        logits = self.inner.run(batch)
        self._check()
        return logits

    def best(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely tokens where the inner runner has them."""
        return self.inner.best()

    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states."""
        self._tell("hidden", batch)
        states = self.inner.hidden(batch)
        self._check()
        return states

    @property
    def lost(self) -> str:
        """Which rank is gone, or an empty text."""
        return self.peers.lost() if self.team.gone and self._end.alive else ""

    def release(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""
        self.inner.release(slot)

    def close(self) -> None:
        """End the others and free the shard."""
        self._end()
        self.inner.close()

    def _tell(self, name: str, batch: Batch) -> None:
        if self.team.gone:
            raise RankLost(self.peers.lost())
        rows = list(batch.rows)
        self.peers.tell({"op": name, "tokens": batch.tokens, "spans": batch.spans, "rows": rows})

    def _check(self) -> None:
        if self.team.gone:
            raise RankLost(self.peers.lost())


def _end_lead(team: Team, peers: Peers) -> None:
    with contextlib.suppress(RankLost, OSError):
        peers.tell({"op": "close"})
    peers.close()
    team.leave()


class Follower:
    """Another rank's side: computes its shard when rank 0 says so."""

    def __init__(self, runner: Runner, team: Team, line: Line) -> None:
        self._runner, self._team, self._line = runner, team, line
        _watch(team, weakref.ref(self), [line.sock.fileno()])

    def work(self) -> dict[str, Any]:
        """Compute steps until rank 0 says ``end`` or ``close``; returns that message.

        Raises RankLost when a rank is gone.
        """
        try:
            while True:
                message = self._line.receive()
                if message["op"] not in ("run", "hidden"):
                    return message
                spans = [Span(*span) for span in message["spans"]]
                batch = Batch(message["tokens"], spans, message["rows"])
                (self._runner.run if message["op"] == "run" else self._runner.hidden)(batch)
        except BaseException:
            self._team.leave()
            raise

    def result(self) -> Tensor:
        """Work until rank 0 has generated; return what it has, int64.  Raises what happened there."""
        message = self.work()
        if message["op"] == "close":
            raise RankLost("rank 0 has closed the engine")
        if message["error"]:
            raise RuntimeError(f"rank 0: {message['error']}")
        return torch.tensor(message["tokens"])

    def close(self) -> None:
        """Hang up and free the shard."""
        self._line.close()
        self._runner.close()


@contextlib.contextmanager
def telling(runner: Any) -> Iterator[dict[str, Any]]:
    """Let launched followers know the end of the block: ``tokens`` of the dict it fills in, or its error."""
    told: dict[str, Any] = {}
    while not isinstance(runner, Lead) and hasattr(runner, "inner"):
        runner = runner.inner
    if not isinstance(runner, Lead) or runner.peers.started:
        yield told
        return
    try:
        yield told
    except BaseException as error:
        with contextlib.suppress(RankLost):  # those who are there still wait
            runner.peers.tell({"op": "end", "error": f"{type(error).__name__}: {error}"})
        raise
    runner.peers.tell({"op": "end", "error": None, "tokens": told["tokens"].tolist()})


def lead(decoder: Decoder, plan: Plan, peers: Peers, device: str) -> Lead:
    """Return rank 0's runner of a decoder; every peer is in :func:`follow`."""
    shape = Shape(
        plan.max_tokens, decoder.width, decoder.vocab, plan.num_slots, -(-plan.max_length // _BLOCK),
        plan.stages,
    )  # fmt: skip
    handle = shared_handle()
    try:
        team = Team(0, plan.degrees.places, shape, handle)
        message = {"plan": asdict(plan), "shape": asdict(shape)}
        for rank, line in enumerate(peers.lines, 1):
            try:
                line.send(message)
                line.send_handle(handle)
            except OSError:
                raise RankLost(peers.cause(rank)) from None
        inner = _lay(part(decoder, 0, plan.degrees), plan, team, device, peers.threads)
        for rank, answer in enumerate(peers.hear(), 1):
            if answer.get("error"):
                raise RuntimeError(f"inference rank {rank}: {answer['error']}")
    except BaseException:
        peers.close()
        raise
    finally:
        os.close(handle)
    return Lead(inner, team, peers)


def follow(decoder: Decoder, line: Line, rank: int, size: int, device: str, threads: int = 0) -> Follower:
    """Return another rank's part of :func:`lead`."""
    message = line.receive()
    handle = line.receive_handle()
    plan, shape = Plan(**message["plan"]), Shape(**message["shape"])
    try:
        assert plan.degrees.size == size, "the plan is for as many ranks as there are"
        stage, place = divmod(rank, plan.degrees.places)
        team = Team(place, plan.degrees.places, shape, handle, stage)
        runner = _lay(part(decoder, rank, plan.degrees), plan, team, device, threads)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        os.close(handle)
    line.send({"error": None})
    return Follower(runner, team, line)


def suits_kernels(decoder: Decoder, degrees: Degrees, form: str, cache: str) -> str:
    """Return why the native kernels cannot run the parts, or an empty text."""
    from thalweg.infer.native import check

    try:
        check(decoder, form, cache)
        for rank in range(degrees.size):
            check(part(decoder, rank, degrees), form, cache)
    except Unsupported as reason:
        return str(reason)
    return ""


def _lay(part: Decoder, plan: Plan, team: Team, device: str, threads: int) -> Runner:
    shape: dict[str, Any] = {
        "num_blocks": plan.num_blocks, "num_slots": plan.num_slots, "max_length": plan.max_length,
        "cache": plan.cache, "team": team,
    }  # fmt: skip
    if plan.native:
        from thalweg.infer.native import NativeRunner

        return NativeRunner(part, form=plan.form, max_tokens=plan.max_tokens, threads=threads, **shape)
    from thalweg.infer.pack import pack_experts, packing

    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        part = pack_experts(part, plan.form)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(plan.form, torch.bfloat16)
    if plan.form in ("int8", "int4"):
        dtype = torch.float32
    make = packing(plan.form) if on_cpu else None
    return EagerRunner(part, dtype=dtype, block_size=_BLOCK, device=device, make_linear=make, **shape)


def _watch(team: Team, owner: weakref.ref[Any], fds: Sequence[int]) -> None:
    """Tell the team when a line is dead, for as long as its owner lives."""

    def watch() -> None:
        while not team.gone:
            dead = hung_up(fds, 300)
            if owner() is None:
                return
            if dead:
                team.leave()

    threading.Thread(target=watch, daemon=True, name="thalweg-team").start()


def main(argument: str) -> int:
    """Be a rank that :func:`spawned` has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fields = json.loads(argument)
    torch.set_num_threads(fields["threads"])
    options = EngineOptions(**fields["options"])
    line = Line(socket.socket(fileno=fields["fd"]))
    model = map_model(fields["model"], options)[0]
    with contextlib.suppress(RankLost):  # rank 0 is gone, and with it the reason to be
        follower = follow(describe(model), line, fields["rank"], fields["size"], "cpu", fields["threads"])
        del model
        assert follower.work()["op"] == "close"
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
