"""How a process learns at its start that ``import deepspeed`` (and ``mii``) is Thalweg.

* ``THALWEG_AS_DEEPSPEED=1`` alone is enough where Thalweg is installed: ``thalweg-as-deepspeed.pth`` in site-packages
  (setup.py) looks for it.
* `thalweg run --as-deepspeed` sets ``PYTHONPATH`` as well, for a checkout and for other interpreters.  Python imports
  ``sitecustomize`` from the first folder of its path that has one, in every process, before anything else; the file
  of that name beside this one opts in where the variable is set, then runs the next one on the path.
* It puts ``cli/bin``, DeepSpeed's programs by their names, first on ``PATH``.  They are not commands that an
  install adds: in the environment of a real DeepSpeed pip would write them over its own, and take those along when
  Thalweg is removed.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

AS_DEEPSPEED = "THALWEG_AS_DEEPSPEED"


def deepspeed_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process and its children take ``deepspeed`` for Thalweg."""
    here = Path(__file__).parent
    # The interpreter's folder too, as activating its environment would: the programs begin with `env python3`.
    programs = (str(here.parents[1] / "cli" / "bin"), str(Path(sys.executable).parent))
    return {
        AS_DEEPSPEED: "1",
        "PYTHONPATH": _prepend(environ.get("PYTHONPATH", ""), str(here)),
        "PATH": _prepend(environ.get("PATH", os.defpath), *programs),
    }


def _prepend(path: str, *folders: str) -> str:
    others = [folder for folder in path.split(os.pathsep) if folder and folder not in folders]
    return os.pathsep.join([*folders, *others])
