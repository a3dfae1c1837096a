"""Collectives as swappable objects, and the ledger that counts them.

FSDP2 takes its collectives as objects with two verbs, ``allocate`` and ``__call__``
(``set_custom_all_gather``, ``set_custom_reduce_scatter``).  This room holds ours:

* :mod:`.plain`   the wire forms: what gloo does well (all-to-all with a local sum);
* :mod:`.arena`   one anonymous memory mapping shared by the ranks of a host, with
  counters in its first page instead of messages;
* :mod:`.ring`    reductions through slots of that arena: FSDP2's copy-in writes the
  gradients in place and each rank sums the rows it owns, a single pass;
* :mod:`.hierarchical`  both: the arena inside a host, the wire between hosts;
* :mod:`.codec`, :mod:`.quantised`  numbers in 8 and 4 bits, and the collectives that send them;
* :mod:`.route`   which ranks of a group share a host;
* :mod:`.ledger`  what was moved, for which module, in how many bytes and seconds.

Invariants.  Sums run over ranks in rank order and in fp32, so each rank and each form
gives the same bits.  A slot is rewritten only after every peer has read it.  Nothing
has a name in a file system, so nothing is left behind however the job ends.  These
objects know nothing of ZeRO.
"""

from thalweg.comm.arena import SharedMemoryArena, CommError
from thalweg.comm.codec import BlockQuantizer, PayloadFormat
from thalweg.comm.hierarchical import (
    HierarchicalAllGather,
    HierarchicalAllReduce,
    HierarchicalReduceScatter,
    HostGroups,
    create_host_arena,
    make_subgroup,
)
from thalweg.comm.ledger import CommsLog
from thalweg.comm.plain import AllToAllReduceScatter, AllReduceSum, WireAllGather, WireAllReduce, AllToAllReduce
from thalweg.comm.quantised import (
    ErrorFeedback,
    QuantizedAllGather,
    QuantizedAllReduceSum,
    QuantizedAllToAllReduce,
    TwoLevelAllGather,
    TwoLevelReduceScatter,
)
from thalweg.comm.ring import SharedMemoryRing, SharedMemoryAllGather, SharedMemoryAllReduce, SharedMemoryReduceScatter
from thalweg.comm.route import HostTopology

__all__ = [
    "AllToAllReduceScatter",
    "SharedMemoryArena",
    "BlockQuantizer",
    "CommError",
    "AllReduceSum",
    "ErrorFeedback",
    "HierarchicalAllGather",
    "HierarchicalAllReduce",
    "HierarchicalReduceScatter",
    "HostGroups",
    "CommsLog",
    "PayloadFormat",
    "WireAllGather",
    "WireAllReduce",
    "QuantizedAllGather",
    "QuantizedAllReduceSum",
    "QuantizedAllToAllReduce",
    "SharedMemoryRing",
    "HostTopology",
    "SharedMemoryAllGather",
    "SharedMemoryAllReduce",
    "SharedMemoryReduceScatter",
    "AllToAllReduce",
    "TwoLevelAllGather",
    "TwoLevelReduceScatter",
    "create_host_arena",
    "make_subgroup",
]
