"""One rank of `bench/plan.py`: trains three steps and prints what its memory was, as one JSON line.

import_mib   resident when everything is imported and the process group stands, before the model
peak_mib     VmHWM at the end; the rest says where it came from (see /proc/self/status)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any


def proc_status_mib() -> dict[str, float]:
    """Return this process's memory in MiB by the kernel's names."""
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")
    found = {}
    with open("/proc/self/status") as rows:
        for row in rows:
            key, _, rest = row.partition(":")
            if key in wanted:
                found[key] = int(rest.split()[0]) / 1024
    return found


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def glibc_heap_mib() -> dict[str, float]:
    """Return what glibc says of its main heap, in MiB: size, mapped apart, in use, free, free at the top."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        return {}
    call.restype = _MallInfo
    info = call()
    names = ("arena", "hblkhd", "uordblks", "fordblks", "keepcost")
    return {name: getattr(info, name) / 2**20 for name in names}


def mapped_mib() -> dict[str, float]:
    """Return resident MiB by kind of mapping: heap, anonymous (large, small), files, shared."""
    found: dict[str, float] = {}
    kind, size = "", 0
    with open("/proc/self/smaps") as rows:
        for row in rows:
            words = row.split()
            if not words[0].endswith(":"):
                name = words[5] if len(words) > 5 else ""
                first, last = (int(end, 16) for end in words[0].split("-"))
                size = last - first
                if name.startswith(("/memfd", "/dev/zero", "/dev/shm")):
                    kind = "shared"
                elif name.startswith("["):
                    kind = name.strip("[]")
                elif name:
                    kind = "file"
                else:
                    kind = "anonymous" if size >= 1 << 20 else "anonymous, small"
            elif words[0] == "Rss:":
                found[kind] = found.get(kind, 0.0) + int(words[1]) / 1024
    return found


def main() -> int:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    case = json.loads(args.case)

    import torch
    import torch.distributed as dist
    from _plan_cases import build_model, make_batch, make_config, preload

    import thalweg

    torch.set_num_threads(1)
    _ = thalweg.initialize
    preload(case)
    world = case["world"]
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=world)
    else:
        thalweg.init_distributed()
    facts: dict[str, Any] = {"import": proc_status_mib(), "import_malloc": glibc_heap_mib()}
    facts["import_mappings"] = mapped_mib()
    model = build_model(case)
    facts["model"] = {**proc_status_mib(), **glibc_heap_mib()}
    start = time.perf_counter()
    engine, *_ = thalweg.initialize(model=model, config=make_config(case))
    del model
    facts["initialize_s"] = time.perf_counter() - start
    facts["initialize"] = {**proc_status_mib(), **glibc_heap_mib()}
    facts["steps"], facts["seconds"] = [], []
    for step in range(args.steps):
        clock = time.perf_counter()
        for micro in range(case.get("accumulation", 1)):
            batch = make_batch(case, engine.module, seed=step * 100 + micro * 10 + args.rank)
            output = engine(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            del output
            engine.backward(loss)
            if args.trace:
                facts["steps"].append({"at": f"backward {micro}", **proc_status_mib(), **glibc_heap_mib()})
            engine.step()
        facts["seconds"].append(time.perf_counter() - clock)
        facts["steps"].append({"at": f"step {step}", **proc_status_mib(), **glibc_heap_mib(), "mappings": mapped_mib()})
    facts["loss"] = loss.item()
    facts["ledger"] = {
        kind: engine.ledger.total(kind).sent_bytes for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    dist.barrier()
    facts["end"], facts["end_mappings"] = proc_status_mib(), mapped_mib()
    facts["peak_mib"], facts["import_mib"] = facts["end"]["VmHWM"], facts["import"]["VmRSS"]
    print(json.dumps(facts), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
