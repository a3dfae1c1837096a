"""Several processes that compute the steps of one engine: shards of layers, stages of them, experts.

The picture: rank 0 has the scheduler, the sampler and the callers, and a :class:`DriverRunner` as its runner.  For each
step it sends the others the tokens to compute and what has changed in the block tables; then all ranks run their shard
(``shard.py``), add up partial results twice a layer, and pass activations from stage to stage (``communicator.py``).
Between steps the others wait in :meth:`WorkerLoop.run`.

Ends (``process_group.py``): when a rank ends, all waiting ends with it, and the step fails with an error that says
which process ended and how.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistNetworkError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thalweg.infer.config import EngineConfig
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.loader.hf import load_mmapped
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import DecoderSpec
from thalweg.infer.parallel.communicator import StageCommunicator
from thalweg.infer.parallel.process_group import LOOPBACK, InferenceGroup, WorkerDiedError, connect_by_store
from thalweg.infer.parallel.shard import shard_for_rank
from thalweg.infer.parallel.shm_comm import ShmCommunicator
from thalweg.infer.precision import get_kv_cache_dtype, get_weight_format
from thalweg.infer.runners.base import ModelInput, ModelRunner, QuerySpan, RunnerRequest, count_kv_blocks
from thalweg.infer.runners.cpu_program import kernels_unsupported_reason
from thalweg.infer.runners.cpu_runner import CpuRunner
from thalweg.infer.runners.torch_runner import TorchRunner
from thalweg.infer.types import Request, RequestOutput


class DriverRunner(ModelRunner):
    """Rank 0's runner: tells the others what to compute, and computes its own shard."""

    def __init__(self, inner: ModelRunner, comm: StageCommunicator, num_blocks: int) -> None:
        self.inner, self.comm, self.group = inner, comm, comm.group
        # Of this rank's shard and cache: each of the others sleeps and wakes up by itself.
        self.argmax, self.sleep, self.wake_up = inner.argmax, inner.sleep, inner.wake_up
        self.num_blocks, self.block_size, self.num_slots = num_blocks, inner.block_size, inner.num_slots
        self.weight_bytes = getattr(inner, "weight_bytes", None)
        self._finalizer = weakref.finalize(self, comm.close)

    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits of the batch's rows, or the hidden states.  Raises WorkerDiedError.

        Any other error ends the engine too, as does Ctrl-C: the others are amid a step that this rank has left.
        """
        try:
            self._broadcast_step(batch)
            result = self.inner.run(batch)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # what they wait for would keep the connections open
            self._finalizer()
            raise
        self._raise_if_failed()
        return result

    @property
    def failure(self) -> str:
        """Which rank has ended, or an empty text."""
        failed = self.comm.failed_rank
        if failed is None or not self._finalizer.alive:
            return ""
        self.group.fail(failed)
        return self.group.failure_message()

    def close(self) -> None:
        """End the others and free the shard."""
        self._finalizer()
        self.inner.close()

    def _broadcast_step(self, batch: ModelInput) -> None:
        self._raise_if_failed()
        # The workers' runners keep the blocks of earlier steps: a token in the middle of a block goes on in the last.
        block_tables = [
            list(blocks[: -(-(span.start + span.num_tokens) // self.block_size)])
            if span.num_tokens > 1 or span.start % self.block_size == 0
            else []
            for span, blocks in zip(batch.spans, batch.block_tables, strict=True)
        ]
        self.group.broadcast({
            "op": "run", "tokens": batch.tokens, "spans": batch.spans, "logit_indices": list(batch.logit_indices),
            "block_tables": block_tables, "wants_hidden_states": batch.wants_hidden_states,
        })  # fmt: skip

    def _raise_if_failed(self) -> None:
        if failure := self.failure:
            raise WorkerDiedError(failure)


class WorkerLoop:
    """Another rank's side: computes its shard when rank 0 says so."""

    def __init__(self, runner: ModelRunner, comm: StageCommunicator) -> None:
        self._runner, self._comm = runner, comm
        self.sleep, self.wake_up = runner.sleep, runner.wake_up  # of this rank's shard and cache

    def run(self) -> dict[str, Any]:
        """Compute steps until rank 0 sends a message of another kind; return it.

        Raises WorkerDiedError when a rank has ended; so ends the loop when rank 0 closes the engine.
        """
        try:
            while True:
                message = self._comm.group.receive()
                if message.pop("op") != "run":
                    return message
                spans = [QuerySpan(*span) for span in message.pop("spans")]
                self._runner.run(ModelInput(spans=spans, **message))
        except BaseException:
            self._comm.close()
            raise

    def wait_result(self) -> dict[str, Any]:
        """Work until rank 0 has generated; return what it has filled in.  Raises what happened there."""
        message = self.run()
        if message["error"]:
            raise RuntimeError(f"rank 0: {message['error']}")
        return message

    def close(self) -> None:
        """Leave the group and free the shard."""
        self._comm.close()
        self._runner.close()


