"""Messages between the ranks of a pipeline: trees of tensors, of any shape, anew each time.

A message is a header and its tensors.  The header (JSON: the tree, the dtypes and shapes, and
whatever leaves are no tensors) travels only when it differs from the last one of its kind, so
a steady pipeline pays eight bytes for it and an unsteady one is still right.

No tags: the receiver knows from the schedule in which order a peer sends, takes the messages in
that order, and keeps those that come before it needs them.  Sends do not wait, so two ranks
that send to each other cannot block; nothing here is a pickle.
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

    ``ledger`` counts the tensors that are sent.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, ledger: Ledger | None = None
    ) -> None:
        self._group, self._device = group, device
        self._ledger = ledger or Ledger()
        self._going: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent_headers: dict[tuple[int, Hashable], bytes] = {}
        self._seen_headers: dict[tuple[int, Hashable], bytes] = {}
        self._expected: dict[int, deque[tuple[Hashable, Hashable]]] = {}
        self._arrived: dict[tuple[int, Hashable, Hashable], Any] = {}

    def expect(self, source: int, messages: Iterable[tuple[Hashable, Hashable]]) -> None:
        """Say in which order ``source`` will send: its (kind, name) pairs from now on."""
        self._expected.setdefault(source, deque()).extend(messages)

    def send(self, destination: int, kind: Hashable, value: Any) -> None:
        """Send a tree without waiting; its tensors must not be written to before :meth:`drain`."""
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
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._ledger.record("send", "stages", "pipeline", full_bytes=num_bytes, world_size=2)
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()

    def _post(self, tensor: Tensor, destination: int) -> None:
        work = dist.isend(tensor, group_dst=destination, group=self._group)
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
        dist.recv(length, group_src=source, group=self._group)
        if length.item():
            raw = torch.empty(int(length.item()), dtype=torch.uint8)
            dist.recv(raw, group_src=source, group=self._group)
            self._seen_headers[source, kind] = raw.numpy().tobytes()
        return self._decode(json.loads(self._seen_headers[source, kind]), source)

    def _decode(self, node: Any, source: int) -> Any:
        tag, body = node
        if tag == "tensor":
            dtype, shape, trains = body
            tensor = torch.empty(shape, dtype=_dtype(dtype), device=self._device)
            if tensor.numel():
                dist.recv(tensor, group_src=source, group=self._group)
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
