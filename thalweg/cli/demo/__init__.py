"""Train a GPT on the source text of Python's standard library: tokenizer, ZeRO, checkpoint, reload at world size 1, a
sample. No download; about two minutes on two cores.

examples:
  thalweg demo
  thalweg demo --steps 40 --stage 2 --out /tmp/demo
  thalweg demo --json | python -m json.tool
"""

# standard library's sources -> tokenizer -> blocks          this process, corpus.py
# GPT on N ranks, ZeRO stage S -> checkpoint                  worker.py train, by the launcher
# checkpoint -> world size 1 -> the same loss, a sample       worker.py reload, a fresh process
# metrics.jsonl -> loss.png, summary.json                     this process

import argparse
import importlib.util
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thalweg.cli.arguments import int_at_least
from thalweg.cli.demo.settings import DemoSettings
from thalweg.launch.cpu_affinity import usable_cpus
from thalweg.utils.env import DEVICE_VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    default = DemoSettings(out="demo-out", results="")
    parser.add_argument("--steps", type=int_at_least(1), default=default.steps, help="optimiser steps (%(default)s)")
    parser.add_argument("--stage", type=int, choices=range(4), default=default.stage, help="of ZeRO (%(default)s)")
    parser.add_argument("--nproc", type=int_at_least(1), default=default.nproc, help="processes (%(default)s)")
    parser.add_argument("--out", default=default.out, metavar="DIR", help="folder for all files (%(default)s)")
    seed = int_at_least(0, 2**31 - 1)
    parser.add_argument("--seed", type=seed, default=default.seed, help="of weights, data and sample (%(default)s)")
    precision = "of the arithmetic; auto: bf16 where this processor is fast at it, else fp32"
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help=precision)
    device = "cpu, cuda, ... (auto: an accelerator for each process, else cpu)"
    parser.add_argument("--device", default=default.device, metavar="NAME", help=device)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, no more")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what came of it."""
    stream = sys.stderr if args.json else sys.stdout

    def log(text: str) -> None:
        print(text, file=stream, flush=True)

    missing = [name for name in ("tokenizers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the demo needs {' and '.join(missing)}: run `pip install 'thalweg[hf,plots]'`")
    started = time.perf_counter()
    out = _make_output_folder(args.out)
    cores = len(usable_cpus())
    if args.nproc > cores:
        sys.stderr.write(f"warning: --nproc {args.nproc} on {cores} cores: the processes will wait for each other\n")
    from thalweg.cli.demo.corpus import prepare_corpus

    given = {name: getattr(args, name) for name in ("steps", "stage", "nproc", "seed")}
    settings = DemoSettings(str(out), results="", device=_resolve_device(args.device, args.nproc), **given)
    vocabulary = prepare_corpus(out, settings.vocabulary, log)
    precision = args.precision
    if precision == "auto":
        from thalweg.cli.demo.precision import has_fast_bf16

        precision = "bf16" if has_fast_bf16(settings.device) else "fp32"
    # What an earlier demo left: metrics are appended to, and a checkpoint is never overwritten.
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for name in ("metrics.jsonl", "loss.png", "summary.json"):
        (out / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="thalweg-demo-") as results:
        settings = replace(settings, vocabulary=vocabulary, precision=precision, results=results)
        code, facts = _train_and_reload(settings, log)
    if code != 0:
        return code
    summary = _build_summary(settings, facts, out, time.perf_counter() - started)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(summary))
    else:
        _print_summary(summary, log)
    return 0 if _matches_after_reload(summary) else 1


def _make_output_folder(name: str) -> Path:
    out = Path(name).expanduser().resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {name} cannot be written to ({error.strerror or error}): choose a folder that you can write to"
        ) from None
    return out


def _resolve_device(requested: str, nproc: int) -> str:
    """The device's name; two ranks cannot share one accelerator: with fewer of them than ranks, the processor."""
    import torch

    from thalweg.device import resolve_device

    too_few = requested == "auto" and torch.accelerator.device_count() < nproc
    return "cpu" if too_few or resolve_device(requested).type == "cpu" else requested


