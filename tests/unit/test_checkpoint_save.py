"""One process: what is saved comes back, tags are replaced safely, and nothing else is touched."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import pickletools
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open

from tests.unit.checkpoint_support import (
    FaultInjectingFileSystem,
    list_names,
    newest_digest,
    record_operations,
    saved_digest,
    small_model,
    tiny_snapshot,
    train_steps,
)
from thalweg.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    FileSystem,
    Snapshot,
    UnserializableStateError,
    build_snapshot,
    open_verified,
    save_snapshot,
)
from thalweg.checkpoint.filesystem import make_owned_name
from thalweg.checkpoint.format.direct_writer import BUFFER_BYTES, SMALL_FILE_BYTES, DirectWriter
from thalweg.utils.processes import process_start_time

torch.set_num_threads(1)


def test_row33_no_pickle_on_disk(tmp_path):
    """PAIN_POINTS 33: no file of a checkpoint is a pickle or an archive; safetensors opens the shards."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 2)
    state = {"client": {"set": {1, 2}, "bytes": b"\x80\x04.", "array": numpy.arange(3), 4: (5,)}}
    path = save_snapshot(tmp_path, "t", build_snapshot(model, optimizer, state=state), step=2)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 5
    for file in files:
        data = file.read_bytes()
        assert not is_pickle(data), file
        assert not data.startswith((b"PK\x03\x04", b"\x1f\x8b", b"\x80")), file
        assert file.suffix in (".json", ".safetensors") or file.name == "latest"
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.keys()
            assert all(opened.get_tensor(key) is not None for key in opened.keys())  # noqa: SIM118


def is_pickle(data: bytes) -> bool:
    try:
        for _ in pickletools.genops(data):
            pass
    except Exception:
        return False
    return True


def test_row33_the_scan_finds_a_pickle(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert is_pickle((tmp_path / "x.pt").read_bytes())


def test_row33_the_source_of_the_room_does_not_unpickle():
    import thalweg.checkpoint

    for file in Path(thalweg.checkpoint.__file__).parent.glob("*.py"):
        text = file.read_text()
        for word in (
            "import pickle",
            "torch.load",
            "torch.save",
            "eval(",
            "exec(",
            "_object(",
            "allow_pickle",
        ):
            assert word not in text, (file, word)


ALL_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def test_every_dtype_shape_and_stride(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in ALL_DTYPES:
        for shape in ((), (0,), (3, 0, 2), (5,), (4, 3), (2, 3, 4)):
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            tensors[f"model/{dtype}{list(shape)}"] = raw.view(dtype).reshape(shape)
    tensors["model/transposed"] = torch.randn(5, 3).t()
    tensors["model/strided"] = torch.randn(10)[::3]
    tensors["model/expanded"] = torch.randn(1, 4).expand(3, 4)
    tensors["model/conjugate"] = torch.randn(3, dtype=torch.complex64).conj()
    tensors["odd name/with spaces@0,1"] = torch.ones(1)
    path = save_snapshot(tmp_path, "t", Snapshot(tensors), step=0)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensor_names()) == set(tensors)
    for name, tensor in tensors.items():
        back = checkpoint.read(name)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        plain = tensor.resolve_conj().contiguous()
        assert torch.equal(back.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                opened.get_tensor(key)


def test_tensors_are_read_from_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["thalweg.checkpoint.save"], "MAX_CHUNK_BYTES", 40)
    tensor = torch.arange(7 * 5 * 2).view(7, 5, 2).float()
    save_snapshot(tmp_path, "t", Snapshot({"model/x": tensor, "model/row": torch.arange(30.0)}), step=0)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.manifest.tensors["model/x"].pieces) == 7
    assert len(checkpoint.manifest.tensors["model/row"].pieces) == 3
    assert torch.equal(checkpoint.read("model/x"), tensor)
    assert torch.equal(checkpoint.read("model/row"), torch.arange(30.0))
    with pytest.raises(CheckpointMismatchError, match="nearest: model/x"):
        checkpoint.read("model/xx")


def test_a_tag_is_replaced_and_the_directory_is_left_tidy(tmp_path):
    reference = tmp_path / "reference"
    save_snapshot(tmp_path / "c", "t", tiny_snapshot(1), step=1)
    inode = (tmp_path / "c" / "t").stat().st_ino
    path = save_snapshot(tmp_path / "c", "t", tiny_snapshot(2), step=2)
    assert path == tmp_path / "c" / "t" and path.stat().st_ino != inode
    assert list_names(tmp_path / "c") == {"latest", "t"}
    assert newest_digest(tmp_path / "c") == saved_digest(tiny_snapshot(2), 2, reference)
    assert newest_digest(tmp_path / "c") != saved_digest(tiny_snapshot(1), 1, reference)
    assert (tmp_path / "c" / "latest").read_text().strip() == "t"


