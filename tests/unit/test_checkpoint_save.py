"""One process: what is saved comes back, tags are replaced safely, what does not fit is an error."""

from __future__ import annotations

import hashlib
import logging
import os
import pickletools
import random
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.unit.checkpoint_support import (
    Small,
    count_operations,
    entries,
    newest_digest,
    save_model,
    saved_digest,
    small_model,
    tiny,
    train,
)
from thalweg.checkpoint import (
    Checkpoint,
    CheckpointError,
    FileSystem,
    MismatchedCheckpoint,
    MissingCheckpoint,
    Probe,
    Snapshot,
    UnstorableState,
    collect,
    load,
    model_tensors,
    publish,
    restore,
    save,
)
from thalweg.checkpoint.stream import BUFFER, SMALL, Stream

torch.set_num_threads(1)


def states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    for group_a, group_b in zip(a.param_groups, b.param_groups, strict=True):
        for p, q in zip(group_a["params"], group_b["params"], strict=True):
            x, y = a.state.get(p, {}), b.state.get(q, {})
            if x.keys() != y.keys():
                return False
            for key in x:
                tensors = isinstance(x[key], torch.Tensor)
                if tensors and (x[key].dtype != y[key].dtype or not torch.equal(x[key], y[key])):
                    return False
                if not tensors and x[key] != y[key]:
                    return False
    return True


def models_equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_and_optimizer_go_on_as_if_never_stopped(tmp_path, name):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    save_model(tmp_path, model, optimizer, 3)
    expected = train(model, optimizer, 3, seed=1)

    other = small_model(seed=9)
    fresh = OPTIMIZERS[name](other.parameters())
    for group in fresh.param_groups:
        group["lr"] = torch.tensor(7.0) if isinstance(group["lr"], torch.Tensor) else 7.0
    restore(Checkpoint.open(tmp_path), other, fresh)
    assert train(other, fresh, 3, seed=1) == expected
    assert models_equal(model, other)
    assert states_equal(optimizer, fresh)


def test_the_comparison_notices_a_wrong_learning_rate(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 3)
    save_model(tmp_path, model, optimizer, 3)
    expected = train(model, optimizer, 3, seed=1)
    other = small_model(seed=9)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    restore(Checkpoint.open(tmp_path), other, fresh)
    fresh.param_groups[0]["lr"] = 0.0101
    assert train(other, fresh, 3, seed=1) != expected
    assert not models_equal(model, other)


def test_an_optimizer_in_use_is_reset_to_the_checkpoint(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    save_model(tmp_path, model, optimizer, 1)
    expected = train(model, optimizer, 2, seed=3)
    train(model, optimizer, 5, seed=4)
    model.scale.requires_grad_(True)
    restore(Checkpoint.open(tmp_path), model, optimizer)
    assert train(model, optimizer, 2, seed=3) == expected


def test_groups_are_matched_by_name_not_by_order(tmp_path):
    def groups(model: nn.Module, turn: bool) -> torch.optim.Optimizer:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        decay = [p for p in parameters.values() if p.dim() > 1]
        rest = [p for p in parameters.values() if p.dim() <= 1]
        made = [
            {"params": decay, "weight_decay": 0.1, "lr": 0.01},
            {"params": rest, "weight_decay": 0.0, "lr": 0.02},
        ]
        return torch.optim.AdamW([{**g, "params": g["params"][::-1]} for g in made[::-1]] if turn else made)

    model = small_model()
    optimizer = groups(model, turn=False)
    train(model, optimizer, 2)
    save_model(tmp_path, model, optimizer, 2)
    expected = train(model, optimizer, 3, seed=1)
    other = small_model(seed=1)
    fresh = groups(other, turn=True)
    for group in fresh.param_groups:
        group.update(lr=5.0, weight_decay=3.0)
    restore(Checkpoint.open(tmp_path), other, fresh)
    assert [g["lr"] for g in fresh.param_groups] == [0.02, 0.01]
    assert train(other, fresh, 3, seed=1) == expected

    one_group = small_model()  # that its group has frozen parameters as well does not matter
    with pytest.raises(MismatchedCheckpoint, match="hyperparameters differ"):
        restore(Checkpoint.open(tmp_path), one_group, torch.optim.AdamW(one_group.parameters()))


def test_lbfgs_state_of_lists_of_tensors(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=2)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        x = torch.linspace(-1, 1, 12).view(4, 3)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    model, optimizer = build(0)
    run(model, optimizer)
    save_model(tmp_path, model, optimizer)
    expected = run(model, optimizer)
    other, fresh = build(1)
    restore(Checkpoint.open(tmp_path), other, fresh)
    assert run(other, fresh) == expected


def test_state_random_generators_and_extra_state(tmp_path):
    class Extra(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "tensor": torch.ones(2)}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = nn.Sequential(Extra(2, 2))
    model[0].seen = 5
    state = {"client": {"tuple": (1, {"x": torch.arange(3)})}, "schedule": {"last": 3}}
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    save(tmp_path, "t", collect(model, state=state, per_rank={"position": (7, [1])}), step=1)
    drawn = (random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2).tolist())
    other = nn.Sequential(Extra(2, 2))
    back = restore(Checkpoint.open(tmp_path), other)
    assert (random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2).tolist()) == drawn
    assert other[0].seen == 5
    assert back["client"]["tuple"][0] == 1 and torch.equal(back["client"]["tuple"][1]["x"], torch.arange(3))
    assert back.keys() == state.keys()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.per_rank(0)["position"] == (7, [1])
    assert checkpoint.per_rank(1) is None


