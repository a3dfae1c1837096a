"""The checkpoint directory: how a save becomes visible, all at once or not at all.

::

    DIR/latest                     the tag of the newest checkpoint, as text
    DIR/<tag>/                     a committed checkpoint: manifest.json and shards
    DIR/<tag>~<sequence>/          the same tag saved again, until the older one is gone
    DIR/.saving-...-<random>/      a save under way (or one that died)
    DIR/.removing-...-<random>/    a checkpoint on its way out
    DIR/.starts.json               which start of which job has the directory (job_starts.py)

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

import contextlib
import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from thalweg.checkpoint import job_starts
from thalweg.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from thalweg.checkpoint.filesystem import (
    REPLACING_PREFIX,
    FileSystem,
    list_if_there,
    make_owned_name,
    read_file,
    remove_tree,
    replace_file,
    write_file,
)
from thalweg.checkpoint.format.manifest import Manifest, ManifestHead, parse_head, parse_manifest, serialize_manifest
from thalweg.utils.log import get_logger
from thalweg.utils.processes import get_hostname, is_process_alive

MANIFEST = "manifest.json"
LATEST = "latest"
_SAVING_PREFIX, _REMOVING_PREFIX = ".saving-", ".removing-"
_SEQUENCE, _MAX_HEAD_BYTES = re.compile(rb'"sequence":(\d{1,18}),'), 4096
_FOREIGN_OWNER_TIMEOUT_S = 3600.0  # without a write, after which another host's temporary is dead

_log = get_logger(__name__)


@dataclass(frozen=True)
class CheckpointEntry:
    """A directory that claims to be a checkpoint: its head, or why it cannot be read."""

    path: Path
    head: ManifestHead | None
    error: str = ""


def check_tag(tag: str) -> str:
    """Return ``tag`` if it can name a directory; ``ValueError`` otherwise."""
    text = str(tag)
    is_file_name = text.isprintable() and not any(c in text for c in "/\\~\0") and len(os.fsencode(text)) <= 200
    if not text or not is_file_name or text.startswith(".") or text == LATEST or text != text.strip():
        raise CheckpointMismatchError(
            f"the tag {text!r} cannot name a checkpoint: use a plain file name other than {LATEST!r}, "
            "without '/', '~' or a leading dot"
        )
    return text


def read_manifest(io: FileSystem, path: Path) -> Manifest:
    """The checked manifest of a committed directory."""
    try:
        return parse_manifest(_read_manifest_bytes(io, path), str(path / MANIFEST))
    except OSError as error:
        raise CorruptCheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error


def _read_manifest_bytes(io: FileSystem, path: Path) -> bytes:
    try:
        return read_file(io, path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpointError(f"{path} has no {MANIFEST}: it is not a committed checkpoint") from None


def list_checkpoints(io: FileSystem, directory: Path, *, ignore_read_errors: bool = False) -> list[CheckpointEntry]:
    """Every committed or damaged checkpoint in ``directory``, newest first, the damaged last.

    Unless ``ignore_read_errors`` an ``OSError`` passes through: that a disk cannot read a manifest now
    does not make it damaged, and a save that took it for damaged might remove it.
    """
    names = list_if_there(io, directory)
    paths = [directory / name for name in names if not name.startswith(".") and name != LATEST]
    entries = [_read_entry(io, one, ignore_read_errors=ignore_read_errors) for one in paths if _is_checkpoint(io, one)]
    return sorted(entries, key=_newest_first_key)


def _is_checkpoint(io: FileSystem, path: Path) -> bool:
    """Whether a directory is a checkpoint, be it one that has lost its manifest."""
    if io.exists(path / MANIFEST):
        return True
    return any(re.fullmatch(r"shard-\d+-of-\d+\..*safetensors", name) for name in list_if_there(io, path))


def _newest_first_key(entry: CheckpointEntry) -> tuple[int, int, str]:
    sequence = entry.head.sequence if entry.head else -1
    return (-sequence, -len(entry.path.name), entry.path.name)  # of equals, the generation


def _read_entry(io: FileSystem, path: Path, *, ignore_read_errors: bool = False) -> CheckpointEntry:
    try:
        return CheckpointEntry(path, parse_head(_read_manifest_bytes(io, path), str(path / MANIFEST)))
    except CorruptCheckpointError as error:
        return CheckpointEntry(path, None, str(error))
    except OSError as error:
        if not ignore_read_errors:
            raise
        return CheckpointEntry(path, None, f"{path / MANIFEST} cannot be read: {error}")


def find_versions(io: FileSystem, directory: Path, tag: str) -> list[CheckpointEntry]:
    """The directories that hold ``tag``, newest first; more than one only after a save was cut off."""
    pattern = re.compile(re.escape(tag) + r"(~\d+)?")
    entries = [_read_entry(io, directory / name) for name in list_if_there(io, directory) if pattern.fullmatch(name)]
    return sorted(entries, key=_newest_first_key)


def resolve_tag(io: FileSystem, directory: Path, tag: str) -> CheckpointEntry:
    """The directory to read for an explicit tag."""
    versions = find_versions(io, directory, check_tag(tag))
    if not versions:
        tags = [entry.head.tag for entry in list_checkpoints(io, directory) if entry.head]
        found = f"it holds {', '.join(tags[:8]) or 'no checkpoint'}"
        found = found if io.exists(directory) else "the directory does not exist"
        raise CheckpointNotFoundError(f"there is no checkpoint {tag!r} in {directory}; {found}")
    if versions[0].head is None:
        raise CorruptCheckpointError(versions[0].error)
    return versions[0]


def read_latest(io: FileSystem, directory: Path) -> str | None:
    """The tag in ``latest``, or None where there is no such file."""
    try:
        return read_file(io, directory / LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def list_load_candidates(io: FileSystem, directory: Path) -> list[CheckpointEntry]:
    """What a load without a tag may take, best first: the pointer's checkpoint, then the newest.

    Warns of damaged ones, and when the pointer is missing, names nothing or is not the newest.
    """
    entries = list_checkpoints(io, directory, ignore_read_errors=True)
    tag = read_latest(io, directory)
    if not entries:
        if tag is None:
            return []
        problem = "is not a checkpoint of Thalweg" if io.exists(directory / tag) else "is not there"
        raise CheckpointNotFoundError(
            f"{directory / LATEST} names {tag!r}, which {problem}; restore it, or remove the file to start anew"
        )
    newest = entries[0]
    pointed = next((f for f in entries if f.head and f.head.tag == tag), None)
    pointed = pointed or next((f for f in entries if f.path.name == tag), None)
    for damaged in entries:
        if damaged.head is None and damaged is not pointed:
            _log.warning("a damaged checkpoint is passed over: %s", damaged.error)
    if tag is None:
        _log.warning("%s has no %r file; the newest committed checkpoint is %s", directory, LATEST, newest.path.name)
    elif pointed is None:
        _log.warning("%s names %r, which is not there; falling back", directory / LATEST, tag)
    elif pointed.head and pointed is not newest:
        _log.warning(
            "%s names %r, but %s was committed after it; taking %r as the pointer says",
            directory / LATEST,
            tag,
            newest.path.name,
            tag,
        )
    return entries if pointed is None else [pointed, *(f for f in entries if f is not pointed)]


def find_paths(io: FileSystem, directory: Path, tag: str | None) -> list[Path]:
    """The checkpoint of ``tag``; without one ``directory`` itself where it is one, else what a load may take."""
    if tag is not None and tag != LATEST:
        return [resolve_tag(io, directory, tag).path]
    if tag is None and io.exists(directory / MANIFEST):
        return [directory]
    entries = list_load_candidates(io, directory)
    if not entries:
        raise CheckpointNotFoundError(f"there is no checkpoint in {directory}; give the directory that was saved to")
    return [entry.path for entry in entries]


def make_directories(io: FileSystem, directory: Path) -> None:
    """Make ``directory`` and its parents where they are missing, durably."""
    missing = takewhile(lambda path: not io.exists(path), (directory, *directory.parents))
    for path in reversed(list(missing)):
        io.mkdir(path)
        io.fsync_dir(path.parent)


def start_save(io: FileSystem, directory: Path, tag: str) -> tuple[Path, int]:
    """Prepare a save into a ``directory`` that is there: clean up after dead ones, check the tag, make the temporary.

    Returns the temporary directory and the sequence number of the commit to come.
    """
    remove_stale(io, directory)
    public = directory / tag
    with io.lock(directory):
        job_starts.take_directory(io, directory, saved=True)
        foreign = io.exists(public) and not _is_checkpoint(io, public)
    if foreign:
        raise CheckpointError(
            f"{public} exists and is not a checkpoint of Thalweg; choose another tag or move it out of the way"
        )
    newest = max((_read_sequence(io, directory / name) for name in list_if_there(io, directory)), default=0)
    temporary = directory / make_owned_name(_SAVING_PREFIX)
    io.mkdir(temporary)
    return temporary, newest + 1


def _read_sequence(io: FileSystem, path: Path) -> int:
    """The number in a manifest's head, 0 without one.

    Unchecked, as one that is too large does no harm: a folder's manifests may be gigabytes, and each save asks.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if match := _SEQUENCE.search(read_file(io, path / MANIFEST, _MAX_HEAD_BYTES)):
            return int(match[1])
    return 0


