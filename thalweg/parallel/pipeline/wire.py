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

from thalweg.comm import Ledger

_PLAIN = (bool, int, float, str, type(None))


class Wire:
    """This rank's connection with the others of ``group`` (ranks of the group throughout).

    ``back``: a group of the same ranks for messages to earlier ones, if they need one of their own.
    ``ledger`` counts what is sent: tensors as ``send``, what describes them as ``header``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        ledger: Ledger | None = None,
        back: dist.ProcessGroup | None = None,
    ) -> None:
        self._device, self.ledger = device, ledger or Ledger()
        self._up, self._down = group, back or group
        self._rank = dist.get_rank(group)
        self._going: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent_headers: dict[tuple[int, Hashable], bytes] = {}
        self._seen_headers: dict[tuple[int, Hashable], bytes] = {}
        self._expected: dict[int, deque[tuple[Hashable, Hashable]]] = {}
        self._arrived: dict[tuple[int, Hashable, Hashable], Any] = {}

    def expect(self, source: int, messages: Iterable[tuple[Hashable, Hashable]]) -> None:
        """Say in which order ``source`` will send: its (kind, name) pairs from now on."""
        self._expected.setdefault(source, deque()).extend(messages)

    def _towards(self, source: int, destination: int) -> dist.ProcessGroup | None:
        return self._up if source < destination else self._down

    def send(self, destination: int, kind: Hashable, value: Any, name: str = "messages") -> None:
        """Send a tree without waiting; its tensors must not be written to before :meth:`drain`.

        ``name``: what the ledger calls it.
        """
        tensors: list[Tensor] = []
        header = json.dumps(_encode(value, tensors), separators=(",", ":")).encode()
        known = self._sent_headers.get((destination, kind)) == header
        self._sent_headers[destination, kind] = header
        self._post(torch.tensor([0 if known else len(header)]), destination)
        if not known:
            self._post(torch.frombuffer(bytearray(header), dtype=torch.uint8), destination)
        for tensor in tensors:
            if tensor.numel():
                self._post(tensor.detach().contiguous(), destination)
        self._count("header", name, 8 if known else 8 + len(header))
        self._count("send", name, sum(tensor.nbytes for tensor in tensors))
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()

    def _count(self, kind: str, name: str, num_bytes: int) -> None:
        self.ledger.record(kind, name, "pipeline", full_bytes=num_bytes, world_size=2)

    def _post(self, tensor: Tensor, destination: int) -> None:
        work = dist.isend(tensor, group_dst=destination, group=self._towards(self._rank, destination))
        assert work is not None
        self._going.append((work, tensor))

    def receive(self, source: int, kind: Hashable, name: Hashable) -> Any:
        """The message (kind, name) of ``source``; waits for it."""
        while (source, kind, name) not in self._arrived:
            expected = self._expected.get(source)
            assert expected, f"rank {source} of the pipeline is not to send {kind} {name}"
            next_kind, next_name = expected.popleft()
            self._arrived[source, next_kind, next_name] = self._take(source, next_kind)
        return self._arrived.pop((source, kind, name))

    def _take(self, source: int, kind: Hashable) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group_src=source, group=self._towards(source, self._rank))
        if length.item():
            raw = torch.empty(int(length.item()), dtype=torch.uint8)
            dist.recv(raw, group_src=source, group=self._towards(source, self._rank))
            self._seen_headers[source, kind] = raw.numpy().tobytes()
        return self._decode(json.loads(self._seen_headers[source, kind]), source)

    def _decode(self, node: Any, source: int) -> Any:
        tag, body = node
        if tag == "tensor":
            dtype, shape, trains = body
            tensor = torch.empty(shape, dtype=_dtype(dtype), device=self._device)
            if tensor.numel():
                dist.recv(tensor, group_src=source, group=self._towards(source, self._rank))
            return tensor.requires_grad_(trains)
        if tag == "plain":
            return body
        if tag == "dict":
            return {key: self._decode(child, source) for key, child in body}
        items = [self._decode(child, source) for child in body]
        return tuple(items) if tag == "tuple" else items

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        while self._going:
            self._going.popleft()[0].wait()


def _encode(value: Any, tensors: list[Tensor]) -> list[Any]:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", [_dtype_code(value.dtype), list(value.shape), value.requires_grad]]
    if isinstance(value, _PLAIN):
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


def _dtype_code(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(code: str) -> torch.dtype:
    dtype = getattr(torch, code)
    assert isinstance(dtype, torch.dtype)
    return dtype