class GroupEngine:
    """One rank of a launched engine to which every rank brings requests: each has its own, and all compute them.

    ``member``: rank 0's engine, another rank's loop.
    """

    def __init__(self, member: LLMEngine | WorkerLoop, group: InferenceGroup) -> None:
        self.member, self.group = member, group

    def run_requests(self, requests: Iterable[Request]) -> Generator[RequestOutput]:
        """Run all ranks' requests together, and yield the outputs of this rank's.

        Each rank calls it, or :meth:`finish`.  Raises an error of rank 0 on all of them, and WorkerDiedError.
        """
        yield from self._run(list(requests)) or ()

    def finish(self) -> None:
        """Compute with the others until none of them has requests any more; collective."""
        while self._run(None) is not None:
            pass

    def _run(self, requests: list[Request] | None) -> list[RequestOutput] | None:
        by_rank = self.group.all_gather_object(requests)
        if all(each is None for each in by_rank):
            return None
        outputs: list[list[RequestOutput]] = [[] for _ in by_rank]

        def run(core: LLMEngine) -> None:
            named = [
                replace(each, request_id=f"{rank} {each.request_id}")
                for rank, of_rank in enumerate(by_rank)
                for each in of_rank or ()
            ]
            for output in core.run_requests(named):
                rank, _, name = output.request_id.partition(" ")
                outputs[int(rank)].append(replace(output, request_id=name))

        self.drive(run)
        return self.group.all_gather_object(outputs)[0][self.group.rank]

    def drive(self, use: Callable[[LLMEngine], Any]) -> Any:
        """Return what ``use`` makes of the engine on rank 0; elsewhere compute its steps, and return None."""
        if isinstance(self.member, WorkerLoop):
            self.member.wait_result()
            return None
        with broadcast_result(self.member.runner):
            return use(self.member)


@contextlib.contextmanager
def broadcast_result(runner: Any) -> Iterator[dict[str, Any]]:
    """Let launched followers know the end of the block: the dict it fills in, or its error."""
    result: dict[str, Any] = {}
    if not isinstance(runner, DriverRunner) or runner.group.processes:  # which this rank has started
        yield result
        return
    try:
        yield result
    except BaseException as error:
        with contextlib.suppress(WorkerDiedError):  # those who are there still wait
            runner.group.broadcast({"op": "end", "error": f"{type(error).__name__}: {error}"})
        raise
    runner.group.broadcast({"op": "end", "error": None, **result})


