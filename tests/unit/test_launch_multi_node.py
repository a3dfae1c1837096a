"""Jobs over several hosts, without hosts: files, filters, command lines, contradictions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import Store

from thalweg.launch import schedulers
from thalweg.launch.env_forwarding import collect_forwarded_env
from thalweg.launch.hostfile import Host, check_hostname, filter_hosts, read_hostfile
from thalweg.launch.multi_node import node_monitor
from thalweg.launch.multi_node.node_monitor import NodeMonitor, NodeSpec, find_mismatch
from thalweg.launch.multi_node.ssh import remote_command
from thalweg.launch.multi_node.static_nodes import resolve_node
from thalweg.launch.network import interface_for, local_address_for
from thalweg.launch.rendezvous import StaticRendezvous, bind_listener
from thalweg.launch.spec import LaunchSpec
from thalweg.utils.env import RankInfo
from thalweg.utils.rendezvous import rendezvous

TWO = (Host("a", 4), Host("user@b", 2))


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\n\na slots=4\nuser@b   slots=2 max_slots=2 # two\n10.0.0.7\nidle slots=0\nfe80::1%eth0\n")
    assert read_hostfile(path) == (*TWO, Host("10.0.0.7"), Host("fe80::1%eth0"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a slots=two", "line 1"),
        ("a\na", "twice"),
        ("a slots=2\nme@a slots=2", "twice"),
        ("a slots=2 slots=3", "line 1"),
        ("a slots = 2", "line 1"),
        ("a slots=-1", "line 1"),
        ("# nothing\n", "names no host"),
        ("a slots=0", "names no host"),
        ("-oProxyCommand=x slots=2", "not a host's name"),
        ("a;reboot slots=2", "not a host's name"),
        ("$(id)", "not a host's name"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_hostfile(path)


def test_filters_as_deepspeed_reads_them() -> None:
    assert filter_hosts(TWO, None, None) == TWO
    assert filter_hosts(TWO, "b", None) == (TWO[1],)
    assert filter_hosts(TWO, "b:1@a:0,2-3", None) == (Host("a", 4, (0, 2, 3)), Host("user@b", 2, (1,))), (
        "the file's order"
    )
    assert filter_hosts(TWO, None, "a") == (TWO[1],)
    assert filter_hosts(TWO, None, "a:0@b:1") == (Host("a", 4, (1, 2, 3)), Host("user@b", 2, (0,)))
    assert filter_hosts(TWO, None, "b:0,1") == (TWO[0],)
    assert filter_hosts((), "localhost:3,1", None) == (Host("localhost", None, (1, 3)),)
    assert filter_hosts((Host("localhost", 4),), "127.0.0.1:1", None) == (Host("localhost", 4, (1,)),)


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        ("a", "b", "one of them"),
        ("c", None, "not in the hostfile"),
        ("a:4", None, "slots 0 to 3"),
        ("a:x", None, "is not `a:0,1`"),
        ("a:3-1", None, "no range of slots"),
        ("a:0-99999999999", None, "no range of slots"),
        ("a:", None, "is not `a:0,1`"),
        ("a@", None, "not a host's name"),
        ("a@a:1", None, "twice"),
        (None, "a@b", "no slot"),
        ("a:0;id", None, "is not"),
        ("-x", None, "not a host's name"),
    ],
)
def test_bad_filters(include: str | None, exclude: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        filter_hosts(TWO, include, exclude)
    with pytest.raises(ValueError, match="hostfile"):
        filter_hosts((), None, "localhost:0")


@given(st.sets(st.integers(0, 7), min_size=1, max_size=7))
@settings(deadline=None, max_examples=50)
def test_include_and_exclude_divide_the_slots(slots: set[int]) -> None:
    hosts = (Host("a", 8), Host("b", 1))
    text = "a:" + ",".join(map(str, slots))
    (kept, *_), (left, other) = filter_hosts(hosts, text, None), filter_hosts(hosts, None, text)
    assert sorted((*(kept.chosen or ()), *(left.chosen or ()))) == list(range(8)) and other == hosts[1]
    assert kept.num_slots == len(slots)


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20))
@example("0\n")
@settings(deadline=None, max_examples=300)
def test_row_r21_a_name_is_delivered_as_it_is_or_refused(name: str) -> None:
    try:
        check_hostname(name, "here")
    except ValueError:
        return
    assert not name.startswith("-") and not set(name) & set(" \t\n'\"$`;&|<>(){}[]*?!#~\\=,/")


@given(
    st.lists(
        st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1),
        max_size=2,
    )
)
@settings(deadline=None, max_examples=25)
def test_row_r21_paths_pass_a_shell_unharmed(words: list[str]) -> None:
    """The command line of a remote host holds two paths; `sh -c` stands for its shell."""
    path = "x".join(words) or "plain"
    command = remote_command(sys.executable, Path(path))
    program = "import sys; sys.stdout.buffer.write(sys.argv[1].encode('utf-8', 'surrogateescape'))"
    command = command.replace(" -u ", f" -S -c {program!r} ".replace("\\", "\\\\"), 1)
    shown = subprocess.run(["sh", "-c", command.replace("exec ", "exec ", 1)], capture_output=True, timeout=30)
    assert shown.stdout == str(Path(path)).encode(), shown.stderr


def test_the_environment_that_goes_along(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# c\nexport A=1 2\nNCCL_DEBUG='INFO'\n\n")
    here = {
        "NCCL_DEBUG": "WARN",
        "HOME": "/root",
        "PYTHONPATH": "/x",
        "SECRET": "s",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    found = collect_forwarded_env(here, ["SECRET", "B=$(id)"], [tmp_path])
    assert found == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "A": "1 2", "SECRET": "s", "B": "$(id)"}
    for named, problem in ((["1x=2"], "not NAME"), (["ABSENT"], "not set here")):
        with pytest.raises(ValueError, match=problem):
            collect_forwarded_env(here, named)
    (tmp_path / ".deepspeed_env").write_text("A B\n")
    with pytest.raises(ValueError, match="line 1"):
        collect_forwarded_env(here, [], [tmp_path])
    (tmp_path / "own").write_text("C=3")
    assert collect_forwarded_env({"DS_ENV_FILE": str(tmp_path / "own")}, [], [tmp_path]) == {"C": "3"}


def test_scheduler_commands_are_words() -> None:
    request = LaunchSpec("train.py", ("--name", "a b;$(id)"), nproc="2")
    words = schedulers.build_srun_command(schedulers.SchedulerJob(request, TWO, python="py"))
    assert words[0] == "srun" and words[-5:] == ["py", "-u", "train.py", "--name", "a b;$(id)"]
    assert {
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--nodelist=a,b",
        "--kill-on-bad-exit=1",
    } <= set(words)
    words = schedulers.build_mpirun_command(
        schedulers.SchedulerJob(LaunchSpec("pkg", kind="module"), TWO, environ={"X": "1"}, python="py")
    )
    text = " ".join(words)
    assert "mpirun -n 6" in text and "--host a:4,b:2" in text and "-x MASTER_ADDR" in text and "-x X" in text
    assert words[-4:] == ["py", "-u", "-m", "pkg"]
    with pytest.raises(ValueError, match="different numbers of slots"):
        schedulers.build_srun_command(schedulers.SchedulerJob(LaunchSpec("x"), TWO))
    with pytest.raises(ValueError, match="--nproc is needed"):
        schedulers.build_mpirun_command(schedulers.SchedulerJob(LaunchSpec("x")))
    environ = schedulers.build_environ(schedulers.SchedulerJob(request, TWO), port=20001)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("a", "20001")


def test_hosts_started_by_hand_or_by_kubernetes() -> None:
    request = LaunchSpec("x")
    assert resolve_node(request, None, None, None, {}) == (request, None)
    assert resolve_node(request, "1:1", "0", "localhost", {}) == (request, None)
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-0"}
    found, place = resolve_node(request, None, None, None, {**pod, "PET_MASTER_PORT": "23456"})
    assert found.nproc == "4" and place is not None
    assert (place.node_rank, place.num_nodes, place.rendezvous.addr, place.rendezvous.port) == (
        1,
        2,
        "job-0",
        23456,
    )
    _, place = resolve_node(request, "3", "2", None, {"PET_RDZV_ENDPOINT": "head:1234"})
    assert place is not None and (place.num_nodes, place.rendezvous.addr, place.rendezvous.port) == (
        3,
        "head",
        1234,
    )
    for options, problem in (
        (("2", None, "a"), "which host is this"),
        (("2", "2", "a"), "from 0 to 1"),
        (("2", "0", None), "--master-addr"),
        ((None, "1", None), "--num-nodes N"),
        (("1:4", None, None), "not built yet"),
        (("two", None, None), "whole number"),
    ):
        with pytest.raises(ValueError, match=problem):
            resolve_node(request, *options, environ={})
    with pytest.raises(ValueError, match=r"PET_NODE_RANK= 5 must be from 0 to 1"):
        resolve_node(request, None, None, None, {**pod, "PET_NODE_RANK": "5"})


def _node_info(**changes: object) -> dict:
    return {
        "host": "a",
        "index": 0,
        "num_hosts": 2,
        "target": "t.py",
        "torch": "2",
        "thalweg": "1",
        "nproc": 1,
    } | changes


def test_contradictions_name_the_option_and_both_hosts() -> None:
    assert find_mismatch([_node_info(), _node_info(host="b", index=1)]) is None
    for other, said in (
        (_node_info(host="b"), "--node-rank 0 is given on a and on b"),
        (_node_info(host="b", index=1, num_hosts=3), "--num-nodes is 2 on a and 3 on b"),
        (_node_info(host="b", index=1, torch="3"), "torch's version is 2 on a and 3 on b"),
        (_node_info(host="b", index=1, target="u.py"), "the script is t.py on a and u.py on b"),
    ):
        assert said in (find_mismatch([_node_info(), other]) or "")


class FakeNodes:
    """Launchers that meet in one store, all in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = StaticRendezvous("127.0.0.1", 0, 0, 1, bind_listener("127.0.0.1"))
        self.monitors: list[NodeMonitor] = []
        self.stopped: list[NodeMonitor] = []
        monkeypatch.setattr(NodeMonitor, "_stop_ranks", lambda peers: self.stopped.append(peers))

    def start(self, node_rank: int, num_nodes: int, **card: object) -> Future[list[dict]]:
        """One more launcher arrives, in a thread of its own."""
        rendezvous = StaticRendezvous("127.0.0.1", self.server.port, node_rank, num_nodes, None)
        monitor = NodeMonitor(
            NodeSpec(node_rank, num_nodes, rendezvous, join_timeout=20.0), threading.Event(), lambda: False
        )
        self.monitors.append(monitor)
        pool = ThreadPoolExecutor(1)
        future = pool.submit(monitor.join_job, _node_info(index=node_rank, **card), lambda text: None)
        pool.shutdown(wait=False)
        return future

    def problem(self, future: Future[list[dict]]) -> str:
        """What the launcher is told instead of the cards."""
        return str(future.exception(timeout=20.0))


