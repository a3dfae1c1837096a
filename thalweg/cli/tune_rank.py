"""One rank of a trial of ``thalweg tune``: opens the job, trains, writes its seconds and its peak."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_STEPS = 3


def main(folder: Path) -> int:
    """Train three steps of the job in ``folder``; returns the exit code."""
    import torch
    import torch.distributed as dist

    import thalweg
    from thalweg.observe import resident_mib
    from thalweg.plan.batch import Field, batch_of
    from thalweg.plan.rehearsal import loss_of
    from thalweg.plan.source import build_real

    job = json.loads((folder / "job.json").read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = folder / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = build_real(job["model"])
    memory = {**(job["config"].get("memory") or {}), "preflight": "off"}
    config = job["config"] | {"memory": memory, "log_level": "error"}
    engine, *_ = thalweg.initialize(model=model, config=config)
    micro = int(engine.config.train_micro_batch_size_per_gpu)
    shapes = batch_of(engine.module, micro, job["sequence_length"])
    best = float("inf")
    for _ in range(_STEPS):
        start = time.perf_counter()
        for _ in range(int(engine.config.gradient_accumulation_steps)):
            batch: dict[str, Any] = {
                name: _values(field) if isinstance(field, Field) else field
                for name, field in shapes.kwargs.items()
            }
            output = engine(**batch)
            engine.backward(loss_of(output))
            engine.step()
        best = min(best, time.perf_counter() - start)
    found = {"seconds": best, "peak_bytes": int(resident_mib(peak=True) * 2**20)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    return 0


def _values(field: Any) -> Any:
    """A tensor of such a field, at random."""
    import torch

    if field.dtype.is_floating_point:
        return torch.randn(field.shape)
    return torch.randint(0, field.high, field.shape)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
