"""`import mii` is Thalweg's engine and server: transformers' greedy tokens, by each of MII's calls."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.repo.source import ROOT
from thalweg.compat.finder import PROGRAM
from thalweg.compat.mii.surface import SURFACE

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
PROMPTS, NEW_TOKENS = ["DeepSpeed is", "Seattle is", "for i in range(10):"], 12


def _make_model(rank: int, world: int, folder: str) -> list[str]:
    """A small random GPT-2 in ``folder``; transformers' greedy continuations."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=len(fast), n_positions=96, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=None, eos_token_id=None)  # fmt: skip
    live: Any = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        live.lm_head.weight *= 20  # a clear choice each time, so that equal means equal
    live.save_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        tokens = torch.tensor([fast.encode(prompt)])
        output = live.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(fast.decode(output[0, tokens.shape[1] :]))
    return texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The folder of a model, and what comes after each prompt."""
    folder = str(tmp_path_factory.mktemp("gpt2"))
    return folder, run_ranks(_make_model, 1, folder)[0]


def _run(code: str, *words: str, folder: Path | None = None) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if folder is not None:
        environ["XDG_RUNTIME_DIR"] = str(folder)
    command = [sys.executable, "-c", f"import thalweg.compat.mii\n{code}", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _use_pipeline(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The calls of a program that runs its model in its own process."""
    import importlib
    import importlib.metadata

    import thalweg.compat.mii  # noqa: F401

    mii = importlib.import_module("mii")
    for name, names in SURFACE.items():
        module = importlib.import_module(name)
        assert all(attribute == PROGRAM or hasattr(module, attribute) for attribute in names)
    pipe = mii.pipeline(folder, max_length=64)
    responses = pipe(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    first = responses[0]
    (full,) = pipe(PROMPTS[0], max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=True)
    (short,) = pipe(PROMPTS[0], max_length=first.prompt_length + 5, max_new_tokens=NEW_TOKENS, do_sample=False)
    drawn = [pipe(PROMPTS[0], max_new_tokens=NEW_TOKENS, temperature=50.0)[0].generated_text for _ in range(3)]
    rank_0 = pipe.is_rank_0
    pipe.destroy()
    with pytest.raises(RuntimeError, match="make another one"):
        pipe("x")
    with pytest.raises(mii.errors.UnknownArgument, match="did you mean max_length"):
        mii.pipeline(folder, max_lenght=3)
    mii.deploy(task="text-generation", model=folder, deployment_name="old", mii_config={"dtype": "fp16"},
               deployment_type=mii.constants.DeploymentType.NON_PERSISTENT)  # fmt: skip
    old = mii.mii_query_handle("old").query({"query": PROMPTS}, do_sample=False, max_new_tokens=NEW_TOKENS)
    mii.terminate("old")
    return {
        "versions": [importlib.metadata.version(name) for name in ("deepspeed-mii", "deepspeed_mii")],
        "texts": [response.generated_text for response in responses],
        "printed": str(responses),
        "first": (first.prompt_length, first.generated_length, first.finish_reason.value, rank_0),
        "is_enum": first.finish_reason is mii.constants.GenerationFinishReason.LENGTH,
        "full": full.generated_text,
        "short": short.to_msg_dict(),
        "drawn": drawn,
        "old": old.response,
    }


def test_the_pipeline(model: tuple[str, list[str]]) -> None:
    folder, texts = model
    found = run_ranks(_use_pipeline, 1, folder)[0]
    assert found["texts"] == texts and found["printed"] == f"[{', '.join(texts)}]"
    assert found["first"][1:] == (NEW_TOKENS, "length", True) and found["first"][0] > 2 and found["is_enum"]
    assert found["full"] == PROMPTS[0] + texts[0]
    assert found["short"]["generated_length"] == 5 and texts[0].startswith(found["short"]["generated_text"])
    assert {texts[0], *found["drawn"]} != {texts[0]}  # sampled unless told not to be
    assert found["old"] == [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert found["versions"] == ["0.3.4", "0.3.4"]


@pytest.mark.nightly
def test_a_deployment_its_clients_and_rest(model: tuple[str, list[str]], tmp_path: Path) -> None:
    """Started by one program, asked by others in Python and by REST, ended by a third; then by the legacy calls."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = f"""
import json, sys
import mii
options = dict(deployment_name="gpt", enable_restful_api=True, restful_api_port={port})
client = mii.serve(sys.argv[1], replica_num=2, **options)
responses = client.generate(json.loads(sys.argv[2]), max_new_tokens=12, do_sample=False)
print(json.dumps([r.generated_text for r in responses]))
"""
    words = (model[0], json.dumps(PROMPTS))
    try:
        assert json.loads(_run(start, *words, folder=tmp_path)) == model[1]
        body: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/mii/gpt", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request))
        assert [part["generated_text"] for part in answer] == model[1]
        assert answer[0]["finish_reason"] == "length" and answer[0]["generated_length"] == NEW_TOKENS
        streamed = """
import sys, mii
pieces = []
mii.client("gpt").generate(sys.argv[1], streaming_fn=lambda r: pieces.append(r[0].generated_text),
                           max_new_tokens=12, do_sample=False)
assert len(pieces) > 3
print("".join(pieces), end="")
"""
        assert _run(streamed, PROMPTS[0], folder=tmp_path) == model[1][0]
    finally:
        _run("import mii; mii.client('gpt').terminate_server()", folder=tmp_path)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
    legacy = """
import json, sys, mii
mii.deploy(task="text-generation", model=sys.argv[1], deployment_name="old", mii_config={"tensor_parallel": 1})
try:
    reply = mii.mii_query_handle("old").query({"query": json.loads(sys.argv[2])}, max_new_tokens=12)
    print(json.dumps(reply.response))
finally:
    mii.terminate("old")
try:
    mii.client("old")
except mii.errors.DeploymentNotFoundError as error:
    assert "mii.serve" in str(error)
"""
    whole = [prompt + text for prompt, text in zip(PROMPTS, model[1], strict=True)]
    assert json.loads(_run(legacy, *words, folder=tmp_path)) == whole


@pytest.mark.nightly
def test_the_openai_server_as_a_module(model: tuple[str, list[str]]) -> None:
    """`python -m mii.entrypoints.openai_api_server`, as MII's page shows it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "mii.entrypoints.openai_api_server"
    code = f"import runpy, sys; sys.argv[0] = 'x'; runpy.run_module({module!r}, None, '__main__')"
    command = [sys.executable, "-c", f"import thalweg.compat.mii; {code}"]
    command += ["--model", model[0], "--port", str(port), "--api-keys", "the-first,the-second", "--host", "127.0.0.1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        body = {"prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0}
        headers = {"Content-Type": "application/json", "Authorization": "Bearer the-second"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + 120
        while True:
            try:
                answer = json.load(urllib.request.urlopen(request))
                break
            except urllib.error.HTTPError:
                raise
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        assert answer["choices"][0]["text"] == model[1][0]
    finally:
        server.terminate()
        assert server.wait(60) == 0, server.stderr and server.stderr.read()
