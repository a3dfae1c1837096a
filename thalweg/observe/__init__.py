"""What a training run says about itself: records, writers, tables, counts of work.

A new writer takes two steps:

1. a class with ``step(record)``, ``metric(name, value, step)`` and ``close()``
   (:class:`Writer`); any import of a service goes inside its ``__init__``;
2. its line in ``recorder._WRITERS``, under the key of its section of the config.
"""

from thalweg.observe.flops import flops_per_token, resident_mib
from thalweg.observe.recorder import Recorder, build_recorder
from thalweg.observe.step_record import MissingPackageError, StepRecord, Writer
from thalweg.observe.table import format_table
from thalweg.utils.timing import PhaseTimer

__all__ = [
    "MissingPackageError",
    "PhaseTimer",
    "Recorder",
    "StepRecord",
    "Writer",
    "build_recorder",
    "flops_per_token",
    "format_table",
    "resident_mib",
]
