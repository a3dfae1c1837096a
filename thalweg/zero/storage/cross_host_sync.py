"""Several hosts: one copy of the parameters a host, kept the same by sending what changed.

The picture: each host has an unsharded copy of every parameter, which its ranks share.  A rank owns
the rows of its shard; its peers, the ranks with its local rank on the other hosts, get them once
a window and write them into their host's copy.  Forward and backward then read that copy:
nothing crosses the network between two updates.  This is hpZ, the secondary shard within
a host (ZeRO++, section 3.2), with a host's memory in place of its ranks'.

Where weights are quantised (qwZ), both ends hold what was sent before, so a rank sends not
its rows but how far they have moved from what the others hold: 4 bits of a step say more than
8 bits of a weight, and what rounding takes is still there to be sent the next time.  A step
that is too large for that, such as a loaded checkpoint, goes as whole weights in 8 bits, so
the error is never above that of qwZ itself.  In ascending order::

    UNCHANGED nothing   DELTA 4 bits of the difference   QUANTIZED 8 bits   RAW the compute dtype

Ranks agree on the highest encoding that any of them chose for a parameter, in one small all-reduce.

Invariants: all hosts' copies hold the same bits, as the sender too applies what it sent; rows of a
copy are written by one rank of the host, between the end of a backward pass on all of them
and the barrier that opens the next forward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm import CommsLog
from thalweg.comm.collectives.hierarchical import HostGroups
from thalweg.comm.collectives.quantized import WEIGHT_QUANTIZER, all_gather_payloads
from thalweg.comm.quantization import BlockQuantizer, PayloadFormat
from thalweg.utils.buckets import iter_buckets
from thalweg.zero.storage.base import ShardStorage

UNCHANGED, DELTA, QUANTIZED, RAW = range(4)
DELTA_QUANTIZER = BlockQuantizer(4)
# Payload of one all-gather: large enough for the link, small beside the model.
_BUCKET_BYTES = 8 << 20


@dataclass
class _ParamUpdate:
    """What this rank sends of one parameter."""

    storage: ShardStorage
    encoding: int
    payload: Tensor | None = None


class CrossHostSync:
    """Brings this host's copy of the parameters up to date; collective over ``group``."""

    def __init__(self, hosts: HostGroups, group: dist.ProcessGroup, ledger: CommsLog, lossy: frozenset[str]) -> None:
        """``lossy``: names of the parameters that may be rounded on their way."""
        self._hosts, self._group, self._ledger, self._lossy = hosts, group, ledger, lossy
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._versions: dict[str, int] = {}
        self._updated = False
        self._pending: set[str] = set()

    def reset(self) -> None:
        """Take it that nobody holds anything: all parameters go as they are the next time."""
        self._versions.clear()
        self._pending.clear()
        self._updated = False

    def mark_updated(self) -> None:
        """An optimizer step may change every trained parameter from here on."""
        self._updated = True

    def __call__(self, storages: Iterable[ShardStorage]) -> None:
        """Send what has changed and write what comes; a barrier must follow before anyone reads."""
        storages = list(storages)
        if self._updated:
            self._pending.update(name for name in self._versions)
            self._updated = False
        updates = [self._choose_encoding(store) for store in storages]
        encodings = torch.tensor([parcel.encoding for parcel in updates], dtype=torch.uint8)
        dist.all_reduce(encodings, op=dist.ReduceOp.MAX, group=self._group)
        for parcel, encoding in zip(updates, encodings.tolist(), strict=True):
            if encoding != parcel.encoding:
                parcel.payload = None
            parcel.encoding = encoding
        full = sum(parcel.storage.spec.unsharded_bytes for parcel in updates if parcel.encoding != UNCHANGED)
        with self._ledger.timed("all_gather", "parameters", "both", full, self._world_size) as call:
            sent_updates = [parcel for parcel in updates if parcel.encoding != UNCHANGED]
            for bucket in iter_buckets(sent_updates, lambda one: _get_payload_format(one).num_bytes, _BUCKET_BYTES):
                sent = torch.cat([self._build_payload(parcel) for parcel in bucket])
                received = all_gather_payloads(sent, self._hosts.inter_host_group, self._hosts.num_hosts)
                lengths = [_get_payload_format(one).num_bytes for one in bucket]
                for rank, row in zip(self._hosts.peer_ranks, received, strict=True):
                    for update, payload in zip(bucket, row.split(lengths), strict=True):
                        rows, shard = update.storage.get_rank_rows(rank), update.storage.shard
                        if rank == self._rank and update.encoding == RAW and rows.data_ptr() == shard.data_ptr():
                            continue  # the shard is its rows
                        add = update.encoding == DELTA
                        _get_payload_format(update).unpack(payload, rows.view(-1), add=add)
                call.add_bytes(*self._hosts.inter_host_topology.ring_bytes(sent.numel()))
        for store in storages:
            self._versions[store.spec.name] = store.version()
            self._pending.discard(store.spec.name)

    def _choose_encoding(self, storage: ShardStorage) -> _ParamUpdate:
        name = storage.spec.name
        if name not in self._versions:
            return _ParamUpdate(storage, RAW)
        is_modified = storage.version() != self._versions[name]
        if not is_modified and not (name in self._pending and (storage.requires_grad or storage.spec.requires_grad)):
            return _ParamUpdate(storage, UNCHANGED)
        if name not in self._lossy:
            return _ParamUpdate(storage, RAW)
        numel = storage.shard.numel()
        delta = torch.sub(storage.shard.view(-1).float(), storage.get_rank_rows(self._rank).view(-1))
        payload = torch.empty(DELTA_QUANTIZER.num_bytes(numel), dtype=torch.uint8)
        DELTA_QUANTIZER.quantize(delta, payload)
        delta_error = DELTA_QUANTIZER.get_scales(payload, numel).square().sum()
        quantized_error = WEIGHT_QUANTIZER.compute_scales(storage.shard.view(-1)).square().sum()
        if delta_error <= quantized_error:
            return _ParamUpdate(storage, DELTA, payload)
        return _ParamUpdate(storage, QUANTIZED)

    def _build_payload(self, update: _ParamUpdate) -> Tensor:
        if update.payload is not None:
            return update.payload
        storage, payload_format = update.storage, _get_payload_format(update)
        values = storage.shard.view(-1)
        if update.encoding == DELTA:  # this rank's rows are as they were, another's are not
            values = torch.sub(values.float(), storage.get_rank_rows(self._rank).view(-1))
        payload = torch.empty(payload_format.num_bytes, dtype=torch.uint8)
        payload_format.pack(values, payload)
        return payload


def _get_payload_format(update: _ParamUpdate) -> PayloadFormat:
    quantizer = WEIGHT_QUANTIZER if update.encoding == QUANTIZED else DELTA_QUANTIZER
    parts = ((update.storage.shard.numel(), update.encoding != RAW),)
    return PayloadFormat(parts, quantizer, update.storage.spec.compute_dtype)
