"""``thalweg study run``: the cells of a study, in turns, each in processes of its own, as often as was asked for.

The output folder is the state: ``study.json`` (the config and where it runs), what ``prepare`` makes, and
``cells/CELL/round-N.json`` for each process that has ended.  The same command over the same folder does what is
missing.  Machine code of peers, and of ours, starts and dies with its process.
"""

import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import thalweg
from thalweg.study import config as study_config
from thalweg.study import prepare
from thalweg.study.cell import run_cell
from thalweg.study.config import StudyConfig, slug
from thalweg.study.prepare import read_json, write_json
from thalweg.utils.procfs import end_with_parent, read_fields
from thalweg.utils.versions import installed_version


@dataclass(frozen=True)
class StudyCell:
    """One model, dataset, technique and hardware setting."""

    model: study_config.StudyModel
    dataset: study_config.StudyDataset
    technique: study_config.StudyTechnique
    hardware: study_config.StudyHardware

    @property
    def name(self) -> str:
        """Its folder below ``cells/``."""
        parts = (self.hardware, self.model, self.dataset, self.technique)
        return "/".join(slug(part.name) for part in parts)


@dataclass(frozen=True)
class CellGroup:
    """The cells that are compared with each other: all techniques of a task; the first one is the baseline, the last
    one the baseline again.  Where they are planned it comes once, and so does each cell."""

    task: study_config.Task
    cells: tuple[StudyCell, ...]

    @property
    def is_planned(self) -> bool:
        """Whether nothing of it is measured."""
        return self.cells[0].hardware.planned


def list_groups(config: StudyConfig) -> list[CellGroup]:
    """Return all cells of a study in the order of the config."""
    groups = []
    for hardware, model, dataset, task in product(config.hardware, config.models, config.datasets, config.tasks):
        if hardware.planned and task == "inference":
            continue  # the plan is one of training
        techniques = config.with_null(task)[: -1 if hardware.planned else None]
        groups.append(CellGroup(task, tuple(StudyCell(model, dataset, one, hardware) for one in techniques)))
    return groups


def list_turns(config: StudyConfig) -> Iterator[tuple[CellGroup, StudyCell, int]]:
    """Yield the processes of a study in order: within a round the cells of a group in turns, each round beginning
    with another."""
    for group in list_groups(config):
        for number in range(1 if group.is_planned else config.rounds):
            start = number % len(group.cells)
            for cell in group.cells[start:] + group.cells[:start]:
                yield group, cell, number


def run_study(config: StudyConfig, folder: Path, progress: Callable[[str], None]) -> dict[str, int]:
    """Run what is missing of a study; returns how many processes ran, and how many cells have failed.

    ``progress`` gets a line for each process.  Raises ValueError where the folder holds another study.
    """
    _claim_folder(config, folder)
    turns = list(list_turns(config))
    missing = [turn for turn in turns if not result_path(folder, turn[1], turn[2]).exists()]
    if missing:
        progress(f"{config.name}: {len(missing)} of {len(turns)} processes to go; preparing datasets and models")
        _run_process(prepare.main, str(folder), folder / "prepare.log", config.timeout)
    seconds: list[float] = []
    for index, (group, cell, number) in enumerate(missing):
        start = time.perf_counter()
        result = _run_cell(config, folder, group, cell, number)
        seconds.append(time.perf_counter() - start)
        left = sum(seconds) / len(seconds) * (len(missing) - index - 1)
        text = result["status"] + (f": {result['reason'][:160]}" if "reason" in result else "")
        progress(f"[{len(turns) - len(missing) + index + 1}/{len(turns)}, {left / 60:.0f} min left] {cell.name}"
                 f" round {number + 1}: {text}")  # fmt: skip
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    failed = {cell.name for _, cell, number in turns if "reason" in read_json(result_path(folder, cell, number))}
    return {"processes": len(missing), "cells": len({cell.name for _, cell, _ in turns}), "failed": len(failed)}


def _claim_folder(config: StudyConfig, folder: Path) -> None:
    """Write ``study.json``, or compare with the one that is there."""
    # As JSON has it: a tuple is a list there.
    wanted = StudyConfig.model_validate(config.model_dump(by_alias=True)).model_dump(by_alias=True, mode="json")
    path = folder / "study.json"
    if not path.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no study: give --out another folder")
        write_json(path, {"config": wanted, "provenance": describe_machine()})
    elif (found := read_json(path)["config"]) != wanted:
        keys = ", ".join(key for key in wanted if found.get(key) != wanted[key])
        raise ValueError(f"{folder} holds a study with other {keys}: give --out another folder")


def result_path(folder: Path, cell: StudyCell, number: int) -> Path:
    return folder / "cells" / cell.name / f"round-{number}.json"


