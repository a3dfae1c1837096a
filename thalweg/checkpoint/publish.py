"""The checkpoint directory: how a save becomes visible, all at once or not at all.

::

    DIR/latest                     the tag of the newest checkpoint, as text
    DIR/<tag>/                     a committed checkpoint: manifest.json and shards
    DIR/<tag>~<sequence>/          the same tag saved again, until the older one is gone
    DIR/.saving-...-<random>/      a save under way (or one that died)
    DIR/.removing-...-<random>/    a checkpoint on its way out

A save fills ``.saving-*``; the manifest is renamed into place inside it; then the
directory itself is renamed to its public name, which is the commit; then ``latest`` is
replaced.  Nothing that has a public name is ever written to.  A tag that exists is not
overwritten: the new directory is published beside it, and only when the pointer is
durable is the old one renamed away, removed, and the new one given the plain name.  A
kill between any two operations leaves the old checkpoint, the new one, or both;
``sequence`` in the manifest says which is newer.

A directory whose name starts with a dot is never read by a load.  A later save removes
those of processes that are dead; the name says whose they were.  Several jobs may save to
one directory: whoever gives or takes a public name holds the directory's lock while it
looks and renames, so that nobody discards by an old listing what has a new meaning.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thalweg.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MismatchedCheckpoint,
    MissingCheckpoint,
)
from thalweg.checkpoint.io import FileSystem, read_file, remove_tree, write_file
from thalweg.checkpoint.manifest import Head, Manifest, parse, parse_head, serialise
from thalweg.utils.log import get_logger

MANIFEST = "manifest.json"
LATEST = "latest"
_SAVING, _REMOVING, _POINTER = ".saving-", ".removing-", ".latest-"
_OTHER_HOST_SECONDS = 3600.0  # a temporary of another host is taken for dead after this long without a change

_log = get_logger(__name__)


@dataclass(frozen=True)
class Found:
    """A directory that claims to be a checkpoint: its head, or why it cannot be read."""

    path: Path
    head: Head | None
    problem: str = ""

    @property
    def sequence(self) -> int:
        """Commit order within the directory; -1 when unreadable."""
        return self.head.sequence if self.head else -1


def check_tag(tag: str) -> str:
    """Return ``tag`` if it can name a directory; ``ValueError`` otherwise."""
    text = str(tag)
    plain = text.isprintable() and not any(c in text for c in "/\\~\0") and len(os.fsencode(text)) <= 200
    if not text or not plain or text.startswith(".") or text == LATEST or text != text.strip():
        raise MismatchedCheckpoint(
            f"the tag {text!r} cannot name a checkpoint: use a plain file name other than {LATEST!r}, "
            "without '/', '~' or a leading dot"
        )
    return text


def read_manifest(io: FileSystem, path: Path) -> Manifest:
    """The checked manifest of a committed directory."""
    try:
        return parse(_manifest_bytes(io, path), str(path / MANIFEST))
    except OSError as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} cannot be read: {error}") from error


def _manifest_bytes(io: FileSystem, path: Path) -> bytes:
    try:
        return read_file(io, path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path} has no {MANIFEST}: it is not a committed checkpoint") from None


def find(io: FileSystem, directory: Path, *, lenient: bool = False) -> list[Found]:
    """Every committed or damaged checkpoint in ``directory``, newest first, the damaged last.

    Unless ``lenient`` an ``OSError`` passes through: that a disk cannot read a manifest now
    does not make it damaged, and a save that took it for damaged might remove it.
    """
    try:
        names = io.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [directory / name for name in names if not name.startswith(".") and name != LATEST]
    found = [_look(io, path, lenient=lenient) for path in paths if _is_ours(io, path)]
    return sorted(found, key=_newest_first)


def _is_ours(io: FileSystem, path: Path) -> bool:
    """Whether a directory is a checkpoint, be it one that has lost its manifest."""
    if io.exists(path / MANIFEST):
        return True
    try:
        return any(re.fullmatch(r"shard-\d+-of-\d+\..*safetensors", name) for name in io.listdir(path))
    except (FileNotFoundError, NotADirectoryError):  # a file, or removed since it was listed
        return False


def _newest_first(found: Found) -> tuple[int, int, str]:
    return (-found.sequence, -len(found.path.name), found.path.name)  # of equals, the generation


def _look(io: FileSystem, path: Path, *, lenient: bool = False) -> Found:
    try:
        return Found(path, parse_head(_manifest_bytes(io, path), str(path / MANIFEST)))
    except DamagedCheckpoint as error:
        return Found(path, None, str(error))
    except OSError as error:
        if not lenient:
            raise
        return Found(path, None, f"{path / MANIFEST} cannot be read: {error}")


def generations(io: FileSystem, directory: Path, tag: str) -> list[Found]:
    """The directories that hold ``tag``, newest first; more than one only after a save was cut off."""
    pattern = re.compile(re.escape(tag) + r"(~\d+)?")
    try:
        names = [name for name in io.listdir(directory) if pattern.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    found = [_look(io, directory / name) for name in names]
    return sorted(found, key=_newest_first)


def resolve(io: FileSystem, directory: Path, tag: str) -> Found:
    """The directory to read for an explicit tag."""
    found = generations(io, directory, check_tag(tag))
    if not found:
        raise MissingCheckpoint(f"there is no checkpoint {tag!r} in {directory}{_choices(io, directory)}")
    if found[0].head is None:
        raise DamagedCheckpoint(found[0].problem)
    return found[0]


def _choices(io: FileSystem, directory: Path) -> str:
    if not io.exists(directory):
        return "; the directory does not exist"
    tags = [f.head.tag for f in find(io, directory) if f.head]
    return f"; it holds {', '.join(tags[:8])}" if tags else "; it holds no checkpoint"


def read_pointer(io: FileSystem, directory: Path) -> str | None:
    """The tag in ``latest``, or None where there is no such file."""
    try:
        return read_file(io, directory / LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def candidates(io: FileSystem, directory: Path) -> list[Found]:
    """What a load without a tag may take, best first: the pointer's checkpoint, then the newest.

    Warns of damaged ones, and when the pointer is missing, names nothing or is not the newest.
    """
    found = find(io, directory, lenient=True)
    tag = read_pointer(io, directory)
    if not found:
        if tag is None:
            return []
        there = "is not a checkpoint of Thalweg" if io.exists(directory / tag) else "is not there"
        raise MissingCheckpoint(
            f"{directory / LATEST} names {tag!r}, which {there}; restore it, or remove the file to start anew"
        )
    newest = found[0]
    named = next((f for f in found if f.head and f.head.tag == tag), None)
    named = named or next((f for f in found if f.path.name == tag), None)
    for damaged in found:
        if damaged.head is None and damaged is not named:
            _log.warning("a damaged checkpoint is passed over: %s", damaged.problem)
    if tag is None:
        _log.warning(
            "%s has no %r file; the newest committed checkpoint is %s", directory, LATEST, newest.path.name
        )
    elif named is None:
        _log.warning("%s names %r, which is not there; falling back", directory / LATEST, tag)
    elif named.head and named is not newest:
        _log.warning(
            "%s names %r, but %s was committed after it; taking %r as the pointer says",
            directory / LATEST,
            tag,
            newest.path.name,
            tag,
        )
    return found if named is None else [named, *(f for f in found if f is not named)]


def make_directory(io: FileSystem, directory: Path) -> None:
    """Make ``directory`` and its parents where they are missing, durably."""
    missing = []
    current = directory
    while not io.exists(current):
        missing.append(current)
        current = current.parent
    for path in reversed(missing):
        io.mkdir(path)
        io.fsync_dir(path.parent)


def begin(io: FileSystem, directory: Path, tag: str, epoch: int) -> tuple[Path, int]:
    """Prepare a save: clean up after dead ones, check the tag, make the temporary directory.

    Returns the temporary directory and the sequence number of the commit to come.
    """
    make_directory(io, directory)
    clean(io, directory)
    plain = directory / tag
    with _alone(io, directory):
        foreign = io.exists(plain) and not _is_ours(io, plain)
    if foreign:
        raise CheckpointError(
            f"{plain} exists and is not a checkpoint of Thalweg; choose another tag or move it out of the way"
        )
    newest = _newest(io, directory)
    _refuse_superseded(newest, epoch, directory)
    temporary = directory / f"{_SAVING}{_owner()}-{secrets.token_hex(8)}"
    io.mkdir(temporary)
    return temporary, (newest.sequence if newest else 0) + 1


def _newest(io: FileSystem, directory: Path) -> Head | None:
    return next((f.head for f in find(io, directory) if f.head), None)


def _refuse_superseded(newest: Head | None, epoch: int, directory: Path) -> None:
    if newest is not None and newest.epoch > epoch:
        raise CheckpointError(
            f"this job is of epoch {epoch}, but {directory} holds {newest.tag!r} of epoch {newest.epoch}: "
            "a newer incarnation of the job has taken over, so this one must not commit"
        )


def publish(
    io: FileSystem, directory: Path, temporary: Path, manifest: Manifest, *, latest: bool = True
) -> Path:
    """Commit a temporary directory whose shards are durable; returns its public path.

    Order: manifest to a temporary, fsync; rename; fsync the directory; rename the
    directory to its public name, fsync its parent; then the pointer in the same way.
    """
    head = manifest.head
    write_file(io, temporary / f".{MANIFEST}", serialise(manifest))
    io.rename(temporary / f".{MANIFEST}", temporary / MANIFEST)
    io.fsync_dir(temporary)
    _refuse_superseded(_newest(io, directory), head.epoch, directory)
    with _alone(io, directory):
        public = directory / head.tag
        if io.exists(public):
            public = directory / f"{head.tag}~{head.sequence}"
        io.rename(temporary, public)
        io.fsync_dir(directory)
    if latest:
        point(io, directory, head.tag)
    return public


def point(io: FileSystem, directory: Path, tag: str) -> None:
    """Make ``latest`` name ``tag``, in one step."""
    temporary = directory / f"{_POINTER}{_owner()}-{secrets.token_hex(8)}"
    write_file(io, temporary, f"{tag}\n".encode())
    io.rename(temporary, directory / LATEST)
    io.fsync_dir(directory)


def settle(io: FileSystem, directory: Path, tag: str) -> Path:
    """Leave one directory for ``tag``, under its plain name: the newest generation that is intact."""
    hidden: list[Path] = []
    with _alone(io, directory):
        found = generations(io, directory, tag)
        good = next((f for f in found if f.head), None)
        if good is not None:
            hidden = [_hide(io, directory, other.path) for other in found if other is not good]
            if good.path.name != tag:
                io.rename(good.path, directory / tag)
                io.fsync_dir(directory)
    for path in hidden:
        remove_tree(io, path)
    return directory / tag


def keep_newest(io: FileSystem, directory: Path, count: int, newest: Path) -> None:
    """Discard all but ``newest`` and the ``count - 1`` before it; what is damaged is left alone."""
    with _alone(io, directory):
        older = [f for f in find(io, directory) if f.head and f.path != newest]
        hidden = [_hide(io, directory, old.path) for old in older[count - 1 :]]
    for path in hidden:
        remove_tree(io, path)


def _hide(io: FileSystem, directory: Path, path: Path) -> Path:
    """Take a committed directory's name, so that no half of it is ever read; returns what to remove."""
    hidden = directory / f"{_REMOVING}{_owner()}-{secrets.token_hex(8)}"
    io.rename(path, hidden)
    io.fsync_dir(directory)
    return hidden