def test_row33_no_pickle_on_disk(tmp_path):
    """PAIN_POINTS 33: no file of a checkpoint is a pickle or an archive; safetensors opens the shards."""
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2)
    state = {"client": {"set": {1, 2}, "bytes": b"\x80\x04.", "array": numpy.arange(3), 4: (5,)}}
    path = save(tmp_path, "t", collect(model, optimizer, state=state), step=2)
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


def test_row34_tied_weights_are_stored_once_and_come_back_tied_or_not(tmp_path):
    """PAIN_POINTS 34: aliases are kept; a tied checkpoint fills a tied and an untied model."""
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert torch.equal(checkpoint.read("model/head.weight"), model.embed.weight)
    tied = small_model(1)
    restore(checkpoint, tied)
    assert tied.head.weight is tied.embed.weight
    assert models_equal(tied, model)
    untied = small_model(2)
    untied.head.weight = nn.Parameter(torch.zeros(7, 5))
    fresh = OPTIMIZERS["adamw"](untied.parameters())
    restore(checkpoint, untied, fresh)
    assert torch.equal(untied.head.weight, untied.embed.weight)
    assert torch.equal(
        fresh.state[untied.head.weight]["exp_avg"], fresh.state[untied.embed.weight]["exp_avg"]
    )


def test_row34_an_untied_checkpoint_fills_a_tied_model_only_if_equal(tmp_path):
    apart = small_model()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    save(tmp_path, "equal", collect(apart), step=0)
    tied = small_model(1)
    restore(Checkpoint.open(tmp_path), tied)
    assert torch.equal(tied.head.weight, apart.embed.weight)
    with torch.no_grad():
        apart.head.weight += 1
    save(tmp_path, "different", collect(apart), step=0)
    with pytest.raises(MismatchedCheckpoint, match=r"ties head\.weight to embed\.weight"):
        restore(Checkpoint.open(tmp_path), tied)


def test_row34_the_other_name_of_a_tie_may_come_first(tmp_path):
    model = small_model()
    save(tmp_path, "t", collect(model), step=0)

    class Reversed(Small):
        def __init__(self) -> None:
            super().__init__()
            embed = self._modules.pop("embed")
            self._modules["embed"] = embed

    other = Reversed()
    assert next(iter(model_tensors(other)[1].items())) == ("embed.weight", "head.weight")
    optimizer = OPTIMIZERS["adamw"](other.parameters())
    train(other, optimizer, 1)
    save_model(tmp_path, other, optimizer)
    back = small_model(4)
    fresh = OPTIMIZERS["adamw"](back.parameters())
    restore(Checkpoint.open(tmp_path), back, fresh)
    assert torch.equal(back.embed.weight, other.embed.weight)
    assert torch.equal(
        fresh.state[back.embed.weight]["exp_avg"], optimizer.state[other.head.weight]["exp_avg"]
    )


