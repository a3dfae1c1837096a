"""Jobs over several hosts, without hosts: files, filters, command lines, contradictions."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thalweg.launch import local, schedulers
from thalweg.launch import rendezvous as launch_rendezvous
from thalweg.launch.cpu_affinity import CpuBinding
from thalweg.launch.elastic_agent import Agent, LocalElasticAgent
from thalweg.launch.env_forwarding import collect_forwarded_env
from thalweg.launch.failure import JobResult
from thalweg.launch.hostfile import Host, check_hostname, filter_hosts, read_hostfile
from thalweg.launch.multi_node import ssh
from thalweg.launch.multi_node.ssh import RemoteNode, remote_command
from thalweg.launch.multi_node.static_nodes import resolve_node
from thalweg.launch.network import interface_for, local_address_for
from thalweg.launch.rendezvous import (
    JobEndedError,
    NodeRendezvous,
    NodeSpec,
    bind_master,
    find_mismatch,
    join_nodes,
)
from thalweg.launch.spec import LaunchSpec, LocalJob
from thalweg.utils.env import RankInfo
from thalweg.utils.rendezvous import rendezvous, serve_store

T = TypeVar("T")
TWO = (Host("a", 4), Host("user@b", 2))


def test_another_host_finds_the_package_and_no_room_of_it_by_itself() -> None:
    job = ssh.MultiNodeJob(TWO, LaunchSpec("train.py"))
    root = Path(ssh._job_message(job, 0, TWO[0])["root"])
    assert (root / "thalweg" / "__init__.py").is_file()
    assert not (root / "compression").exists(), "Python 3.14 has a module of that name"


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
        ("a:x", None, "is not a list of slots in --include a:x"),
        ("a:3-1", None, "no range of slots"),
        ("a:0-99999999999", None, "no range of slots"),
        ("a:", None, "is not a list of slots"),
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
    for named in (str(tmp_path / "own"), "own"):  # a name alone is looked for where the others are
        assert collect_forwarded_env({"DS_ENV_FILE": named}, [], [tmp_path]) == {"C": "3"}
    with pytest.raises(ValueError, match="DS_ENV_FILE is elsewhere"):
        collect_forwarded_env({"DS_ENV_FILE": "elsewhere"}, [], [tmp_path])


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


def test_slots_that_a_scheduler_would_not_take_are_refused() -> None:
    spec = LaunchSpec("x", nproc="2")
    for chosen in ((1, 2), (0, 2)):
        with pytest.raises(ValueError, match="name whole hosts, or use --launcher ssh"):
            schedulers.SchedulerJob(spec, (Host("b"), Host("a", 4, chosen)))
    first_slots = schedulers.SchedulerJob(LaunchSpec("x"), (Host("a", 4, (0, 1)),))
    assert "a:2" in schedulers.build_mpirun_command(first_slots)


def test_hosts_started_by_hand_or_by_kubernetes() -> None:
    request = LaunchSpec("x")
    assert resolve_node(request, None, None, None, {}) == (request, None)
    assert resolve_node(request, "1:1", "0", "localhost", {}) == (request, None)
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-0"}
    found, place = resolve_node(request, None, None, None, {**pod, "PET_MASTER_PORT": "23456"})
    assert found.nproc == "4" and place is not None
    assert (place.node_rank, place.num_nodes, place.addr, place.port) == (1, 2, "job-0", 23456)
    _, place = resolve_node(request, "3", "2", None, {"PET_RDZV_ENDPOINT": "head:1234"})
    assert place is not None and (place.num_nodes, place.addr, place.port) == (3, "head", 1234)
    for options, problem in (
        (("2", None, "a"), "which host is this"),
        (("2", "2", "a"), "from 0 to 1"),
        (("2", "0", None), "--master-addr"),
        ((None, "1", None), "--num-nodes N"),
        (("1:4", None, None), "--elastic-training"),
        (("two", None, None), "whole number"),
    ):
        with pytest.raises(ValueError, match=problem):
            resolve_node(request, *options, environ={})
    with pytest.raises(ValueError, match=r"PET_NODE_RANK= 5 must be from 0 to 1"):
        resolve_node(request, None, None, None, {**pod, "PET_NODE_RANK": "5"})


def test_the_first_pod_waits_until_its_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes into the cluster's DNS some time after the pod; elsewhere a name that is unknown is wrong."""
    calls, ask = [], socket.getaddrinfo

    def getaddrinfo(name: str, *args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=r"job-0\.svc cannot be resolved"):
        bind_master("job-0.svc", multi_node=True)
    assert len(calls) == 1
    calls.clear()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with bind_master("job-0.svc", multi_node=True) as listener:
        assert listener.getsockname()[1]
    assert set(calls) == {"job-0.svc"}