def start_driver(decoder: DecoderSpec, options: EngineConfig, group: InferenceGroup, **plan: Any) -> DriverRunner:
    """Return rank 0's runner of a decoder, when every other rank is in :func:`start_worker`.

    ``plan``: what all ranks do alike, the arguments of :func:`_build_runner`.  On an error the caller closes the group.
    """
    if options.dtype == "auto" and not options.quantization:  # what suits this host, on every rank
        options = replace(options, dtype=get_weight_format(options))
    group.connect()
    group.broadcast({"options": asdict(options), "plan": plan})
    runner = _build_runner(decoder, options, group, **plan)
    num_blocks = runner.num_blocks  # of the cache that holds least
    for rank in range(1, group.num_ranks):
        reply = group.receive(rank)
        if error := reply["error"]:
            raise RuntimeError(f"inference rank {rank}: {error}")
        num_blocks = min(num_blocks, reply["num_blocks"])
    return DriverRunner(runner, runner.comm, num_blocks)


def start_worker(decoder: DecoderSpec, group: InferenceGroup, device: str) -> WorkerLoop:
    """Return another rank's counterpart of :func:`start_driver`."""
    try:
        group.connect()
        message = group.receive()
        options, plan = EngineConfig(**{**message["options"], "device": device}), message["plan"]
        assert options.num_ranks == group.num_ranks, "rank 0 plans for as many ranks as there are"
        try:
            runner = _build_runner(decoder, options, group, **plan)
        except Exception as error:
            group.send({"error": f"{type(error).__name__}: {error}"}, [0])
            raise
        group.send({"error": None, "num_blocks": runner.num_blocks}, [0])
    except BaseException:
        group.close()
        raise
    return WorkerLoop(runner, runner.comm)


def kernel_gap(decoder: DecoderSpec, options: EngineConfig) -> str | None:
    """Return why the native kernels cannot run the parts, or None."""
    kv_cache_dtype = get_kv_cache_dtype(options)
    parts = [decoder, *(shard_for_rank(decoder, rank, options) for rank in range(options.num_ranks))]
    return next(filter(None, (kernels_unsupported_reason(part, kv_cache_dtype) for part in parts)), None)


def _build_runner(
    decoder: DecoderSpec,
    options: EngineConfig,
    group: InferenceGroup,
    *,
    cpu: bool,
    num_blocks: int | None,
    max_length: int,
) -> Any:
    """Return this rank's runner, of the CPU kernels or not; its ``comm`` is what it shares with the others.

    ``num_blocks``: of the KV cache; None: as many as this rank's device holds.
    """
    comm = (ShmCommunicator if cpu and options.ranks_per_stage > 1 else StageCommunicator)(
        group, num_stages=options.pipeline_parallel_size, max_num_batched_tokens=options.max_num_batched_tokens,
        hidden_size=decoder.hidden_size, vocab_size=decoder.vocab_size,
    )  # fmt: skip
    shard = shard_for_rank(decoder, group.rank, options)
    blocks = partial(count_kv_blocks, shard, options, max_length) if num_blocks is None else num_blocks
    request = RunnerRequest(None, shard, options, max_length, options.max_num_seqs, blocks, comm=comm)
    return (CpuRunner if cpu else TorchRunner)(request)


def main(argument: str) -> int:
    """Be a rank that :func:`.process_group.spawn_workers` has started."""
    # Either may be sent to all processes at once: rank 0's end is this one's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fields = json.loads(argument)
    torch.set_num_threads(fields["num_threads"])
    # Rank 0 has ended or closed the engine, if need be before this one has met it: this rank has no other purpose.
    with contextlib.suppress(WorkerDiedError, DistNetworkError):
        store = TCPStore(LOOPBACK, fields["port"], is_master=False)
        model = load_mmapped(fields["model"], EngineConfig(**fields["options"]))[0]
        ranks = fields["rank"], fields["num_ranks"]
        device = fields["options"]["device"]
        connect = connect_by_store(store, device, fields["ranks_per_stage"])
        group = InferenceGroup(connect, *ranks, num_threads=fields["num_threads"])
        worker_loop = start_worker(build_decoder_spec(model), group, device)
        del model
        worker_loop.run()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
