"""What the demo trains and how: the numbers that its processes share.

The sizes are chosen for two slow cores: about a minute of training takes the loss from
ln(vocabulary) to well below 60% of it.  Muon needs far less text for that: with 2 layers
and 205 thousand tokens AdamW came to 65% of ln(vocabulary) at its best rate, Muon to 56%.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DemoSettings:
    """Everything that a rank needs to know; written as JSON for the ranks to read.

    ``out`` is the folder of the demo; ``precision`` ``"bf16"`` or ``"fp32"``; ``device``
    ``"cpu"``, ``"auto"``, or an accelerator's name.
    """

    out: str
    results: str
    steps: int = 150
    stage: int = 3
    nproc: int = 2
    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    vocabulary: int = 4096
    num_layers: int = 2
    num_heads: int = 4
    width: int = 256
    block_size: int = 128
    micro_batch: int = 16
    lr: float = 6e-3
    held_out_blocks: int = 128
    sample_tokens: int = 160
    prompt: str = "    def __init__(self, name):\n        self._name = name\n"


def build_engine_config(settings: DemoSettings | None = None) -> dict[str, Any]:
    """Return the demo's configuration: the keys of a ``ds_config.json``."""
    settings = settings or DemoSettings(out="demo-out", results="demo-out")
    optimizer = {"lr": settings.lr, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    warmup = {"warmup_num_steps": max(2, min(10, settings.steps // 5)), "warmup_type": "linear"}
    scheduler = {"total_num_steps": settings.steps, **warmup, "cos_min_ratio": 0.05}
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "seed": settings.seed,
        "steps_per_print": 10,
        "dataloader_drop_last": True,
        "zero_optimization": {"stage": settings.stage},
        "bf16": {"enabled": settings.precision == "bf16"},
        "optimizer": {"type": "Muon", "params": optimizer},
        "scheduler": {"type": "WarmupCosineLR", "params": scheduler},
        "jsonl_monitor": {"enabled": True, "output_path": settings.out, "job_name": ""},
    }
