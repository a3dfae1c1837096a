"""Counts the files of the package that one training step or one request enters: what a reader must open to follow it.

    python -m tests.count_files step [--stage 3] [--ranks 2] [--nvme]
    python -m tests.count_files request [--stream]

``step`` trains a small GPT for four steps and prints, of rank 0, the files of ``thalweg/`` with a Python function that
the fourth step called (forward, backward and ``engine.step()``), in any thread.  ``--nvme``: parameters and optimizer
state rest on a disk.

``request`` prints those of one chat request, from the socket to the model and back.  The server, its replica and the
engine run in threads of this process, on a small random Llama; a first request has loaded what is loaded once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness import run_ranks

PACKAGE = Path(__file__).resolve().parent.parent / "thalweg"
WARM_UP_STEPS = 3
IDLE_SECONDS = 0.5
BODY = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 20, "temperature": 0}


class FileCounter:
    """Notes the package's files whose functions are entered between :meth:`start` and :meth:`stop`, by function."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}
        self._recording = False
        self._prefix = f"{PACKAGE}{os.sep}"

    def watch_new_threads(self) -> None:
        """Look at threads that start from here on too: one that waits for work is seen once it does some."""
        threading.setprofile(self._on_event)

    def unwatch_threads(self) -> None:
        """Undo it."""
        threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what this thread, and each watched one, enters within."""
        self._recording = True
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.unwatch_threads()
            self._recording = False

    def _on_event(self, frame: Any, event: str, arg: Any) -> None:
        if self._recording and event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            file = frame.f_code.co_filename[len(self._prefix) :]
            self.functions.setdefault(file, set()).add(frame.f_code.co_qualname)

    def result(self) -> dict[str, list[str]]:
        """Return the functions by file, sorted."""
        return {file: sorted(names) for file, names in sorted(self.functions.items())}


def count_training_step(rank: int, world_size: int, stage: int, folder: str | None) -> dict[str, list[str]]:
    """The functions that the fourth step of this rank enters, by file."""
    import thalweg
    from tests.dist.models import make_batch, tiny_gpt
    from thalweg.comm.collectives import shared_memory

    zero: dict[str, Any] = {"stage": stage}
    if folder is not None:
        nvme = {"device": "nvme", "nvme_path": folder}
        zero |= {"offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 2}, "offload_optimizer": nvme}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    counter = FileCounter()
    counter.watch_new_threads()
    engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]

    def train(step: int) -> None:
        tokens, labels = make_batch(step, 2 * world_size)
        engine.backward(engine(tokens[rank::world_size], labels[rank::world_size]))
        engine.step()

    for step in range(WARM_UP_STEPS):
        train(step)
    # Who has waited for a twentieth of a second asks whether the other one lives: a busy machine's way, not a step's.
    with patch.object(shared_memory, "is_process_alive", lambda pid: True), counter.recording():
        train(WARM_UP_STEPS)
    engine.close()
    return counter.result()


def count_files(stage: int, num_ranks: int, nvme: bool) -> dict[str, list[str]]:
    """As :func:`count_training_step`, of rank 0 of a new job."""
    run: Callable[..., list[Any]] = run_ranks
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return run(count_training_step, num_ranks, stage, folder if nvme else None)[0]


def save_model(folder: Path) -> None:
    """Write a small random Llama and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=len(alphabet), max_position_embeddings=256, eos_token_id=None)
    LlamaForCausalLM(config).eval().save_pretrained(folder)


def request_files(stream: bool = False) -> dict[str, list[str]]:
    """The functions that one chat request enters, by file; by the runner that every processor has."""
    from tests.serve_support import run_server
    from thalweg.infer import EngineConfig, load_engine
    from thalweg.serve.openai.requests import ChatTokenizer, load_tokenizer

    counter, path = FileCounter(), "/v1/chat/completions"
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))

        def load() -> Any:
            options = EngineConfig(dtype="fp32", max_num_seqs=4, kv_cache_bytes=2**22)
            return load_engine(folder, options, runner="torch")

        def ask() -> None:
            if stream:
                assert server.stream(path, **BODY)
            else:
                status, answer = server.post(path, **BODY)
                assert status == 200 and answer["usage"]["completion_tokens"] == 20, answer

        counter.watch_new_threads()
        try:
            with run_server(load, lambda: ChatTokenizer(load_tokenizer(folder))) as server:
                ask()
                with counter.recording():
                    time.sleep(IDLE_SECONDS)
                idle, counter.functions = counter.functions, {}
                counter.watch_new_threads()
                with counter.recording():
                    ask()
        finally:
            counter.unwatch_threads()
    # Timers of the server wake its main coroutine, at any time: what an idle server enters is no part of the way.
    counter.functions = {
        file: rest for file, names in counter.functions.items() if (rest := names - idle.get(file, set()))
    }
    return counter.result()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "request"])
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nvme", action="store_true")
    parser.add_argument("--stream", action="store_true", help="of a request: its answer comes in pieces")
    parser.add_argument("--functions", action="store_true", help="name the functions too")
    args = parser.parse_args()
    is_step = args.what == "step"
    files = count_files(args.stage, args.ranks, args.nvme) if is_step else request_files(args.stream)
    for file, names in files.items():
        print(f"{file}  {', '.join(names)}" if args.functions else file)
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