def _run_cell(config: StudyConfig, folder: Path, group: CellGroup, cell: StudyCell, number: int) -> dict[str, Any]:
    """Run one process and return its result, or what became of it."""
    path = result_path(folder, cell, number)
    data = folder / "data" / f"{slug(cell.dataset.name)}.json"
    inputs = [data, folder / "models" / f"{slug(cell.model.name)}.json"]
    problems = [
        read_json(file).get("error") if file.exists() else f"preparing it has failed, see {folder / 'prepare.log'}"
        for file in inputs
    ]
    earlier = read_json(result_path(folder, cell, 0)) if number else {"status": "ok"}
    if any(problems):
        reason = next(filter(None, problems))
        result = {"status": "out of memory" if reason.startswith("MemoryError") else "failed", "reason": reason}
    elif earlier["status"] != "ok":  # it would fail again
        result = {"status": earlier["status"], "reason": earlier["reason"]}
    else:
        scratch = folder / "scratch" / cell.name
        spec = {
            "task": group.task, "model": read_json(inputs[1]), "dataset": cell.dataset.model_dump(by_alias=True),
            "data": str(data.absolute()), "technique": cell.technique.model_dump(), "seed": config.seed,
            "hardware": cell.hardware.model_dump(), "turns": config.turns, "steps": config.steps,
            "result": str(path.absolute()), "scratch": str(scratch.absolute()),
        }  # fmt: skip
        write_json(path.with_name("spec.json"), spec)
        log, given = path.with_name(f"round-{number}.log"), str(path.with_name("spec.json"))
        python = cell.technique.python
        reason = _run_process(run_cell, given, log, config.timeout, python, **_environment(cell))
        if path.exists():
            return read_json(path)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = lines[-1][:300] if lines else "it said nothing"
        result = {"status": "out of memory" if "SIGKILL" in reason else "failed", "reason": f"{reason}; {last}"}
    write_json(path, result)
    return result


def _environment(cell: StudyCell) -> dict[str, str]:
    """Rank 0's variables, for libraries that ask for a launcher; and as many threads as the setting has."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = str(cell.hardware.ranks)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    rank |= dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), ranks)
    needs_rank = ranks != "1" or cell.technique.options.get("library") == "deepspeed"
    accelerator = {"DS_ACCELERATOR": "cpu"} if cell.hardware.device == "cpu" else {}
    launcher = {**rank, **accelerator, "MASTER_PORT": str(port)} if needs_rank else {}
    return {"OMP_NUM_THREADS": str(cell.hardware.threads), **launcher, **cell.technique.env}


# Imported once, in the process from which cells are forked: a cell begins with them loaded and nothing else done.
_PRELOADED = ["torch", "transformers.generation", "transformers.modeling_utils", "thalweg.study.cell"]


def _run_process(
    function: Callable[[str], None],
    argument: str,
    log: Path,
    timeout: float,
    python: str | None = None,
    **variables: str,
) -> str:
    """Run ``function(argument)`` in a process of its own, to its end; return how it ended.

    The process is forked from a server that has imported torch and done nothing with it; with ``python`` it is that
    interpreter, new.  Its output goes to ``log``, what it leaves in temporary folders goes with it, and it ends with
    this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="thalweg-study-") as temporary:
        variables = {"TMPDIR": temporary, **variables}
        if python is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            process: Any = context.Process(target=_enter, args=(function, argument, str(log), variables))
            process.start()
            process.join(timeout)
            code = process.exitcode
        else:
            root = str(Path(str(thalweg.__file__)).parent.parent)
            path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
            command = [python, "-m", function.__module__, argument]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                    env={**os.environ, "PYTHONPATH": path, **variables},
                )  # fmt: skip
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
        # Its ranks are of its session; where it has ended there is nobody left.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            return f"no end after {timeout:g} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _enter(function: Callable[[str], None], argument: str, log: str, variables: dict[str, str]) -> None:
    """The first thing that a forked process does."""
    os.setsid()
    os.environ.update(variables)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    end_with_parent()
    function(argument)


def describe_machine() -> dict[str, Any]:
    """Return where and with what a study runs: date, commit, versions, processor."""
    cpu = read_fields("/proc/cpuinfo")
    model, flags = cpu.get("model name", platform.processor() or platform.machine()), cpu.get("flags", "").split()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if name in flags]
    libraries = ("torch", "transformers", "datasets", "deepspeed", "torchmetrics")
    root = Path(str(thalweg.__file__)).parent.parent
    commit = ""
    if (root / ".git").exists() and shutil.which("git"):
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
        commit = found.stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "thalweg": thalweg.__version__, "commit": commit,
        "processor": model, "features": features, "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "python": platform.python_version(),
        "load": os.getloadavg()[0], **{name: installed_version(name) for name in libraries},
    }  # fmt: skip
