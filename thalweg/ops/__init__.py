"""Operators with a plain form and faster ones, and the measurement that picks.

The picture: a linear layer is three matrix products (forward, input gradient, weight
gradient), each a pure function of two 2-D tensors.  ``linear/kernels.py`` lists, for each of the
three, the candidates that the installed torch wheel offers: torch's own operator first, as
the reference, then oneDNN's, then detours through another precision.  Nothing is compiled
and nothing of torch is patched.

The phases: at the first product of a new shape class, ``linear/autotune.py`` times the usable
candidates for a few milliseconds; ``linear/autotune_cache.py`` keeps the winner, in the process and in a
file that all processes of the machine share; ``linear/functional.py`` looks the winner up at each call
and runs it inside an ``autograd.Function``; ``linear/functional.py`` moves a model's layers over.

The invariants:

- A candidate is used only after it has given the right result on a small case in the same
  dtype; whatever is not known to be safe takes torch's own operator.
- The choice is a fact about the machine, never about the data or the rank: the same product
  goes the same way in forward, recomputation and backward, and on every rank of a host.
- Results differ from torch's by rounding alone; the mode ``"torch"`` gives torch's bits.
- Measuring consumes no random numbers and leaves no trace in whatever is being recorded.
- Private names of torch appear in ``_torch_private.py`` alone.
"""

from collections.abc import Mapping

from thalweg.ops.linear.autotune_cache import get_autotune_cache
from thalweg.ops.linear.functional import patch_linear_layers

__all__ = ["export_autotune_cache", "import_autotune_cache", "patch_linear_layers"]


def export_autotune_cache() -> dict[str, str]:
    """Return this process's choices of kernels, the machine's cache included, for :func:`import_autotune_cache`."""
    return get_autotune_cache().export_entries()


def import_autotune_cache(entries: Mapping[str, str]) -> int:
    """Take over another rank's choices (:meth:`AutotuneCache.import_entries`); returns how many apply here."""
    return get_autotune_cache().import_entries(entries)
