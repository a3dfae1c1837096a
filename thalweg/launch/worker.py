"""The first code of each rank; run as a file, with nothing but the standard library.

    python -u worker.py FOLDER LAUNCHER_PID GRACE CPUS script|module|program TARGET ARGUMENT...

It ties its life to the launcher's, takes its cores (CPUS is ``0,1;2,3``, one run for each local rank, or
``-``), and becomes TARGET as `python TARGET`, `python -m TARGET` or the program itself would be.  An exception
that nobody catches is written to FOLDER instead of standard error: the launcher shows the first one.  The rank
then ends within GRACE seconds, whatever its other threads do.

The ranks of a host share one terminal or pipe, and `print("loss", 1.5)` is four writes there.  What Python code
prints therefore goes out by whole lines, one rank at a time (:class:`_WholeLines`).
"""

import contextlib
import faulthandler
import fcntl
import importlib.machinery
import io
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

PASS_LOCAL_RANK = "THALWEG_PASS_LOCAL_RANK"  # set: the program's first argument is --local_rank=N
_PR_SET_PDEATHSIG = 1
_MAX_HELD_BYTES = 1 << 20  # of one line
_LAUNCHER_FILES = {__file__, "<frozen runpy>", runpy.__file__}


def main(argv: list[str]) -> int:
    """Become the rank's program; returns its exit code, or lets its ``SystemExit`` through."""
    folder, launcher_pid, grace, cpus, kind, target, *arguments = argv
    _set_pdeathsig(int(launcher_pid))
    rank = os.environ["RANK"]
    if cpus != "-" and hasattr(os, "sched_setaffinity"):
        cpu_ids = cpus.split(";")[int(os.environ["LOCAL_RANK"])]
        with contextlib.suppress(OSError):  # a core may have gone offline; an unbound rank still works
            os.sched_setaffinity(0, {int(cpu) for cpu in cpu_ids.split(",")})
    if os.environ.pop(PASS_LOCAL_RANK, None):
        arguments.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    if kind == "program":
        os.execvp(target, [target, *arguments])
    sys.argv = [target, *arguments]
    output_lock = _OutputLock(Path(folder, "output.lock"))
    sys.stdout = sys.__stdout__ = _by_lines(sys.stdout, output_lock)
    sys.stderr = sys.__stderr__ = _by_lines(sys.stderr, output_lock)
    if sys.stderr is not None and not faulthandler.is_enabled():
        faulthandler.enable()  # a crash in compiled code leaves the Python stack behind
    try:
        _run_target(kind, target)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        _write_error_record(error, folder, rank)
        devnull = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(max(float(grace), 0.01), exit=True, file=devnull)
        return 1
    return 0


def _set_pdeathsig(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when the launcher ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it ended before the request was made
        os._exit(128 + signal.SIGKILL)


class _OutputLock:
    """Held by one thread of one rank of this host: a lock of the process's file, which a dead rank does not keep."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._new_thread_lock()
        os.register_at_fork(after_in_child=self._new_thread_lock)  # whoever held it is not in the child

    def _new_thread_lock(self) -> None:
        self._thread_lock = threading.RLock()

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        with contextlib.suppress(OSError, ValueError):  # a program may close all files; its lines still come
            fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._thread_lock.release()


class _WholeLines(io.FileIO):
    """Holds a line until it is whole or flushed, then writes it while no other rank of this host writes.

    A kernel takes a write of up to 4 KiB to a pipe as one, and may put others' between the parts of a longer one:
    hence the lock.  What follows a carriage return is a progress bar and goes out at once.
    """

    def __init__(self, fd: int, lock: _OutputLock) -> None:
        super().__init__(fd, "w", closefd=False)
        self._lock, self._held = lock, bytearray()

    def write(self, data: Any) -> int:
        data = bytes(data)
        with self._lock:
            self._held += data
            if b"\r" in data.rpartition(b"\n")[2] or len(self._held) > _MAX_HELD_BYTES:
                self._write_held(len(self._held))
            elif b"\n" in data:
                self._write_held(self._held.rindex(b"\n") + 1)
        return len(data)

    def flush(self) -> None:
        if self._held and not self.closed:
            with self._lock:
                self._write_held(len(self._held))
        super().flush()

    def _write_held(self, length: int) -> None:
        output = memoryview(bytes(self._held[:length]))
        del self._held[:length]
        while output:
            written = super().write(output)
            if written is None:  # somebody made it non-blocking, and it is full
                select.select([], [self], [])
            output = output[written or 0 :]


def _by_lines(stream: Any, lock: _OutputLock) -> Any:
    """The same stream, line by line; None where it is closed."""
    if stream is None:
        return None
    raw = _WholeLines(stream.fileno(), lock)
    raw.name = stream.name
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)


def _run_target(kind: str, target: str) -> None:
    if not sys.flags.safe_path:  # the interpreter put this file's folder there
        del sys.path[0]
    if kind == "module":
        _prepend_sys_path(os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        _prepend_sys_path(os.path.dirname(os.path.realpath(target)))
        path = os.path.abspath(target)
        module = types.ModuleType("__main__")
        loader = _ScriptLoader("__main__", path)
        vars(module).update(__file__=path, __loader__=loader, __spec__=None, __annotations__={})
        sys.modules["__main__"] = module
        loader.exec_module(module)


def _prepend_sys_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Loads a file as ``__main__`` the way the interpreter does: no cached bytecode is read or written."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _write_error_record(error: BaseException, folder: str, rank: str) -> None:
    trace = error.__traceback__
    while trace is not None and _is_launcher_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    text = "".join(traceback.format_exception(error))
    hook = sys.excepthook
    shown = hook is not sys.__excepthook__ and not (hook.__module__ or "").startswith("torch.distributed")
    if shown:  # the script's own hook, a debugger's or a reporter's
        hook(type(error), error, trace)
    alone = traceback.TracebackException(type(error), error, None)
    alone.__notes__ = None  # they would come last
    summary = list(alone.format_exception_only())[-1].strip()
    record = {"rank": int(rank), "time_ns": time.time_ns(), "summary": summary, "traceback": text, "shown": shown}
    record["type"] = f"{type(error).__module__}.{type(error).__qualname__}"
    temporary = Path(folder, f"{rank}.error.part")
    temporary.write_text(json.dumps(record))
    temporary.replace(Path(folder, f"{rank}.error"))


def _is_launcher_frame(filename: str) -> bool:
    return filename in _LAUNCHER_FILES or filename.startswith("<frozen importlib.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
