"""Other engines for bench/infer.py, each in a process and a folder of packages of its own.

    python bench/_infer_peers.py install [--isa avx2]

installs ctranslate2, llama.cpp (compiled from its sdist, for this processor) and onnxruntime below
.venv-infer-peers/; `make bench-vllm` installs vLLM.  They get the same weights, converted once into a
temporary folder, and the same prompts.  What is not installed, or cannot convert the model, has no rows.
`--isa avx2` installs llama.cpp once more, compiled for a processor with AVX2 alone; ctranslate2 reads a variable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _isa import ISAS, LLAMA_CPP_SWITCHES, asked_isa, start_within, with_isa
from _peers import ROOT

FOLDER = ROOT / ".venv-infer-peers"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
WORKER = Path(__file__).with_name("_infer_peer_worker.py")


@dataclass(frozen=True)
class PeerSpec:
    """One form of one engine: its packages' folder (or its interpreter) and how it names the form."""

    engine: str
    weight_format: str
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the rows call it."""
        return f"{self.engine} {self.weight_format}"

    @property
    def installed(self) -> bool:
        """Whether it can take part."""
        return VLLM.exists() if self.engine == "vllm" else self.folder.is_dir()

    @property
    def folder(self) -> Path:
        """Where its packages are: of those compiled for a processor, for the one that was asked for."""
        return FOLDER / (with_isa(self.engine) if self.engine == "llama.cpp" else self.engine)

    def command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """Return a command line for `_infer_peer_worker.py` and its environment."""
        python = str(VLLM) if self.engine == "vllm" else sys.executable
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        if self.engine != "vllm":
            environment["PYTHONPATH"] = str(self.folder)
        return [python, str(WORKER), words[0], self.engine, self.weight_format, *words[1:]], environment


_ONNX = ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "protobuf", "ml_dtypes", "flatbuffers")
PEER_SPECS = (
    PeerSpec("ctranslate2", "fp32", ("--no-deps", "ctranslate2", "pyyaml")),
    PeerSpec("ctranslate2", "int8"),
    PeerSpec("llama.cpp", "f32", ("llama-cpp-python", "gguf")),
    PeerSpec("llama.cpp", "q8_0"),
    PeerSpec("llama.cpp", "q4_0"),
    PeerSpec("onnxruntime", "fp32", ("--no-deps", *_ONNX)),
    PeerSpec("onnxruntime", "int8"),
    PeerSpec("onnxruntime", "int4"),
    PeerSpec("vllm", "bf16"),
)


class PeerProcess:
    """A process that takes turns: a JSON object a line in, one out."""

    def __init__(self, kind: PeerSpec, folder: str, threads: int) -> None:
        self.name = kind.name
        command, environment = kind.command("serve", folder, str(threads))
        environment["OMP_NUM_THREADS"] = str(threads)
        self._log = open(f"{folder}.log", "wb+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._read_reply()

    def _read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and "first" in line:
                return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"{self.name} ended with {code}: {self._log.read()[-300:].decode()}")

    def run_turn(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Return seconds to the first token and in all."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._read_reply()
        return answer["first"], answer["whole"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()


@contextmanager
def start_peers(
    model: Any, threads: int, weight_formats: tuple[str, ...] = (), engines: tuple[str, ...] = ()
) -> Iterator[list[PeerProcess]]:
    """Give the peers that are installed, with this model loaded; of the named forms and engines, or all."""
    processes: list[PeerProcess] = []
    kinds = [
        kind for kind in PEER_SPECS if kind.installed and (not weight_formats or kind.weight_format in weight_formats)
    ]
    kinds = [kind for kind in kinds if not engines or kind.engine in engines]
    with TemporaryDirectory(prefix="thalweg-bench-") as folder:
        if kinds:
            _save(model, Path(folder) / "model")
        try:
            for kind in kinds:
                target = f"{folder}/{kind.engine}-{kind.weight_format}"
                command, environment = kind.command("convert", f"{folder}/model", target)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                try:
                    if done.returncode:
                        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
                    processes.append(PeerProcess(kind, target, threads))  # returns once it has loaded
                except RuntimeError as error:
                    print(f"{kind.name}: left out: {error}", file=sys.stderr)
            yield processes
        finally:
            for peer in processes:
                peer.close()


def _save(model: Any, folder: Path) -> None:
    """Save the model and a tokenizer that names its tokens by their numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    size = model.config.vocab_size
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    named = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **named)
    fast.save_pretrained(folder)


def install() -> int:
    """Install each engine into a folder of its own; 1 if one could not be."""
    failed = 0
    for kind in (kind for kind in PEER_SPECS if kind.packages):
        if asked_isa() and kind.engine != "llama.cpp":
            continue  # has no folder of its own for it
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(kind.folder)]
        if asked_isa():  # pip would take the wheel that it made of the sdist for this processor
            command.append("--no-cache-dir")
        environment = {**os.environ, "CMAKE_ARGS": LLAMA_CPP_SWITCHES[asked_isa()]}
        failed |= subprocess.run([*command, *kind.packages], env=environment, check=False).returncode != 0
    return int(failed)


def main() -> int:
    """Install what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("install",))
    parser.add_argument("--isa", choices=ISAS)
    start_within(parser.parse_args().isa)
    return install()


if __name__ == "__main__":
    raise SystemExit(main())
