"""``thalweg.runtime.lr_schedules.WarmupLR``: the schedules of a ``ds_config.json``, where DeepSpeed's users look."""

from thalweg.optim.lr_scheduler import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
