"""`thalweg demo` as a user types it, in a few steps; what it promises holds and can fail."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thalweg.cli
from tests.marks import nightly
from thalweg.cli.demo.settings import DemoSettings, build_engine_config
from thalweg.cli.demo.worker import build_model, build_plain_model, hash_weights, held_out_loss
from thalweg.config import load_config
from thalweg.data.packing import save_tokens
from thalweg.observe.writers import read_jsonl

KEYS = {
    "loss_first",
    "loss_last",
    "loss_saved",
    "loss_reloaded",
    "vocabulary",
    "tokens_per_s",
    "checkpoint",
    "picture",
    "sample",
}


# The same program on an eighth of the text and of what is held out: most of a short demo is tokenizing.
SMALL = """
import functools, sys, thalweg.cli, thalweg.cli.demo as demo, thalweg.cli.demo.corpus as corpus
documents, demo.DemoSettings = corpus.stdlib_documents, functools.partial(demo.DemoSettings, held_out_blocks=8)
corpus.stdlib_documents = lambda: list(documents())[::8]
if __name__ == "__main__":
    sys.exit(thalweg.cli.main(sys.argv[1:]))
"""


def demo(out: Path, *arguments: str, small: bool = False) -> tuple[dict, str]:
    program = ["-c", SMALL] if small else ["-m", "thalweg"]
    done = subprocess.run(
        [sys.executable, *program, "demo", "--json", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1, "one JSON object on standard output and nothing else"
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module", params=[pytest.param(True, id="small", marks=pytest.mark.nightly), nightly(False)])
def first(request, tmp_path_factory) -> tuple[dict, str, Path, bool]:
    out = tmp_path_factory.mktemp("demo")
    return *demo(out, "--steps", "8", small=request.param), out, request.param


@pytest.mark.slow
def test_the_demo_learns_and_its_checkpoint_gives_the_same_loss(first):
    summary, _, out, _ = first
    assert set(summary) >= KEYS
    assert summary["loss_saved"] == summary["loss_reloaded"]
    assert summary["weights_saved"] == summary["weights_reloaded"]
    ceiling = math.log(summary["vocabulary"])
    assert summary["vocabulary"] == 4096
    assert abs(summary["loss_first"] - ceiling) < 0.2
    assert summary["loss_last"] < 0.95 * summary["loss_first"]
    assert abs(summary["loss_saved"] - summary["loss_last"]) < 1
    assert summary["tokens_per_s"] > 0
    assert (summary["stage"], summary["nproc"], summary["steps"]) == (3, 2, 8)
    assert json.loads((out / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_everything_lies_in_the_demos_folder(first):
    summary, _, out, _ = first
    assert Path(summary["checkpoint"]).is_dir()
    assert out in Path(summary["checkpoint"]).parents
    picture = Path(summary["picture"])
    assert picture.parent == out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["loss"] == summary["loss_first"]
    assert all(row["tokens"] == rows[0]["tokens"] for row in rows)
    names = {path.name for path in out.iterdir()}
    assert names == {
        "checkpoint",
        "corpus.json",
        "held_out.npy",
        "loss.png",
        "metrics.jsonl",
        "summary.json",
        "tokenizer.json",
        "tokens.npy",
    }


@pytest.mark.slow
def test_the_sample_continues_the_prompt(first):
    summary, _, _, _ = first
    prompt = DemoSettings(out="", results="").prompt
    assert summary["sample"].startswith(prompt)
    assert len(summary["sample"]) > len(prompt) + 20


@pytest.mark.nightly
@pytest.mark.slow
def test_again_in_the_same_folder_at_another_stage_and_world(first):
    before, _, out, small = first
    stamp = (out / "tokenizer.json").stat().st_mtime_ns
    summary, said = demo(out, "--steps", "4", "--stage", "1", "--nproc", "1", "--precision", "fp32", small=small)
    assert "kept from before" in said
    assert (out / "tokenizer.json").stat().st_mtime_ns == stamp
    assert summary["loss_saved"] == summary["loss_reloaded"] != before["loss_saved"]
    assert len(read_jsonl(out / "metrics.jsonl")) == 4
    assert (summary["stage"], summary["nproc"], summary["precision"]) == (1, 1, "fp32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "4"], "--stage: invalid choice: "),
        (["--nproc", "0"], "--nproc: 0 must be at least 1"),
        (["--steps", "0"], "--steps: 0 must be at least 1"),
        (["--seed", "-1"], "--seed: -1 must be at least 0"),
        (["--out", "/proc/thalweg"], "choose a folder that you can write to"),
        (["--out", "/dev/null/x"], "choose a folder that you can write to"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, capfd):
    try:
        code = thalweg.cli.main(["demo", *arguments])
    except SystemExit as refused:  # by argparse
        code = refused.code
    assert code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_more_processes_than_cores_is_said(capfd, monkeypatch, tmp_path):
    from thalweg.cli.demo import corpus

    def stop(*_: object) -> None:
        raise ValueError("the work would begin here")

    monkeypatch.setattr(corpus, "prepare_corpus", stop)
    for nproc, is_said in ((10_000, True), (1, False)):
        assert thalweg.cli.main(["demo", "--nproc", str(nproc), "--out", str(tmp_path)]) == 2
        err = capfd.readouterr().err
        assert (f"--nproc {nproc} on" in err) == is_said
        assert err.endswith("thalweg: the work would begin here\n")


@pytest.mark.parametrize("missing", ["tokenizers", "matplotlib"])
def test_a_missing_package_is_named_before_any_work(missing, monkeypatch, capfd, tmp_path):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else real(name, *rest))
    assert thalweg.cli.main(["demo", "--out", str(tmp_path / "x")]) == 2
    err = capfd.readouterr().err
    assert missing in err
    assert "pip install 'thalweg[hf,plots]'" in err
    assert not (tmp_path / "x").exists()


def test_the_configuration_is_a_valid_one_at_every_stage():
    for stage in range(4):
        settings = replace(DemoSettings(out="o", results=""), stage=stage, steps=1, precision="bf16")
        config = load_config(build_engine_config(settings), world_size=2)
        assert config.zero_optimization.stage == stage
        assert config.bf16.enabled


def test_the_held_out_loss_repeats_to_the_last_bit_and_sees_a_change(tmp_path):
    """Negative control of "equal to the last digit"; the digest sees a single bit."""
    settings = DemoSettings(
        out=str(tmp_path),
        results="",
        vocabulary=64,
        num_layers=1,
        width=32,
        block_size=16,
        held_out_blocks=32,
    )
    tokens = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(1))
    save_tokens(tmp_path / "held_out.npy", tokens.numpy().astype("uint16"))
    weights = {name: value.clone() for name, value in build_model(settings).state_dict().items()}
    torch.set_num_threads(2)
    loss = held_out_loss(build_plain_model(settings, weights), settings)
    torch.set_num_threads(1)
    assert held_out_loss(build_plain_model(settings, weights), settings) == loss
    before = hash_weights(weights)
    flat = weights["blocks.0.mlp.up.weight"].view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(1e9))
    assert hash_weights(weights) != before
    flat[0] += 1e-2
    assert held_out_loss(build_plain_model(settings, weights), settings) != loss
