"""Ranks that generate and do not train: weights go to them bucket by bucket, prompts and responses as messages.

::

    rank          0 .. T-1, which train                      T .. W-1, which generate
    command       rank 0: go on, in this dtype ----------->
    sync          <------------- what is read next           an inference engine reads layer by layer
                  gather it; rank 0 broadcasts it ------->   LoRA is merged, the weights are packed
    prompts       each rank's own ------------------------>  those of ranks r with r % (W - T) alike
    train         ...                                        generate
    responses     <---------------------------------------   as they are there

With a ``tensor_parallel_size`` so many generating neighbours are one inference engine: each has its part of every
layer, and all compute what any of them is asked for.

The generating side is a :class:`.weight_sync.HybridEngine`, too: its actor (:class:`_RemoteActor`) has the modules, and
asks the ranks that train for weights, and for the logits that the first sync is verified by.

Invariants: all ranks take part in each question and its answer, in the order in which the first generating rank asks;
the others read the same.  Training waits for the sync, not for what is generated.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.device import pick_device
from thalweg.engine import Engine
from thalweg.infer.config import EngineConfig
from thalweg.infer.parallel.process_group import InferenceGroup, join_launched_group
from thalweg.infer.precision import eval_mode
from thalweg.parallel_dims import init_distributed, without_communicator_split
from thalweg.rlhf.rollout import Rollout, RolloutAhead, generate_rollout
from thalweg.rlhf.weight_sync import HybridEngine

_NO_TIMEOUT = timedelta(days=365)  # one side waits for as long as the other trains, or generates


class RolloutRanks:
    """The job's ranks, of which the last ``num_generating`` generate, ``tensor_parallel_size`` together; making it is
    collective.

    ``mesh``: the ranks that train, for their engines.  ``is_generating``: whether this rank has none.

    Raises:
        ValueError: no rank is left to train, or none generates, or some are left over.
    """

    def __init__(self, num_generating: int, tensor_parallel_size: int = 1) -> None:
        self.device = pick_device(init_distributed().local_rank)
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        if not 0 < num_generating < world_size:
            raise ValueError(f"rollout_ranks is {num_generating}; of {world_size} ranks, one at least must train")
        if num_generating % tensor_parallel_size:
            raise ValueError(f"{num_generating} rollout_ranks are no whole number of groups of {tensor_parallel_size}")
        self.tensor_parallel_size = tensor_parallel_size
        self.num_training = world_size - num_generating
        self.peers = range(self.num_training, world_size)  # that generate
        self.is_generating = self.rank in self.peers
        with without_communicator_split():
            self.mesh = DeviceMesh(self.device.type, list(range(self.num_training)), mesh_dim_names=("dp",))
            self.messages: Any = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
            self.weights: Any = dist.new_group([0, *self.peers])
            self.generating: Any = dist.new_group(list(self.peers))

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value that a rank has; collective over all of them."""
        values = [value]
        dist.broadcast_object_list(values, source, self.messages)
        return values[0]

    def _receive(self, source: int) -> Any:
        values: list[Any] = [None]
        dist.recv_object_list(values, source, self.messages)
        return values[0]

    # The side that trains

    def begin(
        self, version: int, actor: Engine, arguments: Mapping[str, Any], join: Callable[[Rollout], Rollout]
    ) -> RolloutAhead:
        """Hand over the actor's weights and :func:`.rollout.generate_rollout`'s arguments; collective.  ``join``: as
        :meth:`.RolloutAhead.begin`'s."""
        self._command("bf16" if actor.bfloat16_enabled() else "fp16" if actor.fp16_enabled() else "fp32")
        with ExitStack() as reading:
            while (question := self.broadcast(None, self.peers[0])) is not None:
                self._answer(actor, reading, *question)
        peer = self.peers[self.rank % len(self.peers)]
        dist.send_object_list([arguments], peer, self.messages)
        return RolloutAhead.begin(version, nullcontext(), lambda _: self._receive(peer), join, self.device)

    def _answer(self, actor: Engine, reading: ExitStack, kind: str, value: Any) -> None:
        if kind == "open":
            self._read: Callable[[Mapping[str, Tensor]], None] = reading.enter_context(actor.sharded_model.read_whole())
        elif kind == "close":
            reading.close()
        elif kind == "group":
            join_launched_group(EngineConfig(**value), self.peers)
        elif kind == "logits":
            with torch.no_grad(), eval_mode(actor.module):
                logits = actor(input_ids=value.to(actor.device)).logits
            self.broadcast(logits.cpu(), 0)
        for name, shape, dtype in value if kind == "read" else ():
            out = torch.empty(shape, dtype=dtype, device=actor.device)
            self._read({name: out})
            if self.rank == 0:
                dist.broadcast(out, 0, self.weights)

    def close(self) -> None:
        """Let the generating ranks go on to what comes after :meth:`generate`."""
        self._command(None)

    def _command(self, dtype: str | None) -> None:
        """Rank 0 alone tells them: one that fails, and closes, waits for no other that trains."""
        for peer in self.peers if self.rank == 0 else ():
            dist.send_object_list([dtype], peer, self.messages)

    # The side that generates

    def generate(self, model: nn.Module, max_model_len: int) -> None:
        """Generate sequences of up to so many tokens until the others :meth:`close`; the model's own values are
        dropped."""
        sizes: dict[str, Any] = {"tensor_parallel_size": self.tensor_parallel_size, "max_model_len": max_model_len}
        hybrid = None
        while (dtype := self._receive(0)) is not None:
            if hybrid is None:
                actor: Any = _RemoteActor(self, model, dtype)
                hybrid = HybridEngine(actor, EngineConfig(dtype=dtype, **sizes), join_group=actor.join_group)
                model.to("meta")  # the engine has made a skeleton of it
            with hybrid.generation() as core:
                self.broadcast(None, self.peers[0])
                for trainer in range(self.rank - self.num_training, self.num_training, len(self.peers)):
                    dist.send_object_list([generate_rollout(core, **self._receive(trainer))], trainer, self.messages)
        if hybrid is not None:
            hybrid.close()


class _RemoteActor:
    """What a hybrid engine wants of an actor, where other ranks train it."""

    def __init__(self, ranks: RolloutRanks, module: nn.Module, dtype: str) -> None:
        self.module, self._ranks, self.device, self.sharded_model = module, ranks, ranks.device, self
        self.meshes = SimpleNamespace(pp=None, tp=None, world_group=ranks.generating)
        self.bfloat16_enabled, self.fp16_enabled = lambda: dtype == "bf16", lambda: dtype == "fp16"

    def _ask(self, kind: str, value: Any = None) -> None:
        self._ranks.broadcast((kind, value), self._ranks.peers[0])

    def __call__(self, input_ids: Tensor) -> Any:
        self._ask("logits", input_ids.cpu())
        return SimpleNamespace(logits=self._ranks.broadcast(None, 0).to(self.device))

    def join_group(self, config: EngineConfig) -> InferenceGroup:
        """This rank's group of those that generate: torch makes none without all of the job's ranks."""
        self._ask("group", asdict(config))
        return join_launched_group(config, self._ranks.peers)

    @contextmanager
    def read_whole(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        self._ask("open")
        yield self._read
        self._ask("close")

    def _read(self, outs: Mapping[str, Tensor]) -> None:
        self._ask("read", [(name, out.shape, out.dtype) for name, out in outs.items()])
        for out in outs.values():
            dist.broadcast(out, 0, self._ranks.weights)
