"""How a process learns at its start that ``import deepspeed`` is Thalweg: a variable, and a folder on ``PYTHONPATH``.

Python imports ``sitecustomize`` from the first folder of its path that has one, in every process, before anything
else; the file of that name beside this one opts in where the variable is set, then runs the next one on the path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

AS_DEEPSPEED = "THALWEG_AS_DEEPSPEED"


def deepspeed_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process and its children take ``import deepspeed`` for Thalweg."""
    folder = str(Path(__file__).parent)
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    return {AS_DEEPSPEED: "1", "PYTHONPATH": os.pathsep.join([folder, *others])}