def _train_and_reload(settings: DemoSettings, log: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Run both parts; returns the first non-zero exit code, or 0 and what the ranks wrote."""
    from thalweg.launch.local import run_local
    from thalweg.launch.spec import LaunchSpec, build_local_job

    results, environ = Path(settings.results), {DEVICE_VARIABLE: settings.device}
    (results / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    log(
        f"model: GPT, {settings.num_layers} layers x {settings.width}, sequence {settings.block_size}; "
        f"{settings.nproc} processes, ZeRO stage {settings.stage}, {settings.precision}, {settings.steps} steps"
    )
    facts: dict[str, Any] = {}
    for phase, nproc, result in (("train", settings.nproc, "trained"), ("reload", 1, "reloaded")):
        arguments = phase, str(results / "settings.json")
        spec = LaunchSpec("thalweg.cli.demo.worker", arguments, "module", str(nproc), bind=nproc > 1, environ=environ)
        code = run_local(build_local_job(spec)).show()
        if code != 0:
            return code, {}
        facts |= json.loads((results / f"{result}.json").read_text(encoding="utf-8"))
        if phase == "train":
            log(f"checkpoint: {facts['checkpoint']}")
    return 0, facts


def _build_summary(settings: DemoSettings, facts: dict[str, Any], out: Path, seconds: float) -> dict[str, Any]:
    from thalweg.observe.writers import read_jsonl

    losses = [float(row["loss"]) for row in read_jsonl(out / "metrics.jsonl")]
    tail = losses[-max(1, len(losses) // 10) :]
    plot_path = out / "loss.png"
    _plot_losses(plot_path, losses, vocabulary=settings.vocabulary, held_out=facts["loss_saved"])
    of_ranks = ("loss_saved", "loss_reloaded", "tokens_per_s", "checkpoint", "sample", "weights_saved",
                "weights_reloaded", "parameters", "tokens")  # fmt: skip
    return {
        "loss_first": losses[0],
        "loss_last": sum(tail) / len(tail),
        "picture": str(plot_path),
        **{name: facts[name] for name in of_ranks},
        **{name: getattr(settings, name) for name in ("vocabulary", "steps", "stage", "nproc", "precision")},
        "seconds_training": facts["seconds"],
        "seconds": seconds,
    }


def _matches_after_reload(summary: dict[str, Any]) -> bool:
    """Whether the reloaded model is the saved one: the loss to its last digit, each weight to its bits."""
    same_loss = summary["loss_reloaded"] == summary["loss_saved"]
    return same_loss and summary["weights_reloaded"] == summary["weights_saved"]


def _print_summary(summary: dict[str, Any], log: Callable[[str], None]) -> None:
    ceiling = math.log(summary["vocabulary"])
    comparison = "equal to the last digit, and so are all weights" if _matches_after_reload(summary) else "NOT EQUAL"
    log(
        f"loss: {summary['loss_first']:.3f} at the start (ln of the vocabulary is {ceiling:.3f}), "
        f"{summary['loss_last']:.3f} at the end, {summary['loss_last'] / ceiling:.0%} of ln(vocabulary); "
        f"{summary['tokens_per_s']:,.0f} tokens/s"
    )
    log(f"held-out loss: {summary['loss_saved']!r} when saved, {summary['loss_reloaded']!r} reloaded: {comparison}")
    log(f"picture: {summary['picture']}")
    log(f"sample:\n{'-' * 72}\n{summary['sample'].rstrip()}\n{'-' * 72}")
    log(f"{summary['seconds']:.0f} s in all, {summary['seconds_training']:.0f} of them training")


def _plot_losses(path: Path, losses: list[float], *, vocabulary: int, held_out: float) -> None:
    """Write a PNG of the training loss by step, with ln(vocabulary), 60% of it, and the held-out loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training loss")
    axes.plot(steps, _smooth(losses), color="#08519c", linewidth=2, label="the same, smoothed")
    axes.plot([len(losses)], [held_out], "o", color="#d94801", label=f"held-out loss {held_out:.3f}")
    ceiling = math.log(vocabulary)
    for height, label in ((ceiling, f"ln({vocabulary:,})"), (0.6 * ceiling, "60% of it")):
        axes.axhline(height, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(label, (0.995, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.set_title("A GPT learns the Python standard library")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _smooth(values: list[float], decay: float = 0.8) -> list[float]:
    """An exponential mean, corrected for its start as Adam's moments are."""
    mean, smooth = 0.0, []
    for count, value in enumerate(values, start=1):
        mean = decay * mean + (1 - decay) * value
        smooth.append(mean / (1 - decay**count))
    return smooth
