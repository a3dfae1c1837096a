"""One rank of a trial of ``thalweg tune``: opens the job, trains, writes its seconds and its peak."""

import json
import os
import sys
import time
from pathlib import Path

_NUM_STEPS = 3


def main(folder: Path) -> int:
    """Train three steps of the job in ``folder``; returns the exit code."""
    import torch
    import torch.distributed as dist

    import thalweg
    from thalweg.plan.inputs.input_spec import infer_input_spec
    from thalweg.plan.inputs.model_loader import build_cpu_model
    from thalweg.plan.trace.step import scalar_loss
    from thalweg.utils.procfs import resident_bytes

    job = json.loads((folder / "job.json").read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = folder / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = build_cpu_model(job["model"])
    memory = {**(job["config"].get("memory") or {}), "preflight": "off"}
    config = job["config"] | {"memory": memory, "log_level": "error"}
    engine, *_ = thalweg.initialize(model=model, config=config)
    micro_batch = int(engine.config.train_micro_batch_size_per_gpu)
    input_spec = infer_input_spec(engine.module, micro_batch, job["sequence_length"])
    best = float("inf")
    for _ in range(_NUM_STEPS):
        start = time.perf_counter()
        for _ in range(int(engine.config.gradient_accumulation_steps)):
            engine.backward(scalar_loss(engine(**input_spec.make_random()[1])))
            engine.step()
        best = min(best, time.perf_counter() - start)
    report = {"seconds": best, "peak_bytes": resident_bytes(peak=True)}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