def _node_info(**changes: object) -> dict:
    return {
        "host": "a",
        "index": 0,
        "num_nodes": 2,
        "target": "t.py",
        "torch": "2",
        "thalweg": "1",
        "nproc": 1,
        "max_restarts": 0,
    } | changes


def test_contradictions_name_the_option_and_both_hosts() -> None:
    assert find_mismatch([_node_info(), _node_info(host="b", index=1)]) is None
    for other, said in (
        (_node_info(host="b"), "--node-rank 0 is given on a and on b"),
        (_node_info(host="b", index=1, num_nodes=3), "--num-nodes is 2 on a and 3 on b"),
        (_node_info(host="b", index=1, torch="3"), "torch's version is 2 on a and 3 on b"),
        (_node_info(host="b", index=1, target="u.py"), "the script is t.py on a and u.py on b"),
        (_node_info(host="b", index=1, max_restarts=3), "--max-restarts is 0 on a and 3 on b"),
    ):
        assert said in (find_mismatch([_node_info(), other]) or "")


class FakeNodes:
    """Launchers that meet in one store, all in this process; the store lives as long as this object."""

    def __init__(self, heartbeat_timeout: float = 5.0) -> None:
        self.server: TCPStore | None = serve_store(bind_master("127.0.0.1"), 60.0)
        self.port, self._heartbeat_timeout = self.server.port, heartbeat_timeout
        self._joined: list[NodeRendezvous] = []

    def start(self, node_rank: int, num_nodes: int, restart: int = 0, **card: object) -> Future[NodeRendezvous]:
        """One more launcher arrives, in a thread of its own; ``restart`` is what it takes for the start's number."""
        node = NodeSpec(
            node_rank,
            num_nodes,
            "127.0.0.1",
            self.port,
            join_timeout=20.0,
            heartbeat_timeout=self._heartbeat_timeout,
        )
        with_defaults = _node_info(**{"host": "ab"[node_rank] if node_rank < 2 else "c", **card})
        return _in_thread(lambda: join_nodes(node, with_defaults, restart))

    def start_job(self, num_nodes: int = 2, **card: Any) -> list[NodeRendezvous]:
        """Launchers that have met and whose hearts beat."""
        futures = [self.start(index, num_nodes, **card) for index in range(num_nodes)]
        job = [future.result(20.0) for future in futures]
        self._joined += job
        infos = [future.result(20.0) for future in [_in_thread(node.next_rendezvous) for node in job]]
        assert [(info.rank, info.world_size) for info in infos] == [(index, num_nodes) for index in range(num_nodes)]
        masters = [info.bootstrap_store_info for info in infos]
        assert all(m and (m.master_addr, m.master_port) == ("127.0.0.1", self.port) for m in masters)
        return job

    def close(self) -> None:
        """No heartbeat outlives the store."""
        assert all(node.shutdown() for node in self._joined)
        self.server = None


MakeNodes = Callable[..., FakeNodes]


@pytest.fixture
def fake_nodes() -> Iterator[MakeNodes]:
    """Makes parties of launchers, and ends them with the test."""
    with contextlib.ExitStack() as stack:

        def make(**options: float) -> FakeNodes:
            return stack.enter_context(contextlib.closing(FakeNodes(**options)))

        yield make


