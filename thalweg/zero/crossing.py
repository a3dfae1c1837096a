"""Homes on several hosts: one copy of the parameters a host, kept in step by what changed.

The picture: each host has a home of every parameter, which its ranks share.  A rank owns
the rows of its shard; its peers, the ranks with its place on the other hosts, get them once
a window and write them into their host's home.  Forward and backward then read the home:
nothing crosses the network between two updates.  This is hpZ, the secondary shard within
a host (ZeRO++, section 3.2), with a host's memory in place of its ranks'.

Where weights are quantised (qwZ), both ends hold what was sent before, so a rank sends not
its rows but how far they have moved from what the others hold: 4 bits of a step say more than
8 bits of a weight, and what rounding takes is still there to be sent the next time.  A step
that is too large for that, such as a loaded checkpoint, goes as whole weights in 8 bits, so
the error is never above that of qwZ itself.  In ascending order::

    SAME nothing   STEP 4 bits of the difference   WHOLE 8 bits   RAW the compute dtype

Ranks agree on the highest of their wishes for each parameter, in one small all-reduce.

Invariants: all homes hold the same bits, as the sender too applies what it sent; rows of a
home are written by one rank of the host, between the end of a backward pass on all of them
and the fence that opens the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm import Codec, Hosts, Ledger, Packing
from thalweg.comm.quantised import WEIGHTS, gather_payloads
from thalweg.zero.homes import Store

SAME, STEP, WHOLE, RAW = range(4)
STEPS = Codec(4)
# Payload of one all-gather: large enough for the link, small beside the model.
_BUCKET_BYTES = 8 << 20


@dataclass
class _Parcel:
    """What this rank sends of one parameter."""

    store: Store
    mode: int
    payload: Tensor | None = None


class Crossing:
    """Brings this host's homes up to date; collective over ``group``."""

    def __init__(
        self, hosts: Hosts, rank: int, group: dist.ProcessGroup, ledger: Ledger, lossy: frozenset[str]
    ) -> None:
        """``lossy``: names of the parameters that may be rounded on their way."""
        self._hosts, self._group, self._ledger, self._lossy = hosts, group, ledger, lossy
        self._peers = hosts.shards_of_peers(rank)
        self._rank, self._world_size = rank, dist.get_world_size(group)
        self._versions: dict[str, int] = {}
        self._updated = False
        self._pending: set[str] = set()

    def begin_anew(self) -> None:
        """Take it that nobody holds anything: all parameters go as they are the next time."""
        self._versions.clear()
        self._pending.clear()
        self._updated = False

    def note_update(self) -> None:
        """An optimizer step may change every trained parameter from here on."""
        self._updated = True

    def __call__(self, stores: Iterable[Store]) -> None:
        """Send what has changed and write what comes; a fence must follow before anyone reads."""
        stores = list(stores)
        if self._updated:
            self._pending.update(name for name in self._versions)
            self._updated = False
        parcels = [self._wish(store) for store in stores]
        self._agree(parcels)
        full = sum(parcel.store.slot.home_bytes for parcel in parcels if parcel.mode != SAME)
        with self._ledger.timed(
            "all_gather", "parameters", "both", full_bytes=full, world_size=self._world_size
        ) as call:
            for bucket in _buckets([parcel for parcel in parcels if parcel.mode != SAME]):
                sent = torch.cat([self._payload(parcel) for parcel in bucket])
                received = gather_payloads(sent, self._hosts.peers, self._hosts.num_hosts)
                for rank, row in zip(self._peers, received, strict=True):
                    self._apply(bucket, rank, row)
                call.moved(*self._hosts.peers_route.ring(sent.numel()))
        for store in stores:
            self._versions[store.slot.name] = store.version()
            self._pending.discard(store.slot.name)

    def _wish(self, store: Store) -> _Parcel:
        name = store.slot.name
        if name not in self._versions:
            return _Parcel(store, RAW)
        moved = store.version() != self._versions[name]
        if not moved and not (name in self._pending and (store.trains or store.slot.trains)):
            return _Parcel(store, SAME)
        if name not in self._lossy:
            return _Parcel(store, RAW)
        numel = store.shard.numel()
        step = torch.sub(store.shard.view(-1).float(), store.rows_of(self._rank).view(-1))
        payload = torch.empty(STEPS.num_bytes(numel), dtype=torch.uint8)
        STEPS.encode(step, payload)
        fine = STEPS.step_sizes(payload, numel).square().sum()
        coarse = WEIGHTS.errors(store.shard.view(-1)).square().sum()
        return _Parcel(store, STEP, payload) if fine <= coarse else _Parcel(store, WHOLE)

    def _agree(self, parcels: list[_Parcel]) -> None:
        modes = torch.tensor([parcel.mode for parcel in parcels], dtype=torch.uint8)
        dist.all_reduce(modes, op=dist.ReduceOp.MAX, group=self._group)
        for parcel, mode in zip(parcels, modes.tolist(), strict=True):
            if mode != parcel.mode:
                parcel.payload = None
            parcel.mode = mode

    def _payload(self, parcel: _Parcel) -> Tensor:
        if parcel.payload is not None:
            return parcel.payload
        store, form = parcel.store, _form(parcel)
        values = store.shard.view(-1)
        if parcel.mode == STEP:  # this rank's rows are as they were, another's are not
            values = torch.sub(values.float(), store.rows_of(self._rank).view(-1))
        payload = torch.empty(form.num_bytes, dtype=torch.uint8)
        form.pack(values, payload)
        return payload

    def _apply(self, bucket: list[_Parcel], rank: int, row: Tensor) -> None:
        begin = 0
        for parcel in bucket:
            form, rows = _form(parcel), parcel.store.rows_of(rank)
            payload = row[begin : begin + form.num_bytes]
            begin += form.num_bytes
            if rank == self._rank and parcel.mode == RAW and rows.data_ptr() == parcel.store.shard.data_ptr():
                continue  # the shard is its rows
            form.unpack(payload, rows.view(-1), add=parcel.mode == STEP)


def _form(parcel: _Parcel) -> Packing:
    codec = WEIGHTS if parcel.mode == WHOLE else STEPS
    return Packing(((parcel.store.shard.numel(), parcel.mode != RAW),), codec, parcel.store.slot.compute)


def _buckets(parcels: list[_Parcel]) -> Iterable[list[_Parcel]]:
    bucket: list[_Parcel] = []
    used = 0
    for parcel in parcels:
        if bucket and used > _BUCKET_BYTES:
            yield bucket
            bucket, used = [], 0
        bucket.append(parcel)
        used += _form(parcel).num_bytes
    if bucket:
        yield bucket
