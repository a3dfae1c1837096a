"""DeepSpeed's asynchronous-I/O operator as a contestant: a process that transfers on command.

Run by `bench/nvme.py` with the interpreter of the peers.  Each line on standard input is `write` or `read`;
the answer is a line with the seconds of one transfer of the whole buffer.  `quit` ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

from _peers import deepspeed_env


def main() -> int:
    """Make the operator and serve commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    os.environ.update({**deepspeed_env(), **dict(os.environ)})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the operator's loader talks on standard output
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]

    handle = AsyncIOBuilder().load().aio_handle(args.block, args.depth, False, True, args.threads)
    buffer = handle.new_cpu_locked_tensor(args.bytes, torch.empty(0, dtype=torch.uint8))
    buffer.random_()
    path = os.path.join(args.folder, f"aio-{os.getpid()}.bin")
    try:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            call = handle.sync_pwrite if line.strip() == "write" else handle.sync_pread
            start = time.perf_counter()
            moved = call(buffer, path, 0)
            seconds = time.perf_counter() - start
            print(seconds if moved >= 0 else "nan", file=answers, flush=True)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
