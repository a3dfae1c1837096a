"""`thalweg run` over several hosts: network namespaces with names, processes and /dev/shm of their own.

What stands in for ssh enters a host and gives the command line to `sh -c`, as an ssh server does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch_support import (
    EXIT_DEADLINE,
    RUN_COMMAND,
    clean_environ,
    is_alive,
    wait_for_pids,
    wait_for_stderr,
    wait_for_texts,
    wait_output,
)
from tests.e2e.test_run_restarts import TRAIN as TRAIN_AND_STOP
from tests.marks import nightly
from tests.repo.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))
namespaces = importlib.import_module("_namespaces")
NUM_HOSTS = 4
pytestmark = [
    pytest.mark.skipif(namespaces.missing_reason() is not None, reason=str(namespaces.missing_reason())),
    pytest.mark.slow,
]
NASTY = [
    "",
    "two words",
    "$(touch INJECTED)",
    "`id`",
    "a;b|c&d",
    "'\"\\",
    "$$ ${local_rank}",
    "*",
    "new\nline",
    "é",
]


def _command_of(pid: int) -> str:
    """What a process runs; "" where it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class Cluster:
    """Four hosts, a hostfile, and the command that reaches them."""

    def __init__(self, hosts: Any, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{addr} slots=2\n" for addr in hosts.addresses))
        enter = {addr: hosts.command_prefix(index) for index, addr in enumerate(hosts.addresses)}
        self.ssh = folder / "reach.py"
        self.ssh.write_text(
            "import os, sys\n"
            f"enter = {enter!r}\n"
            "host, command = sys.argv[1], ' '.join(sys.argv[2:])\n"
            f"if os.path.exists(os.path.join({str(folder)!r}, 'down.' + host)): sys.exit(255)\n"
            "print('welcome to', host, flush=True)\n"  # what a login shell may print
            "os.execvp(enter[host][0], [*enter[host], 'sh', '-c', command])\n"
        )
        self.started: list[subprocess.Popen[str]] = []

    def launch(self, script: str, *arguments: str, options: tuple[str, ...] = (), **environ: str) -> Any:
        path = self.folder / "script.py"
        path.write_text(script)
        reach = f"{sys.executable} {self.ssh}"
        words = [
            *RUN_COMMAND,
            "--hostfile",
            str(self.hostfile),
            "--ssh",
            reach,
            *options,
            str(path),
            *arguments,
        ]
        process = subprocess.Popen(
            words,
            env=clean_environ(THALWEG_TEST_OUT=str(self.folder), **environ),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """All processes on the hosts but the first ones; a host is a pid namespace."""
        spaces = {os.stat(f"/proc/{self.hosts.init_pid(i)}/ns/pid").st_ino: i for i in range(NUM_HOSTS)}
        first = {self.hosts.init_pid(i) for i in range(NUM_HOSTS)}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    os.stat(path / "ns/pid").st_ino in spaces
                    and int(path.name) not in first
                    and is_alive(int(path.name))
                ):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Those of the processes that are ranks."""
        return [pid for pid in self.processes() if "launch/worker.py" in _command_of(pid)]

    def lose(self, index: int) -> None:
        """End the agent of a host, which is what the launcher sees of one that is switched off."""
        space = os.stat(f"/proc/{self.hosts.init_pid(index)}/ns/pid").st_ino
        agents = [pid for pid in self.processes() if "multi_node/bootstrap.py" in _command_of(pid)]
        for pid in agents:
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == space:
                os.kill(pid, signal.SIGKILL)

    def wait_empty(self, since: float, ranks: bool = False) -> None:
        """Everything is gone in time, or all ranks are."""
        while left := self.ranks() if ranks else self.processes():
            assert time.monotonic() - since < EXIT_DEADLINE, [_command_of(pid) for pid in left]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with namespaces.NamespaceHosts(num_hosts=NUM_HOSTS) as made:
        yield made


@pytest.fixture
def cluster(hosts: Any, tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(hosts, tmp_path)
    yield one
    for process in one.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


TRAIN = """
import json, os, socket, sys
import torch
import thalweg
from thalweg.nn.transformer import GPT, GPTConfig
from tests.inspect import tensor_mesh

torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=31, n_layer=1, n_head=2, n_embd=16, block_size=8))
engine, *_ = thalweg.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": None,
    "tensor_parallel": {"autotp_size": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
for step in range(2):
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(step))
    own = tokens[int(os.environ["RANK"]) // 2 :: 4]
    loss = engine(own[:, :-1], own[:, 1:])
    engine.backward(loss)
    engine.step()
weights = engine.state_dict()
table = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
listening = [fields[1] for fields in table if fields[3] == "0A"]
about = {"host": socket.gethostname(), "rank": os.environ["RANK"], "local": os.environ["LOCAL_RANK"],
         "sum": float(sum(w.double().abs().sum() for w in weights.values())), "argv": sys.argv[1:],
         "set": os.environ.get("SOME_NAME"), "listening": listening,
         "tensor": tensor_mesh(engine).mesh.tolist()}
with open(os.path.join(os.environ["THALWEG_TEST_OUT"], "about" + os.environ["RANK"]), "w") as file:
    json.dump(about, file)
if about["rank"] == "0":
    print("trained", flush=True)
engine.close()
"""


@pytest.mark.parametrize("num_hosts", [nightly(2), nightly(NUM_HOSTS)])
def test_hosts_with_two_ranks_each_train_from_one_command(cluster: Cluster, num_hosts: int) -> None:
    options = ("--num-nodes", str(num_hosts), "--env", "SOME_NAME=a $HOME 'b'")
    process = cluster.launch(TRAIN, *NASTY, options=options, PYTHONPATH=str(ROOT))
    code, out, err = wait_output(process, timeout=200)
    assert (code, out) == (0, "trained\n"), err
    assert not list(cluster.folder.rglob("INJECTED"))
    told = [json.loads((cluster.folder / f"about{rank}").read_text()) for rank in range(2 * num_hosts)]
    assert [one["host"] for one in told] == [name for name in cluster.hosts.names[:num_hosts] for _ in range(2)]
    assert [one["local"] for one in told] == ["0", "1"] * num_hosts
    assert all(one["argv"] == NASTY and one["set"] == "a $HOME 'b'" for one in told)
    assert len({round(one["sum"], 9) for one in told}) == 1, "one model"
    assert all(one["tensor"][0] // 2 == one["tensor"][1] // 2 for one in told), "a tensor group is on one host"
    own = {f"{host + 1:02X}004D0A" for host in range(num_hosts)} | {"0100007F"}
    heard = {where.split(":")[0] for one in told for where in one["listening"]}
    assert heard <= own, f"something listens on more than the chosen address: {heard}"
    assert cluster.processes() == []


TWO = ("--num-nodes", "2")
HANG = """
import os, time
rank = os.environ["RANK"]
with open(os.path.join(os.environ["THALWEG_TEST_OUT"], "up" + rank), "w") as file:
    file.write(str(os.getpid()))
if rank == os.environ.get("RAISES"):
    time.sleep(0.5)
    raise ValueError("no such shard: data/7")
time.sleep(120)
"""


def test_the_first_traceback_is_shown_with_its_host(cluster: Cluster) -> None:
    process = cluster.launch(HANG, RAISES="3", options=(*TWO, "--env", "RAISES"))
    wait_for_pids(cluster.folder, "up*", 4, timeout=120)
    began = time.monotonic()
    code, _, err = wait_output(process, timeout=60)
    assert code == 1 and err.count("Traceback") == 1, err
    assert "ValueError: no such shard: data/7" in err
    assert f"rank 3 of 4 on {cluster.hosts.names[1]} failed first" in err
    cluster.wait_empty(began + 0.5)


def test_a_signal_to_the_launcher_ends_all_hosts(cluster: Cluster) -> None:
    process = cluster.launch(HANG, options=TWO)
    wait_for_pids(cluster.folder, "up*", 4, timeout=120)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    cluster.wait_empty(began)
    code, _, err = wait_output(process, timeout=20)
    assert code == 143 and "stopped by SIGTERM" in err and "Traceback" not in err


@pytest.mark.nightly
def test_a_killed_launcher_takes_all_hosts_along(cluster: Cluster) -> None:
    process = cluster.launch(HANG, options=TWO)
    wait_for_pids(cluster.folder, "up*", 4, timeout=120)
    process.kill()
    cluster.wait_empty(time.monotonic())


def test_a_script_that_one_host_lacks_is_one_error(cluster: Cluster) -> None:
    began = time.monotonic()
    cluster.hostfile.write_text("10.77.0.1 slots=2\n10.77.0.9 slots=2\n")
    code, _, err = wait_output(cluster.launch("print('hello')"), timeout=90)
    assert code == 2 and "host 10.77.0.9: no agent came up" in err and "--ssh" in err, err
    cluster.wait_empty(time.monotonic())
    assert time.monotonic() - began < 60


STARTS = """
import os, socket, time
start, rank, out = os.environ["THALWEG_RESTART_COUNT"], os.environ["RANK"], os.environ["THALWEG_TEST_OUT"]
with open(os.path.join(out, f"up.{start}.{rank}.part"), "w") as file:
    file.write(" ".join([socket.gethostname(), os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]]))
