"""Other engines for bench/infer.py, each in a process and a folder of packages of its own.

    python bench/_infer_peers.py install

installs ctranslate2 below .venv-infer-peers/.  It gets the same weights, converted once into a temporary
folder, and the same prompts.  Where it is not installed, or cannot convert the model, it has no rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import ROOT

FOLDER = ROOT / ".venv-infer-peers" / "ctranslate2"


class Peer:
    """A process that takes turns: a JSON object a line in, one out."""

    def __init__(self, name: str, command: list[str], folder: Path, threads: int) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def turn(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Return seconds to the first token and in all."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["first"], answer["whole"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def peers(model: Any, threads: int) -> list[Peer]:
    """Return the peers that are installed, with this model loaded."""
    if not (FOLDER / "ctranslate2").is_dir():
        return []
    found = []
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder:
        _save(model, Path(folder) / "model")
        for label, kind in (("fp32", "float32"), ("int8", "int8")):
            target = f"{folder}/{label}"
            command = [sys.executable, __file__, "convert", f"{folder}/model", target, kind]
            environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"ctranslate2 {label}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            command = [sys.executable, __file__, "serve", target, kind, str(threads)]
            found.append(Peer(f"ctranslate2 {label}", command, FOLDER, threads))  # returns once it has loaded
    return found


def _save(model: Any, folder: Path) -> None:
    """Save the model and a tokenizer that names its tokens by their numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    size = model.config.vocab_size
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2")
    fast.save_pretrained(folder)


def _convert(source: str, target: str, kind: str) -> None:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    ctranslate2.converters.TransformersConverter(source).convert(target, quantization=kind)


def _serve(folder: str, kind: str, threads: int) -> None:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    generator = ctranslate2.Generator(folder, device="cpu", compute_type=kind, intra_threads=threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [[f"t{token}" for token in prompt] for prompt in job["prompts"]]
        times = []
        for count in (1, job["new"]):
            start = time.perf_counter()
            generator.generate_batch(
                prompts, max_length=count, min_length=count, beam_size=1, include_prompt_in_result=False
            )
            times.append(time.perf_counter() - start)
        print(json.dumps({"first": times[0], "whole": times[1]}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "install":
        raise SystemExit(
            subprocess.run(
                [
                    sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER),
                    "ctranslate2", "pyyaml",
                ],
                check=False,
            ).returncode
        )  # fmt: skip
    if sys.argv[1] == "convert":
        _convert(*sys.argv[2:5])
    else:
        _serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