def test_row02_unmatched_names_are_errors_with_the_nearest_names(tmp_path):
    """PAIN_POINTS 2: a strict load; nothing is skipped in silence, and nothing is changed."""
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    checkpoint = Checkpoint.open(tmp_path)

    renamed = small_model(1)
    renamed.hiden = renamed._modules.pop("hidden")
    before = {k: v.clone() for k, v in renamed.state_dict().items()}
    with pytest.raises(MismatchedCheckpoint, match=r"model/hiden\.weight \(nearest: model/hidden\.weight"):
        restore(checkpoint, renamed)
    assert all(torch.equal(before[k], v) for k, v in renamed.state_dict().items())

    smaller = small_model(1)
    del smaller.frozen
    with pytest.raises(MismatchedCheckpoint, match=r"not asked for: .*model/frozen\.weight"):
        restore(checkpoint, smaller)
    restore(checkpoint, smaller, strict=False)
    assert torch.equal(smaller.hidden.weight, model.hidden.weight)

    resized = small_model(1)
    resized.hidden = nn.Linear(5, 4)
    with pytest.raises(
        MismatchedCheckpoint, match=r"model/hidden\.weight has shape \[4, 5\] here and \[3, 5\] there"
    ):
        restore(checkpoint, resized)

    fewer = small_model(1)
    partial = OPTIMIZERS["adamw"]([p for n, p in fewer.named_parameters() if n != "scale"])
    with pytest.raises(MismatchedCheckpoint, match=r"not asked for: .*optim/.*/scale"):
        restore(checkpoint, fewer, partial)

    save(tmp_path, "weights", collect(model), step=1)
    with pytest.raises(MismatchedCheckpoint, match="saved without an optimiser"):
        restore(Checkpoint.open(tmp_path, "weights"), model, optimizer)


def test_row02_the_loss_curve_continues(tmp_path):
    """PAIN_POINTS 2: a job that stops and resumes has the losses of one that did not."""
    straight = small_model()
    optimizer = OPTIMIZERS["adamw"](straight.parameters())
    train(straight, optimizer, 4, seed=1)
    whole = train(straight, optimizer, 4, seed=2)
    first = small_model()
    optimizer = OPTIMIZERS["adamw"](first.parameters())
    train(first, optimizer, 4, seed=1)
    save_model(tmp_path, first, optimizer, 4)
    second = small_model(5)
    optimizer = OPTIMIZERS["adamw"](second.parameters())
    restore(load(tmp_path, resume="must"), second, optimizer)
    assert train(second, optimizer, 4, seed=2) == whole


def test_a_parameter_frozen_at_save_may_be_unfrozen_and_the_reverse_is_an_error(tmp_path):
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    save_model(tmp_path, model, optimizer)
    other = small_model(1)
    other.frozen.requires_grad_(True)
    fresh = OPTIMIZERS["adamw"](other.parameters())
    restore(Checkpoint.open(tmp_path), other, fresh)
    assert other.frozen.weight not in fresh.state
    train(other, fresh, 1)
    save(tmp_path, "some", collect(other, OPTIMIZERS["adamw"]([other.scale])), step=2)
    with pytest.raises(
        MismatchedCheckpoint, match=r"group 0 has parameters that .* did not have: embed\.weight"
    ):
        restore(Checkpoint.open(tmp_path, "some"), other, fresh)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(MismatchedCheckpoint, match="not among the module's"):
        collect(model, stranger)


def test_dtypes_are_cast_with_a_warning_and_only_among_floats(tmp_path, caplog):
    save(tmp_path, "t", Snapshot({"model/a": torch.arange(3.0), "model/i": torch.arange(3)}), step=0)
    target = {"model/a": torch.zeros(3, dtype=torch.bfloat16), "model/i": torch.zeros(3, dtype=torch.int64)}
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(tmp_path).read_into(target)
    assert "model/a" in caplog.text and torch.equal(target["model/a"], torch.arange(3).bfloat16())
    target["model/i"] = torch.zeros(3)
    with pytest.raises(MismatchedCheckpoint, match="model/i is float32 here and int64 there"):
        Checkpoint.open(tmp_path).read_into(target)
    with pytest.raises(MismatchedCheckpoint, match="meta device"):
        Checkpoint.open(tmp_path).read_into({"model/a": torch.zeros(3, device="meta")}, strict=False)


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
    path = save(tmp_path, "t", Snapshot(tensors), step=0)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        back = checkpoint.read(name)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        plain = tensor.resolve_conj().contiguous()
        assert torch.equal(back.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                opened.get_tensor(key)


def test_boxes_are_read_from_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["thalweg.checkpoint.save"], "PIECE_BYTES", 40)
    tensor = torch.arange(7 * 5 * 2).view(7, 5, 2).float()
    save(tmp_path, "t", Snapshot({"model/x": tensor, "model/row": torch.arange(30.0)}), step=0)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.manifest.tensors["model/x"].pieces) == 7
    assert len(checkpoint.manifest.tensors["model/row"].pieces) == 3
    assert torch.equal(checkpoint.read("model/x"), tensor)
    assert torch.equal(checkpoint.read("model/x", (2, 1, 0), (3, 2, 1)), tensor[2:5, 1:3, :1])
    assert checkpoint.read("model/x", (2, 1, 0), (0, 2, 1)).shape == (0, 2, 1)
    for offsets, sizes in (((0, 0, 0), (8, 1, 1)), ((-1, 0, 0), (1, 1, 1)), ((0, 0), (1, 1))):
        with pytest.raises(MismatchedCheckpoint, match="outside"):
            checkpoint.read("model/x", offsets, sizes)
    with pytest.raises(MismatchedCheckpoint, match="nearest: model/x"):
        checkpoint.read("model/xx")