os.rename(file.name, file.name.removesuffix(".part"))
while not os.path.exists(os.path.join(out, f"end.{start}")):
    time.sleep(0.05)
if start != os.environ["LAST_START"]:
    raise ValueError("no such shard: data/7")
"""


def _end_start(cluster: Cluster, start: int, world: int) -> list[str]:
    """Wait for the ranks of a start and let them end; returns what each said."""
    told = wait_for_texts(cluster.folder, f"up.{start}.[0-9]", world, timeout=120)
    (cluster.folder / f"end.{start}").touch()
    return told


def _restart_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if "restart" in line]


@pytest.mark.nightly
def test_a_lost_host_is_left_out_and_comes_back(cluster: Cluster) -> None:
    cluster.hostfile.write_text("10.77.0.1 slots=1\n10.77.0.2 slots=1\n")
    options = ("--elastic-training", "--max-restarts", "3", "--env", "LAST_START")
    process = cluster.launch(STARTS, options=options, LAST_START="2")
    one, two = cluster.hosts.names[:2]
    assert wait_for_texts(cluster.folder, "up.0.[01]", 2, timeout=120) == [f"{one} 2 0", f"{two} 2 0"]
    cluster.lose(1)
    assert _end_start(cluster, 1, 1) == [f"{one} 1 1"]
    assert _end_start(cluster, 2, 2) == [f"{one} 2 2", f"{two} 2 2"]
    code, _, err = wait_output(process, timeout=60)
    assert code == 0 and f"host {two} (rank 1) is gone" in err and "no such shard: data/7" in err, err
    without = ", without host 10.77.0.2: 1 of 2 hosts"
    assert _restart_lines(err) == [f"thalweg run: restart 1 of 3{without}", "thalweg run: restart 2 of 3"]
    assert cluster.processes() == []


@pytest.mark.nightly
def test_a_host_whose_agent_does_not_come_up_is_left_out(cluster: Cluster) -> None:
    """The first host, while a third one stands in; then too few are left."""
    cluster.hostfile.write_text("".join(f"10.77.0.{number} slots=1\n" for number in (1, 2, 3)))
    options = ("--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "2", "--env", "LAST_START")
    process = cluster.launch(STARTS, options=options, LAST_START="9")
    names = cluster.hosts.names
    told = wait_for_texts(cluster.folder, "up.0.[01]", 2, timeout=120)
    (cluster.folder / "down.10.77.0.1").touch()
    assert told == _end_start(cluster, 0, 2) == [f"{names[0]} 2 0", f"{names[1]} 2 0"]
    wait_for_texts(cluster.folder, "up.1.[01]", 2, timeout=120)
    (cluster.folder / "down.10.77.0.3").touch()
    assert _end_start(cluster, 1, 2) == [f"{names[1]} 2 1", f"{names[2]} 2 1"]
    code, _, err = wait_output(process, timeout=120)
    assert (
        code == 2
        and "host 10.77.0.1: no agent came up" in err
        and "no restart: 2 hosts are needed, and 1 are left" in err
    ), err
    assert _restart_lines(err)[:2] == [
        "thalweg run: restart 1 of 100",
        "thalweg run: restart 1 of 100, without host 10.77.0.1: 2 of 2 hosts",
    ]
    assert cluster.processes() == []


def test_a_job_over_ssh_starts_anew_on_all_hosts(cluster: Cluster) -> None:
    """And a signal to the launcher between two starts ends it: it is told while the new agents come up."""
    process = cluster.launch(STARTS, options=(*TWO, "--max-restarts", "2", "--env", "LAST_START"), LAST_START="9")
    _end_start(cluster, 0, 4)
    wait_for_stderr(process, "restart 1 of 2")
    process.send_signal(signal.SIGTERM)
    code, _, err = wait_output(process, timeout=20)
    assert code == 143 and err == "thalweg run: stopped by SIGTERM, and the ranks with it\n"
    cluster.wait_empty(time.monotonic())


@pytest.mark.nightly
def test_training_goes_on_with_the_hosts_that_are_left(cluster: Cluster) -> None:
    """Each start begins with the step of the newest checkpoint, on another number of ranks."""
    cluster.hostfile.write_text("10.77.0.1 slots=1\n10.77.0.2 slots=1\n")
    names = ("OUT", "PART", "KILL_IN")
    options = ("--elastic-training", *(word for name in names for word in ("--env", name)))
    told = {"OUT": str(cluster.folder), "PART": "", "KILL_IN": "0,1", "PYTHONPATH": str(ROOT)}
    process = cluster.launch(TRAIN_AND_STOP, options=options, **told)
    wait_for_texts(cluster.folder, "pid.0.[01]", 2, timeout=120)
    cluster.lose(1)
    wait_for_texts(cluster.folder, "pid.1.0", 1, timeout=120)
    os.kill(next(iter(cluster.ranks())), signal.SIGKILL)
    code, out, err = wait_output(process, timeout=120)
    assert code == 0, err
    done = [(start, int(step), int(world)) for start, step, world, _ in map(str.split, out.splitlines())]
    steps = {"0": (range(8), 2), "1": (range(6, 8), 1), "2": (range(6, 10), 2)}
    assert done == [(start, step, world) for start, (numbers, world) in steps.items() for step in numbers]
    assert _restart_lines(err) == [
        "thalweg run: restart 1 of 100, without host 10.77.0.2: 1 of 2 hosts",
        "thalweg run: restart 2 of 100",
    ]


@pytest.mark.nightly
def test_the_others_of_a_host_that_falls_off_the_network_go_on(hosts: Any, cluster: Cluster) -> None:
    """Its line to the launcher holds: the other hosts say which one is lost.  Its host does not come back."""
    cluster.hostfile.write_text(f"10.77.0.1 slots=1\n10.77.0.{NUM_HOSTS} slots=1\n")
    process = cluster.launch(STARTS, options=("--elastic-training", "--env", "LAST_START"), LAST_START="1")
    wait_for_texts(cluster.folder, "up.0.[01]", 2, timeout=120)
    hosts.disconnect(NUM_HOSTS - 1)
    assert _end_start(cluster, 1, 1) == [f"{hosts.names[0]} 1 1"]
    code, _, err = wait_output(process, timeout=60)
    assert code == 0 and f"host {hosts.names[-1]} (rank 1) is gone" in err, err
    assert _restart_lines(err) == [f"thalweg run: restart 1 of 100, without host 10.77.0.{NUM_HOSTS}: 1 of 2 hosts"]
    assert cluster.processes() == []


@pytest.mark.nightly
def test_a_host_that_falls_off_the_network_ends_the_job(hosts: Any, cluster: Cluster) -> None:
    """The last test: its host does not come back."""
    process = cluster.launch(HANG, options=TWO)
    wait_for_pids(cluster.folder, "up*", 4, timeout=120)
    began = time.monotonic()
    hosts.disconnect(1)
    cluster.wait_empty(began, ranks=True)
    code, _, err = wait_output(process, timeout=40)
    assert code == 1 and f"host {hosts.names[1]} (ranks 2 to 3) is gone" in err, err
    cluster.wait_empty(time.monotonic())
