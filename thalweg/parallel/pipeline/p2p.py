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

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
        self._sent_headers: dict[tuple[int, Hashable], bytes] = {}
        self._received_headers: dict[tuple[int, Hashable], bytes] = {}
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
        tensors: list[Tensor] = []
        header = json.dumps(_encode(value, tensors), separators=(",", ":")).encode()
        header_is_known = self._sent_headers.get((destination, kind)) == header
        self._sent_headers[destination, kind] = header
        parts = [torch.tensor([0 if header_is_known else len(header)])]
        if not header_is_known:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        parts += [tensor.detach().contiguous() for tensor in tensors if tensor.numel()]
        for part in parts:
            work = dist.isend(part, group_dst=destination, group=self._group_towards(self._rank, destination, part))
            assert work is not None
            self._pending_sends.append((work, part))
        header_bytes = 8 if header_is_known else 8 + len(header)
        for traffic, num_bytes in (("header", header_bytes), ("send", sum(tensor.nbytes for tensor in tensors))):
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
            self._received_headers[source, kind] = raw.numpy().tobytes()
        return self._decode(json.loads(self._received_headers[source, kind]), source)

    def _recv(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            dist.recv(tensor, group_src=source, group=self._group_towards(source, self._rank, tensor))
        return tensor

    def _decode(self, node: Any, source: int) -> Any:
        tag, body = node
        if tag == "tensor":
            dtype, shape, requires_grad = body
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            return self._recv(tensor, source).requires_grad_(requires_grad)
        if tag == "plain":
            return body
        if tag == "dict":
            return {key: self._decode(child, source) for key, child in body}
        items = [self._decode(child, source) for child in body]
        return tuple(items) if tag == "tuple" else items

    def wait_sends(self) -> None:
        """Wait until all that was sent has left."""
        while self._pending_sends:
            work, _part = self._pending_sends.popleft()  # held until it has left
            work.wait()


def _encode(value: Any, tensors: list[Tensor]) -> list[Any]:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape), value.requires_grad]]
    if isinstance(value, _JSON_TYPES):
        return ["plain", value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", [[key, _encode(child, tensors)] for key, child in value.items()]]
    if isinstance(value, tuple | list):
        tag = "tuple" if isinstance(value, tuple) else "list"
        return [tag, [_encode(child, tensors) for child in value]]
    raise ValueError(
        f"a pipeline stage returned a {type(value).__name__}: stages pass on tensors, numbers, strings, "
        "None, and tuples, lists and dicts of them"
    )
