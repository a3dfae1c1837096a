"""Compile the operators that DeepSpeed uses in these benchmarks, and say how long it took.

Run by `make bench-peers` with the interpreter of the peers; `--isa avx2` (`make bench-peers-avx2`) makes those of a
smaller processor, in a folder of their own.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from _isa import ISAS, start_within
from _peers import deepspeed_env, remove_deepspeed_shm


def _async_io() -> str:
    """Compile the operator for files, which needs the headers of libaio."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]

    start = time.perf_counter()
    try:
        AsyncIOBuilder().load()
    except Exception as error:  # it names the missing headers in several ways
        return f"left out ({type(error).__name__}: install libaio-dev)"
    return f"{time.perf_counter() - start:.1f} s"


def main() -> int:
    """Make them and take a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=ISAS)
    start_within(parser.parse_args().isa)
    port = str(os.getpid())
    os.environ.update(deepspeed_env(), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = port
    start = time.perf_counter()
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch

    import_seconds = time.perf_counter() - start
    start = time.perf_counter()
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 0.0,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    torch.distributed.destroy_process_group()
    remove_deepspeed_shm(port)
    seconds = time.perf_counter() - start
    kind = f"{type(engine.optimizer).__module__}.{type(engine.optimizer).__qualname__}"
    print(f"deepspeed {deepspeed.__version__}, {kind}")
    print(f"import {import_seconds:.1f} s, first initialize {seconds:.1f} s")
    print(f"async_io (for bench/nvme.py): {_async_io()}")
    Path(os.environ["TORCH_EXTENSIONS_DIR"], "ready").touch()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
