"""Say what this machine has and what it lacks for training, with a cure for each lack.

examples:
  thalweg doctor
  thalweg doctor --json

Exit code 0 when nothing is broken (warnings allowed), 1 otherwise.
"""

# Each check is a function that returns one ``CheckResult``; ``CHECKS`` is the order in which they are shown.  A
# check never raises: what it cannot find out it says.

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import thalweg
from thalweg.launch.cpu_affinity import assign_cores, cpu_quota, physical_cores, usable_cpus
from thalweg.utils.procfs import available_host_memory, read_fields
from thalweg.utils.versions import installed_version, python_version_problem, torch_version_problem

_MIB, _GIB = 2**20, 2**30
_EXTRAS = {
    "hf": ("transformers", "datasets", "tokenizers", "accelerate", "peft"),
    "demo": ("tokenizers", "matplotlib"),
    "plots": ("matplotlib",),
    "monitor": ("tensorboard",),
    "quant": ("torchao",),
    "native": ("llvmlite",),
    "serve": ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client", "llguidance", "transformers"),
    "diffusion": ("diffusers", "transformers"),
    "study": ("transformers", "datasets", "torchmetrics", "matplotlib"),
    "test": ("pytest", "hypothesis", "psutil"),
}
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class CheckResult:
    """One finding; ``cure`` is empty when ``status`` is ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    cure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when something is broken."""
    checks = [check() for check in CHECKS]
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        found = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"ok": not failed, "thalweg": thalweg.__version__, "checks": found}, indent=1))
        return int(failed)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:4}  {check.name:{width}}  {check.found}")
        if check.cure:
            print(f"{'':{width + 8}}-> {check.cure}")
    return int(failed)


def _judge(name: str, found: str, cure: str = "") -> CheckResult:
    """What has a cure is a warning."""
    return CheckResult(name, "warn" if cure else "ok", found, cure)


def _check_python() -> CheckResult:
    found = f"{platform.python_version()} at {sys.executable}"
    if not (problem := python_version_problem()):
        return CheckResult("python", "ok", found)
    status = "warn" if "newer" in problem else "fail"
    return CheckResult("python", status, f"{found}; {problem}", "make an environment with Python 3.11 to 3.14")


def _check_torch() -> CheckResult:
    try:
        import torch
    except (ImportError, OSError) as error:
        return CheckResult("torch", "fail", str(error).splitlines()[0], "pip install torch==2.13.0")
    if not (problem := torch_version_problem(torch.__version__)):
        return CheckResult("torch", "ok", torch.__version__)
    return CheckResult("torch", "warn" if "newer" in problem else "fail", problem, "pip install torch==2.13.0")


def _check_devices() -> CheckResult:
    try:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return CheckResult("devices", "ok", "no GPU: ranks run on the processor, over gloo")
        module = torch.get_device_module(accelerator)
        sizes = [torch.accelerator.get_memory_info(index)[1] for index in range(torch.accelerator.device_count())]
        found = ", ".join(f"{module.get_device_name(i)} ({size // _GIB} GiB)" for i, size in enumerate(sizes))
    except (ImportError, OSError, RuntimeError) as error:
        return CheckResult("devices", "warn", str(error).splitlines()[0], "check the driver with nvidia-smi")
    return CheckResult("devices", "ok", found)


def _check_processor() -> CheckResult:
    cpus = usable_cpus()
    cores, quota = physical_cores(cpus), cpu_quota()
    plan = assign_cores(2, cores, quota=quota)
    found = f"{len(cores)} cores, {len(cpus)} hardware threads" + (f", quota {quota:g}" if quota else "")
    found += f"; `thalweg run --nproc 2` gives each rank {plan.num_threads} thread(s)"
    if (threads := os.environ.get("OMP_NUM_THREADS")) is None:
        return _judge("processor", found)
    found += f"; OMP_NUM_THREADS={threads} is set"
    return _judge("processor", found, "unset it to let `thalweg run` share out")


def _check_cpu_features() -> CheckResult:
    cpu = read_fields("/proc/cpuinfo")
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    if not found:
        return _judge("processor features", f"{platform.machine()}, nothing known of its vector units")
    cure = "" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "bf16 is emulated here: train in fp32"
    return _judge("processor features", ", ".join(found), cure)