def test_keep(tmp_path):
    for step in range(5):
        save_snapshot(tmp_path, f"s{step}", tiny_snapshot(step), step=step, keep_latest_k=2 if step == 4 else None)
    assert list_names(tmp_path) == {"latest", "s3", "s4"}
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="keep is"):
            save_snapshot(tmp_path, "x", tiny_snapshot(), step=0, keep_latest_k=wrong)


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/abs", "../up", "latest", ".hidden", "a~1", "a\n", "x" * 201, " a"]
)
def test_tags_that_are_no_plain_names_are_refused(tmp_path, tag):
    with pytest.raises(ValueError, match="cannot name a checkpoint"):
        save_snapshot(tmp_path, tag, tiny_snapshot(), step=0)
    assert not list_names(tmp_path)


def test_a_directory_that_is_not_a_checkpoint_is_not_touched(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not a checkpoint of Thalweg"):
        save_snapshot(tmp_path, "t", tiny_snapshot(), step=0)
    assert list_names(tmp_path) == {"t"} and list_names(tmp_path / "t") == {"mine.txt"}


def test_snapshots_that_contradict_themselves(tmp_path):
    for snapshot, text in [
        (Snapshot({"model/a": torch.zeros(1)}, {"model/b": "model/c"}), "alias"),
        (Snapshot({"model/a": torch.zeros(1)}, {"model/a": "model/a"}), "alias"),
        (Snapshot({"": torch.zeros(1)}), "cannot name"),
        (Snapshot({"__metadata__": torch.zeros(1)}), "cannot name"),
        (Snapshot({"a": torch.zeros(1, device="meta")}), "no form on disk"),
        (Snapshot({"a": torch.eye(2).to_sparse()}), "no form on disk"),
        (Snapshot({"state/x": torch.zeros(1)}, state={"x": torch.zeros(1)}), "names both"),
        (Snapshot(state={"client": {"f": threading.Lock()}}), r"state\['client'\]\['f'\]"),
    ]:
        with pytest.raises(UnserializableStateError, match=text):
            save_snapshot(tmp_path / "c", "t", snapshot, step=0)
        assert not (tmp_path / "c").exists() or not list_names(tmp_path / "c")


def test_temporaries_of_dead_saves_go_and_those_of_living_ones_stay(tmp_path):
    save_snapshot(tmp_path, "a", tiny_snapshot(), step=0)
    owner = make_owned_name("")[:-17]
    host, _, started = owner.rsplit("-", 2)
    dead = tmp_path / f".saving-{host}-999999999-5-{'0' * 16}"
    reused_pid = tmp_path / f".saving-{host}-1-3-{'1' * 16}"
    mine = tmp_path / f".saving-{owner}-{'2' * 16}"
    alive = tmp_path / f".saving-{host}-{os.getppid()}-{process_start_time(os.getppid())}-{'3' * 16}"
    elsewhere = tmp_path / f".saving-otherhost-1-{started}-{'4' * 16}"
    for path in (dead, reused_pid, mine, alive, elsewhere):
        path.mkdir()
        (path / "shard").write_text("x")
    (tmp_path / ".removing-0123").mkdir()
    (tmp_path / f".latest-{host}-999999999-5-{'0' * 16}").write_text("a")
    (tmp_path / ".note-of-a-user").write_text("x")
    save_snapshot(tmp_path, "b", tiny_snapshot(), step=1)
    assert list_names(tmp_path) == {"latest", "a", "b", alive.name, elsewhere.name, ".note-of-a-user"}
    os.utime(elsewhere, (0, 0))
    save_snapshot(tmp_path, "b", tiny_snapshot(), step=1)
    # Another host's save that has written one large shard for hours: the folder's own time stands still meanwhile.
    assert list_names(tmp_path) == {"latest", "a", "b", alive.name, elsewhere.name, ".note-of-a-user"}
    os.utime(elsewhere / "shard", (0, 0))
    save_snapshot(tmp_path, "b", tiny_snapshot(), step=1)
    assert list_names(tmp_path) == {"latest", "a", "b", alive.name, ".note-of-a-user"}


def test_a_directory_that_stays_locked_is_an_error_and_not_an_unlocked_commit(tmp_path, monkeypatch):
    save_snapshot(tmp_path, "a", tiny_snapshot(), step=0)
    monkeypatch.setattr(FileSystem, "lock_timeout", 0.05)
    holder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="held the lock of this directory"):
        save_snapshot(tmp_path, "b", tiny_snapshot(), step=1)
    os.close(holder)
    assert list_names(tmp_path) == {"latest", "a"}
    save_snapshot(tmp_path, "b", tiny_snapshot(), step=1)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    save_snapshot(tmp_path, "a", tiny_snapshot(), step=0)
    assert "cannot be locked (No locks available)" in caplog.text


