"""Which of DeepSpeed's tests a real one passes, which of them pass on Thalweg, and why the others do not."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The files worth most to a user; all others can be named by --files.
FILES = [
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_no_sync_ctxt.py",
    "comm/test_dist.py",
    "pipe/test_pipe_module.py",
    "launcher/test_ds_arguments.py",
    "launcher/test_run.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_config.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_leaf_module.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "runtime/pipe/test_topology.py",
    "checkpoint/test_tag_validation.py",
    "runtime/test_lr_schedulers.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_user_backward.py",
    "checkpoint/test_zero_optimizer.py",
    "v1/moe/test_moe.py",
    "checkpoint/test_universal_checkpoint.py",
    "model_parallelism/test_autotp_training.py",
]


def file_of(test: str) -> str:
    """The file of a test, as FILES names it."""
    return test.removeprefix("unit/").partition("::")[0]


def read_passing() -> set[str]:
    """The tests that pass."""
    return set((HERE / "passing.txt").read_text().splitlines())


def read_real_passing() -> set[str]:
    """The tests that DeepSpeed itself passes."""
    return set((HERE / "real_passing.txt").read_text().splitlines())


def read_left_out() -> list[tuple[str, str]]:
    """Patterns of tests that do not, each with its reason; the first that fits counts."""
    lines = (HERE / "left_out.tsv").read_text().splitlines()
    return [(pattern, reason) for pattern, _, reason in (line.partition("\t") for line in lines)]


def reason_of(test: str) -> str:
    """Why a test is left out; empty where nothing says so."""
    return next((reason for pattern, reason in read_left_out() if fnmatchcase(test.replace("[", "("), pattern)), "")
