"""``thalweg.ops.adam``: an error that says where DeepSpeed's Adams are.

The optimizers lie in ``thalweg.optim``, above this room, since they step over shards; kernels are all that is here.
"""

from typing import NoReturn

_DEEPSPEED_NAMES = ("DeepSpeedCPUAdam", "FusedAdam")


def __getattr__(name: str) -> NoReturn:
    if name not in _DEEPSPEED_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{name} is not needed: give initialize() optimizer=torch.optim.AdamW(model.parameters(), lr=...), or name "
        '"optimizer": {"type": "AdamW"} in the config; either is stepped by a fused kernel over shards in memory, on '
        "the host or on NVMe. `thalweg run --as-deepspeed` runs programs that import deepspeed.ops.adam as they are",
        name=name,
    )
