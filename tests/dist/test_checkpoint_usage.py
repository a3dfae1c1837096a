"""What programs do around checkpoints: paths that a save returned, data that go on, what each rank keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thalweg
from tests.dist.models import make_batch, tiny_gpt
from tests.harness import run_ranks
from thalweg.compat.deepspeed.fp32_weights import get_fp32_state_dict_from_zero_checkpoint, get_model_ckpt_name_for_rank
from thalweg.compat.deepspeed.initialization import initialize as initialize_like_deepspeed
from thalweg.data.repeating_loader import RepeatingLoader
from thalweg.optim.step import TrainingDivergedError

REUSE_RANKS = True


def _engine(world: int, stage: int = 1, **extra: Any) -> thalweg.Engine:
    config = {
        "train_batch_size": 4, "zero_optimization": {"stage": stage}, "cpu_kernels": "torch", "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **extra,
    }  # fmt: skip
    return thalweg.initialize(model=tiny_gpt(0), config=config)[0]


def _step(engine: thalweg.Engine, rank: int, world: int, scale: float = 1.0) -> None:
    tokens, labels = make_batch(engine.global_steps, 4)
    engine.backward(engine(tokens[rank::world], labels[rank::world]) * scale)
    engine.step()


def _loads_what_a_save_returned(rank: int, world: int, folder: str) -> list[int]:
    engine = _engine(world)
    _step(engine, rank, world)
    path = engine.save_checkpoint(folder)
    found = []
    for again in range(2):  # the second time with DeepSpeed's file beside ours
        fresh = _engine(world)
        loaded, _ = fresh.load_checkpoint(path)
        assert loaded is not None and Path(loaded) == Path(path)
        found.append(fresh.global_steps)
        fresh.close()
        if rank == 0 and not again:
            torch.load(get_model_ckpt_name_for_rank(path, "00"), weights_only=True)
        torch.distributed.barrier()
    engine.close()
    return found


def test_the_path_that_a_save_returned_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(_loads_what_a_save_returned, 2, str(tmp_path)) == [[1, 1]] * 2


def _client_states(rank: int, world: int, folder: str, stage: int, save: bool) -> Any:
    engine = _engine(world, stage)
    if save:
        engine.save_checkpoint(folder, tag="t", client_state={"cursor": 10 * rank, "rng": torch.full((2,), rank)})
    _, state = engine.load_checkpoint(folder, tag="t")
    engine.close()
    assert state is not None
    return state["cursor"], state["rng"].tolist()


def test_at_stage_3_each_rank_gets_its_own_client_state_back(tmp_path: Path) -> None:
    own = run_ranks(_client_states, 2, str(tmp_path / "3"), 3, True)
    assert own == [(0, [0, 0]), (10, [1, 1])]
    assert run_ranks(_client_states, 1, str(tmp_path / "3"), 3, False) == own[:1]
    assert run_ranks(_client_states, 2, str(tmp_path / "1"), 1, True) == own[:1] * 2


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def _rows_of_a_run(rank: int, world: int, folder: str, own_generator: bool, stop: int) -> list[list[int]]:
    """What a run of two epochs sees that stops after ``stop`` batches and goes on, and what one that does not."""
    found = []
    for cuts in ([], [stop]):
        torch.manual_seed(0)
        seen: list[int] = []
        for start in [0, *cuts]:
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(5) if own_generator else None
            data = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 4, shuffle=True, generator=generator)
            config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
            engine, _, loader, _ = thalweg.initialize(model=_Rows(), config=config, training_data=data)
            if start:
                engine.load_checkpoint(folder)
            while len(seen) < (4 * stop if cuts and not start else 32):
                for (x,) in loader:
                    seen += [int(value) for value in x.flatten()]
                    torch.rand(1)  # as dropout would
                    engine.backward(engine(x))
                    engine.step()
                    if cuts and not start and len(seen) == 4 * stop:
                        engine.save_checkpoint(folder)
                        break
            engine.close()
        found.append(seen)
    return found


@pytest.mark.parametrize(("own_generator", "stop"), [(False, 3), (True, 2), (False, 5), (True, 7)])
def test_a_shuffled_loader_of_one_rank_goes_on_where_it_was(tmp_path: Path, own_generator: bool, stop: int) -> None:
    ((whole, resumed),) = run_ranks(_rows_of_a_run, 1, str(tmp_path), own_generator, stop)
    assert resumed == whole and sorted(whole[:16]) == list(range(16)) and whole[:16] != whole[16:]


def _other_data(rank: int, world: int, folder: str) -> tuple[int, bool]:
    def start(rows: int) -> Any:
        data = TensorDataset(torch.zeros(rows, 1))
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        return thalweg.initialize(model=_Rows(), config=config, training_data=data)[0]

    engine = start(32)
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.close()
    other = start(48)
    before = other.state_dict()["net.bias"].clone()
    with pytest.raises(ValueError, match=r"num_samples was 32 .* make their loader with thalweg\.data\.build_loader"):
        other.load_checkpoint(folder)
    unchanged = bool(torch.equal(other.state_dict()["net.bias"], before))
    steps = other.global_steps
    other.close()
    return steps, unchanged


def test_other_data_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(_other_data, 2, str(tmp_path)) == [(0, True)] * 2


def _kept(rank: int, world: int, folder: str) -> tuple[set[str], int]:
    engine = _engine(world, checkpoint={"keep": 1})
    _step(engine, rank, world)
    engine.save_checkpoint(folder)
    _step(engine, rank, world)
    engine.save_checkpoint(folder, tag="best", save_latest=False)
    left = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    again = _engine(world)
    again.load_checkpoint(folder)
    steps = again.global_steps
    _step(engine, rank, world)
    engine.save_checkpoint(folder)
    assert {path.name for path in Path(folder).iterdir() if path.is_dir()} == {"global_step3"}
    engine.close()
    again.close()
    return left, steps


def test_what_latest_names_is_kept(tmp_path: Path) -> None:
    assert run_ranks(_kept, 1, str(tmp_path)) == [({"global_step1", "best"}, 1)]


def _goes_back(rank: int, world: int, folder: str) -> tuple[str, str, int, int]:
    health = {"non_finite": "rewind"}
    engine = _engine(world, checkpoint={"keep": 1}, health=health)
    for _ in range(2):
        _step(engine, rank, world)
        engine.save_checkpoint(folder)
    num_tried, message = 0, ""
    while not message and num_tried < 10:
        num_tried += 1
        try:
            _step(engine, rank, world, float("nan"))
        except TrainingDivergedError as error:
            message = str(error)
    engine.close()
    return engine.device.type, message, engine.global_steps, num_tried


def test_with_one_checkpoint_kept_going_back_ends_in_words(tmp_path: Path) -> None:
    """The one before is gone, so that it is not gone back to.  An accelerator goes back with the step after."""
    ((device, message, *found),) = run_ranks(_goes_back, 1, str(tmp_path))
    assert "3 times back at a checkpoint did not help" in message
    assert found == ([3, 4] if device == "cpu" else [4, 8])


def _repeating(rank: int, world: int, folder: str) -> list[float]:
    engine = thalweg.initialize(
        model=_Rows(), config={"train_micro_batch_size_per_gpu": 2}, training_data=TensorDataset(torch.zeros(8, 1))
    )
    batches = iter(RepeatingLoader(engine[2]))
    engine[0].save_checkpoint(folder)
    engine[0].load_checkpoint(folder)
    shapes = [len(next(batches)[0]) for _ in range(6)]
    engine[0].close()
    return shapes


def test_a_repeating_loader_may_be_made_before_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(_repeating, 1, str(tmp_path)) == [[2] * 6]


def _routes(rank: int, world: int) -> dict[str, list[list[int]]]:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    data = list(range(12))
    stack = lambda rows: torch.tensor(rows) + 100
    engine = initialize_like_deepspeed(model=_Rows(), config=config, training_data=data, collate_fn=stack)[0]
    loaders = {
        "eval": engine.deepspeed_io(data, route="eval"),
        "by place": engine.deepspeed_io(data, 3, "eval"),
        "sampler": engine.deepspeed_io(data, data_sampler=[4, 2, 0], collate_fn=torch.tensor),
        "train": engine.deepspeed_io(data),
    }
    found = {name: [batch.tolist() for batch in loader] for name, loader in loaders.items()}
    engine.close()
    return found


def test_loaders_of_deepspeed_io_are_what_their_arguments_say() -> None:
    first, second = run_ranks(_routes, 2)
    assert sorted(x for rank in (first, second) for batch in rank["eval"] for x in batch) == list(range(100, 112))
    for found in (first, second):
        assert all(batch == sorted(batch) for name in ("eval", "by place") for batch in found[name])
        assert [len(batch) for batch in found["by place"]] == [3, 3] and found["sampler"] == [[4, 2], [0]]
        trained = [x for batch in found["train"] for x in batch]
        assert trained != sorted(trained)


@pytest.mark.parametrize(("name", "tag"), [("stage2", None), ("stage3", None), ("stage3", "global_step3")])
def test_zero_to_fp32_reads_what_deepspeed_wrote(name: str, tag: str | None) -> None:
    folder = Path(__file__).parents[1] / "data" / "deepspeed" / name
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    assert state and all(value.dtype == torch.float32 and value.abs().sum() > 0 for value in state.values())
