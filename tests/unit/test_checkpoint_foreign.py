"""Foreign files: a pickle is data, flat vectors become boxes, and what is damaged or not readable is named."""

from __future__ import annotations

import argparse
import collections
import io
import math
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.deepspeed.job import OddModel
from thalweg.checkpoint import CheckpointMismatchError, CorruptCheckpointError, FileSystem, UnserializableStateError
from thalweg.checkpoint.deepspeed.checkpoint import ForeignCheckpoint, find_foreign
from thalweg.checkpoint.deepspeed.flat_tensors import (
    LogicalTensor,
    cut_concatenation,
    cut_parameter_shares,
    flat_range_chunks,
    flat_start,
)
from thalweg.checkpoint.deepspeed.torch_file import TorchFile
from thalweg.checkpoint.errors import CheckpointNotFoundError
from thalweg.checkpoint.load import open_checkpoint
from thalweg.cli import main

DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def save(value: object, path: Path, **options: object) -> TorchFile:
    torch.save(value, path, **options)
    return TorchFile(FileSystem(), path)


def repack(source: Path, target: Path, pickled: bytes | None = None, **options: int) -> None:
    """The same zip under names of another length, so that storages lie at any byte; ``pickled`` in the tree's place."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", **options) as packed:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            raw = archive.read(info) if pickled is None or name != "data.pkl" else pickled
            packed.writestr(f"longer/{name}", raw)


class Malicious:
    """Runs a command where a pickle is loaded in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_runs_nothing_and_is_named(tmp_path: Path) -> None:
    file = save({"x": torch.ones(2), "evil": Malicious(tmp_path / "owned")}, tmp_path / "a.pt")
    with pytest.raises(UnserializableStateError, match=r"a\.pt holds an object of posix\.mkdir, which is not read"):
        file.tree()
    assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)  # the control: it does what it says
    assert (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cposix\nsystem\n(S'touch ran'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        b"(S'true'\niposix\nsystem\n.",
        b"(cposix\nsystem\nS'true'\no.",
        b"\x82\x01.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cdeepspeed.x\nY\n)R}(S'__class__'\ncposix\nsystem\nu\x86b.",
        b"]]" + b"a" * 9,
        b"\x80\x02}q\x00",
        b"K\x01K\x02b.",
    ],
)
def test_hostile_opcodes_are_errors(payload: bytes, tmp_path: Path) -> None:
    save([1], tmp_path / "whole.pt")
    repack(tmp_path / "whole.pt", tmp_path / "a.pt", payload)
    with pytest.raises((UnserializableStateError, CorruptCheckpointError), match=r"a\.pt"):
        TorchFile(FileSystem(), tmp_path / "a.pt").tree()
    assert not (tmp_path / "ran").exists()