def _check_cpu_kernels() -> CheckResult:
    from thalweg.ops import cpu_kernels  # imports torch

    isa, reason = cpu_kernels.host_isa(), cpu_kernels.unsupported_reason()
    if isa is None:
        cure = "pip install 'thalweg[native]'" if "llvmlite" in reason else "serve on a processor of these kinds"
        return _judge("inference kernels", f"torch's operators, several times slower: {reason}", cure)
    return _judge("inference kernels", f"CPU kernels for {isa.name}")


def _check_memory() -> CheckResult:
    available = available_host_memory()
    if available is None:
        return _judge("memory", "unknown on this system")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{available / _GIB:.1f} GiB available to this process, of the machine's {total / _GIB:.1f}"
    cure = "two ranks of a small model want 2 GiB: end other programs" if available < 2 * _GIB else ""
    return _judge("memory", found, cure)


def _check_shared_memory() -> CheckResult:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return _judge("shared memory", "no /dev/shm", "collectives go over sockets, which is slower")
    found = f"{usage.free / _GIB:.2f} GiB free of {usage.total / _GIB:.2f} in /dev/shm"
    if not os.access("/dev/shm", os.W_OK):
        return _judge("shared memory", f"{found}, not writable", "make /dev/shm writable for this user")
    cure = "in a container: --shm-size=8g; shared-memory collectives want the model's size in bytes"
    return _judge("shared memory", found, cure if usage.free < 512 * _MIB else "")


def _check_limits() -> CheckResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    too_few = soft != resource.RLIM_INFINITY and soft < 1024
    return _judge("limits", f"{soft} open files", "ulimit -n 4096" if too_few else "")


def _check_loopback() -> CheckResult:
    try:
        addresses = sorted({str(item[4][0]) for item in socket.getaddrinfo("localhost", None)})
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
    except OSError as error:
        cure = "bring it up: ip link set lo up; add `127.0.0.1 localhost` to hosts"
        return CheckResult("loopback", "fail", str(error), cure)
    return CheckResult("loopback", "ok", f"localhost is {', '.join(addresses)}")


def _check_two_ranks() -> CheckResult:
    from thalweg.launch.local import run_local
    from thalweg.launch.spec import LaunchSpec, build_local_job

    script, start = str(Path(thalweg.__file__).parent / "cli" / "doctor_check.py"), time.monotonic()
    try:
        outcome = run_local(build_local_job(LaunchSpec(script, nproc="2", bind=False, grace=2.0)))
    except (ImportError, OSError, RuntimeError) as error:
        return CheckResult("two ranks over gloo", "fail", str(error).splitlines()[0], "see the checks above")
    seconds = time.monotonic() - start
    if outcome.exit_code:
        last_line = outcome.report.strip().splitlines()[-1]
        return CheckResult("two ranks over gloo", "fail", last_line, "see the loopback check")
    return CheckResult("two ranks over gloo", "ok", f"started, summed and ended in {seconds:.1f} s")


def _check_extras() -> CheckResult:
    present, absent = [], []
    for extra, names in _EXTRAS.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        (absent if missing else present).append(extra)
    found = f"installed: {', '.join(present) or 'none'}" + (f"; not installed: {', '.join(absent)}" if absent else "")
    return _judge("extras", found, "`thalweg demo` wants pip install 'thalweg[demo]'" if "demo" in absent else "")


def _check_core_packages() -> CheckResult:
    versions = {name: installed_version(name) for name in ("safetensors", "numpy", "pydantic", "tqdm")}
    if missing := [name for name, version in versions.items() if version is None]:
        return CheckResult("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return _judge("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _check_disk() -> CheckResult:
    refused = []
    for label, folder in (("here", os.getcwd()), ("temporary files", tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            refused.append(f"{label} ({folder}): {error.strerror}")
    free = shutil.disk_usage(os.getcwd()).free / _GIB
    if refused:
        return _judge("disk", "; ".join(refused), "change to a folder you may write to, or set TMPDIR")
    if free < 1:
        return _judge("disk", f"{free:.2f} GiB free here", "checkpoints want three times the model: free some")
    return _judge("disk", f"writable, {free:.0f} GiB free here")


CHECKS: tuple[Callable[[], CheckResult], ...] = (
    _check_python, _check_torch, _check_core_packages, _check_devices, _check_processor, _check_cpu_features,
    _check_cpu_kernels, _check_memory, _check_shared_memory, _check_limits, _check_loopback, _check_two_ranks,
    _check_disk, _check_extras,
)  # fmt: skip
