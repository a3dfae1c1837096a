"""`Accelerator(deepspeed_plugin=...)`: a loop of the user's own, plain PyTorch's losses, save_state and load_state."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat.hf_support import ACCUMULATION, LENGTH, MICRO_BATCH, make_dataset, make_model, prepare_rank
from tests.harness import run_ranks
from tests.marks import nightly

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs transformers and accelerate")
REUSE_RANKS = True
TOLERANCE = 1e-4
NUM_MICRO_BATCHES = 22  # an odd number of updates after load_state, and a whole number of windows
LR = 5e-3


def _batches(world: int) -> list[dict[str, Any]]:
    import torch

    rows, size = make_dataset(NUM_MICRO_BATCHES * MICRO_BATCH * 2, masked=False), MICRO_BATCH * 2 // world
    chunks = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in chunk]) for key in chunk[0]} for chunk in chunks]


def _plain(rank: int, world: int) -> list[float]:
    import torch

    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for number, batch in enumerate(_batches(1)):
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (number + 1) % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _with_plugin(rank: int, world: int, folder: str, stage: int, dummy: bool) -> dict[str, Any]:
    import torch

    prepare_rank()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    options: dict[str, Any] = {"zero_stage": stage, "gradient_accumulation_steps": ACCUMULATION}
    if dummy:
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    else:
        plugin = DeepSpeedPlugin(**options, gradient_clipping=1.0, zero3_init_flag=False, zero3_save_16bit_model=True)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
    if dummy:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
    rows = make_dataset(NUM_MICRO_BATCHES * MICRO_BATCH * 2, masked=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=MICRO_BATCH * 2 // world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for number, batch in enumerate(loader):
            if not first <= number < last:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    losses = train(0, 12)
    accelerator.save_state(folder)
    losses += train(12, NUM_MICRO_BATCHES)
    accelerator.load_state(folder)
    again = train(12, NUM_MICRO_BATCHES)
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    names = None if state is None else sorted(state)
    whole = None if state is None else all(type(value) is torch.Tensor for value in state.values())
    return {
        "losses": losses,
        "again": again,
        "names": names,
        "whole": whole,
        "class": type(unwrapped).__name__,
        "norm": model.get_global_grad_norm(),
    }


@pytest.mark.parametrize(
    ("stage", "dummy", "world"),
    [
        *(nightly(1, False, 2), nightly(2, False, 2), nightly(3, False, 2), nightly(1, True, 2), nightly(2, True, 2)),
        *((3, True, 2), nightly(1, False, 1), nightly(2, True, 1), nightly(3, True, 1)),
    ],
)
def test_a_loop_of_the_users_own(stage: int, dummy: bool, world: int, tmp_path: Path) -> None:
    plain = run_ranks(_plain, 1)[0]
    ours = run_ranks(_with_plugin, world, str(tmp_path), stage, dummy)
    for result in ours:
        assert max(abs(a - b) for a, b in zip(result["losses"], plain, strict=True)) < TOLERANCE
        assert max(abs(a - b) for a, b in zip(result["again"], result["losses"][12:], strict=True)) < TOLERANCE
        assert result["class"] == "GPT2LMHeadModel" and result["norm"] > 0
    assert ours[0]["whole"] is True
    assert "lm_head.weight" in ours[0]["names"]


def _with_warmup(rank: int, world: int, device: str) -> dict[str, Any]:
    """The optimizer and its schedule come to `prepare` together, as accelerate's documentation has it."""
    import torch

    prepare_rank()
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers import get_scheduler

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, offload_optimizer_device=device))
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler: Any = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=8)
    loader: Any = torch.utils.data.DataLoader(make_dataset(16, masked=False), batch_size=MICRO_BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates, losses = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "rates": rates}


def test_a_schedule_steers_the_optimizer_that_accelerate_offloads() -> None:
    resident, offloaded = (run_ranks(_with_warmup, 1, device)[0] for device in ("none", "cpu"))
    assert max(resident["rates"]) == LR and len(set(resident["rates"])) == 7, "no warm-up and no decay"
    assert offloaded["rates"] == resident["rates"]
    assert offloaded["losses"] == pytest.approx(resident["losses"], abs=1e-5)


def _distil(teacher: Any, student: Any, batch: Any) -> Any:
    """The student's loss, and its distance from the teacher, both models' outputs whole."""
    import torch

    with torch.no_grad():
        wanted = teacher(input_ids=batch["input_ids"]).logits
    found = student(**batch)
    return found.loss + torch.nn.functional.mse_loss(found.logits, wanted)