def test_two_hosts_with_one_number_are_one_error_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    party = FakeNodes(monkeypatch)
    futures = [party.start(index, 3, host=host) for index, host in ((1, "b"), (0, "a"), (1, "c"))]
    told = {party.problem(future) for future in futures}
    assert len(told) == 1 and "--node-rank 1 is given on" in told.pop()


def test_a_launcher_too_many_ends_a_young_job_and_leaves_an_old_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for early in (True, False):
        party = FakeNodes(monkeypatch)
        monkeypatch.setattr(node_monitor, "_STARTUP_SECONDS", 30.0 if early else 0.0)
        job = [party.start(index, 2) for index in (0, 1)]
        assert [[card["index"] for card in future.result(20.0)] for future in job] == [[0, 1]] * 2
        late = party.start(1, 2, host="late")
        assert "--node-rank 1 is given on a and on late" in party.problem(late)
        first = party.monitors[0]
        first._heartbeat({})
        assert party.stopped == ([first] if early else [])
        if early:
            outcome = party.monitors[1].agree_result(None, False, timeout=5.0)
            assert outcome is not None and outcome.exit_code == 2 and "--node-rank 1 is given on" in outcome.report


def test_a_rank_too_many_is_told_and_the_others_go_on() -> None:
    with bind_listener("127.0.0.1") as probe:
        port = probe.getsockname()[1]

    def call(rank: int) -> Store:
        info = RankInfo(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
        return rendezvous(info, "127.0.0.1", port, 20.0, lambda text: None)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(call, (0, 1)))
    with pytest.raises(ValueError, match=r"RANK=1 on .* and on .* each once"):
        call(1)
    assert len(stores) == 2


def test_a_launcher_that_loses_its_line_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    party = FakeNodes(monkeypatch)
    future = party.start(1, 2)
    time.sleep(0.2)
    party.server._server_store = None  # host 0 is gone
    assert "lost its line to the first host of the job, at 127.0.0.1" in party.problem(future)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are read by Linux's ioctl")
def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_for("127.0.0.1") == "lo" and local_address_for("127.0.0.1") == "127.0.0.1"
    assert interface_for("no.such.host.invalid") is None
