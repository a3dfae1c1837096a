"""The table of choices: measured once per machine, shared through a file, robust against its content."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.ops.linear import autotune
from thalweg.ops.linear.autotune import benchmark_kernels, select_fastest, shrink_shape
from thalweg.ops.linear.autotune_cache import AutotuneCache, get_cache_dir, get_cpu_name, round_up_pow2
from thalweg.ops.linear.kernels import KERNELS, MATMUL_KINDS, REFERENCE, is_usable

ROWS, K, N = 100, 48, 64
F32 = torch.float32

pytestmark = pytest.mark.skipif(
    not is_usable("nt", "onednn", F32), reason="this torch build has no mkldnn::_linear_pointwise"
)


class Counted:
    """A measurement that costs nothing, favours one candidate and counts."""

    def __init__(self, winner: str = "onednn") -> None:
        self.winner = winner
        self.calls: list[tuple[str, int, int, int]] = []

    def __call__(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> dict[str, float]:
        self.calls.append((kind, rows, k, n))
        return {name: 1e-3 if name == self.winner else 2e-3 for name in KERNELS[kind]}


def the_file(directory: Path) -> Path:
    (path,) = directory.glob("*.json")
    return path


def test_measured_once_then_read_from_the_file(tmp_path: Path) -> None:
    first, second = Counted(), Counted("convolution")
    table = AutotuneCache(tmp_path / "deep" / "cache", first)
    for kind in MATMUL_KINDS:
        assert table.best_kernel(kind, F32, ROWS, K, N) == "onednn"
        assert table.best_kernel(kind, F32, ROWS - 5, K, N) == "onednn"
    assert len(first.calls) == 3
    again = AutotuneCache(tmp_path / "deep" / "cache", second)
    assert [again.best_kernel(kind, F32, ROWS, K, N) for kind in MATMUL_KINDS] == ["onednn"] * 3
    assert not second.calls
    again.best_kernel("tn", F32, ROWS, K, N + 1)
    assert again.best_kernel("tn", F32, ROWS, K, N + 1) == "convolution"
    assert len(second.calls) == 1


def test_each_class_has_its_own_entry(tmp_path: Path) -> None:
    counted = Counted()
    table = AutotuneCache(tmp_path, counted)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for rows in (64, 65):
                for dtype in (F32, torch.bfloat16):
                    table.best_kernel("nt", dtype, rows, K, N)
    finally:
        torch.set_num_threads(threads)
    assert len(counted.calls) == 8
    assert {call[1] for call in counted.calls} == {64, 128}


@given(rows=st.integers(1, 10**9))
def test_bucket_is_the_next_power_of_two(rows: int) -> None:
    assert rows <= round_up_pow2(rows) < 2 * rows or rows == round_up_pow2(rows) == 1
    assert round_up_pow2(rows) & (round_up_pow2(rows) - 1) == 0


GARBAGE = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"null",
    b"[1, 2]",
    b'{"format": 1}',
    b'{"format": 1, "identity": {}, "picks": {}}',
    b'{"format": 1, "identity": IDENTITY, "picks": [1]}',
    b'{"format": 1, "identity": IDENTITY, "picks": {"KEY": 7}}',
    b'{"format": 1, "identity": IDENTITY, "picks": {"KEY": "rm -rf /"}}',
    b'{"format": 1, "identity": IDENTITY, "picks": {"KEY": "convolution"}}',
    b'{"format": 2, "identity": IDENTITY, "picks": {"KEY": "onednn"}}',
    b'{"format": 1, "identity": {"processor": "another", "torch": "2.0"}, "picks": {"KEY": "onednn"}}',
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_damaged_or_foreign_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    AutotuneCache(tmp_path, Counted()).best_kernel("nt", F32, ROWS, K, N)
    good = json.loads(the_file(tmp_path).read_text())
    (key,) = good["picks"]
    content = content.replace(b"IDENTITY", json.dumps(good["identity"]).encode()).replace(b"KEY", key.encode())
    the_file(tmp_path).write_bytes(content)
    counted = Counted("torch")
    assert AutotuneCache(tmp_path, counted).best_kernel("nt", F32, ROWS, K, N) == "torch"
    assert len(counted.calls) == 1
    assert json.loads(the_file(tmp_path).read_text())["picks"] == {key: "torch"}


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=200), cut=st.integers(0, 400))
def test_no_content_of_the_file_raises(tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cache")
    AutotuneCache(folder, Counted()).best_kernel("nt", F32, ROWS, K, N)
    whole = the_file(folder).read_bytes()
    the_file(folder).write_bytes(whole[:cut] + content)
    assert AutotuneCache(folder, Counted()).best_kernel("nt", F32, ROWS, K, N) in KERNELS["nt"]


def test_a_directory_that_cannot_be_used_costs_a_measurement(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for directory in (blocked / "cache", None):
        counted = Counted()
        table = AutotuneCache(directory, counted)
        assert table.best_kernel("nt", F32, ROWS, K, N) == "onednn"
        assert table.best_kernel("nt", F32, ROWS, K, N) == "onednn"
        assert len(counted.calls) == 1


def test_nothing_is_left_beside_the_file_and_nobody_else_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    AutotuneCache(folder, Counted()).best_kernel("nt", F32, ROWS, K, N)
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".lock"]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(the_file(folder).stat().st_mode) & 0o077 == 0


def _rank(folder: str, winner: str, start: object, results: object) -> None:
    table = AutotuneCache(Path(folder), Counted(winner))
    start.wait()  # type: ignore[attr-defined]
    shapes = [(kind, n) for n in range(1, 21) for kind in MATMUL_KINDS]
    results.put([table.best_kernel(kind, F32, ROWS, K, n) for kind, n in shapes])  # type: ignore[attr-defined]


def test_processes_that_would_measure_differently_choose_alike(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(3), context.Queue()
    winners = ("torch", "onednn", "torch")
    ranks = [context.Process(target=_rank, args=(str(tmp_path), w, start, results)) for w in winners]
    for rank in ranks:
        rank.start()
    choices = [results.get(timeout=30) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert choices[0] == choices[1] == choices[2]


def test_without_the_file_they_would_not(tmp_path: Path) -> None:
    picks = {AutotuneCache(None, Counted(winner)).best_kernel("nt", F32, ROWS, K, N) for winner in ("torch", "onednn")}
    assert picks == {"torch", "onednn"}


def test_a_table_travels_between_ranks(tmp_path: Path) -> None:
    mine = AutotuneCache(None, Counted("onednn"))
    mine.best_kernel("nt", F32, ROWS, K, N)
    table = json.loads(json.dumps(mine.export_entries()))
    counted = Counted("torch")
    theirs = AutotuneCache(tmp_path, counted)
    assert theirs.best_kernel("nt", F32, ROWS, K, N) == "torch"
    assert theirs.import_entries(table) == 1
    assert theirs.best_kernel("nt", F32, ROWS, K, N) == "onednn"
    assert theirs.import_entries({"nonsense": "onednn", **dict.fromkeys(table, "nonsense")}) == 0
    assert len(counted.calls) == 1


def test_the_file_of_this_machine_is_exported(tmp_path: Path) -> None:
    AutotuneCache(tmp_path, Counted()).best_kernel("nt", F32, ROWS, K, N)
    assert list(AutotuneCache(tmp_path, Counted()).export_entries().values()) == ["onednn"]


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("THALWEG_CACHE_DIR", str(tmp_path))
    assert get_cache_dir() == tmp_path
    monkeypatch.delenv("THALWEG_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_cache_dir() == tmp_path / "thalweg"
    assert get_cpu_name().startswith(os.uname().machine)


def test_ever_new_lengths_do_not_compile_for_ever() -> None:
    counted = Counted()
    table = AutotuneCache(None, counted)
    answers = [table.best_kernel("nt", F32, rows, K, N) for rows in range(1, 1001)]
    assert answers == ["onednn"] * 384 + [REFERENCE] * 616
    assert [table.best_kernel("nt", F32, rows, K, N) for rows in range(1, 1001)] == answers
    assert len(counted.calls) == 11
    half = AutotuneCache(None, Counted("fp32_onednn"))
    answers = [half.best_kernel("nn", torch.float16, rows, K, N) for rows in range(1, 401)]
    assert answers == ["fp32_onednn"] * 384 + ["fp32"] * 16


def test_a_challenger_must_win_clearly() -> None:
    assert select_fastest({REFERENCE: 1.00, "onednn": 0.50}) == "onednn"
    assert select_fastest({REFERENCE: 1.00, "onednn": 0.99}) == REFERENCE
    assert select_fastest({REFERENCE: 10e-6, "onednn": 5e-6}) == REFERENCE
    assert select_fastest({REFERENCE: 1.00, "onednn": 2.00}) == REFERENCE


@given(dims=st.tuples(*[st.integers(1, 100_000)] * 3))
def test_trial_shapes_are_bounded(dims: tuple[int, int, int]) -> None:
    rows, k, n = shrink_shape(*dims, 5e8)
    assert 2 * rows * k * n <= 5e8 or max(rows, k, n) <= 128
    assert all(0 < small <= whole for small, whole in zip((rows, k, n), dims, strict=True))


@pytest.mark.parametrize("kind", MATMUL_KINDS)
def test_the_measurement_times_every_usable_candidate(kind: str) -> None:
    torch.set_num_threads(1)
    times = benchmark_kernels(kind, F32, 64, 96, 128)
    assert set(times) == {name for name in KERNELS[kind] if is_usable(kind, name, F32)}
    assert all(0 < seconds < 1 for seconds in times.values())


def test_the_measurement_finds_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)

    def wasteful(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(4):
            y = torch.nn.functional.linear(a, b, bias)
        return y

    for slow, expected in (("onednn", REFERENCE), (REFERENCE, "onednn")):
        candidates = {REFERENCE: KERNELS["nt"][REFERENCE], "onednn": KERNELS["nt"][REFERENCE]}
        monkeypatch.setattr(autotune, "KERNELS", {"nt": {**candidates, slow: wasteful}})
        assert select_fastest(benchmark_kernels("nt", F32, 256, 256, 256)) == expected


def test_the_probe_and_the_measurement_leave_no_trace() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.set_num_threads(1)
    state = torch.get_rng_state()
    is_usable.cache_clear()
    with (
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        FlopCounterMode(display=False) as mode,
    ):
        benchmark_kernels("nn", F32, 64, 96, 128)
        is_usable("tn", "convolution", F32)
        torch.ones(2, 2) + torch.ones(2, 2)
    assert mode.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 1