@contextlib.contextmanager
def _alone(io: FileSystem, directory: Path) -> Iterator[None]:
    """Nobody else gives or takes public names in ``directory`` meanwhile."""
    handle = io.lock(directory)
    try:
        yield
    finally:
        os.close(handle)  # not one of a save's operations: a disk that fails must not keep the lock


def clean(io: FileSystem, directory: Path) -> None:
    """Remove what dead saves left behind, and finish replacements that were cut off.

    What cannot be removed is warned of and left for the next save: rubbish never stops a save.
    """
    for name in io.listdir(directory):
        path = directory / name
        try:
            if name.startswith((_REMOVING, _SAVING)) and not _alive(io, path):
                remove_tree(io, path)
            elif name.startswith(_POINTER) and not _alive(io, path):
                io.remove(path)
        except FileNotFoundError:  # its owner, or another save, was faster
            continue
        except OSError as error:
            _log.warning("could not remove the left-over %s: %s", path, error)
    for tag in sorted({name.partition("~")[0] for name in io.listdir(directory) if "~" in name}):
        if not tag.startswith("."):
            settle(io, directory, tag)


def _owner() -> str:
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid()) or 0}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "host"


def _start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process began; None when it is dead (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _alive(io: FileSystem, path: Path) -> bool:
    """Whether another living process owns a temporary; this process saves one thing at a time."""
    match = re.fullmatch(r"\.[a-z]+-([A-Za-z0-9_]+)-(\d+)-(\d+)-[0-9a-f]+", path.name)
    if match is None:
        return False
    host, pid, started = match.group(1), int(match.group(2)), int(match.group(3))
    if host != _host():
        return io.age(path) < _OTHER_HOST_SECONDS
    return pid != os.getpid() and started == _start_time(pid)


def abandon(io: FileSystem, temporary: Path) -> None:
    """Remove the temporary of a failed save, as far as the disk allows; the next save tries again."""
    try:
        if io.exists(temporary):
            remove_tree(io, temporary)
    except OSError as error:
        _log.warning("could not remove %s after a failed save (%s); the next save will", temporary, error)