def test_resume_policies(tmp_path, caplog):
    assert open_verified(tmp_path / "none") is None
    assert open_verified(tmp_path / "none", resume="never") is None
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        open_verified(tmp_path / "none", resume="must")
    save_snapshot(tmp_path, "a", tiny_snapshot(1), step=1)
    save_snapshot(tmp_path, "b", tiny_snapshot(2), step=2)
    assert open_verified(tmp_path, resume="never") is None
    assert open_verified(tmp_path).tag == "b"
    assert open_verified(tmp_path, "a").tag == "a"
    assert open_verified(tmp_path, "latest").tag == "b"
    with pytest.raises(CheckpointNotFoundError, match="it holds b, a"):
        open_verified(tmp_path, "c")
    caplog.clear()
    (tmp_path / "latest").unlink()
    with caplog.at_level(logging.WARNING):
        assert open_verified(tmp_path).tag == "b"
    assert "no 'latest'" in caplog.text
    (tmp_path / "latest").write_text("a\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert open_verified(tmp_path).tag == "a"
    assert "committed after it" in caplog.text
    (tmp_path / "latest").write_text("gone\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert open_verified(tmp_path).tag == "b"
        assert Checkpoint.open(tmp_path).tag == "b"
    assert "names 'gone', which is not there" in caplog.text
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint.open(tmp_path / "none")
    assert Checkpoint.open(tmp_path / "a").tag == "a"


def test_loading_reads_only_what_it_needs(tmp_path):
    path = save_snapshot(tmp_path, "t", tiny_snapshot(), step=0)
    probe = record_operations(lambda io: Checkpoint.open(tmp_path, io=io).read("model/weight"))
    opened = {Path(target).name for operation, target in probe.calls if operation == "open_read"}
    assert opened == {"latest", "manifest.json", "shard-00000-of-00001.model.safetensors"}
    assert len(list(path.glob("*.safetensors"))) == 3


def test_a_save_reads_little_of_the_checkpoints_beside_it(tmp_path):
    """Manifests of large jobs are megabytes each, and there may be hundreds in a folder."""

    class CountingFileSystem(FileSystem):
        num_bytes = 0

        def pread_into(self, handle, buffer, offset):
            done = super().pread_into(handle, buffer, offset)
            self.num_bytes += done
            return done

    tag = "\N{SNOWMAN}" * 60 + ' "sequence":77,'  # a long head, which says of itself what it does not mean
    for name in ("a", tag, "b"):
        snapshot = tiny_snapshot()
        snapshot.state["client"]["large"] = "x" * (1 << 20)
        save_snapshot(tmp_path, name, snapshot, step=1)
    (tmp_path / "a" / "manifest.json").write_bytes(b"{}")  # damaged
    io = CountingFileSystem()
    save_snapshot(tmp_path, "c", tiny_snapshot(), step=2, io=io)
    assert io.num_bytes < 1 << 16
    assert [Checkpoint.open(tmp_path, name).head.sequence for name in (tag, "b", "c")] == [2, 3, 4]


def test_a_save_beside_the_pointer(tmp_path):
    save_snapshot(tmp_path, "a", tiny_snapshot(1), step=1)
    save_snapshot(tmp_path, "b", tiny_snapshot(2), step=2, save_latest=False)
    assert open_verified(tmp_path).tag == "a" and open_verified(tmp_path, "b").tag == "b"


@pytest.mark.parametrize("extra", [-4096, -1, 0, 1, 4095, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1])
@pytest.mark.parametrize("direct", [True, False])
def test_streams_of_every_length(tmp_path, extra, direct):
    size = BUFFER_BYTES + extra if direct else abs(extra) % SMALL_FILE_BYTES
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
    seen = hashlib.sha256()
    probe = FaultInjectingFileSystem()
    with closing(DirectWriter(probe, tmp_path / "x", size)) as stream:
        for start in range(0, size, 700_001):
            stream.append(data[start : start + 700_001].data, seen.update)
        stream.finish()
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert seen.hexdigest() == hashlib.sha256(data.tobytes()).hexdigest()
    kept = [name for name, _ in probe.calls if name not in ("pwrite", "truncate")]
    assert kept == ["open_write", "fsync", "close"]


def test_a_file_system_that_wants_other_alignment_gets_plain_writes(tmp_path):
    io = FileSystem()
    handle = io.open_write(tmp_path / "x", direct=True)
    io.pwrite(handle, b"unaligned", 3)
    io.close(handle)
    assert (tmp_path / "x").read_bytes() == b"\0\0\0unaligned"
    with pytest.raises(OSError, match="Bad file descriptor"):
        io.pwrite(handle, b"x", 0)