def _in_thread(call: Callable[[], T]) -> Future[T]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def _wait_ended(node: NodeRendezvous, timeout: float) -> JobEndedError | None:
    """What the agent would hear within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            assert node.num_nodes_waiting() == 0
        except JobEndedError as error:
            return error
        time.sleep(0.05)
    return None


def test_two_hosts_with_one_number_are_one_error_everywhere(fake_nodes: MakeNodes) -> None:
    party = fake_nodes()
    futures = [party.start(index, 3, host=host) for index, host in ((1, "b"), (0, "a"), (1, "c"))]
    told = {str(future.exception(timeout=20.0)) for future in futures}
    assert len(told) == 1 and "--node-rank 1 is given on" in told.pop()


def test_a_launcher_too_many_ends_a_young_job_and_leaves_an_old_one_alone(
    fake_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for early in (True, False):
        party = fake_nodes()
        monkeypatch.setattr(launch_rendezvous, "_STARTUP_SECONDS", 30.0 if early else 0.0)
        job = party.start_job()
        late = party.start(1, 2, host="late")
        assert "--node-rank 1 is given on b and on late" in str(late.exception(timeout=20.0))
        assert [node.is_closed() for node in job] == [early] * 2
        if early:
            for node in job:
                ended = _wait_ended(node, 10.0)
                assert ended is not None and ended.silent_node is None
            first = _in_thread(lambda node=job[0]: node.finish(None, 8.0))
            assert not wait([first], timeout=0.5).done, "whose store it is stays until the other has read"
            results = [job[1].finish(None, 8.0), first.result(20.0)]
            assert all(result and result.exit_code == 2 for result in results)
            assert all(result and "--node-rank 1 is given on" in result.report for result in results)


def test_the_failure_of_one_host_is_the_result_of_all(fake_nodes: MakeNodes) -> None:
    """A result that is not certain waits for one that is."""
    job = fake_nodes().start_job(3)
    first = JobResult(7, "rank 2 failed first")
    ends = [_in_thread(lambda: job[0].finish(JobResult(1, "lost a peer", is_certain=False), 8.0))]
    time.sleep(0.3)
    assert not ends[0].done()
    ends.append(_in_thread(lambda: job[2].finish(first, 8.0)))
    ended = _wait_ended(job[1], 10.0)
    assert ended is not None and ended.silent_node is None
    ends.append(_in_thread(lambda: job[1].finish(None, 8.0)))
    assert [future.result(20.0) for future in ends] == [first] * 3


def test_the_next_start_has_host_0_s_number_and_nothing_of_the_last_one(fake_nodes: MakeNodes) -> None:
    """Host 1 comes early, with another number (its launcher is a new one); a host of the last start is late."""
    party = fake_nodes()
    last = party.start_job()
    assert party.server is not None
    party.server.set("default_pg/0/rank0", "an address of a dead rank")
    failed = JobResult(7, "rank 1 failed first", can_restart=True)
    ends = [_in_thread(lambda node=node: node.finish(failed, 8.0)) for node in last]
    assert [end.result(20.0) for end in ends] == [failed] * 2 and all(node.shutdown() for node in last)
    early = party.start(1, 2, restart=0)
    assert not wait([early], timeout=0.5).done, "the last start has ended, and host 0 has opened no other"
    job = [party.start(0, 2, restart=4).result(20.0), early.result(20.0)]
    assert [node.restart for node in job] == [4, 4]
    assert not party.server.check(["default_pg/0/rank0"])
    assert last[1].finish(JobResult(9, "late"), 1.0) == failed and not job[0].is_closed()
    assert all(node.shutdown() for node in job)


def test_a_launcher_that_comes_for_a_killed_one_waits_for_the_next_start(fake_nodes: MakeNodes) -> None:
    """Before the others have missed the killed one; a job that does not start anew has no place for it."""
    party = fake_nodes(heartbeat_timeout=4.0)
    job = party.start_job(max_restarts=1)
    assert job[1].shutdown()
    late = party.start(1, 2, max_restarts=1)
    assert not wait([late], timeout=0.5).done and not job[0].is_closed()
    failed = JobResult(1, "host b is gone", can_restart=True)
    assert _in_thread(lambda: job[0].finish(failed, 0.5)).result(20.0) == failed and job[0].shutdown()
    job = [party.start(0, 2, restart=1, max_restarts=1).result(20.0), late.result(20.0)]
    assert [node.restart for node in job] == [1, 1] and all(node.shutdown() for node in job)


@pytest.mark.nightly
def test_a_silent_host_is_named_by_the_others(fake_nodes: MakeNodes) -> None:
    job = fake_nodes(heartbeat_timeout=2.0).start_job(3)
    assert _wait_ended(job[0], 2.5) is None, "hearts beat"
    assert job[1].shutdown()
    for node in (job[0], job[2]):
        ended = _wait_ended(node, 8.0)
        assert ended is not None and ended.silent_node == 1
    assert "host b (rank 1) is gone: no sign of life" in job[0].lost_result(1).report


def test_a_host_whose_store_is_gone_ends_for_all(fake_nodes: MakeNodes) -> None:
    party = fake_nodes(heartbeat_timeout=2.0)
    job = party.start_job()
    assert _wait_ended(job[1], 0.1) is None
    assert job[0].shutdown()
    party.server = None
    ended = _wait_ended(job[1], 8.0)
    assert ended is not None and ended.silent_node == 0
    assert not job[1].lost_result(0).is_certain, "it may be this host that was cut off"
    assert not job[1]._heart.is_alive(), "it does not try again"


def test_no_heartbeat_outlives_a_job_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenAgent:
        pids: ClassVar[dict[int, int]] = {}

        def __init__(self, job: LocalJob, handler: NodeRendezvous, folder: Path) -> None:
            self._handler = handler

        def run(self) -> None:
            assert self._handler.next_rendezvous().world_size == 1
            assert list_heartbeats()
            raise OSError("no more processes")

    def list_heartbeats() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "thalweg-heartbeat"]

    monkeypatch.setattr(local, "_build_agent", BrokenAgent)
    listener = bind_master("127.0.0.1")
    node = NodeSpec(0, 1, "127.0.0.1", listener.getsockname()[1], listener)
    with pytest.raises(OSError, match="no more processes") as caught:  # whose traceback holds the handler
        local.run_local(LocalJob(LaunchSpec("script.py"), 1, CpuBinding((), 1), {}), node)
    assert caught.tb and not list_heartbeats()


@pytest.mark.parametrize("told_to_stop", [True, False])
def test_a_signal_while_the_last_start_is_cleared_away_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], told_to_stop: bool
) -> None:
    starts = []

    class FailingAgent:
        pids: ClassVar[dict[int, int]] = {}
        exited: ClassVar[set[int]] = {0}

        def __init__(self, job: LocalJob, handler: object, folder: Path) -> None:
            starts.append((job.spec.restart, os.environ["THALWEG_RESTART_COUNT"]))

        def run(self) -> SimpleNamespace:
            return SimpleNamespace(is_failed=lambda: True, failures={0: SimpleNamespace(exitcode=4)})

    def clear(pids: set[int]) -> None:
        if told_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(local, "_build_agent", FailingAgent)
    monkeypatch.setattr(local, "_kill_sessions", clear)
    before = signal.getsignal(signal.SIGTERM)
    result = local.run_local(LocalJob(LaunchSpec("script.py", max_restarts=2), 1, CpuBinding((), 1), {}))
    assert starts == [(restart, str(restart)) for restart in range(1 if told_to_stop else 3)]
    assert result.exit_code == (143 if told_to_stop else 4) and signal.getsignal(signal.SIGTERM) is before
    err = capfd.readouterr().err
    assert err.count("exit code 4") == (1 if told_to_stop else 2) and result.report.count("exit code 4") == (
        0 if told_to_stop else 1
    )


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_ends_the_job_unless_nohup_started_it(monkeypatch: pytest.MonkeyPatch, ignored: bool) -> None:
    class HungUpAgent:
        pids: ClassVar[dict[int, int]] = {}

        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> SimpleNamespace:
            torch_handles = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
            assert ("SIGHUP" not in torch_handles) is ignored and "SIGTERM" in torch_handles
            os.kill(os.getpid(), signal.SIGHUP)
            return SimpleNamespace(is_failed=lambda: False)

    monkeypatch.setattr(local, "_build_agent", HungUpAgent)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        result = local.run_local(LocalJob(LaunchSpec("script.py"), 1, CpuBinding((), 1), {}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.exit_code == (0 if ignored else 129)


def test_ranks_have_all_of_their_grace_however_little_torch_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    context = SimpleNamespace(close=lambda death_sig, timeout: waited.append(timeout), subprocess_handlers={})
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda agent, group: {})
    agent: Any = object.__new__(Agent)
    agent._grace, agent._restart, agent.exited, agent._pcontext = 40.0, 0, set(), context
    agent._start_workers(
        SimpleNamespace(spec=SimpleNamespace(max_restarts=0), workers=[SimpleNamespace(global_rank=0)])
    )
    agent._pcontext.close(signal.SIGTERM, 30)
    assert waited == [40.0]


def test_hosts_whose_clocks_differ_by_a_day_stay_together(
    fake_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = fake_nodes(heartbeat_timeout=1.5).start_job()
    now, deadline = time.time, time.monotonic() + 2.5
    monkeypatch.setattr(time, "time", lambda: now() - 86400 * (threading.current_thread() is job[1]._heart))
    while time.monotonic() < deadline:
        assert [node.num_nodes_waiting() for node in job] == [0, 0]
        time.sleep(0.2)


def test_what_a_stranger_writes_into_the_store_is_not_executed(fake_nodes: MakeNodes, tmp_path: Path) -> None:
    """The payload writes a file when it is unpickled."""
    job = fake_nodes().start_job()
    payload = f"cos\nsystem\n(S'touch {tmp_path}/executed'\ntR."
    strange: list[Any] = [payload, b"\xff", "{}", "[]", "[" * 100000]
    for text in strange:
        job[0]._control_store.set("end/result", text)
        assert job[1].finish(None, 1.0) is None
    assert not (tmp_path / "executed").exists()


def test_a_rank_too_many_is_told_and_the_others_go_on() -> None:
    with bind_master("127.0.0.1") as probe:
        port = probe.getsockname()[1]

    def call(rank: int) -> Store:
        info = RankInfo(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
        return rendezvous(info, "127.0.0.1", port, 20.0, lambda text: None)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(call, (0, 1)))
    with pytest.raises(ValueError, match=r"RANK=1 on .* and on .* each once"):
        call(1)
    assert len(stores) == 2


def test_a_launcher_that_loses_its_line_says_where_to_look(fake_nodes: MakeNodes) -> None:
    party = fake_nodes()
    future = party.start(1, 2)
    time.sleep(0.5)
    party.server = None  # host 0 is gone
    assert "lost its line to the first host of the job, at 127.0.0.1" in str(future.exception(timeout=20.0))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are read by Linux's ioctl")
def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_for("127.0.0.1") == "lo" and local_address_for("127.0.0.1") == "127.0.0.1"
    assert interface_for("no.such.host.invalid") is None


A, B, C = (Host(name) for name in "abc")
FAILED = JobResult(9, "rank 1 failed\n", can_restart=True)
MISSING = ssh.MissingHostError("no agent came up", {A})


@pytest.mark.parametrize(
    ("min_hosts", "ends", "starts", "code", "said"),
    [
        # all hosts, whichever was lost; a host that is missing ends the job
        (0, [(FAILED, {B}), (FAILED, {B})], ["0 ab a", "1 ab a"], 9, ["1 of 1"]),
        (0, [(FAILED, set()), MISSING], ["0 ab a", "1 ab a"], None, ["1 of 1"]),
        # what was not a failure of the job's own is not started again
        (1, [(JobResult(143, "stopped\n"), {B})], ["0 ab a"], 143, []),
        # the third stands in for a lost one, which is asked again at the next restart; the address was the first one's
        (
            1,
            [(FAILED, {A}), (FAILED, set()), (JobResult(0, ""), set())],
            ["0 ab a", "1 bc None", "2 ab a"],
            0,
            ["1 of 2, without host a: 2 of 2 hosts", "2 of 2"],
        ),
        # one that is missing is left out of the same start, beside those that were lost in the last
        (
            1,
            [(FAILED, {B}), MISSING, (JobResult(0, ""), set())],
            ["0 ab a", "1 ac a", "1 c None"],
            0,
            ["1 of 1, without host b: 2 of 2 hosts", "1 of 1, without host a, b: 1 of 2 hosts"],
        ),
        (2, [(FAILED, {A, C})], ["0 ab a"], 9, []),
        (1, [MISSING], ["0 ab a"], None, []),
    ],
)
def test_which_hosts_take_part_in_a_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    min_hosts: int,
    ends: list[Any],
    starts: list[str],
    code: int | None,
    said: list[str],
) -> None:
    seen, left = [], [*ends]

    def run_once(job: ssh.MultiNodeJob, inbox: ssh.Inbox) -> Any:
        seen.append(f"{job.spec.restart} {''.join(host.name for host in job.hosts)} {job.master_addr}")
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(ssh, "_run_once", run_once)
    restarts = max((int(line[0]) for line in said), default=1)
    hosts = (A, B, C) if min_hosts else (A, B)
    spec = LaunchSpec("t.py", max_restarts=restarts)
    job = ssh.MultiNodeJob(hosts, spec, master_addr="a", min_hosts=min_hosts, max_hosts=2)
    if code is None:
        with pytest.raises(ssh.MissingHostError):
            ssh.run_multi_node(job)
    else:
        result = ssh.run_multi_node(job)
        assert result.exit_code == code
        assert ("2 hosts are needed, and 1 are left" in result.report) == (min_hosts == 2)
    assert seen == starts and not left
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if "restart" in line] == [f"thalweg run: restart {line}" for line in said]


SPEAKS_IN_PIECES = """
import os, sys
out = lambda text: os.write(1, text.encode())
out('\\0thalweg-node-1 {"hello": 1}\\n')
for i in range(400):
    out(f"{sys.argv[1]} "); out("x" * (i % 50)); out(f" {i}\\n")
