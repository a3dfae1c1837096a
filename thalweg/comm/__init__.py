"""Collectives as swappable objects, and the ledger that counts them.

FSDP2 takes its collectives as objects with two verbs, ``allocate`` and ``__call__``
(``set_custom_all_gather``, ``set_custom_reduce_scatter``).  This room holds ours:

* :mod:`.collectives.wire`   the wire forms: what gloo does well (all-to-all with a local sum);
* :mod:`.collectives.shared_memory`    one anonymous memory mapping shared by the ranks of a host, with
  counters in its first page instead of messages, and reductions through slots of that arena: FSDP2's copy-in writes the
  gradients in place and each rank sums the rows it owns, a single pass;
* :mod:`.collectives.hierarchical`  both: the arena inside a host, the wire between hosts;
* :mod:`.quantization`, :mod:`.collectives.quantized`  numbers in 8 and 4 bits, and the collectives that send them;
* :mod:`.topology`   which ranks of a group share a host;
* :mod:`.comms_logger`  what was moved, for which module, in how many bytes and seconds.

Invariants.  Sums run over ranks in rank order and in fp32, so each rank and each form
gives the same bits.  A slot is rewritten only after every peer has read it.  Nothing
has a name in a file system, so nothing is left behind however the job ends.  These
objects know nothing of ZeRO.
"""

from typing import Any

import torch.distributed as _torch_collectives

from thalweg.comm.collectives.shared_memory import CommError
from thalweg.comm.comms_logger import CommsLog

__all__ = ["CommError", "CommsLog"]


def __getattr__(name: str) -> Any:
    """A program's own collectives are torch's: ``thalweg.comm.all_reduce(tensor)``."""
    if name.startswith("_") or not hasattr(_torch_collectives, name):
        raise AttributeError(f"module 'thalweg.comm' has no attribute {name!r}")
    return getattr(_torch_collectives, name)