def _plain_distillation(rank: int, world: int) -> list[float]:
    import torch

    student, teacher, losses = make_model(), make_model(5), []
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR)
    for batch in _batches(1):
        loss = _distil(teacher, student, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _two_models(rank: int, world: int, student_stage: int) -> dict[str, Any]:
    """As accelerate's documentation of several models has it: a plugin for each, one of them for inference alone."""
    import torch

    prepare_rank()
    from accelerate import Accelerator, DeepSpeedPlugin

    common = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config={**common, "zero_optimization": {"stage": student_stage}}),
        "teacher": DeepSpeedPlugin(hf_ds_config={**common, "zero_optimization": {"stage": 3}}),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    student, teacher = make_model(), make_model(5)
    optimizer: Any = torch.optim.AdamW(student.parameters(), lr=LR)
    rows = make_dataset(NUM_MICRO_BATCHES * MICRO_BATCH * 2, masked=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=MICRO_BATCH)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(teacher)
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for batch in loader:
        loss = _distil(teacher, student, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return {"losses": losses, "stages": [model.zero_optimization_stage() for model in (student, teacher)]}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_several_models(stage: int) -> None:
    plain = run_ranks(_plain_distillation, 1)[0]
    for result in run_ranks(_two_models, 2, stage):
        assert max(abs(a - b) for a, b in zip(result["losses"], plain, strict=True)) < TOLERANCE
        assert result["stages"] == [stage, 3]


NUM_SEQUENCES = 24
SGD_LR = 0.2  # not Adam, to which a gradient of twice the size is the same


def _plain_sequences(rank: int, world: int, weighed_by: str) -> dict[str, list[float]]:
    """Every batch whole, with the mean of its tokens; of its halves' means, wrong where these have unequal numbers of
    targets; or of its rows' means, as four ranks in two groups deal them out."""
    import torch
    from torch.nn.functional import cross_entropy, pad

    model, losses, rows = make_model(), [], make_dataset(NUM_SEQUENCES)
    if weighed_by == "rows":
        rows = [rows[first + step] for first in range(0, len(rows), 4) for step in (0, 2, 1, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_LR)
    batches = [torch.utils.data.default_collate(rows[i : i + MICRO_BATCH]) for i in range(0, len(rows), MICRO_BATCH)]
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits
        targets = pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        chunks = {"tokens": (1, 0), "halves": (2, 1), "rows": (2, 0)}[weighed_by]
        parts = list(zip(logits.chunk(*chunks), targets.chunk(*chunks), strict=True))
        loss: Any = sum(cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in parts) / len(parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rows = make_dataset(NUM_SEQUENCES)
    batches = [torch.utils.data.default_collate(rows[i : i + MICRO_BATCH]) for i in (0, MICRO_BATCH)]
    with torch.no_grad():
        return {"losses": losses, "evaluated": [model.eval()(**batch).loss.item() for batch in batches]}


def _sequence_parallel(rank: int, world: int, stage: int, sp_size: int) -> dict[str, Any]:
    """As accelerate's page of sequence parallelism has it: the program weighs the losses of the ranks."""
    import torch

    prepare_rank()
    import accelerate
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    sizes: dict[str, Any] = {"sp_size": sp_size, "dp_shard_size": world // sp_size}
    config = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    batch_size = MICRO_BATCH * sp_size // world
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config={**config, "train_micro_batch_size_per_gpu": batch_size})
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=plugin,
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_handler=handler, **sizes),
    )
    model, rows = make_model(), make_dataset(NUM_SEQUENCES)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=SGD_LR)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group = import_module("deepspeed.utils.groups")._get_sequence_parallel_group()
    losses, lengths = [], set()
    for batch in loader:
        lengths.add(batch["input_ids"].shape[1])
        targets = batch["shift_labels"]
        logits = model(**batch).logits
        loss = accelerator.unwrap_model(model).loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=logits.shape[-1]
        )
        count = (targets != -100).sum()
        if world == sp_size:
            all_losses: Any = torch.distributed.nn.functional.all_gather(loss, group=group)
            counts: Any = torch.distributed.nn.functional.all_gather(count, group=group)
            loss = sum(one * count for one, count in zip(all_losses, counts, strict=True)) / sum(counts)
        else:  # torch's differentiable gather over gloo knows no groups that are not the job's
            total = count.clone()
            torch.distributed.all_reduce(total, group=group)
            loss = loss * count * sp_size / total
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    model.eval()
    first = rank % 2 * MICRO_BATCH
    own = torch.utils.data.default_collate(rows[first : first + MICRO_BATCH])
    with torch.no_grad():
        evaluated = model(**own).loss.item()
    return {"losses": losses, "evaluated": evaluated, "lengths": lengths, "steps": len(loader)}


@pytest.mark.parametrize(("stage", "world"), [(3, 2), nightly(1, 2), nightly(2, 4)])
def test_ranks_share_sequences(stage: int, world: int) -> None:
    """Each of them brings its own rows; in evaluation each has its own, whole."""
    wanted, wrong = ("tokens", "halves") if world == 2 else ("rows", "tokens")
    plain, other = (run_ranks(_plain_sequences, 1, weighed_by)[0] for weighed_by in (wanted, wrong))
    for rank, result in enumerate(run_ranks(_sequence_parallel, world, stage, 2)):
        assert result["lengths"] == {LENGTH // 2} and result["steps"] == NUM_SEQUENCES // MICRO_BATCH
        assert max(abs(a - b) for a, b in zip(result["losses"], plain["losses"], strict=True)) < TOLERANCE
        assert max(abs(a - b) for a, b in zip(result["losses"], other["losses"], strict=True)) > TOLERANCE
        assert abs(result["evaluated"] - plain["evaluated"][rank % 2]) < TOLERANCE
