"""One rank of one contestant: built once, then idle until the driver gives it a turn.

The driver talks over standard input and the descriptor that was standard output, one JSON object a line;
whatever the contestant prints goes to standard error, which the driver keeps in a file.  Between turns
the rank sleeps in `readline` (gloo's own threads sleep too), so contestants that are all alive at once do
not disturb the one whose turn it is.  When the driver goes away, `readline` ends and so does the rank.

    {"do": "run", "steps": k}  ->  {"seconds": [k], "cpu": [k], "losses": [k]}
    {"do": "report"}           ->  {"peak_mib", "now_mib", "import_mib", "model_mib", "setup_mib",
                                    "setup_seconds", "setup_cpu_seconds", "imports", "inter_mib"
                                    (sent to other hosts in the last step, where it is counted)}
    {"do": "stop"}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO


def memory_mib() -> dict[str, float]:
    """Return this process's resident memory in MiB: its highest ("peak") and its present ("now") value."""
    wanted = {"VmHWM": "peak_mib", "VmRSS": "now_mib"}
    found = {}
    with open("/proc/self/status") as status:
        for line in status:
            key = line.split(":")[0]
            if key in wanted:
                found[wanted[key]] = int(line.split()[1]) / 1024
    return found


class ContestantRank:
    """The contestant on this rank, with its counters."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from _contestants import Job, build_contestant, build_model, preload

        torch.set_num_threads(args.threads)
        self.job = Job(**json.loads(args.job))
        self.rank, self.world = args.rank, args.world
        self.measurements: dict[str, Any] = {"imports": preload(args.contestant, self.job)}
        self.measurements["import_mib"] = memory_mib()["peak_mib"]
        backend = "nccl" if self.job.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{args.store}", rank=args.rank, world_size=args.world)
        model = build_model(self.job)
        self.measurements["model_mib"] = memory_mib()["peak_mib"]
        start, cpu = time.perf_counter(), time.process_time()
        self.step = build_contestant(args.contestant, self.job, model, self.world)
        self.measurements["setup_seconds"] = time.perf_counter() - start
        self.measurements["setup_cpu_seconds"] = time.process_time() - cpu
        self.measurements["setup_mib"] = memory_mib()["peak_mib"]
        self.num_steps_done = 0
        self.sent_bytes = 0
        self.dist = dist

    def run(self, steps: int) -> dict[str, list[float]]:
        """Take `steps` optimiser steps together with the other ranks; seconds and CPU seconds of each."""
        if self.job.device == "cuda":
            return self._run_cuda(steps)
        batches = self._batches(steps)
        answer: dict[str, list[float]] = {"seconds": [], "cpu": [], "losses": []}
        self.dist.barrier()
        for tokens_BT, labels_BT in batches:
            clock, cpu = time.perf_counter(), time.process_time()
            answer["losses"].append(self.step(tokens_BT, labels_BT).item())
            answer["seconds"].append(time.perf_counter() - clock)
            answer["cpu"].append(time.process_time() - cpu)
            self._count_sent()
        return answer

    def _count_sent(self) -> None:
        """Note what the contestant counted between hosts in this step, if it counts."""
        sent = getattr(self.step, "inter_bytes", None)
        if sent is not None:
            self.measurements["inter_mib"] = (sent - self.sent_bytes) / 2**20
            self.sent_bytes = sent

    def _batches(self, steps: int) -> list[tuple[Any, Any]]:
        from _contestants import make_batch

        first = self.num_steps_done
        self.num_steps_done += steps
        batches = [make_batch(self.job, first + i, self.rank, self.world) for i in range(steps)]
        return [(tokens.to(self.job.device), labels.to(self.job.device)) for tokens, labels in batches]

    def _run_cuda(self, steps: int) -> dict[str, list[float]]:
        """The same on a GPU that others share in turns: its memory is taken and given back within the turn.

        One step that is not counted fills the allocator; the host then runs ahead, so only the turn has a
        clock, and each step gets its mean.
        """
        import torch

        batches = self._batches(steps + 1)
        self.step(*batches.pop(0))
        torch.cuda.synchronize()
        clock, cpu = time.perf_counter(), time.process_time()
        losses = [self.step(tokens_BT, labels_BT) for tokens_BT, labels_BT in batches]
        torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
        values = [loss.item() for loss in losses]
        torch.cuda.empty_cache()
        self.measurements["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        return {"seconds": [seconds / steps] * steps, "cpu": [cpu_seconds / steps] * steps, "losses": values}

    def report(self) -> dict[str, Any]:
        """Return what the memory table needs."""
        return {**self.measurements, **memory_mib()}


def _serve_commands(rank: ContestantRank, reply: TextIO) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            return
        answer = rank.run(command["steps"]) if command["do"] == "run" else rank.report()
        print(json.dumps(answer), file=reply, flush=True)


def main() -> int:
    """Build the contestant, say that it is ready, and serve the driver until it stops us or goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--job", required=True, help="the Job as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", required=True, help="file through which the ranks meet")
    args = parser.parse_args()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        rank = ContestantRank(args)
        print(json.dumps({"ready": True}), file=reply, flush=True)
        _serve_commands(rank, reply)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=reply, flush=True)
        return 1
    rank.dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
