"""``deepspeed.utils.logging`` over the package's logger."""

import logging
import sys
from collections.abc import Sequence

from thalweg.device import current_accelerator
from thalweg.observe.flops import memory_text
from thalweg.utils.log import current_rank

# Programs ask for it by its name too, to silence it; every rank speaks.
logger = logging.getLogger("DeepSpeed")
logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all for None or -1."""
    if not ranks or -1 in ranks or current_rank() in ranks:
        logger.log(level, "%s", message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Log on rank 0, if asked to."""
    if force or debug:
        logger.info("%s", message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what the process has on its device, if asked to."""
    if force:
        logger.info("%s: %s", message, memory_text(current_accelerator()))
