"""The benchmarks: they measure what they say, compare the right way up, and clean up after themselves."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thalweg
from thalweg.cli import main as cli_main

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))
contestants, interleaved, goals, groups, llama, namespaces, report = (
    importlib.import_module(name)
    for name in ("_contestants", "_interleaved", "_goals", "_groups", "_llama", "_namespaces", "_report")
)
TINY = contestants.JOBS["tiny"]


def script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bench/ as a user does."""
    command = [sys.executable, str(BENCH / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


# ---- the command line -------------------------------------------------------------------------------


def test_bench_lists_every_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main(["bench", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["benchmarks"]
    assert set(listed) == {path.stem for path in BENCH.glob("[!_]*.py")}
    assert {"train_step", "start", "hosts", "gpu_mfu"} <= set(listed)
    assert all(listed.values()), "every benchmark says in one line what it compares"


def test_bench_names_the_nearest_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main(["bench", "trian_step"]) == 2
    captured = capsys.readouterr()
    assert "did you mean train_step?" in captured.err
    assert not captured.out


def test_bench_without_a_checkout_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thalweg, "__file__", str(tmp_path / "site-packages" / "thalweg" / "__init__.py"))
    assert cli_main(["bench", "train_step"]) == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.nightly
def test_bench_passes_options_and_exit_code_on() -> None:
    command = [sys.executable, "-m", "thalweg", "bench", "train_step", "--only", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nobody" in done.stderr


# ---- arithmetic of comparisons ----------------------------------------------------------------------


def test_a_ratio_above_one_means_that_thalweg_is_better() -> None:
    assert report.compare("case", "peer", "clock_ms", 10.0, 25.0).ratio == 2.5
    assert report.compare("case", "peer", "mfu", 0.5, 0.4, lower_is_better=False).ratio == 1.25
    absent = report.compare("case", "peer", "clock_ms", None, 1.0, note="absent: why").to_dict()
    assert absent["ratio"] is None
    assert absent["note"] == "absent: why"


def outcome(name: str, batch: int, seconds: list[list[float]]) -> Any:
    """Return an outcome with one turn for each inner list, two ranks, the second a little faster."""
    made = interleaved.ContestantResult(name, batch)
    for turn in seconds:
        made.turns.append(groups.TurnResult([turn, [0.9 * s for s in turn]], [turn, turn], [[1.0] * len(turn)] * 2))
    return made


def test_ratios_survive_a_slow_minute_and_different_batches() -> None:
    run = interleaved.InterleavedRun(TINY, 2, interleaved.RunSettings(), "anchor")
    slow = [1.0, 1.0, 7.0]  # the machine is seven times slower in the last round, for all alike
    a = outcome("ours", 0, [[0.2 * s] * 3 for s in slow])
    b = outcome("theirs", 1, [[0.5 * s] * 3 for s in slow])
    # The second batch met a machine at half speed.
    anchors = [
        outcome("anchor", 0, [[0.3 * s] * 3 for s in slow]),
        outcome("anchor", 1, [[0.6 * s] * 3 for s in slow]),
    ]
    run.outcomes, run.anchors = {"ours": a, "theirs": b, "anchor": anchors[0]}, anchors
    assert run.time_ratio("ours", "anchor") == pytest.approx(1.5)
    assert run.time_ratio("anchor", "theirs") == pytest.approx(0.5 / 0.6)
    assert run.time_ratio("ours", "theirs") == pytest.approx((0.5 / 0.6) / (0.2 / 0.3))
    assert a.clock_ms()[0] == pytest.approx(200.0), "the slowest rank's clock counts"


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from(["ddp", "fsdp2_2", "fsdp2_3", "deepspeed_3", "thalweg_1"]), unique=True),
    world=st.integers(1, 8),
    budget=st.floats(100, 50000),
)
def test_batches_hold_everyone_once_and_fit(names: list[str], world: int, budget: float) -> None:
    job = contestants.JOBS["69m"]
    batches = interleaved.split_into_batches(names, "ddp_fused", job, world, budget)
    assert [name for batch in batches for name in batch[1:]] == names
    assert all(batch[0] == "ddp_fused" for batch in batches)
    for batch in batches:
        need = sum(interleaved.estimate_mib(name, job, world) for name in batch)
        assert need <= budget or len(batch) <= 2, "only a pair that does not fit may exceed the budget"


def test_the_device_is_in_the_scripts_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from thalweg.cli import bench, main

    (tmp_path / "one.py").write_text('import os, sys\nsys.exit(7 if os.environ.get("THALWEG_DEVICE") == "cpu" else 8)')
    monkeypatch.setattr(bench, "find_bench_folder", lambda: tmp_path)
    assert main(["bench", "--device", "cpu", "one"]) == 7 and main(["bench", "one"]) == 8


def test_an_accelerator_holds_one_contestant_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: five models of a billion parameters at once are 100 GB."""
    job = dataclasses.replace(TINY, device="cuda")
    run = interleaved.InterleavedRun(job, 1, interleaved.RunSettings(rounds=2), "anchor")
    alive: list[str] = []
    seconds = {"anchor": 0.4, "ours": 0.2, "theirs": 0.5}

    class Group:
        def __init__(self, name: str, *_: object, **__: object) -> None:
            self.name = name
            alive.append(name)
            assert alive == [name]

        def wait_ready(self) -> None: ...

        def run(self, steps: int) -> Any:
            return groups.TurnResult([[seconds[self.name]] * steps], [[0.0] * steps], [[0.0] * steps])

        def report(self) -> list[dict[str, Any]]:
            return [{}]

        def stop(self, orderly: bool = True) -> None:
            alive.remove(self.name)

    monkeypatch.setattr(interleaved, "RankGroup", Group)
    run.run(["anchor", "ours", "theirs"])
    assert run.time_ratio("ours", "anchor") == pytest.approx(2.0)
    assert run.time_ratio("ours", "theirs") == pytest.approx(2.5)


def test_goals_are_measured_never_assumed() -> None:
    run = interleaved.InterleavedRun(contestants.JOBS["69m"], 2, interleaved.RunSettings(), "ddp_fused")
    ours, theirs = outcome("thalweg_torch_3", 0, [[0.5]] * 5), outcome("deepspeed_3", 0, [[1.0]] * 5)
    for made, peak in ((ours, 1500.0), (theirs, 2500.0)):
        made.reports = [{"peak_mib": peak, "import_mib": 200.0}]
    run.outcomes = {"thalweg_torch_3": ours, "deepspeed_3": theirs}
    found = {(g["peer"], g["metric"]): g for g in goals.check_goals(run)}
    assert set(found) == {("deepspeed_3", "clock"), ("deepspeed_3", "memory")}
    assert not found["deepspeed_3", "clock"]["met"], "2.0 is below the promised 2.2"
    assert found["deepspeed_3", "memory"]["met"]


def test_reference_models_have_the_sizes_that_the_results_name() -> None:
    import torch

    for name, millions in (("small", 5.3), ("69m", 69.3)):
        with torch.device("meta"):
            model = contestants.build_model(contestants.JOBS[name])
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_flop_count_of_the_llama_shape_equals_what_torch_counts() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 96, "vocabulary": 128}
    model, tokens_BT = llama.Llama(**shape), torch.randint(0, 128, (2, 32))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens_BT, tokens_BT).backward()
    assert counter.get_total_flops() == llama.flops_per_token(shape, 32) * tokens_BT.numel()
    whole, masked = (llama.flops_per_token(shape, 32, causal=c) for c in (False, True))
    assert whole - masked == 6 * 2 * 64 * 32


# ---- the processes ----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_contestants_in_turns_compute_the_same_and_a_changed_model_shows() -> None:
    changed = dataclasses.replace(TINY, heads=4)  # the same weights, other arithmetic
    made = [groups.RankGroup(n, j, 2) for n, j in (("ddp_fused", TINY), ("fsdp2_3", TINY), ("ddp_fused", changed))]
    folders = [group._folder for group in made]
    pids = [process.pid for group in made for process in group._ranks]
    try:
        for group in made:
            group.wait_ready()
        turns = [[group.run(steps) for group in made] for steps in (1, 2)]
        memory = made[0].report()
    finally:
        for group in made:
            group.stop()
    losses = [[loss for turn in turns for loss in turn[i].loss()] for i in range(3)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    assert losses[0] != pytest.approx(losses[2], abs=1e-5), "the check on fairness must be able to fail"
    assert len(turns[1][0].clock()) == 2
    assert all(second > 0 for second in turns[1][0].clock())
    assert 50 < memory[0]["import_mib"] <= memory[0]["model_mib"] <= memory[0]["peak_mib"]
    assert not any(folder.exists() for folder in folders)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_contestant_that_fails_is_reported_with_its_log_and_leaves_nothing() -> None:
    group = groups.RankGroup("nobody_3", TINY, 1)
    pids = [process.pid for process in group._ranks]
    with pytest.raises(groups.RankGroupError, match="no contestant 'nobody_3'"), group:
        group.wait_ready()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.nightly
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_nothing_stays_of_a_driver_that_is_killed(signal_number: int) -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {str(BENCH)!r}); import _groups, _contestants\n"
        "_groups.exit_on_terminate()\n"
        "with _groups.RankGroup('ddp', _contestants.JOBS['tiny'], 1) as g:\n"
        "    g.wait_ready(); print(g._ranks[0].pid, g._folder, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid, folder = driver.stdout.readline().split()
    driver.send_signal(signal_number)
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 10
    while _state(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _state(pid) in ("", "Z")
    assert (Path(folder) in groups.remove_stale()) == (signal_number == signal.SIGKILL)
    assert not Path(folder).exists()


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.nightly
@pytest.mark.slow
def test_train_step_prints_one_object_whose_rows_compare() -> None:
    options = ["--model", "tiny", "--ranks", "1", "--only", "thalweg_torch_2", "fsdp2_2", "fsdp2_comm_2"]
    done = script("train_step", *options, "--rounds", "2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {"date", "commit", "machine", "rows", "contestants"} <= set(data)
    assert {"case", "peer", "metric", "ours", "theirs", "ratio"} <= set(data["rows"][0])
    found = {(row["case"].split(", ")[1], row["peer"], row["metric"]) for row in data["rows"]}
    assert ("stage 2", "fsdp2_2", "clock_ms_median") in found
    assert ("stage 2", "fsdp2_comm_2", "peak_mib") in found
    for row in data["rows"]:
        if row["metric"] == "peak_mib":
            assert row["ratio"] == pytest.approx(row["theirs"] / row["ours"], rel=1e-3)
    assert all(line["loss_difference"] < 1e-5 for line in data["contestants"])


def test_gpu_benchmark_refuses_a_machine_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = script("gpu_mfu", "--quick", "--json")
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert not done.stdout


# ---- hosts ------------------------------------------------------------------------------------------


def test_hosts_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "iproute2" in namespaces.missing_reason()
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces, "os", SimpleNamespace(geteuid=lambda: 1000))
    assert "root" in namespaces.missing_reason()


def _make_hosts() -> Any:
    reason = namespaces.missing_reason()
    if reason:
        pytest.skip(f"namespace hosts: {reason}")
    try:
        with namespaces.NamespaceHosts():
            pass
    except namespaces.NamespaceError as error:
        pytest.skip(f"namespace hosts: {error}")
    return namespaces.NamespaceHosts("1gbit")


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_share_nothing_but_the_cable_and_go_with_an_error() -> None:
    hosts = _make_hosts()
    with pytest.raises(RuntimeError, match="as planned"), hosts:
        _look_around(hosts)
    assert not any(name in _namespaces() for name in hosts.names)


def _look_around(hosts: Any) -> None:
    program = (
        "import os, socket; print(socket.gethostname(), len(os.listdir('/dev/shm')), "
        "*(os.readlink(f'/proc/self/ns/{kind}') for kind in ('net', 'pid', 'ipc', 'mnt')))"
    )
    places = hosts.placements(2)
    commands = [[*place.prefix, sys.executable, "-c", program] for place in places]
    seen = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.split() for c in commands]
    assert [line[:2] for line in seen] == [[hosts.names[rank // 2], "0"] for rank in range(4)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc", "mnt")]
    for first, second, outside in zip(seen[0][2:], seen[2][2:], here, strict=True):
        assert len({first, second, outside}) == 3
    assert [place.environment["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert all(name in _namespaces() for name in hosts.names)
    raise RuntimeError("as planned")


_SOCKET = "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(30)\n"
_ANSWER = _SOCKET + (
    "s.bind(('10.77.0.2', 7)); print('up', flush=True); said = b''\n"
    "while said != b'end': said, sender = s.recvfrom(64); s.sendto(said, sender)"
)
_PING = _SOCKET + (
    "s.connect(('10.77.0.2', 7))\n"
    "for _ in range(20): start = time.perf_counter(); s.send(b'x'); s.recv(64); print(time.perf_counter() - start)\n"
    "s.send(b'end'); s.recv(64)"
)


def _round_trip(hosts: Any) -> float:
    """The shortest of twenty pings (of UDP, as there may be no `ping`), in seconds."""
    answerer = subprocess.Popen(
        [*hosts.command_prefix(1), sys.executable, "-c", _ANSWER], stdout=subprocess.PIPE, text=True
    )
    try:
        assert answerer.stdout is not None and answerer.stdout.readline() == "up\n"
        pings = subprocess.run(
            [*hosts.command_prefix(0), sys.executable, "-c", _PING], capture_output=True, text=True, check=True
        )
    finally:
        answerer.communicate(timeout=60)
    return min(map(float, pings.stdout.split()))


def test_a_round_trip_takes_the_delay_longer() -> None:
    """By the kernel or by a relay; the shortest of many, so that a busy machine does not matter."""
    _make_hosts()
    with namespaces.NamespaceHosts() as hosts:
        plain = _round_trip(hosts)
    delayed = namespaces.NamespaceHosts("100mbit", delay="20ms")
    with ExitStack() as stack:
        try:
            stack.enter_context(delayed)
        except namespaces.NamespaceError as error:
            pytest.skip(f"a longer cable: {error}")
        assert delayed.delayed_by in ("netem", "relay")
        longer = _round_trip(delayed) - plain
        assert delayed.sent_mib() > 0
    assert 0.019 < longer < 0.030
    assert not any(name in _namespaces() for name in delayed.names)
    with pytest.raises(ValueError, match='write it as "20ms"'):
        namespaces.NamespaceHosts(delay="20 parsecs")


def test_hosts_of_a_dead_driver_are_swept() -> None:
    _make_hosts()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    name = f"{namespaces._PREFIX}{child.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    alive = f"{namespaces._PREFIX}{os.getpid()}-9"
    subprocess.run(["ip", "netns", "add", alive], check=True)
    try:
        assert namespaces.remove_stale() == [name]
    finally:
        subprocess.run(["ip", "netns", "del", alive], check=True)