def test_a_tag_is_replaced_and_the_directory_is_left_tidy(tmp_path):
    reference = tmp_path / "reference"
    save(tmp_path / "c", "t", tiny(1), step=1)
    inode = (tmp_path / "c" / "t").stat().st_ino
    path = save(tmp_path / "c", "t", tiny(2), step=2)
    assert path == tmp_path / "c" / "t" and path.stat().st_ino != inode
    assert entries(tmp_path / "c") == {"latest", "t"}
    assert newest_digest(tmp_path / "c") == saved_digest(tiny(2), 2, reference)
    assert newest_digest(tmp_path / "c") != saved_digest(tiny(1), 1, reference)
    assert (tmp_path / "c" / "latest").read_text().strip() == "t"


def test_keep(tmp_path):
    for step in range(5):
        save(tmp_path, f"s{step}", tiny(step), step=step, keep=2 if step == 4 else None)
    assert entries(tmp_path) == {"latest", "s3", "s4"}
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="keep is"):
            save(tmp_path, "x", tiny(), step=0, keep=wrong)


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/abs", "../up", "latest", ".hidden", "a~1", "a\n", "x" * 201, " a"]
)
def test_tags_that_are_no_plain_names_are_refused(tmp_path, tag):
    with pytest.raises(ValueError, match="cannot name a checkpoint"):
        save(tmp_path, tag, tiny(), step=0)
    assert not entries(tmp_path)


def test_a_directory_that_is_not_a_checkpoint_is_not_touched(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not a checkpoint of Thalweg"):
        save(tmp_path, "t", tiny(), step=0)
    assert entries(tmp_path) == {"t"} and entries(tmp_path / "t") == {"mine.txt"}


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
        with pytest.raises(UnstorableState, match=text):
            save(tmp_path / "c", "t", snapshot, step=0)
        assert not (tmp_path / "c").exists() or not entries(tmp_path / "c")


def test_a_superseded_job_cannot_commit(tmp_path):
    save(tmp_path, "new", tiny(2), step=2, epoch=3)
    with pytest.raises(CheckpointError, match=r"epoch 2, but .* of epoch 3"):
        save(tmp_path, "old", tiny(1), step=1, epoch=2)
    assert entries(tmp_path) == {"latest", "new"}
    save(tmp_path, "same", tiny(3), step=3, epoch=3)


def test_a_job_superseded_during_its_save_cannot_commit(tmp_path):
    done = []

    def before(k, operation, target):
        if operation == "fsync" and not done:
            done.append(k)
            save(tmp_path, "new", tiny(2), step=2, epoch=3)

    probe = Probe(before)
    with pytest.raises(CheckpointError):
        save(tmp_path, "old", tiny(1), step=1, epoch=2, io=probe)
    assert entries(tmp_path) == {"latest", "new"}
    assert Checkpoint.open(tmp_path).tag == "new"


def test_temporaries_of_dead_saves_go_and_those_of_living_ones_stay(tmp_path):
    save(tmp_path, "a", tiny(), step=0)
    owner = publish._owner()
    host, _, started = owner.rsplit("-", 2)
    dead = tmp_path / f".saving-{host}-999999999-5-{'0' * 16}"
    reused_pid = tmp_path / f".saving-{host}-1-3-{'1' * 16}"
    mine = tmp_path / f".saving-{owner}-{'2' * 16}"
    alive = tmp_path / f".saving-{host}-{os.getppid()}-{publish._start_time(os.getppid())}-{'3' * 16}"
    elsewhere = tmp_path / f".saving-otherhost-1-{started}-{'4' * 16}"
    for path in (dead, reused_pid, mine, alive, elsewhere):
        path.mkdir()
        (path / "shard").write_text("x")
    (tmp_path / ".removing-0123").mkdir()
    (tmp_path / f".latest-{host}-999999999-5-{'0' * 16}").write_text("a")
    (tmp_path / ".note-of-a-user").write_text("x")
    save(tmp_path, "b", tiny(), step=1)
    assert entries(tmp_path) == {"latest", "a", "b", alive.name, elsewhere.name, ".note-of-a-user"}
    os.utime(elsewhere, (0, 0))
    save(tmp_path, "b", tiny(), step=1)
    assert entries(tmp_path) == {"latest", "a", "b", alive.name, ".note-of-a-user"}


def test_resume_policies(tmp_path, caplog):
    assert load(tmp_path / "none") is None
    assert load(tmp_path / "none", resume="never") is None
    with pytest.raises(MissingCheckpoint, match="resume='must'"):
        load(tmp_path / "none", resume="must")
    with pytest.raises(ValueError, match="resume is 'maybe'"):
        load(tmp_path, resume="maybe")
    save(tmp_path, "a", tiny(1), step=1)
    save(tmp_path, "b", tiny(2), step=2)
    assert load(tmp_path, resume="never") is None
    assert load(tmp_path).tag == "b"
    assert load(tmp_path, "a").tag == "a"
    assert load(tmp_path, "latest").tag == "b"
    with pytest.raises(MissingCheckpoint, match="it holds b, a"):
        load(tmp_path, "c")
    caplog.clear()
    (tmp_path / "latest").unlink()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).tag == "b"
    assert "no 'latest'" in caplog.text
    (tmp_path / "latest").write_text("a\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).tag == "a"
    assert "committed after it" in caplog.text
    (tmp_path / "latest").write_text("gone\n")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).tag == "b"
        assert Checkpoint.open(tmp_path).tag == "b"
    assert "names 'gone', which is not there" in caplog.text
    with pytest.raises(MissingCheckpoint):
        Checkpoint.open(tmp_path / "none")
    assert Checkpoint.open(tmp_path / "a").tag == "a"


