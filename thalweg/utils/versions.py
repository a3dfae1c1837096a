"""The versions that Thalweg was tried with.  A newer one is said, not refused: most of them work."""

import importlib.metadata
import sys
from functools import cache

from thalweg.utils.log import get_logger

# Those of which the gate's tests have passed, in order; `make nightly` runs them on others too.
TRIED_TORCH, TRIED_PYTHON = ("2.11", "2.13", "2.15"), ("3.11", "3.12", "3.13", "3.14")
_log = get_logger(__name__)


def python_version_problem() -> str:
    """What is to be said about this Python, or nothing."""
    return _version_problem("Python", "{}.{}".format(*sys.version_info[:2]), TRIED_PYTHON)


def torch_version_problem(version: str) -> str:
    """What is to be said about this torch (``torch.__version__``), or nothing."""
    return _version_problem("torch", version, TRIED_TORCH)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_problem(name: str, version: str, tried: tuple[str, ...]) -> str:
    release, *releases = (tuple(map(int, text.split("+")[0].split(".")[:2])) for text in (version, *tried))
    if releases[0] <= release <= releases[-1]:
        return ""
    how = "newer" if release > releases[-1] else "older"
    return f"{name} {version} is {how} than the tried ones, {', '.join(tried)}"


@cache
def warn_of_untried_torch(version: str) -> None:
    """Say once that this torch is newer or older than those that were tried."""
    if problem := torch_version_problem(version):
        _log.warning("%s: where something fails that should not, pip install torch==%s.0", problem, TRIED_TORCH[-1])
