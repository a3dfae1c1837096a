"""`thalweg doctor` and the command line's own manners."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import thalweg
from thalweg.cli import COMMANDS, doctor, main
from thalweg.ops import cpu_kernels
from thalweg.utils import procfs

THALWEG = [sys.executable, "-m", "thalweg"]


def test_doctor_prints_one_json_object(tmp_path: Path) -> None:
    done = subprocess.run([*THALWEG, "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["ok"] is True and report["thalweg"] == thalweg.__version__
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(doctor.CHECKS)
    assert checks["two ranks over gloo"]["status"] == "ok", "two ranks really met"
    for check in checks.values():
        assert check["status"] in ("ok", "warn") and check["found"]
        assert bool(check["cure"]) == (check["status"] == "warn")
    assert not list(tmp_path.iterdir())


def test_doctor_names_a_cure_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(
        doctor, "CHECKS", (doctor._check_shared_memory, doctor._check_python, doctor._check_core_packages)
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, used=0, free=64 << 20))
    assert main(["doctor"]) == 0, "a warning is no failure"
    assert "--shm-size" in capsys.readouterr().out
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [check["status"] for check in report["checks"]] == ["warn", "fail", "ok"]


@pytest.mark.parametrize("environ", [{"OMP_NUM_THREADS": "1"}, {}])
def test_doctor_sees_the_environment(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert doctor._check_processor().status == ("warn" if environ else "ok")


def test_doctor_sees_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a limit what is used counts, and of nested ones the tightest, as the plan counts them."""
    limits = [(64 << 30, 1 << 30)]
    monkeypatch.setattr(procfs, "_cgroup_limits", lambda: limits)
    monkeypatch.setattr(procfs, "read_fields", lambda path: {"MemAvailable": f"{32 << 20} kB"})
    assert doctor._check_memory().status == "ok"
    limits.append((4 << 30, 3 << 30))
    found = doctor._check_memory()
    assert found.status == "warn" and found.found.startswith("1.0 GiB available")
    if thalweg.get_accelerator().device_name() == "cpu":
        assert thalweg.get_accelerator().available_memory() == 1 << 30


def test_doctor_names_the_kernels_of_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    isas = [isa.name for isa in cpu_kernels.supported_isas()]
    for name in isas:
        monkeypatch.setenv("THALWEG_CPU_ISA", name)
        assert doctor._check_cpu_kernels().found == f"CPU kernels for {name}"
    monkeypatch.setenv("THALWEG_CPU_ISA", "riscv")
    result = doctor._check_cpu_kernels()
    assert result.status == "warn" and "torch's operators" in result.found and result.cure


def test_doctor_knows_what_an_extra_brings() -> None:
    text = (Path(thalweg.__file__).parent.parent / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for name, wanted in doctor._EXTRAS.items():
        brought = {re.split(r"[<>=\[]", item)[0].replace("-", "_") for item in extras[name]}
        assert set(wanted) <= brought and (set(wanted) == brought or name == "test"), name
    assert set(doctor._EXTRAS) == set(extras) - {"docs"}


def test_every_subcommand_has_help_with_an_example(capsys: pytest.CaptureFixture) -> None:
    assert {"run", "doctor", "config"} <= set(COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit) as leaving:
            main([name, "--help"])
        text = capsys.readouterr().out
        assert leaving.value.code == 0 and "example" in text and f"thalweg {name}" in text


def test_the_front_page_lists_them_without_torch() -> None:
    code = "import sys; from thalweg.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, text in COMMANDS.items():
        assert name in done.stdout and text in done.stdout


def test_wrong_use_of_the_front_page(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    assert "usage: thalweg" in capsys.readouterr().err
    for arguments, said in (
        (["nonsense"], "there are demo, run"),
        (["sevre", "model"], "did you mean serve?"),
        (["--nproc", "2", "run", "train.py"], "options follow them"),
        (["--nonsense"], "--nonsense"),
        (["doctor", "--nonsense"], "thalweg doctor --help"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["ckpt", "export", "--max-shard-byte=1", "x", "y", "z"], "thalweg ckpt"),
        (["run", "--nprok", "2", "train.py"], "did you mean --nproc?"),
        (["config", "absent/absent"], "absent/absent"),
        (["run", "--hostfile", "absent", "train.py"], "absent: no such file"),
    ):
        try:
            code: object = main(arguments)
        except SystemExit as leaving:
            code = leaving.code
        captured = capsys.readouterr()
        assert code == 2 and captured.out == "" and said in captured.err, (arguments, captured.err)
        assert len(captured.err.strip().splitlines()) <= 2
    for arguments in (["help"], ["help", "serve"]):
        with pytest.raises(SystemExit) as asked:
            main(arguments)
        assert asked.value.code == 0 and " ".join(arguments[1:]) in capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0 and thalweg.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad value: do this"), 2),
        (FileNotFoundError("no file x"), 2),
        (RuntimeError("it broke"), 1),
        (OSError("disk full"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_paragraph_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, error: BaseException, code: int
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("thalweg: ") and "Traceback" not in captured.err
    monkeypatch.setenv("THALWEG_TRACEBACK", "1")
    assert main(["doctor"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise TypeError("a defect")

    monkeypatch.setattr(doctor, "run", fail)
    with pytest.raises(TypeError):
        main(["doctor"])


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m thalweg --help"
    first = subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None and first.stderr is not None
    first.stdout.close()
    assert b"Traceback" not in first.stderr.read()
    first.stderr.close()
    first.wait(timeout=60)