def test_loading_reads_only_what_it_needs(tmp_path):
    path = save(tmp_path, "t", tiny(), step=0)
    probe = count_operations(lambda io: Checkpoint.open(tmp_path, io=io).read("model/weight"))
    opened = {Path(target).name for operation, target in probe.log if operation == "open_read"}
    assert opened == {"latest", "manifest.json", "shard-00000-of-00001.model.safetensors"}
    assert len(list(path.glob("*.safetensors"))) == 3


def test_a_save_beside_the_pointer(tmp_path):
    save(tmp_path, "a", tiny(1), step=1)
    save(tmp_path, "b", tiny(2), step=2, latest=False)
    assert load(tmp_path).tag == "a" and load(tmp_path, "b").tag == "b"


def test_frozen_parameters_may_be_left_out(tmp_path):
    model = small_model()
    save(tmp_path, "t", collect(model, frozen=False), step=0)
    assert not [name for name in Checkpoint.open(tmp_path).names() if "frozen" in name]
    other = small_model(1)
    before = other.frozen.weight.clone()
    restore(Checkpoint.open(tmp_path), other)
    assert torch.equal(other.frozen.weight, before)
    assert torch.equal(other.hidden.weight, model.hidden.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_on_a_gpu_state_and_generator_go_back_to_where_they_were(tmp_path, options):
    model = small_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    save_model(tmp_path, model, optimizer)
    drawn = torch.rand(3, device="cuda")
    other = small_model(1).cuda()
    fresh = torch.optim.AdamW(other.parameters(), **options)
    restore(Checkpoint.open(tmp_path), other, fresh)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert models_equal(model, other) and states_equal(optimizer, fresh)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert {k: v.device for k, v in optimizer.state.get(p, {}).items()} == {
            k: v.device for k, v in fresh.state.get(q, {}).items()
        }


@pytest.mark.parametrize("extra", [-4096, -1, 0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1])
@pytest.mark.parametrize("direct", [True, False])
def test_streams_of_every_length(tmp_path, extra, direct):
    size = BUFFER + extra if direct else abs(extra) % SMALL
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
    seen = hashlib.sha256()
    probe = Probe()
    with closing(Stream(probe, tmp_path / "x", size)) as stream:
        for start in range(0, size, 700_001):
            stream.append(data[start : start + 700_001].data, seen.update)
        stream.finish()
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert seen.hexdigest() == hashlib.sha256(data.tobytes()).hexdigest()
    kept = [name for name, _ in probe.log if name not in ("pwrite", "truncate")]
    assert kept == ["open_write", "fsync", "close"]


def test_a_file_system_that_wants_other_alignment_gets_plain_writes(tmp_path):
    io = FileSystem()
    handle = io.open_write(tmp_path / "x", direct=True)
    io.pwrite(handle, b"unaligned", 3)
    io.close(handle)
    assert (tmp_path / "x").read_bytes() == b"\0\0\0unaligned"
    with pytest.raises(OSError, match="Bad file descriptor"):
        io.pwrite(handle, b"x", 0)
