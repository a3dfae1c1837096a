"""`thalweg demo`: the whole of Thalweg on an embedded default, with nothing to download.

standard library's sources -> tokenizer -> blocks          this process, demo_corpus.py
GPT on N ranks, ZeRO stage S -> checkpoint                  demo_rank.py train, by the launcher
checkpoint -> world size 1 -> the same loss, a sample       demo_rank.py reload, a fresh process
metrics.jsonl -> loss.png, summary.json                     this process
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from thalweg.cli.demo_settings import DemoSettings

_EXAMPLES = """examples:
  thalweg demo
  thalweg demo --steps 40 --stage 2 --out /tmp/demo
  thalweg demo --json | python -m json.tool
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train a GPT on real text on two processes, from nothing",
        description="Train a GPT on the source text of Python's standard library: tokenizer, ZeRO, "
        "checkpoint, reload at world size 1, a sample. No download; about two minutes on two cores.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = DemoSettings(out="demo-out", results="")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimiser steps (%(default)s)")
    parser.add_argument("--stage", type=int, default=default.stage, help="ZeRO stage, 0 to 3 (%(default)s)")
    parser.add_argument("--nproc", type=int, default=default.nproc, help="processes (%(default)s)")
    parser.add_argument(
        "--out", default=default.out, metavar="DIR", help="folder for all files (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="of weights, data and sample (%(default)s)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of the arithmetic; auto: bf16 where this processor is fast at it, else fp32",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output, no more"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what came of it."""
    stream = sys.stderr if args.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    _check(args)
    _require_packages()
    started = time.perf_counter()
    out = _open_folder(args.out)
    _warn_of_cores(args.nproc)
    from thalweg.cli.demo_corpus import prepare

    settings = DemoSettings(
        out=str(out), results="", steps=args.steps, stage=args.stage, nproc=args.nproc, seed=args.seed
    )
    corpus = prepare(out, settings.vocabulary, say)
    settings = replace(settings, vocabulary=corpus.vocabulary, precision=_precision(args.precision))
    _forget_earlier_run(out)
    with tempfile.TemporaryDirectory(prefix="thalweg-demo-") as results:
        settings = replace(settings, results=results)
        code, facts = _train_and_reload(settings, say)
    if code != 0:
        return code
    summary = _summarise(settings, facts, out, time.perf_counter() - started)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(summary))
    else:
        _tell(summary, say)
    return 0 if _came_back(summary) else 1


def _check(args: argparse.Namespace) -> None:
    if args.stage not in (0, 1, 2, 3):
        raise ValueError(f"--stage {args.stage} is not a ZeRO stage: give 0, 1, 2 or 3")
    if args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc} must be at least 1")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} must be at least 1")
    if not 0 <= args.seed < 1 << 31:
        raise ValueError(f"--seed {args.seed} must be between 0 and {(1 << 31) - 1}")


def _require_packages() -> None:
    import importlib.util

    missing = [name for name in ("tokenizers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the demo needs {' and '.join(missing)}: run `pip install 'thalweg[hf,plots]'`")


def _open_folder(name: str) -> Path:
    out = Path(name).expanduser().resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {name} cannot be written to ({error.strerror or error}): "
            "choose a folder that you can write to"
        ) from None
    return out


def _warn_of_cores(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if nproc > cores:
        sys.stderr.write(
            f"warning: --nproc {nproc} on {cores} cores: the processes will wait for each other\n"
        )


def _precision(asked: str) -> str:
    if asked != "auto":
        return asked
    from thalweg.cli.demo_precision import fast_bf16

    return "bf16" if fast_bf16() else "fp32"


def _forget_earlier_run(out: Path) -> None:
    """Remove what an earlier demo left: metrics are appended to, and a checkpoint is never overwritten."""
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png", "summary.json"):
        (out / name).unlink(missing_ok=True)


def _train_and_reload(settings: DemoSettings, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Run both parts; returns the first non-zero exit code, or 0 and what the ranks wrote."""
    results = Path(settings.results)
    settings.save(results / "settings.json")
    say(
        f"model: GPT, {settings.num_layers} layers x {settings.width}, sequence {settings.block_size}; "
        f"{settings.nproc} processes, ZeRO stage {settings.stage}, {settings.precision}, "
        f"{settings.steps} steps"
    )
    facts: dict[str, Any] = {}
    for part, nproc, result in (("train", settings.nproc, "trained"), ("reload", 1, "reloaded")):
        code = _launch(part, nproc, results / "settings.json")
        if code != 0:
            return code, {}
        facts |= json.loads((results / f"{result}.json").read_text(encoding="utf-8"))
        if part == "train":
            say(f"checkpoint: {facts['checkpoint']}")
    return 0, facts


def _launch(part: str, nproc: int, settings: Path) -> int:
    """Run one part of the demo on ``nproc`` ranks; returns the exit code, standard error has what failed."""
    import torch

    from thalweg.launch.cores import cpu_quota, physical_cores, plan_cores, usable_cpus
    from thalweg.launch.local import Job, run_local

    few_gpus = torch.cuda.device_count() < nproc
    bind = few_gpus and nproc > 1
    outcome = run_local(
        Job(
            nproc=nproc,
            target="thalweg.cli.demo_rank",
            arguments=(part, str(settings)),
            kind="module",
            cores=plan_cores(nproc, physical_cores(usable_cpus()), quota=cpu_quota(), bind=bind),
            # Two ranks cannot share one GPU under NCCL: with fewer GPUs than ranks, use the processor.
            environ={"CUDA_VISIBLE_DEVICES": ""} if few_gpus else {},
        )
    )
    sys.stderr.write(outcome.report)
    return outcome.code


def _summarise(settings: DemoSettings, facts: dict[str, Any], out: Path, seconds: float) -> dict[str, Any]:
    from thalweg.cli.demo_picture import draw
    from thalweg.observe.files import read_jsonl

    losses = [float(row["loss"]) for row in read_jsonl(out / "metrics.jsonl")]
    tail = losses[-max(1, len(losses) // 10) :]
    picture = out / "loss.png"
    draw(picture, losses, vocabulary=settings.vocabulary, held_out=facts["loss_saved"])
    return {
        "loss_first": losses[0],
        "loss_last": sum(tail) / len(tail),
        "loss_saved": facts["loss_saved"],
        "loss_reloaded": facts["loss_reloaded"],
        "vocabulary": settings.vocabulary,
        "tokens_per_s": facts["tokens_per_s"],
        "checkpoint": facts["checkpoint"],
        "picture": str(picture),
        "sample": facts["sample"],
        "weights_saved": facts["weights_saved"],
        "weights_reloaded": facts["weights_reloaded"],
        "steps": settings.steps,
        "stage": settings.stage,
        "nproc": settings.nproc,
        "precision": settings.precision,
        "parameters": facts["parameters"],
        "tokens": facts["tokens"],
        "seconds_training": facts["seconds"],
        "seconds": seconds,
    }


def _came_back(summary: dict[str, Any]) -> bool:
    """Whether the reloaded model is the saved one: the loss to its last digit, each weight to its bits."""
    same_loss = summary["loss_reloaded"] == summary["loss_saved"]
    return same_loss and summary["weights_reloaded"] == summary["weights_saved"]


def _tell(summary: dict[str, Any], say: Callable[[str], None]) -> None:
    ceiling = math.log(summary["vocabulary"])
    same = "equal to the last digit, and so are all weights" if _came_back(summary) else "NOT EQUAL"
    say(
        f"loss: {summary['loss_first']:.3f} at the start (ln of the vocabulary is {ceiling:.3f}), "
        f"{summary['loss_last']:.3f} at the end, {summary['loss_last'] / ceiling:.0%} of ln(vocabulary); "
        f"{summary['tokens_per_s']:,.0f} tokens/s"
    )
    say(f"held-out loss: {summary['loss_saved']!r} when saved, {summary['loss_reloaded']!r} reloaded: {same}")
    say(f"picture: {summary['picture']}")
    say(f"sample:\n{'-' * 72}\n{summary['sample'].rstrip()}\n{'-' * 72}")
    say(f"{summary['seconds']:.0f} s in all, {summary['seconds_training']:.0f} of them training")