out("asks"); sys.stdin.readline(); out(" on\\n")
out('half\\0thalweg-node-1 {"ended": 0}\\n')
"""


def test_lines_of_two_hosts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox: Any = queue.Queue()
    lock, shown = threading.Lock(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown))
    nodes = [
        RemoteNode(Host(name), [sys.executable, "-c", SPEAKS_IN_PIECES, name], inbox, lock) for name in ("one", "two")
    ]
    deadline = time.monotonic() + 20
    while shown.getvalue().count(b"asks") < 2:  # a question comes, though its line has no end
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for node in nodes:
        node.send(None)
        node.close(10)
    messages = [inbox.get(timeout=10)[1] for _ in range(6)]
    assert sorted(map(str, messages)) == sorted(map(str, [{"hello": 1}, {"ended": 0}, {"gone": 0}] * 2))
    lines = shown.getvalue().replace(b"asks", b"").replace(b"half", b"").decode().splitlines()
    wanted = {f"{name} {'x' * (i % 50)} {i}" for name in ("one", "two") for i in range(400)} | {" on"}
    assert not [line for line in lines if line not in wanted] and len(lines) == 802


@pytest.mark.parametrize(
    ("interface", "given", "nccl"),
    [("eth7", {}, "=eth7"), ("lo", {}, None), ("eth7", {"NCCL_SOCKET_IFNAME": "ib0"}, "ib0"), (None, {}, None)],
)
def test_nccl_meets_where_gloo_does(monkeypatch, interface, given, nccl):
    """M2: on several hosts, unless the user has said where."""
    from thalweg.launch import local
    from thalweg.launch.spec import LaunchSpec, build_local_job

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local, "interface_for", lambda addr: interface)
    environ = {**os.environ, **local._worker_environ(build_local_job(LaunchSpec("true", (), "program", "1")), "host")}
    assert environ.get("GLOO_SOCKET_IFNAME") == interface and environ.get("NCCL_SOCKET_IFNAME") == nccl