def commit(io: FileSystem, directory: Path, temporary: Path, manifest: Manifest, *, save_latest: bool = True) -> Path:
    """Commit a temporary directory whose shards are durable; returns its public path.

    Order: manifest to a temporary, fsync; rename; fsync the directory; rename the
    directory to its public name, fsync its parent; then the pointer in the same way.
    """
    head = manifest.head
    write_file(io, temporary / f".{MANIFEST}", serialize_manifest(manifest))
    io.rename(temporary / f".{MANIFEST}", temporary / MANIFEST)
    io.fsync_dir(temporary)
    with io.lock(directory):
        job_starts.check_start(io, directory)
        public = directory / head.tag
        if io.exists(public):
            public = directory / f"{head.tag}~{head.sequence}"
        io.rename(temporary, public)
        io.fsync_dir(directory)
    if save_latest:
        replace_file(io, directory / LATEST, f"{head.tag}\n".encode())
    return public


def finalize_tag(io: FileSystem, directory: Path, tag: str) -> Path:
    """Leave one directory for ``tag``, under its plain name: the newest generation that is intact."""
    trashed: list[Path] = []
    with io.lock(directory):
        versions = find_versions(io, directory, tag)
        intact = next((f for f in versions if f.head), None)
        if intact is not None:
            trashed = [_move_to_trash(io, directory, other.path) for other in versions if other is not intact]
            if intact.path.name != tag:
                io.rename(intact.path, directory / tag)
                io.fsync_dir(directory)
    for path in trashed:
        remove_tree(io, path)
    return directory / tag


