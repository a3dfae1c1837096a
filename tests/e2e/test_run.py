"""`thalweg run`: what a rank sees, and wrong use (rows 29 and 30)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.e2e.launch_support import RUN_COMMAND, Launch, clean_environ, wait_output

DESCRIBE = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    seen = {name: os.environ.get(name) for name in (*names, "OMP_NUM_THREADS")}
    seen.update(argv=sys.argv, name=__name__, file=__file__, path0=sys.path[0])
    seen.update(main=sys.modules["__main__"].__dict__ is globals(), thalweg="thalweg" in sys.modules)
    seen.update(cpus=sorted(os.sched_getaffinity(0)))
    with open(os.path.join(os.environ["OUT"], f"rank{os.environ['RANK']}.json"), "w") as file:
        json.dump(seen, file)
"""


def test_ranks_see_their_variables_and_disjoint_cores(launch: Launch, tmp_path: Path) -> None:
    code, out, err = wait_output(launch(DESCRIBE, "x"))
    assert (code, out, err) == (0, "", ""), "a quiet script leaves a quiet terminal"
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(seen):
        assert (one["RANK"], one["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert one["argv"] == [str(tmp_path / "script.py"), "x"] and one["file"] == str(tmp_path / "script.py")
        assert (one["name"], one["main"], one["path0"]) == ("__main__", True, str(tmp_path))
        assert not one["thalweg"], "the launcher puts nothing of ours into the script's process"
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != "29500"
    usable = len(os.sched_getaffinity(0))
    assert seen[0]["OMP_NUM_THREADS"] == str(max(1, usable // 2)) or usable > 2
    if usable >= 2:
        assert not set(seen[0]["cpus"]) & set(seen[1]["cpus"])


def test_the_device_is_in_the_ranks_environment(launch: Launch, tmp_path: Path) -> None:
    script = 'import os\nprint(os.environ.get("THALWEG_DEVICE"))'
    assert wait_output(launch(script, options=("--nproc", "1", "--device", "cpu"))) == (0, "cpu\n", "")
    assert wait_output(launch(script, options=("--nproc", "1"))) == (0, "None\n", "")


def test_a_variable_for_all_ranks_is_for_those_of_one_host_too(launch: Launch, tmp_path: Path) -> None:
    script = 'import os\nprint(os.environ.get("GIVEN"), os.environ.get("KEPT"))'
    options = ("--nproc", "1", "--env", "GIVEN=a b=c", "--env", "KEPT")
    assert wait_output(launch(script, options=options, KEPT="here", GIVEN="old")) == (0, "a b=c here\n", "")
    code, _, err = wait_output(launch(script, options=("--nproc", "1", "--env", "2=x")))
    assert code == 2 and "--env 2=x is not NAME or NAME=VALUE" in err


@pytest.mark.nightly
def test_threads_and_binding_can_be_chosen(launch: Launch, tmp_path: Path) -> None:
    code, _, err = wait_output(launch(DESCRIBE, options=("--nproc", "2", "--threads", "3", "--no-bind")))
    assert (code, err) == (0, "")
    seen = json.loads((tmp_path / "rank1.json").read_text())
    assert seen["OMP_NUM_THREADS"] == "3" and seen["cpus"] == sorted(os.sched_getaffinity(0))
    assert wait_output(launch(DESCRIBE, OMP_NUM_THREADS="5"))[0] == 0
    assert json.loads((tmp_path / "rank1.json").read_text())["OMP_NUM_THREADS"] == "5", "the user's own value wins"


HARD = [
    "", " ", "$(touch pwned)", "`id`", "; rm -rf x", "a'b\"c", "$HOME", "$$", "${local_rank}", "%s",
    "\\", "*", "~", "--", "--nproc", "-m", "\n", "\t", "é漢", "\udcff", "&&", "|", ">x", "!", "#", "{a,b}",
    "--x=$(y)",
]  # fmt: skip


def test_arguments_are_delivered_exactly(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        with open(os.path.join(os.environ["OUT"], f"args{os.environ['RANK']}"), "wb") as file:
            file.write(b"\\0".join(map(os.fsencode, sys.argv[1:])))
    """
    assert wait_output(launch(script, *HARD))[0] == 0
    for rank in range(2):
        delivered = (tmp_path / f"args{rank}").read_bytes().split(b"\0")
        assert delivered == [os.fsencode(argument) for argument in HARD]
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "x").exists()


@pytest.mark.nightly
def test_modules_programs_and_spawned_children(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text(textwrap.dedent(DESCRIBE))
    done = subprocess.run(
        [*RUN_COMMAND, "-m", "package.tool", "--help"], cwd=tmp_path, env=clean_environ(OUT=str(tmp_path))
    )
    seen = json.loads((tmp_path / "rank0.json").read_text())
    assert done.returncode == 0 and seen["argv"][1:] == ["--help"] and seen["name"] == "__main__"
    done = subprocess.run(
        [*RUN_COMMAND, "--no-python", "env"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "LOCAL_RANK=0\n" in done.stdout
    spawning = """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
    """
    assert wait_output(launch(spawning, options=("--nproc", "1"))) == (0, "[9]\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no script was given"),
        (["absent.py"], "there is no script absent.py"),
        (["--nproc", "0", "script.py"], "at least 1"),
        (["--nproc", "two", "script.py"], "not a number"),
        (["--nproc", "gpu", "script.py"], "no GPU"),
        (["--num-nodes", "2", "script.py"], "which host is this"),
        (["--nnodes=1:4", "script.py"], "--elastic-training hosts come and go"),
        (["--node_rank", "1", "script.py"], "add --num-nodes"),
        (["--launcher", "slurm", "script.py"], "--nproc is needed"),
        (["--include", "a;id", "script.py"], "not a host's name"),
        (["--master_addr", "10.1.2.3", "script.py"], "add --num-nodes"),
        (["--hostfile", "hosts", "--ssh", "false", "script.py"], "no agent came up"),
        (["--hostfile", "nowhere", "script.py"], "nowhere"),
        (["--cores", "9999", "script.py"], "may use"),
        (["--threads", "0", "script.py"], "at least 1"),
        (["--master-port", "70000", "script.py"], "not a port"),
        (["--unknown", "script.py"], "thalweg run --help"),
        (["--rdzv-backend=c10d", "script.py"], "--master-addr"),
        (["--rdzv_endpoint", "localhost:0", "script.py"], "--master-addr"),
        (["--no_ssh", "--hostfile", "hosts", "script.py"], "which host is this"),
        (["--no_ssh", "--hostfile", "hosts", "--node_rank", "2", "script.py"], "must be from 0 to 1"),
        (["--enable_each_rank_log", "logs", "script.py"], "RANK"),
        (["--num_processes", "2", "script.py"], "--nproc N"),
        (["-np", "2", "script.py"], "--nproc N"),
        (["--autotuning", "run", "script.py"], "thalweg tune"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_paragraph_and_code_two(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from thalweg.cli import main
    from thalweg.launch import spec

    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spec, "_count_gpus", lambda: 0)
    try:
        code = main(["run", *options])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert said in captured.err and len(captured.err.strip().splitlines()) == 1, captured.err


def test_a_busy_master_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from thalweg.cli import main

    (tmp_path / "script.py").write_text("")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        code = main(["run", "--master-port", str(busy.getsockname()[1]), str(tmp_path / "script.py")])
    assert code == 2 and "leave out --master-port" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_chosen_master_port_is_used(launch: Launch, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert wait_output(launch(DESCRIBE, options=("--num_accelerators", "2", "--master_port", str(port))))[0] == 0
    assert json.loads((tmp_path / "rank1.json").read_text())["MASTER_PORT"] == str(port)


def test_a_schedulers_command_takes_the_launchers_place(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$$ $OMP_NUM_THREADS $*"\nexit 3\n')
    (tmp_path / "srun").chmod(0o755)
    command = [*RUN_COMMAND, "--launcher", "slurm", "--nproc", "2", "--threads", "5", "train.py", "a b"]
    for path, code in ((str(tmp_path), 3), ("", 2)):
        process = subprocess.Popen(
            command, env=clean_environ(PATH=path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        out, err = process.communicate(timeout=60)
        assert process.returncode == code
        if code == 3:
            assert out.startswith(f"{process.pid} 5 --nodes=1 --ntasks=2 ") and out.endswith(" -u train.py a b\n")
        else:
            assert "there is no srun on PATH: use --launcher ssh" in err
