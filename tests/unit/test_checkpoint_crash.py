"""R1, R2, R11 in one process: killed, out of space or out of power at every operation of a save."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
import torch

from tests.marks import nightly
from tests.unit.checkpoint_support import (
    NoFsyncFileSystem,
    fail_at,
    kill_at,
    list_names,
    newest_digest,
    record_operations,
    run_in_fork,
    saved_digest,
    tiny_snapshot,
)
from thalweg.checkpoint import Checkpoint, CheckpointError, FileSystem, Snapshot, open_verified, save_snapshot

torch.set_num_threads(1)

# what the second save is, given that "a" is committed: a new tag, the same tag, or the last one to be kept
SAVES = {
    "new tag": {"tag": "b"},
    "same tag": {"tag": "a"},
    "keep one": {"tag": "b", "keep_latest_k": 1},
}


def second(folder: Path, variant: str, io: FileSystem | None = None) -> None:
    save_snapshot(folder, snapshot=tiny_snapshot(2), step=2, io=io or NoFsyncFileSystem(), **SAVES[variant])


def first(folder: Path) -> None:
    save_snapshot(folder, "a", tiny_snapshot(1), step=1, io=NoFsyncFileSystem())


def digests(folder: Path) -> tuple[str, str]:
    return saved_digest(tiny_snapshot(1), 1, folder / "one"), saved_digest(tiny_snapshot(2), 2, folder / "two")


def left_over(folder: Path) -> set[str]:
    return {name for name in list_names(folder) if name.startswith(".") or "~" in name}


@pytest.mark.parametrize("variant", ["same tag", *(nightly(name) for name in SAVES if name != "same tag")])
def test_row36_killed_at_every_operation_the_previous_or_the_new_one_loads(tmp_path, variant):
    """PAIN_POINTS 36, R1: SIGKILL at operation k of a save, for every k."""
    old, new = digests(tmp_path)
    first(tmp_path / "count")
    operations = len(record_operations(lambda io: second(tmp_path / "count", variant, io)).calls)
    assert operations > 20
    seen = set()
    for k in range(operations + 1):
        folder = tmp_path / f"{k}"
        first(folder)
        status = run_in_fork(lambda folder=folder, k=k: second(folder, variant, kill_at(k)))
        assert status == (9 if k < operations else 0)
        found = newest_digest(folder)
        assert found in (old, new), k
        seen.add(found)
        save_snapshot(folder, "c", tiny_snapshot(3), step=3, io=NoFsyncFileSystem())
        assert not left_over(folder), (k, list_names(folder))
        assert open_verified(folder).tag == "c"
    assert seen == {old, new}


@pytest.mark.parametrize("code", [errno.ENOSPC, nightly(errno.EIO)])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("variant", ["keep one", *(nightly(name) for name in SAVES if name != "keep one")])
def test_a_failing_disk_at_every_operation_leaves_the_old_checkpoint(tmp_path, variant, forever, code):
    """R11: the old one is intact, the error is a CheckpointError, the next save leaves no temporary."""
    old, new = digests(tmp_path)
    first(tmp_path / "count")
    operations = len(record_operations(lambda io: second(tmp_path / "count", variant, io)).calls)
    failed = 0
    for k in range(operations):
        folder = tmp_path / f"{k}"
        first(folder)
        try:
            second(folder, variant, fail_at(k, code, forever=forever))
            expected = {new}
        except CheckpointError:
            failed += 1
            expected = {old, new}
        assert newest_digest(folder) in expected, k
        second(folder, variant)
        assert not left_over(folder), (k, list_names(folder))
        assert newest_digest(folder) == new
    assert failed > operations // 2


def test_a_first_save_that_is_killed_leaves_nothing_to_load(tmp_path):
    operations = len(
        record_operations(
            lambda io: save_snapshot(tmp_path / "count" / "deep", "a", tiny_snapshot(1), step=1, io=io)
        ).calls
    )
    new = saved_digest(tiny_snapshot(1), 1, tmp_path / "reference")
    for k in range(operations):
        folder = tmp_path / f"{k}" / "deep"
        run_in_fork(lambda folder=folder, k=k: save_snapshot(folder, "a", tiny_snapshot(1), step=1, io=kill_at(k)))
        checkpoint = open_verified(folder)
        assert checkpoint is None or newest_digest(folder) == new
        save_snapshot(folder, "b", tiny_snapshot(2), step=2, io=NoFsyncFileSystem())
        assert not left_over(folder)


def test_the_order_of_a_commit(tmp_path):
    """RELIABILITY: shards, fsync each; manifest, fsync; rename; fsync the directory; then the pointer."""
    first(tmp_path)
    log = record_operations(lambda io: second(tmp_path, "new tag", io)).calls
    names = [(operation, Path(target).name if isinstance(target, Path) else "") for operation, target in log]
    renames = [i for i, (operation, _) in enumerate(names) if operation == "rename"]
    assert [names[i][1].split("-")[0] for i in renames] == [".manifest.json", ".saving", ".latest"]
    manifest, public, pointer = renames
    shards = [i for i, (o, n) in enumerate(names) if o == "open_write" and n.endswith(".safetensors")]
    synced = [i for i, (operation, _) in enumerate(names) if operation == "fsync"]
    assert len(shards) == 3
    opened = [i for i, (operation, _) in enumerate(names) if operation == "open_write"]
    for start, following in zip(opened, [*opened[1:], len(names)], strict=True):
        assert any(start < i < following for i in synced), names[start]
    assert max(shards) < manifest
    assert names[manifest + 1][0] == "fsync_dir" and manifest + 1 < public
    assert names[public + 1] == ("fsync_dir", tmp_path.name)
    assert names[pointer + 1] == ("fsync_dir", tmp_path.name) and public + 1 < pointer


class Volatile(FileSystem):
    """A disk as it would be after a loss of power, over a real directory used as the cache.

    Bytes survive once ``fsync`` was called on their file, names once ``fsync_dir`` was called on
    their directory; of what was not made durable, any part may survive in any combination.
    """

    def __init__(self) -> None:
        self.content: dict[int, bytes | None] = {}  # inode -> durable bytes
        self.durable: dict[Path, dict[str, object]] = {}  # directory -> name -> inode or directory
        self.pending: dict[Path, list[tuple]] = {}
        self.handles: dict[int, Path] = {}
        self.stop_at: int | None = None
        self.count = 0

    class Off(BaseException):
        pass

    def step(self) -> None:
        if self.count == self.stop_at:
            raise self.Off
        self.count += 1

    def note(self, path: Path, *operation: object) -> None:
        self.pending.setdefault(path.parent, []).append(operation)

    def open_write(self, path: Path, *, direct: bool = False) -> int:
        self.step()
        handle = super().open_write(path)
        self.handles[handle] = path
        self.note(path, "link", path.name, path.stat().st_ino)
        return handle

    def fsync(self, handle: int) -> None:
        self.step()
        path = self.handles[handle]
        self.content[path.stat().st_ino] = path.read_bytes()

    def pwrite(self, handle, data, offset) -> None:
        self.step()
        super().pwrite(handle, data, offset)

    def fsync_dir(self, path: Path) -> None:
        self.step()
        apply(self.durable.setdefault(path, {}), self.pending.pop(path, []))

    def mkdir(self, path: Path) -> None:
        self.step()
        super().mkdir(path)
        self.note(path, "link", path.name, path.stat().st_ino)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        assert source.parent == target.parent
        moved = source.is_dir()
        super().rename(source, target)
        self.note(target, "rename", source.name, target.name)
        if moved:
            for table in (self.durable, self.pending):
                if source in table:
                    table[target] = table.pop(source)

    def remove(self, path: Path) -> None:
        self.step()
        super().remove(path)
        self.note(path, "unlink", path.name)

    def rmdir(self, path: Path) -> None:
        self.step()
        super().rmdir(path)
        self.note(path, "unlink", path.name)

    def after_power_loss(self, root: Path, out: Path, draw: random.Random) -> None:
        """Write one state that the disk may have into ``out``."""
        directories = {path.stat().st_ino: path for path in [root, *root.iterdir()] if path.is_dir()}
        self.restore(root, out, directories, draw)

    def restore(self, source: Path, out: Path, directories: dict[int, Path], draw: random.Random) -> None:
        out.mkdir(parents=True)
        names = dict(self.durable.get(source, {}))
        survived = [operation for operation in self.pending.get(source, []) if draw.random() < 0.5]
        apply(names, survived)
        for name, inode in names.items():
            if inode in directories:
                self.restore(directories[inode], out / name, directories, draw)
            elif self.content.get(inode) is not None:
                (out / name).write_bytes(self.content[inode])
            else:
                (out / name).write_bytes(bytes(draw.randrange(40)))


def apply(names: dict, operations: list[tuple]) -> None:
    for kind, name, *rest in operations:
        if kind == "link":
            names[name] = rest[0]
        elif kind == "unlink":
            names.pop(name, None)
        elif name in names:
            names[rest[0]] = names.pop(name)


class Careless(Volatile):
    """The same disk under a save that does not call fsync, as the negative control."""

    def fsync(self, handle: int) -> None:
        self.step()


@pytest.mark.parametrize("variant", SAVES)
def test_power_lost_at_every_operation(tmp_path, variant):
    """R2: whatever part of the unsynced bytes and names survives, the old or the new one loads."""
    wrong = power_losses(tmp_path, variant, Volatile)
    assert wrong == 0


def test_power_loss_finds_a_missing_fsync(tmp_path):
    assert power_losses(tmp_path, "same tag", Careless) > 0


def power_losses(tmp_path: Path, variant: str, disk: type[Volatile]) -> int:
    old, new = digests(tmp_path)
    draw = random.Random(7)
    wrong, k, finished = 0, 0, False
    while not finished:
        root = tmp_path / f"disk{k}"
        root.mkdir()
        io = disk()
        save_snapshot(root, "a", tiny_snapshot(1), step=1, io=NoFsyncFileSystem())
        io = base_of(io, root)
        io.stop_at = k
        try:
            second(root, variant, io)
            finished = True
        except Volatile.Off:
            pass
        for trial in range(4):
            state = tmp_path / f"state{k}-{trial}"
            io.after_power_loss(root, state, draw)
            try:
                wrong += newest_digest(state) not in (old, new)
            except CheckpointError:
                wrong += 1
        k += 1
    return wrong


def base_of(io: Volatile, root: Path) -> Volatile:
    """Take what is on the disk now as durable."""
    for path in [root, *(p for p in root.iterdir() if p.is_dir())]:
        io.durable[path] = {child.name: child.stat().st_ino for child in path.iterdir()}
        for child in path.iterdir():
            if child.is_file():
                io.content[child.stat().st_ino] = child.read_bytes()
    return io


def test_an_interrupted_replacement_is_finished_by_the_next_save(tmp_path):
    first(tmp_path)
    second(tmp_path, "same tag")
    (tmp_path / "a").rename(tmp_path / "a~2")
    save_snapshot(tmp_path / "x", "a", tiny_snapshot(1), step=1)
    (tmp_path / "x" / "a").rename(tmp_path / "a")
    assert Checkpoint.open(tmp_path, "a").step == 2
    save_snapshot(tmp_path, "b", tiny_snapshot(3), step=3)
    assert list_names(tmp_path) == {"a", "b", "latest", "x"}
    assert Checkpoint.open(tmp_path, "a").step == 2


def big(seed: int) -> Snapshot:
    """Enough for direct writes from several buffers, and a tail that no block divides."""
    generator = torch.Generator().manual_seed(seed)
    return Snapshot({"model/w": torch.randn(1_300_003, generator=generator)}, state={"seed": seed})


def test_direct_writes_that_fail_or_are_killed_lose_nothing(tmp_path):
    save_snapshot(tmp_path, "a", big(1), step=1, io=NoFsyncFileSystem())
    operations = record_operations(lambda io: save_snapshot(tmp_path, "a", big(1), step=1, io=io)).calls
    names = [operation for operation, _ in operations]
    writes = [k for k in range(names.index("rename")) if names[k] in ("pwrite", "truncate", "fsync")]
    assert len(writes) > 6 and "truncate" in names
    for k in writes:
        with pytest.raises(CheckpointError, match="Input/output"):
            save_snapshot(tmp_path, "a", big(2), step=2, io=fail_at(k))
        assert open_verified(tmp_path).state["seed"] == 1
        assert run_in_fork(lambda k=k: save_snapshot(tmp_path, "a", big(2), step=2, io=kill_at(k))) == 9
        assert open_verified(tmp_path).state["seed"] == 1
    save_snapshot(tmp_path, "a", big(3), step=3)
    assert torch.equal(open_verified(tmp_path).read("model/w"), big(3).tensors["model/w"])
    assert list_names(tmp_path) == {"a", "latest"}
