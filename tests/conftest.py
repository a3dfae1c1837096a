"""What every run of pytest here does: the order of files, what was left out, how long files took.

``make test`` calls pytest twice: for the tests marked ``alone`` (they measure time, or look at what all processes
share) and for all others on several workers.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import durations, harness


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("thalweg")
    group.addoption("--device", choices=("cpu", "sim", "cuda"), default="cpu", help="the device of ranks")
    group.addoption("--check-durations", action="store_true", help="fail when a test file exceeds its budget")
    group.addoption("--save-durations", action="store_true", help="write this phase's to tests/durations.json")
    group.addoption("--required-tools", default="", help="modules and commands that must be there, with commas")


def pytest_configure(config: pytest.Config) -> None:
    harness.set_default_device(config.getoption("--device"))
    if _phase(config) != "shared":  # whose workers have nothing to spare while they collect
        harness.start_fork_server()
    if not hasattr(config, "workerinput"):  # of pytest-xdist: the workers' reports arrive at the main process
        config.pluginmanager.register(_RunReport(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A phase of few tests need not import the files that have none of them."""
    phase = _phase(config)
    if phase != "shared" and collection_path.name.startswith("test_"):
        return f"mark.{phase}".encode() not in collection_path.read_bytes() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, where workers take one after another."""
    if hasattr(config, "workerinput"):
        seconds = durations.load()["shared"]
        items.sort(key=lambda item: -seconds.get(_file_of(item.nodeid), durations.MARGIN_SECONDS))


def pytest_collection_finish() -> None:
    """What collecting leaves stays to the end: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*harness.GC_THRESHOLD)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A config's "log_level" is of the whole process: the next test begins with what the package has by itself."""
    yield
    logger = logging.getLogger("thalweg")
    if logger.level != logging.INFO:  # setting it makes logging forget what each of 2,000 loggers is to say
        logger.setLevel(logging.INFO)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    module = item.getparent(pytest.Module)
    if module is not None and module.obj is not _current_module[0]:
        _current_module[0] = module.obj
        harness.enter_module(getattr(module.obj, "REUSE_RANKS", False))


_NO_BUDGET = "tests/durations.json has no seconds of this phase: run `make durations`"
_current_module: list[object] = [None]


def _phase(config: pytest.Config) -> str:
    """Which of `make gate`'s this run is; one of chosen files or tests is taken for the last of them."""
    phase = config.option.markexpr.partition(" ")[0]
    return phase if phase in ("alone", "waits") else "shared"


def _file_of(node_id: str) -> str:
    return node_id.partition("::")[0]


class _RunReport:
    """What the run left out, and its durations by file."""

    def __init__(self, config: pytest.Config) -> None:
        self._required = [name for name in config.getoption("--required-tools").split(",") if name]
        absent = [name for name in self._required if find_spec(name) is None and shutil.which(name) is None]
        if absent:
            raise pytest.UsageError(f"required by --required-tools and not there: {', '.join(absent)}")
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._left_out: Counter[str] = Counter()
        self._files: defaultdict[str, set[str]] = defaultdict(set)
        self._save, self._check = config.getoption("--save-durations"), config.getoption("--check-durations")
        self._kind = _phase(config)
        self._failures: list[str] = []
        self._notes: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module may be left out as a whole."""
        self._add_skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown of each test."""
        self._seconds[_file_of(report.nodeid)] += report.duration
        self._add_skip(report)

    def _add_skip(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self._left_out[reason] += 1
            self._files[reason].add(_file_of(report.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail where the run took too long, or left out what must be there."""
        for reason in self._left_out:
            tools = [name for name in self._required if name in reason]
            self._failures += [f"left out though {name} is required: {reason}" for name in tools]
        if self._check:
            budget = durations.load()[self._kind]
            self._failures += durations.find_exceeded(self._seconds, budget) if budget else []
            self._notes += [] if budget else [_NO_BUDGET]
            times = durations.slowness(self._seconds, budget)
            if times > 1.5:
                self._notes.append(f"most files took {times:.1f} times their seconds of tests/durations.json")
        if self._save and session.exitstatus == pytest.ExitCode.OK:
            durations.save(self._kind, self._seconds)
        if self._failures and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One block at the end."""
        if self._left_out:
            terminalreporter.section(f"left out: {sum(self._left_out.values())} tests or files")
            for reason, count in sorted(self._left_out.items()):
                files = ", ".join(sorted(Path(name).name for name in self._files[reason]))
                terminalreporter.line(f"{count:4d}  {reason}  ({files})")
        for line in self._notes:
            terminalreporter.line(line)
        if self._failures:
            terminalreporter.section("failed as a run", red=True)
            for line in self._failures:
                terminalreporter.line(line)
