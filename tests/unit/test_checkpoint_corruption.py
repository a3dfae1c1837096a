"""R3, R5: every changed byte is found before anything live changes; a load falls back, loudly."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint_support import digest, newest_digest, saved_digest, tiny_snapshot
from thalweg.checkpoint import (
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    Snapshot,
    open_verified,
    save_snapshot,
)
from thalweg.checkpoint.format.manifest import parse_manifest, serialize_manifest
from thalweg.cli import main

torch.set_num_threads(1)
SEED = 20260


@pytest.fixture
def saved(tmp_path):
    save_snapshot(tmp_path, "t", tiny_snapshot(1), step=1)
    return tmp_path / "t"


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file())


def sees_damage(path: Path) -> str:
    """The error of each way to load; all must find it."""
    with pytest.raises(CorruptCheckpointError) as first:
        open_verified(path.parent, path.name)
    with pytest.raises(CorruptCheckpointError, match="does not start over silently"):
        open_verified(path.parent)
    return str(first.value)


def test_row36_every_sampled_flip_is_found_and_named(saved):
    """Some hundred flips in shards, their headers and the manifest: each found, with file and tensor."""
    draw = random.Random(SEED)
    for file in files(saved):
        intact = file.read_bytes()
        places = {0, 7, 8, len(intact) - 1, *(draw.randrange(len(intact)) for _ in range(100))}
        for place in sorted(places):
            flipped = bytearray(intact)
            flipped[place] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            text = sees_damage(saved)
            assert file.name in text, (file.name, place, text)
        file.write_bytes(intact)
    assert open_verified(saved.parent, "t") is not None


def test_a_flip_in_the_data_names_its_tensor(saved):
    file = saved / "shard-00000-of-00001.model.safetensors"
    intact = file.read_bytes()
    start = len(intact) - 5 * 3 * 4 - 7 * 2
    for place, name in ((start, "model/weight"), (len(intact) - 1, "model/half")):
        flipped = bytearray(intact)
        flipped[place] ^= 64
        file.write_bytes(flipped)
        assert f"tensor {name}" in sees_damage(saved)
        found = Checkpoint.open(saved.parent).find_corruption()
        assert [(d.file, d.tensor) for d in found] == [(file.name, name)]


def test_no_flip_reaches_a_live_tensor(saved):
    draw = random.Random(SEED + 1)
    for file in saved.glob("*.safetensors"):
        intact = file.read_bytes()
        for _ in range(40):
            flipped = bytearray(intact)
            flipped[draw.randrange(len(intact))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            live = {"model/weight": torch.full((5, 3), 7.0), "model/half": torch.full((7,), 7.0).bfloat16()}
            checkpoint = Checkpoint.open(saved.parent, "t")
            if ".model." in file.name:
                with pytest.raises(CorruptCheckpointError):
                    checkpoint.read_into(live)
                assert all((tensor == 7.0).all() for tensor in live.values())
            else:
                checkpoint.read_into(live)  # not a byte of what is damaged is needed
                assert not any((tensor == 7.0).all() for tensor in live.values())
        file.write_bytes(intact)


@pytest.mark.parametrize("cut", ["empty", "header", "half", "last", "longer"])
def test_truncations_are_found(saved, cut):
    for file in files(saved):
        intact = file.read_bytes()
        lengths = {"empty": 0, "header": 8, "half": len(intact) // 2, "last": len(intact) - 1}
        file.write_bytes(intact + b"\0" if cut == "longer" else intact[: lengths[cut]])
        assert file.name in sees_damage(saved)
        file.write_bytes(intact)


def test_missing_swapped_and_stale_shards_are_found(tmp_path):
    paths = [save_snapshot(tmp_path / f"{n}", "t", tiny_snapshot(n), step=n) for n in (1, 2)]
    for file in files(paths[0]):
        intact = file.read_bytes()
        file.unlink()
        assert file.name in sees_damage(paths[0])
        if file.suffix == ".safetensors":
            shutil.copy(paths[1] / file.name, file)  # the same names and sizes, another save
            assert file.name in sees_damage(paths[0])
        file.write_bytes(intact)
    shards = sorted(paths[0].glob("*.safetensors"))
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second), shards[1].write_bytes(first)
    sees_damage(paths[0])
    shards[0].write_bytes(first), shards[1].write_bytes(second)
    shutil.copy(paths[1] / "manifest.json", paths[0] / "manifest.json")
    sees_damage(paths[0])


def test_shards_of_equal_layout_swapped_between_ranks_are_found(tmp_path):
    path = save_snapshot(tmp_path, "t", Snapshot({"model/a": torch.zeros(4), "optim/b/a": torch.ones(4)}), step=0)
    a, b = sorted(path.glob("*.safetensors"))
    data = a.read_bytes(), b.read_bytes()
    a.write_bytes(data[1]), b.write_bytes(data[0])
    sees_damage(path)


def test_a_shard_that_is_a_directory_or_unreadable_is_damage_not_a_crash(saved):
    file = next(saved.glob("*.safetensors"))
    file.unlink()
    file.mkdir()
    sees_damage(saved)


def test_falling_back_to_the_newest_good_one_loudly(tmp_path, caplog):
    for step in range(1, 5):
        save_snapshot(tmp_path, f"s{step}", tiny_snapshot(step), step=step)
    good = {step: saved_digest(tiny_snapshot(step), step, tmp_path / "reference") for step in range(1, 5)}
    victims = [("s4", "*.model.*"), ("s3", "manifest.json"), ("s2", "*.state.*")]
    assert newest_digest(tmp_path) == good[4]
    for step, (tag, pattern) in zip((3, 2, 1), victims, strict=True):
        file = next((tmp_path / tag).glob(pattern))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert newest_digest(tmp_path) == good[step]
        for victim in victims[: 4 - step]:
            assert f"{victim[0]}/" in caplog.text
        assert "falling back past a damaged checkpoint" in caplog.text
        with pytest.raises(CorruptCheckpointError, match=file.name):
            open_verified(tmp_path, tag)
    file = tmp_path / "s1" / "manifest.json"
    file.write_bytes(b"")
    for policy in ("auto", "must"):
        with pytest.raises(CorruptCheckpointError, match="does not start over silently"):
            open_verified(tmp_path, resume=policy)


def test_open_skips_damaged_manifests_and_names_them(tmp_path, caplog):
    save_snapshot(tmp_path, "a", tiny_snapshot(1), step=1)
    save_snapshot(tmp_path, "b", tiny_snapshot(2), step=2)
    (tmp_path / "b" / "manifest.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert Checkpoint.open(tmp_path).tag == "a"
    assert "skipping a damaged checkpoint" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="does not begin with its checksum"):
        Checkpoint.open(tmp_path, "b")
    (tmp_path / "a" / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="every checkpoint"):
        Checkpoint.open(tmp_path)


def test_a_damaged_tag_can_be_saved_again(tmp_path):
    save_snapshot(tmp_path, "t", tiny_snapshot(1), step=1)
    (tmp_path / "t" / "manifest.json").write_bytes(b"\0" * 10)
    save_snapshot(tmp_path, "t", tiny_snapshot(2), step=2)
    assert {p.name for p in tmp_path.iterdir()} == {"t", "latest"}
    assert newest_digest(tmp_path) == saved_digest(tiny_snapshot(2), 2, tmp_path / "reference")


def signed(body: bytes) -> bytes:
    """A manifest file whose checksum is right, as someone with bad intent would make it."""
    return b'{"checksum":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def crafted(path: Path, change) -> None:
    file = path / "manifest.json"
    tree = json.loads(file.read_bytes())
    del tree["checksum"]
    change(tree)
    body = b'"head":' + json.dumps(tree.pop("head")).encode() + b",\n" + json.dumps(tree).encode()[1:]
    file.write_bytes(signed(body))


def piece(tree: dict) -> dict:
    return tree["tensors"]["model/weight"]["pieces"][0]


CRAFTED = {
    "outside the directory": lambda t: piece(t).update(file="../../etc/passwd"),
    "absolute": lambda t: piece(t).update(file="/etc/passwd"),
    "hidden": lambda t: piece(t).update(file=".ssh"),
    "unlisted file": lambda t: piece(t).update(file="other.safetensors"),
    "negative offset": lambda t: piece(t).update(offset=[-1, 0]),
    "huge": lambda t: t["tensors"]["model/weight"].update(shape=[1 << 60, 3]),
    "overlap": lambda t: t["tensors"]["model/weight"]["pieces"].append(dict(piece(t))),
    "hole": lambda t: t["tensors"]["model/weight"]["pieces"].clear(),
    "float offset": lambda t: piece(t).update(offset=[0.0, 0]),
    "text offset": lambda t: piece(t).update(offset=["0", 0]),
    "dims": lambda t: piece(t).update(offset=[0], size=[15]),
    "dtype": lambda t: t["tensors"]["model/weight"].update(dtype="load"),
    "other dtype": lambda t: t["tensors"]["model/weight"].update(dtype="int32"),
    "key": lambda t: piece(t).update(key="model/half"),
    "digest": lambda t: piece(t).update(sha256="0" * 64),
    "alias": lambda t: t["aliases"].update({"model/weight": "model/half"}),
    "dangling alias": lambda t: t["aliases"].update({"model/x": "model/y"}),
    "extra": lambda t: t.update(run="os.system"),
    "missing section": lambda t: t.pop("files"),
    "list for a section": lambda t: t.update(tensors=[]),
    "header size": lambda t: t["files"]["shard-00000-of-00001.model.safetensors"].update(header_bytes=1 << 61),
    "file size": lambda t: t["files"]["shard-00000-of-00001.model.safetensors"].update(size=1 << 50),
    "version": lambda t: t["head"].update(version=99),
    "format": lambda t: t["head"].update(format="pickle"),
    "head": lambda t: t["head"].pop("sequence"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_manifests_are_refused(saved, name):
    crafted(saved, CRAFTED[name])
    refused(saved)


def test_a_manifest_nested_without_end_is_refused(saved):
    crafted(saved, lambda tree: tree.update(state="@"))
    file = saved / "manifest.json"
    body = file.read_bytes().split(b"\n", 1)[1]
    file.write_bytes(signed(body.replace(b'"@"', b"[" * 100_000 + b"]" * 100_000)))
    refused(saved)


def refused(path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_verified(path.parent, "t")
    with pytest.raises(CheckpointError):
        digest(Checkpoint.open(path.parent, "t"))


def test_the_crafting_of_this_file_leaves_a_sound_manifest_sound(saved):
    crafted(saved, lambda tree: None)
    assert open_verified(saved.parent, "t") is not None


def test_random_bytes_never_crash_the_parsers(saved):
    draw = random.Random(SEED + 2)
    manifest = (saved / "manifest.json").read_bytes()
    body = manifest.split(b"\n", 1)[1]
    for _ in range(300):
        changed = bytearray(body)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(changed))
            changed[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            found = parse_manifest(signed(bytes(changed)), "x")
        except CorruptCheckpointError:
            continue
        assert parse_manifest(serialize_manifest(found), "x") == found


def run_verify(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["ckpt", "verify", *arguments])
    return code, capsys.readouterr().out


def test_ckpt_verify_names_each_damaged_file_and_tensor(tmp_path, capsys):
    path = save_snapshot(tmp_path, "t", tiny_snapshot(1), step=1)
    assert run_verify(capsys, str(tmp_path))[0] == 0
    code, out = run_verify(capsys, str(tmp_path), "--json")
    assert code == 0 and json.loads(out)["sound"] is True
    model, optim, state = sorted(path.glob("*.safetensors"))
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    optim.unlink()
    header = bytearray(state.read_bytes())
    header[20] ^= 1
    state.write_bytes(header)
    code, out = run_verify(capsys, str(tmp_path), "--json")
    report = json.loads(out)
    assert code == 1 and report["sound"] is False
    named = {(d["file"], d["tensor"]) for d in report["damaged"]}
    assert named == {
        (model.name, "model/half"),
        (optim.name, None),
        (optim.name, "optim/step/weight"),
        (state.name, None),
        (state.name, "state/client/tensor"),
    }
    code, out = run_verify(capsys, str(path))
    assert code == 1 and "model/half" in out and optim.name in out


def test_ckpt_verify_does_not_verify_another_one_instead(tmp_path, capsys):
    save_snapshot(tmp_path, "a", tiny_snapshot(1), step=1)
    save_snapshot(tmp_path, "b", tiny_snapshot(2), step=2)
    (tmp_path / "b" / "manifest.json").write_bytes(b"{")
    assert run_verify(capsys, str(tmp_path))[0] == 1
    assert run_verify(capsys, str(tmp_path), "--tag", "a")[0] == 0
    assert run_verify(capsys, str(tmp_path), "--tag", "b")[0] == 1
    assert run_verify(capsys, str(tmp_path / "b"))[0] == 1
    assert main(["ckpt", "verify", str(tmp_path), "--tag", "c"]) == 2
    assert main(["ckpt", "verify", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_ckpt_inspect(tmp_path, capsys):
    save_snapshot(tmp_path, "t", tiny_snapshot(1), step=7)
    assert main(["ckpt", "inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tag"], report["step"], report["world"]) == ("t", 7, 1)
    assert report["tensors"]["model/weight"] == {"dtype": "float32", "shape": [5, 3], "bytes": 60}
    assert report["aliases"] == {"model/tied": "model/weight"}
    assert main(["ckpt", "inspect", str(tmp_path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "step 7" in out and "model/half" in out
    (tmp_path / "t" / "manifest.json").write_bytes(b"{")
    assert main(["ckpt", "inspect", str(tmp_path)]) == 1
