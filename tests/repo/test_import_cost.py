"""``import thalweg`` is quick, silent, creates no device context and forks safely (row 27)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache

import pytest

REPEATS = 3
LIMIT = 0.3  # seconds of process CPU time beyond `import torch`
FIRST_USE_LIMIT = 0.3  # of what importing torch takes in the same process; the config's schema is half of it


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "an import wrote to standard error"
    return done.stdout


def _cost(statement: str) -> float:
    """CPU seconds that ``statement`` adds to `import torch`, the least of several runs.

    The first run leaves the bytecode, as pip does at install, also where the environment forbids it.
    """
    timed = f"start = time.process_time()\n{statement}\nprint(time.process_time() - start)"
    return _least(f"import time, torch\n{timed}")


@cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """One folder for all runs: compiling torch takes longer than all else here together."""
    return tempfile.TemporaryDirectory()


def _least(code: str) -> float:
    """The least number that several runs of ``code`` print."""
    folder = os.environ.get("PYTHONPYCACHEPREFIX") or _bytecode().name
    return min(float(_run(code, PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=folder)) for _ in range(REPEATS))


@pytest.mark.alone
def test_import_is_quick() -> None:
    assert _cost("import thalweg") < LIMIT


@pytest.mark.nightly
@pytest.mark.alone
def test_the_first_use_is_quick() -> None:
    """Public names are resolved on first use; beyond the parts of torch that it needs, that is cheap."""
    of_torch = "import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.data"
    clock = "time.process_time()"
    ours = f"import thalweg; thalweg.initialize\nprint(({clock} - b) / (b - a))"
    code = f"import time\na = {clock}\n{of_torch}\nb = {clock}\n{ours}"
    assert _least(code) < FIRST_USE_LIMIT


@pytest.mark.parametrize("collects", [True, False])
def test_the_first_use_collects_no_garbage(collects: bool) -> None:
    """And leaves the collector as it was."""
    code = f"""
import gc, torch.distributed.fsdp
{"" if collects else "gc.disable()"}
starts = []
gc.callbacks.append(lambda phase, info: starts.append(phase))
import thalweg
thalweg.initialize
print(len(starts), gc.isenabled())
"""
    assert _run(code).split() == ["0", str(collects)]


def test_an_import_of_the_engine_loads_nothing_that_only_a_job_uses() -> None:
    """Beyond torch's own parts: no plan, no compiler, no Hugging Face; what torch loads itself is not ours."""
    code = """
import sys, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.data
before = set(sys.modules)
import thalweg.engine
assert "thalweg.engine" in sys.modules
print(*sorted(set(sys.modules) - before))
"""
    loaded = _run(code).split()
    assert "thalweg.parallelize" in loaded
    late = ("thalweg.plan", "thalweg.infer", "thalweg.serve", "sympy", "torch.export", "torch._dynamo")
    late += ("torch._inductor", "transformers", "datasets", "accelerate", "peft", "matplotlib", "fastapi", "uvicorn")
    found = [name for name in loaded if any(name == one or name.startswith(f"{one}.") for one in late)]
    assert not found, found


@pytest.mark.nightly
def test_the_clock_would_notice() -> None:
    """Negative control: a module that takes its time at import is over the limit."""
    assert _cost("while time.process_time() < start + 0.35: pass") > LIMIT


def test_import_alone_loads_no_torch_and_says_nothing() -> None:
    assert _run("import sys, thalweg; assert 'torch' not in sys.modules; dir(thalweg)") == ""


def test_a_process_that_imported_it_forks_safely() -> None:
    code = """
import os, torch, thalweg
thalweg.initialize
pid = os.fork()
if pid == 0:
    ok = bool((torch.ones(64, 64) @ torch.ones(64, 64) == 64).all())
    os._exit(0 if ok else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    assert _run(code) == ""


def test_using_public_names_prints_nothing_creates_no_context_and_leaves_torch_as_it_was() -> None:
    """No name of torch's is exchanged by using Thalweg's (row 13); no thread, process group or logger is made."""
    code = """
import logging, os
import torch, torch.distributed as dist, torch.nn.functional as F, torch.utils.checkpoint
import torch.distributed.fsdp, torch.distributed.tensor
def threads():
    return os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")), torch.get_num_threads()
threads_before = threads()
spaces = (torch, torch.nn, torch.nn.Module, torch.nn.Linear, torch.nn.Parameter, torch.Tensor, F, dist,
          torch.optim, torch.utils.checkpoint, torch.distributed.fsdp, torch.autograd.Function)
before = [dict(vars(space)) for space in spaces]
import thalweg
for name in thalweg.__all__:
    getattr(thalweg, name)
for space, old in zip(spaces, before):
    changed = [k for k, v in old.items() if vars(space).get(k) is not v and not k.startswith("__")]
    assert not changed, (space, changed)
assert threads_before == threads(), f"threads {threads_before} -> {threads()}"
assert not torch.cuda.is_initialized()
assert not dist.is_initialized()
assert not logging.getLogger().handlers and not logging.getLogger("thalweg").handlers
"""
    assert _run(code) == ""


def test_inference_is_imported_where_no_kernel_can_be_made() -> None:
    """llvmlite is optional, and no wheel of it may exist for a new Python: torch's operators do instead."""
    code = """
import sys
sys.modules["llvmlite"] = None
import thalweg.infer.loader.load
from thalweg.ops import cpu_kernels
print(cpu_kernels.unsupported_reason())
"""
    assert "llvmlite is not installed" in _run(code)