def test_values_come_back_equal(tmp_path: Path) -> None:
    strided = torch.arange(24.0).view(4, 6).t()[1:, ::2]
    value = {
        "plain": [1, -(2**70), 2.5, "text", b"bytes", None, True, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "sets": [{1, 2}, frozenset({3})],
        "containers": [collections.OrderedDict(a=1), collections.defaultdict(list, {"b": [2]}), bytearray(b"xy")],
        "numpy": [numpy.float32(0.5), numpy.int64(7), numpy.arange(6, dtype="<i4").reshape(2, 3)],
        "queues": [collections.deque([1, 2], 3)],
        "namespace": argparse.Namespace(lr=0.5, names=["a"]),
        "tensors": [strided, torch.tensor(3), torch.empty(0, 3), torch.nn.Parameter(torch.ones(2).bfloat16())],
        "torch": [torch.Size([2, 3]), torch.float16],
        7: "number",
    }
    tree = save(value, tmp_path / "a.pt").tree()
    for expected, found in zip(value["tensors"], tree["tensors"], strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    for expected, found in zip(value["numpy"], tree["numpy"], strict=True):
        assert found.dtype == expected.dtype and numpy.array_equal(found, expected)
    assert tree["torch"] == [(2, 3), torch.float16]
    assert tree["queues"] == [[1, 2]]  # torch's reader knows none
    for key in ("plain", "sets", "containers", "namespace", 7):
        assert tree[key] == value[key]


@pytest.mark.parametrize("protocol", [4, 5])
def test_another_protocol_than_torch_s_is_an_error(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt is not a file of torch\.save that can be read"):
        save({"a": [1]}, tmp_path / "a.pt", pickle_protocol=protocol).tree()


def test_a_file_that_was_packed_anew_reads_the_same(tmp_path: Path) -> None:
    saved = {"a": torch.arange(5.0, dtype=torch.float64), "b": torch.arange(12).view(3, 4).t()}
    save(saved, tmp_path / "a.pt")
    repack(tmp_path / "a.pt", tmp_path / "b.pt")
    found = TorchFile(FileSystem(), tmp_path / "b.pt").tree()
    assert all(torch.equal(found[key], value) for key, value in saved.items())


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    save({"a": torch.zeros(100)}, tmp_path / "a.pt")
    repack(tmp_path / "a.pt", tmp_path / "b.pt", compression=zipfile.ZIP_DEFLATED)  # mapped, its zeros are others
    with pytest.raises(CorruptCheckpointError, match=r"not one that torch\.save has written"):
        TorchFile(FileSystem(), tmp_path / "b.pt")


@pytest.mark.parametrize(
    "shift", [pytest.param(b"J\x00\x10\x00\x00", id="offset"), pytest.param(b"J\xff\xff\xff\xff", id="negative")]
)
def test_a_tensor_outside_of_its_storage_is_an_error(shift: bytes, tmp_path: Path) -> None:
    save({"a": torch.arange(8.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        pickled = archive.read("a/data.pkl")
    assert pickled.count(b"QK\x00K\x08\x85") == 1  # the storage, the offset 0, the shape (8,)
    repack(tmp_path / "a.pt", tmp_path / "b.pt", pickled.replace(b"QK\x00K\x08\x85", b"Q" + shift + b"K\x08\x85"))
    with pytest.raises(CorruptCheckpointError, match=r"b\.pt"):
        TorchFile(FileSystem(), tmp_path / "b.pt").tree()


def test_a_user_class_in_the_client_state_is_named_with_the_cure(tmp_path: Path) -> None:
    file = save({"model": OddModel()}, tmp_path / "a.pt")
    with pytest.raises(UnserializableStateError, match=r"OddModel.*replace that object by plain values"):
        file.tree()


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_flat_ranges_are_boxes(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    index, found = torch.arange(numel).view(shape), []
    for chunk in flat_range_chunks(shape, start, stop):
        values = index[chunk.slices((0,) * len(shape))].reshape(-1).tolist()
        assert values[0] == flat_start(chunk, shape)
        found += values
    assert found == list(range(start, stop))


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    st.integers(1, 5),
    st.booleans(),
)
def test_parameters_are_found_in_the_shares_of_any_number_of_ranks(
    shapes: list[list[int]], world: int, trimmed: bool
) -> None:
    params = {f"p{i}": torch.arange(math.prod(s)) + 100 * i for i, s in enumerate(shapes)}
    named = {f"p{i}": tuple(s) for i, s in enumerate(shapes)}
    # Stages 1 and 2: one vector, padded to a multiple of twice the ranks; a save may trim the padding.
    flat = torch.cat(list(params.values()))
    share = -(-max(flat.numel(), 1) // (2 * world)) * 2
    padded = torch.cat([flat, torch.full((share * world - flat.numel(),), -1)])
    parts = [padded[r * share : min((r + 1) * share, flat.numel() if trimmed else 10**6)] for r in range(world)]
    # Stage 3: each parameter in equal shares.
    ranks = []
    for rank in range(world):
        shares = []
        for values in params.values():
            each = -(-values.numel() // world)
            whole = torch.cat([values, torch.full((each * world - values.numel(),), -1)])
            shares.append(whole[rank * each : (rank + 1) * each])
        ranks.append(torch.cat(shares))
    for found in (list(cut_concatenation(named, parts)), list(cut_parameter_shares(named, ranks))):
        assert [name for name, _, _ in found] == list(params)
        for name, shape, fragments in found:
            tensor = LogicalTensor.of(shape, fragments, name)
            values = [fragment.read(fragment.start, fragment.stop) for fragment in tensor.fragments]
            assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *values]), params[name])


@pytest.mark.parametrize("case", ["stage1", "stage2", "stage3"])
def test_damage_is_found_and_named(case: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / case, tmp_path / "run")
    folder = tmp_path / "run" / "global_step3"
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint) and checkpoint.find_corruption() == []
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    raw = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("data/2"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", raw, entry.header_offset + 26)
    raw[entry.header_offset + 30 + name_bytes + extra_bytes + 5] ^= 1  # within the first elements
    file.write_bytes(raw)
    assert main(["ckpt", "verify", str(tmp_path / "run")]) == 1
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="but 2 ranks saved: a file is missing"):
        open_checkpoint(tmp_path / "run")


def test_the_command_line_reads_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(DATA / "stage3"), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert "tag global_step3, step 3, world 2" in printed and "deepspeed 0.19.8" in printed
    assert (
        "optim/exp_avg_sq/up.weight  float32 [7, 6]" in printed and "model/head.weight is model/embed.weight" in printed
    )
    assert main(["ckpt", "verify", str(DATA / "stage3")]) == 0
    assert main(["ckpt", "export", str(DATA / "stage3"), str(tmp_path / "out")]) == 0
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "out" / "model.safetensors")
    stage3, stage1 = open_checkpoint(DATA / "stage3"), open_checkpoint(DATA / "stage1")
    assert exported.keys() == {name.removeprefix("model/") for name in stage3.tensor_names("model/")}
    for name, value in exported.items():  # the same job at another stage
        assert torch.allclose(value, stage1.read(f"model/{name}"), atol=1e-6)


def test_a_tensor_parallel_folder_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "global_step3"
    shutil.copytree(DATA / "stage1" / "global_step3", folder)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointMismatchError, match="tensor parallelism"):
        open_checkpoint(tmp_path)


def test_which_folder_a_load_takes(tmp_path: Path) -> None:
    io = FileSystem()
    for step in (3, 20, 100):
        shutil.copytree(DATA / "stage1" / "global_step3", tmp_path / f"global_step{step}")
    assert find_foreign(io, tmp_path) == tmp_path / "global_step100"  # no pointer: the most steps
    (tmp_path / "latest").write_text("global_step20")
    assert find_foreign(io, tmp_path) == tmp_path / "global_step20"
    assert find_foreign(io, tmp_path, "global_step3") == tmp_path / "global_step3"
    assert find_foreign(io, tmp_path / "global_step3") == tmp_path / "global_step3"
    assert find_foreign(io, tmp_path, "other") is None
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path, "other")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(pickletools.optimize(pickle.dumps({})))
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_00_model_states\.pt is damaged, or was written in the"):
        open_checkpoint(tmp_path)
    buffer = io.BytesIO()
    torch.save({}, buffer)
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(buffer.getvalue()[:-30])
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_00_model_states\.pt"):
        open_checkpoint(tmp_path)
