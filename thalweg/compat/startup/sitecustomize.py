"""Opts in to ``import deepspeed`` (and ``mii``) being Thalweg, then runs the ``sitecustomize`` that this one hides."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _opt_in() -> None:
    if importlib.util.find_spec("thalweg") is None:  # run from a checkout that is not on the path
        sys.path.append(str(Path(__file__).resolve().parents[3]))
    import thalweg.compat.opt_in  # noqa: F401


def _run_next() -> None:
    here = str(Path(__file__).resolve().parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("THALWEG_AS_DEEPSPEED") == "1":
    _opt_in()
_run_next()
