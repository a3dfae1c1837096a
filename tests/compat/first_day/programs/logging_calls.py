"""What scripts print with."""

import logging

import deepspeed
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.utils import log_dist, logger
from deepspeed.utils.logging import print_rank_0

records = []


class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())


logger.addHandler(Keep())
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
logger.info("every rank %d", rank)
log_dist("rank one alone", ranks=[1])
log_dist("rank zero alone", ranks=[0])
see_memory_usage("memory", force=True)
print_rank_0("printed once")
report = {
    "own": [text for text in records if text.startswith(("every", "rank"))]
    == [f"every rank {rank}", "rank one alone" if rank else "rank zero alone"],
}
logger.handlers.pop()
