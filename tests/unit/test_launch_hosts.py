"""Jobs over several hosts, without hosts: files, filters, command lines, contradictions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.launch import schedulers
from thalweg.launch.by_hand import place_of
from thalweg.launch.hosts import Host, check_name, read_hostfile, select
from thalweg.launch.network import address_towards, interface_towards
from thalweg.launch.peers import contradiction
from thalweg.launch.propagate import environment_for_hosts
from thalweg.launch.request import Request
from thalweg.launch.ssh import remote_command

TWO = (Host("a", 4), Host("user@b", 2))


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# mine\n\na slots=4\nuser@b   slots=2 max_slots=2 # two\n10.0.0.7\nidle slots=0\nfe80::1%eth0\n"
    )
    assert read_hostfile(path) == (*TWO, Host("10.0.0.7"), Host("fe80::1%eth0"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a slots=two", "line 1"),
        ("a\na", "twice"),
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
    assert select(TWO, None, None) == TWO
    assert select(TWO, "b", None) == (TWO[1],)
    assert select(TWO, "b:1@a:0,2-3", None) == (Host("a", 4, (0, 2, 3)), Host("user@b", 2, (1,))), (
        "the file's order"
    )
    assert select(TWO, None, "a") == (TWO[1],)
    assert select(TWO, None, "a:0@b:1") == (Host("a", 4, (1, 2, 3)), Host("user@b", 2, (0,)))
    assert select(TWO, None, "b:0,1") == (TWO[0],)
    assert select((), "localhost:3,1", None) == (Host("localhost", None, (1, 3)),)
    assert select((Host("localhost", 4),), "127.0.0.1:1", None) == (Host("localhost", 4, (1,)),)


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        ("a", "b", "one of them"),
        ("c", None, "not in the hostfile"),
        ("a:4", None, "slots 0 to 3"),
        ("a:x", None, "is not `a:0,1`"),
        ("a@a:1", None, "twice"),
        (None, "a@b", "no slot"),
        ("a:0;id", None, "is not"),
        ("-x", None, "not a host's name"),
    ],
)
def test_bad_filters(include: str | None, exclude: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        select(TWO, include, exclude)
    with pytest.raises(ValueError, match="hostfile"):
        select((), None, "localhost:0")


@given(st.sets(st.integers(0, 7), min_size=1, max_size=7))
@settings(deadline=None, max_examples=50)
def test_include_and_exclude_divide_the_slots(slots: set[int]) -> None:
    hosts = (Host("a", 8), Host("b", 1))
    text = "a:" + ",".join(map(str, slots))
    (kept, *_), (left, other) = select(hosts, text, None), select(hosts, None, text)
    assert sorted((*(kept.chosen or ()), *(left.chosen or ()))) == list(range(8)) and other == hosts[1]
    assert kept.count == len(slots)


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20))
@settings(deadline=None, max_examples=300)
def test_row_r21_a_name_is_delivered_as_it_is_or_refused(name: str) -> None:
    try:
        check_name(name, "here")
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
    shown = subprocess.run(
        ["sh", "-c", command.replace("exec ", "exec ", 1)], capture_output=True, timeout=30
    )
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
    found = environment_for_hosts(here, ["SECRET", "B=$(id)"], [tmp_path])
    assert found == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "A": "1 2", "SECRET": "s", "B": "$(id)"}
    for named, problem in ((["1x=2"], "not NAME"), (["ABSENT"], "not set here")):
        with pytest.raises(ValueError, match=problem):
            environment_for_hosts(here, named)
    (tmp_path / ".deepspeed_env").write_text("A B\n")
    with pytest.raises(ValueError, match="line 1"):
        environment_for_hosts(here, [], [tmp_path])
    (tmp_path / "own").write_text("C=3")
    assert environment_for_hosts({"DS_ENV_FILE": str(tmp_path / "own")}, [], [tmp_path]) == {"C": "3"}


def test_scheduler_commands_are_words() -> None:
    request = Request("train.py", ("--name", "a b;$(id)"), nproc="2")
    words = schedulers.srun(schedulers.Tasks(request, TWO, python="py"))
    assert words[0] == "srun" and words[-5:] == ["py", "-u", "train.py", "--name", "a b;$(id)"]
    assert {
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--nodelist=a,b",
        "--kill-on-bad-exit=1",
    } <= set(words)
    words = schedulers.mpirun(
        schedulers.Tasks(Request("pkg", kind="module"), TWO, environ={"X": "1"}, python="py")
    )
    text = " ".join(words)
    assert "mpirun -n 6" in text and "--host a:4,b:2" in text and "-x MASTER_ADDR" in text and "-x X" in text
    assert words[-4:] == ["py", "-u", "-m", "pkg"]
    with pytest.raises(ValueError, match="different numbers of slots"):
        schedulers.srun(schedulers.Tasks(Request("x"), TWO))
    with pytest.raises(ValueError, match="--nproc is needed"):
        schedulers.mpirun(schedulers.Tasks(Request("x")))
    environ = schedulers.environment(schedulers.Tasks(request, TWO), port=20001)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("a", "20001")


def test_hosts_started_by_hand_or_by_kubernetes() -> None:
    request = Request("x")
    assert place_of(request, None, None, None, {}) == (request, None)
    assert place_of(request, "1:1", "0", "localhost", {}) == (request, None)
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-0"}
    found, place = place_of(request, None, None, None, {**pod, "PET_MASTER_PORT": "23456"})
    assert found.nproc == "4" and place is not None
    assert (place.index, place.num_hosts, place.meeting.addr, place.meeting.port) == (1, 2, "job-0", 23456)
    _, place = place_of(request, "3", "2", None, {"PET_RDZV_ENDPOINT": "head:1234"})
    assert place is not None and (place.num_hosts, place.meeting.addr, place.meeting.port) == (
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
            place_of(request, *options, environ={})
    with pytest.raises(ValueError, match=r"PET_NODE_RANK= 5 must be from 0 to 1"):
        place_of(request, None, None, None, {**pod, "PET_NODE_RANK": "5"})


def _card(**changes: object) -> dict:
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
    assert contradiction([_card(), _card(host="b", index=1)]) is None
    for other, said in (
        (_card(host="b"), "--node-rank 0 is given on a and on b"),
        (_card(host="b", index=1, num_hosts=3), "--num-nodes is 2 on a and 3 on b"),
        (_card(host="b", index=1, torch="3"), "torch's version is 2 on a and 3 on b"),
        (_card(host="b", index=1, target="u.py"), "the script is t.py on a and u.py on b"),
    ):
        assert said in (contradiction([_card(), other]) or "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are read by Linux's ioctl")
def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo" and address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("no.such.host.invalid") is None
