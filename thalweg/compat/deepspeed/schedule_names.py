"""The words of ``deepspeed.runtime.lr_schedules``: types of schedules, and keys of their parameters."""

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
_KEYS = """
lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase
cycle_first_step_size cycle_first_stair_count cycle_second_step_size cycle_second_stair_count decay_step_size
cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate
warmup_min_lr warmup_max_lr warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps
"""


def __getattr__(name: str) -> str:
    """A key under its name in capitals."""
    if name.lower() not in _KEYS.split():
        raise AttributeError(name)
    return name.lower()
