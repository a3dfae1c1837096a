"""Which files of the package one chat request enters, from the socket to the model and back.

``python -m tests.count_files_request`` prints them.  The server, its replica and the engine run in threads of this
process, on a small random Llama; a first request has loaded what is loaded once.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import thalweg

PACKAGE = Path(thalweg.__file__).parent
BODY = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 20, "temperature": 0}


class EnteredFiles:
    """Notes the files of the package whose functions are called while ``recording``, on any thread."""

    def __init__(self) -> None:
        self.recording = False
        self._codes: set[CodeType] = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Be a profile function, as ``sys.setprofile`` takes it."""
        if self.recording and event == "call":
            self._codes.add(frame.f_code)

    def names(self) -> list[str]:
        """Return the files' names below the package."""
        paths = {Path(code.co_filename) for code in self._codes}
        return sorted(str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE))


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


def request_files(stream: bool = False) -> list[str]:
    """Return the files of the package that one chat request enters."""
    from tests.serve_support import run_server
    from thalweg.infer import EngineConfig, load_engine
    from thalweg.serve.openai.tokenizer import ChatTokenizer, load_tokenizer

    files = EnteredFiles()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))

        def load() -> Any:
            return load_engine(folder, EngineConfig(dtype="fp32", max_num_seqs=4, kv_cache_bytes=2**22))

        threading.setprofile(files.profile)
        try:
            with run_server(load, lambda: ChatTokenizer(load_tokenizer(folder))) as server:
                for files.recording in (False, True):
                    if stream:
                        assert server.stream("/v1/chat/completions", **BODY)
                    else:
                        status, answer = server.post("/v1/chat/completions", **BODY)
                        assert status == 200 and answer["usage"]["completion_tokens"] == 20, answer
                files.recording = False
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
    return files.names()


def main() -> None:
    """Print the files."""
    names = request_files(stream="--stream" in sys.argv)
    print(*names, sep="\n")
    print(f"{len(names)} files, {sum(name.startswith('infer/') for name in names)} of them of infer")


if __name__ == "__main__":
    main()
