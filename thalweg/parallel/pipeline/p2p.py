"""Messages between the ranks of a pipeline: trees of tensors, of any shape, anew each time.

A message is a header and its tensors.  The header (JSON: the tree, the dtypes and shapes, and
whatever leaves are no tensors) travels only when it differs from the last one of its kind, so
a steady pipeline pays eight bytes for it and an unsteady one is still right.

No tags: the receiver knows from the schedule in which order a peer sends, takes the messages in
that order, and keeps those that come before it needs them.  Sends do not wait, so two ranks
that send to each other cannot block; nothing here is a pickle.

On CUDA the messages of two ranks in a group run on one stream, in order: a send would wait for a
receive that stands behind the peer's own send.  So those to later ranks and those to earlier ones go
by a group each there; within one of the two their order is that of the schedule.
"""

import json
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from thalweg.comm import CommsLog
from thalweg.parallel_dims import control_group

_JSON_TYPES = (bool, int, float, str, type(None))


class P2PChannel:
    """This rank's connection with the others of ``group`` (ranks of the group throughout).

    ``reverse_group``: a group of the same ranks for messages to earlier ones, if they need one of their own.
    ``ledger`` counts what is sent: tensors as ``send``, what describes them as ``header``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        ledger: CommsLog | None = None,
        reverse_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device, self.ledger = device, ledger or CommsLog()
        self.group, self._reverse_group = group, reverse_group or group
        self._rank = dist.get_rank(group)
        for one in (self.group, self._reverse_group):  # now, as a message is between two ranks and this needs all
            control_group(one)
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._pending_on_host: deque[tuple[dist.Work, Tensor]] = (
            deque()
        )  # gloo's say that they have left only when asked
        # By peer and kind, the last message's tree and leaves: numbers and the like, and what describes a tensor.
        self._sent_headers: dict[tuple[int, Hashable], tuple[TreeSpec, str]] = {}
        self._received_headers: dict[tuple[int, Hashable], tuple[TreeSpec, list[Any]]] = {}
        self._recv_order: dict[int, deque[tuple[Hashable, Hashable]]] = {}
        self._received: dict[tuple[int, Hashable, Hashable], Any] = {}

    def set_recv_order(self, source: int, messages: Iterable[tuple[Hashable, Hashable]]) -> None:
        """Say in which order ``source`` will send: its (kind, name) pairs from now on."""
        self._recv_order.setdefault(source, deque()).extend(messages)

    def _group_towards(self, source: int, destination: int, tensor: Tensor) -> dist.ProcessGroup:
        return control_group(self.group if source < destination else self._reverse_group, tensor.device)

    def send(self, destination: int, kind: Hashable, value: Any, name: str = "messages") -> None:
        """Send a tree without waiting; its tensors must not be written to before :meth:`drain`.

        ``name``: what the ledger calls it.
        """
        leaves, spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        header, raw = (spec, json.dumps([_describe(leaf) for leaf in leaves])), b""
        if self._sent_headers.get((destination, kind)) != header:
            self._sent_headers[destination, kind] = header
            raw = json.dumps([treespec_dumps(spec), header[1]]).encode()
        parts = [torch.tensor([len(raw)])]
        if raw:
            parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        parts += [tensor.detach().contiguous() for tensor in tensors if tensor.numel()]
        for part in parts:
            work = dist.isend(part, group_dst=destination, group=self._group_towards(self._rank, destination, part))
            assert work is not None
            (self._pending_on_host if part.is_cpu else self._pending_sends).append((work, part))
        for traffic, num_bytes in (("header", 8 + len(raw)), ("send", sum(tensor.nbytes for tensor in tensors))):
            self.ledger.record(traffic, name, "pipeline", full_bytes=num_bytes, world_size=2)
        while self._pending_sends and self._pending_sends[0][0].is_completed():
            self._pending_sends.popleft()

    def receive(self, source: int, kind: Hashable, name: Hashable) -> Any:
        """The message (kind, name) of ``source``; waits for it."""
        while (source, kind, name) not in self._received:
            recv_order = self._recv_order.get(source)
            assert recv_order, f"rank {source} of the pipeline is not to send {kind} {name}"
            next_kind, next_name = recv_order.popleft()
            self._received[source, next_kind, next_name] = self._receive_next(source, next_kind)
        return self._received.pop((source, kind, name))

    def _receive_next(self, source: int, kind: Hashable) -> Any:
        length = int(self._recv(torch.zeros(1, dtype=torch.int64), source))
        if length:
            raw = self._recv(torch.empty(length, dtype=torch.uint8), source)
            spec, leaves = json.loads(raw.numpy().tobytes())
            self._received_headers[source, kind] = treespec_loads(spec), json.loads(leaves)
        spec, leaves = self._received_headers[source, kind]
        return tree_unflatten([self._recv_leaf(leaf, source) for leaf in leaves], spec)

    def _recv(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            dist.recv(tensor, group_src=source, group=self._group_towards(source, self._rank, tensor))
        return tensor

    def _recv_leaf(self, leaf: Any, source: int) -> Any:
        if not isinstance(leaf, list):
            return leaf
        dtype, shape, requires_grad = leaf
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        return self._recv(tensor, source).requires_grad_(requires_grad)

    def wait_sends(self) -> None:
        """Wait until all that was sent has left."""
        for pending in (self._pending_on_host, self._pending_sends):
            while pending:
                work, _part = pending.popleft()  # held until it has left
                work.wait()


def _describe(leaf: Any) -> Any:
    """What the receiver must know of it: a tensor's dtype, shape and whether it has a gradient, else itself."""
    if isinstance(leaf, Tensor):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]
    if isinstance(leaf, _JSON_TYPES):
        return leaf
    raise ValueError(
        f"a pipeline stage returned a {type(leaf).__name__}: stages pass on tensors, numbers, strings, "
        "None, and tuples, lists and dicts of them"
    )
