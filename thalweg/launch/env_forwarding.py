"""Which environment variables go along to the other hosts.

Three sources, later ones win: variables of this process that start with one of :data:`FORWARDED_PREFIXES`;
the files ``.deepspeed_env`` and ``.thalweg_env`` (``NAME=VALUE`` a line) in the home and the current directory,
or the file that ``DS_ENV_FILE`` names; and ``--env NAME[=VALUE]``.  They travel as data, not on a command line.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "MV2_", "TORCH_", "TORCHINDUCTOR_", "PYTHON", "OMP_", "MKL_", "KMP_", "CUBLAS_",
    "CUDA_DEVICE_MAX", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "THALWEG_", "WANDB_", "LD_LIBRARY_PATH",
)  # fmt: skip
ENV_FILES = (".deepspeed_env", ".thalweg_env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def collect_forwarded_env(
    environ: Mapping[str, str], assignments: Iterable[str], folders: Iterable[Path] = ()
) -> dict[str, str]:
    """The variables to set on every host.

    Raises:
        ValueError: a line or an option that is not ``NAME=VALUE``, or a NAME that is not set here.
    """
    variables = {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    env_file, folders = environ.get("DS_ENV_FILE"), tuple(folders)
    files = [folder / name for folder in folders for name in ([env_file] if env_file else ENV_FILES)]
    files = list(dict.fromkeys(path for path in files if path.is_file()))
    if env_file and folders and not files:
        raise ValueError(f"DS_ENV_FILE is {env_file}, and there is no such file in {' or '.join(map(str, folders))}")
    for path in files:
        variables.update(read_env_file(path))
    return variables | read_assignments(environ, assignments)


def read_assignments(environ: Mapping[str, str], assignments: Iterable[str]) -> dict[str, str]:
    """The variables that ``--env`` names; raises as :func:`collect_forwarded_env`."""
    variables = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"--env {text} is not NAME or NAME=VALUE")
        if not equals and name not in environ:
            raise ValueError(f"--env {name}: it is not set here; write --env {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of one file; blank lines, comments and a leading ``export`` are allowed."""
    variables = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or _NAME.fullmatch(name) is None:
            raise ValueError(f"{path}, line {number}: {text!r} is not NAME=VALUE")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        variables[name] = value[1:-1] if quoted else value
    return variables