def remove_old_checkpoints(io: FileSystem, directory: Path, keep_latest_k: int, newest: Path) -> None:
    """Discard all but ``newest`` and the ``keep_latest_k - 1`` before it; what is damaged is left alone."""
    with io.lock(directory):
        kept = {newest.name, read_latest(io, directory)}
        older = [f for f in list_checkpoints(io, directory) if f.head and not kept & {f.path.name, f.head.tag}]
        trashed = [_move_to_trash(io, directory, old.path) for old in older[keep_latest_k - 1 :]]
    for path in trashed:
        remove_tree(io, path)


def _move_to_trash(io: FileSystem, directory: Path, path: Path) -> Path:
    """Take a committed directory's name, so that no half of it is ever read; returns what to remove."""
    trash_path = directory / make_owned_name(_REMOVING_PREFIX)
    io.rename(path, trash_path)
    io.fsync_dir(directory)
    return trash_path


def remove_stale(io: FileSystem, directory: Path) -> None:
    """Remove what dead saves left behind, and finish replacements that were cut off.

    What cannot be removed is warned of and left for the next save: rubbish never stops a save.
    """
    for name in io.listdir(directory):
        path = directory / name
        try:
            if name.startswith((_REMOVING_PREFIX, _SAVING_PREFIX)) and not _owner_alive(io, path):
                remove_tree(io, path)
            elif name.startswith(REPLACING_PREFIX) and not _owner_alive(io, path):
                io.remove(path)
        except FileNotFoundError:  # its owner, or another save, was faster
            continue
        except OSError as error:
            _log.warning("could not remove the left-over %s: %s", path, error)
    for tag in sorted({name.partition("~")[0] for name in io.listdir(directory) if "~" in name}):
        if not tag.startswith("."):
            finalize_tag(io, directory, tag)


def _owner_alive(io: FileSystem, path: Path) -> bool:
    """Whether another living process owns a temporary; this process saves one thing at a time (background_save.py)."""
    match = re.fullmatch(r"\.[a-z]+-([A-Za-z0-9_]+)-(\d+)-(\d+)-[0-9a-f]+", path.name)
    if match is None:
        return False
    host, pid, started = match.group(1), int(match.group(2)), int(match.group(3))
    if host != get_hostname():
        return io.age(path) < _FOREIGN_OWNER_TIMEOUT_S
    return pid != os.getpid() and is_process_alive(pid, started)


def discard_save(io: FileSystem, temporary: Path) -> None:
    """Remove the temporary of a failed save, as far as the disk allows; the next save tries again."""
    try:
        remove_tree(io, temporary)
    except OSError as error:
        _log.warning("could not remove %s after a failed save (%s); the next save will", temporary, error)
