"""One process against an engine whose ranks share sequences, on batches of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.dist.tensor_models import build_model
from tests.dist.tensor_parity import TrainResult, make_config, train_engine, train_plain

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}
VOCAB_SIZE = 67


def make_hf_batch(kind: str, step: int, num_rows: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a Hugging Face model; labels are shifted inside of it."""
    generator = torch.Generator().manual_seed(90 + step)
    tokens = torch.randint(3, VOCAB_SIZE, (num_rows, length), generator=generator)
    labels = tokens.clone()
    batch = {"input_ids": tokens, "labels": labels}
    if kind == "masked":  # the later shards have no target at all, and one row fewer than the other
        labels[:, length // 3 :] = -100
        labels[0, : length // 4] = -100
    if kind == "ragged":  # rows with very different numbers of targets, the first of them with none
        for row in range(num_rows):
            labels[row, 1 + min(row, 1) + (row * (5 + step)) % length :] = -100
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        labels[0, length - 3 :] = -100
        batch["attention_mask"] = mask
    if kind == "packed":
        cut = length // 2 + 1
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        batch["position_ids"] = positions.expand(num_rows, -1).contiguous()
        labels[:, cut] = -100
    return batch


def compute_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inner = getattr(model, "module", model)
    if hasattr(inner, "main_input_name"):
        # With a key-value cache, its default, Hugging Face does not look for packed documents.
        return model(**batch, use_cache=False).loss if "position_ids" in batch else model(**batch).loss
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return model(batch["input_ids"], labels)


@dataclass(frozen=True)
class SequenceCase:
    """A model, a kind of batch, a length, and the ranks of each axis."""

    model: str
    kind: str
    length: int
    stage: int = 0
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    extra: tuple[tuple[str, Any], ...] = ()
    wrapped: bool = False  # by PEFT, with adapters that train

    def build_model(self) -> torch.nn.Module:
        """The model, as a user makes it."""
        if not self.wrapped:
            return build_model(self.model)
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "down_proj"]
        lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, init_lora_weights=False)
        return get_peft_model(build_model(self.model), lora)

    def num_data_ranks(self, world: int) -> int:
        """Ranks with other rows."""
        return world // (self.sequence_parallel * self.tensor_parallel * self.context_parallel)


def run_plain(case: SequenceCase, steps: int, world: int) -> TrainResult:
    """One process on whole batches."""
    rows = 2 * case.num_data_ranks(world)
    return train_plain(
        case.build_model(),
        lambda model, step: compute_loss(model, make_hf_batch(case.kind, step, rows, case.length)),
        steps,
    )


def run_engine(case: SequenceCase, steps: int, rank: int, world: int) -> TrainResult:
    """The engine; every rank of a sequence takes the same rows."""
    ranks = case.num_data_ranks(world)
    rows = 2 * ranks
    local_rows = slice(rank * ranks // world, None, ranks)
    config = make_config(
        case.stage,
        case.tensor_parallel,
        rows,
        ranks,
        sequence_parallel_size=case.sequence_parallel,
        context_parallel_size=case.context_parallel,
        **dict(case.extra),
    )

    def loss_at(model: Any, step: int) -> torch.Tensor:
        batch = make_hf_batch(case.kind, step, rows, case.length)
        return compute_loss(model, {key: value[local_rows] for key, value in batch.items()})

    return train_engine(case.build_model(), config, loss_at, steps)


def find_mismatches(rank: int, world: int, cases: list[SequenceCase], steps: int) -> list[str]:
    """Cases whose losses, gradients or parameters differ."""
    torch.set_num_threads(1)
    mismatches = []
    for case in cases:
        differences = run_engine(case, steps, rank, world).max_differences(run_plain(case, steps, world))
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            mismatches.append(f"{case}: {differences}")
    return mismatches
