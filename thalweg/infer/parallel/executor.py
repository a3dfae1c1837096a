"""Several processes that compute the steps of one engine: parts of layers, stages of them, experts.

The picture: rank 0 has the scheduler, the sampler and the callers, and a :class:`DriverRunner` for a runner.  For
each step it tells the others which tokens to compute (a frame of JSON on a socket), and all ranks run their
part (``shard.py``) and meet in shared memory (``team.py``), twice a layer and once for the logits, or wait
for the states of the stage before theirs.  The others (``ranks.py``) are in :meth:`WorkerLoop.work` meanwhile.

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

from thalweg.infer.config import EngineConfig
from thalweg.infer.loader.hf import load_mmapped
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import DecoderSpec, UnsupportedModelError
from thalweg.infer.parallel.shard import ParallelConfig, shard_for_rank
from thalweg.infer.parallel.shm_comm import ShmCommunicator, ShmShape, create_memfd
from thalweg.infer.parallel.workers import WorkerChannel, WorkerDiedError, WorkerGroup, peer_closed
from thalweg.infer.runners.base import EncoderInput, ModelInput, ModelRunner, QuerySpan, write_block_tables
from thalweg.infer.runners.torch_runner import TorchRunner

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class RunnerConfig:
    """What all ranks must agree on to lay down their runners."""

    use_cpu_kernels: bool
    weight_format: str
    kv_cache_dtype: str
    num_blocks: int
    num_slots: int
    max_length: int
    max_num_batched_tokens: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def parallel_config(self) -> ParallelConfig:
        """Into how many parts the model is cut."""
        return ParallelConfig(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)


class DriverRunner:
    """Rank 0's runner: tells the others what to compute, and computes its own shard."""

    def __init__(self, inner: ModelRunner, comm: ShmCommunicator, workers: WorkerGroup) -> None:
        self.inner, self.comm, self.workers = inner, comm, workers
        self.num_blocks, self.block_size, self.num_slots = inner.num_blocks, inner.block_size, inner.num_slots
        self.weight_bytes = getattr(inner, "weight_bytes", None)
        fds = [line.sock.fileno() for line in workers.channels]
        self._finalizer = weakref.finalize(self, _close_driver, comm, workers)
        _monitor_peers(comm, weakref.ref(self), fds)

    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """No model that listens is shared out."""
        raise NotImplementedError

    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits of the batch's rows.  Raises RankLost."""
        self._broadcast_step("run", batch)
        logits = self.inner.run(batch)
        self._raise_if_aborted()
        return logits

    def argmax(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely tokens where the inner runner has them."""
        return self.inner.argmax()

    def hidden_states(self, batch: ModelInput) -> Tensor:
        """Return the final hidden states."""
        self._broadcast_step("hidden", batch)
        states = self.inner.hidden_states(batch)
        self._raise_if_aborted()
        return states

    @property
    def failure(self) -> str:
        """Which rank is gone, or an empty text."""
        return self.workers.failure_message() if self.comm.aborted and self._finalizer.alive else ""

    def free_slot(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""
        self.inner.free_slot(slot)

    def close(self) -> None:
        """End the others and free the shard."""
        self._finalizer()
        self.inner.close()

    def _broadcast_step(self, name: str, batch: ModelInput) -> None:
        if self.comm.aborted:
            raise WorkerDiedError(self.workers.failure_message())
        rows = list(batch.logit_indices)
        write_block_tables(self.comm.block_tables, batch, self.block_size)  # in the memory that the ranks share
        self.workers.broadcast({"op": name, "tokens": batch.tokens, "spans": batch.spans, "rows": rows})

    def _raise_if_aborted(self) -> None:
        if self.comm.aborted:
            raise WorkerDiedError(self.workers.failure_message())


def _close_driver(comm: ShmCommunicator, workers: WorkerGroup) -> None:
    with contextlib.suppress(WorkerDiedError, OSError):
        workers.broadcast({"op": "close"})
    workers.close()
    comm.abort()


class WorkerLoop:
    """Another rank's side: computes its shard when rank 0 says so."""

    def __init__(self, runner: ModelRunner, comm: ShmCommunicator, channel: WorkerChannel) -> None:
        self._runner, self._comm, self._channel = runner, comm, channel
        _monitor_peers(comm, weakref.ref(self), [channel.sock.fileno()])

    def run(self) -> dict[str, Any]:
        """Compute steps until rank 0 says ``end`` or ``close``; returns that message.

        Raises RankLost when a rank is gone.
        """
        try:
            while True:
                message = self._channel.receive()
                if message["op"] not in ("run", "hidden"):
                    return message
                spans = [QuerySpan(*span) for span in message["spans"]]
                batch = ModelInput(message["tokens"], spans, message["rows"])
                (self._runner.run if message["op"] == "run" else self._runner.hidden_states)(batch)
        except BaseException:
            self._comm.abort()
            raise

    def wait_result(self) -> Tensor:
        """Work until rank 0 has generated; return what it has, int64.  Raises what happened there."""
        message = self.run()
        if message["op"] == "close":
            raise WorkerDiedError("rank 0 has closed the engine")
        if message["error"]:
            raise RuntimeError(f"rank 0: {message['error']}")
        return torch.tensor(message["tokens"])

    def close(self) -> None:
        """Hang up and free the shard."""
        self._channel.close()
        self._runner.close()


@contextlib.contextmanager
def broadcast_result(runner: Any) -> Iterator[dict[str, Any]]:
    """Let launched followers know the end of the block: ``tokens`` of the dict it fills in, or its error."""
    result: dict[str, Any] = {}
    while not isinstance(runner, DriverRunner) and hasattr(runner, "inner"):
        runner = runner.inner
    if not isinstance(runner, DriverRunner) or runner.workers.is_spawned:
        yield result
        return
    try:
        yield result
    except BaseException as error:
        with contextlib.suppress(WorkerDiedError):  # those who are there still wait
            runner.workers.broadcast({"op": "end", "error": f"{type(error).__name__}: {error}"})
        raise
    runner.workers.broadcast({"op": "end", "error": None, "tokens": result["tokens"].tolist()})


def start_driver(decoder: DecoderSpec, config: RunnerConfig, workers: WorkerGroup, device: str) -> DriverRunner:
    """Return rank 0's runner of a decoder; every peer is in :func:`follow`."""
    shape = ShmShape(
        config.max_num_batched_tokens, decoder.hidden_size, decoder.vocab_size, config.num_slots, -(-config.max_length // _BLOCK_SIZE),
        config.pipeline_parallel,
    )  # fmt: skip
    shm_fd = create_memfd()
    try:
        comm = ShmCommunicator(0, config.parallel_config.ranks_per_stage, shape, shm_fd)
        message = {"plan": asdict(config), "shape": asdict(shape)}
        for rank, channel in enumerate(workers.channels, 1):
            try:
                channel.send(message)
                channel.send_fd(shm_fd)
            except OSError:
                raise WorkerDiedError(workers.exit_cause(rank)) from None
        inner = _build_runner(
            shard_for_rank(decoder, 0, config.parallel_config), config, comm, device, workers.num_threads
        )
        for rank, answer in enumerate(workers.gather(), 1):
            if answer.get("error"):
                raise RuntimeError(f"inference rank {rank}: {answer['error']}")
    except BaseException:
        workers.close()
        raise
    finally:
        os.close(shm_fd)
    return DriverRunner(inner, comm, workers)


def start_worker(
    decoder: DecoderSpec, channel: WorkerChannel, rank: int, num_ranks: int, device: str, num_threads: int = 0
) -> WorkerLoop:
    """Return another rank's part of :func:`lead`."""
    message = channel.receive()
    shm_fd = channel.receive_fd()
    config, shape = RunnerConfig(**message["plan"]), ShmShape(**message["shape"])
    try:
        assert config.parallel_config.num_ranks == num_ranks, "the plan is for as many ranks as there are"
        stage, rank_in_stage = divmod(rank, config.parallel_config.ranks_per_stage)
        comm = ShmCommunicator(rank_in_stage, config.parallel_config.ranks_per_stage, shape, shm_fd, stage)
        runner = _build_runner(shard_for_rank(decoder, rank, config.parallel_config), config, comm, device, num_threads)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        os.close(shm_fd)
    channel.send({"error": None})
    return WorkerLoop(runner, comm, channel)


def kernel_gap(decoder: DecoderSpec, parallel_config: ParallelConfig, weight_format: str, kv_cache_dtype: str) -> str:
    """Return why the native kernels cannot run the parts, or an empty text."""
    from thalweg.infer.runners.cpu_runner import check_supported

    try:
        check_supported(decoder, weight_format, kv_cache_dtype)
        for rank in range(parallel_config.num_ranks):
            check_supported(shard_for_rank(decoder, rank, parallel_config), weight_format, kv_cache_dtype)
    except UnsupportedModelError as reason:
        return str(reason)
    return ""


def _build_runner(
    decoder: DecoderSpec, config: RunnerConfig, comm: ShmCommunicator, device: str, num_threads: int
) -> ModelRunner:
    common_args: dict[str, Any] = {
        "num_blocks": config.num_blocks, "num_slots": config.num_slots, "max_length": config.max_length,
        "kv_cache_dtype": config.kv_cache_dtype, "comm": comm,
    }  # fmt: skip
    if config.use_cpu_kernels:
        from thalweg.infer.runners.cpu_runner import CpuRunner

        return CpuRunner(
            decoder,
            weight_format=config.weight_format,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_threads=num_threads,
            **common_args,
        )
    from thalweg.infer.quantization.pack import linear_packer, quantize_experts

    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        decoder = quantize_experts(decoder, config.weight_format)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.weight_format, torch.bfloat16)
    if config.weight_format in ("int8", "int4"):
        dtype = torch.float32
    make_linear = linear_packer(config.weight_format) if on_cpu else None
    return TorchRunner(
        decoder, dtype=dtype, block_size=_BLOCK_SIZE, device=device, make_linear=make_linear, **common_args
    )


def _monitor_peers(comm: ShmCommunicator, owner: weakref.ref[Any], fds: Sequence[int]) -> None:
    """Tell the team when a line is dead, for as long as its owner lives."""

    def monitor() -> None:
        while not comm.aborted:
            dead = peer_closed(fds, 300)
            if owner() is None:
                return
            if dead:
                comm.abort()

    threading.Thread(target=monitor, daemon=True, name="thalweg-team").start()


def main(argument: str) -> int:
    """Be a rank that :func:`spawn_workers` has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fields = json.loads(argument)
    torch.set_num_threads(fields["threads"])
    options = EngineConfig(**fields["options"])
    channel = WorkerChannel(socket.socket(fileno=fields["fd"]))
    model = load_mmapped(fields["model"], options)[0]
    with contextlib.suppress(WorkerDiedError):  # rank 0 is gone, and with it the reason to be
        worker_loop = start_worker(
            build_decoder_spec(model), channel, fields["rank"], fields["size"], "cpu", fields["threads"]
        )
        del model
        assert worker_loop.run()["op"] == "close"
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
