"""One combination of the matrix on ranks, against one plain process: losses, first gradients, parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import inspect
from tests.dist.matrix import Combination
from tests.dist.parity import FP32_SLACK, full_named
from tests.dist.tensor_models import VOCAB_SIZE
from tests.dist.tensor_parity import TrainResult
from thalweg.moe import MoE
from thalweg.nn.moe import layer
from thalweg.nn.transformer import GPT, GPTConfig

ROWS, SEQ_LEN, STEPS, LR = 8, 9, 20, 0.05
FP32_TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}
HALF_TOLERANCE = {"loss": 5e-3, "gradient": 6e-2, "parameter": 2e-2}


class MoEMlp(nn.Module):
    """An MoE layer that leaves its balance loss out, in an MLP's place."""

    def __init__(self, width: int, ep: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.moe = MoE(width, expert, 4, ep, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        with torch.no_grad():
            for parameter in self.moe.experts.stack.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.moe(x_BTD)[0]


def get_model_key(combination: Combination) -> tuple[bool, int, bool]:
    """What its model depends on: whether the head is tied, how many ranks share the experts (0: none), LoRA.

    Tied by the parity of the name's length, so that both kinds occur with everything; a tied head has two
    names over stages.
    """
    degrees = combination.degrees
    return len(combination.name) % 2 == 0 and "pp" not in degrees, degrees.get("ep", 0), "lora" in degrees


def build_model(combination: Combination) -> nn.Module:
    """The model of a combination: the reference GPT, or one with experts, or with adapters."""
    return _build_model(*get_model_key(combination))


def _build_model(tied: bool, ep: int, lora: bool) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, n_embd=16, block_size=SEQ_LEN, tied=tied))
    if ep:
        model.blocks[1].mlp = MoEMlp(16, ep)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # large enough that a mistake shows
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if lora:
        import peft

        targets = ["qkv", "proj", "up", "down"]
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets), model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which is made of zeros
                nn.init.normal_(parameter, std=0.1)
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens (ROWS, LENGTH) of a step, alike on every rank."""
    generator = torch.Generator().manual_seed(700 + step)
    tokens = torch.randint(0, VOCAB_SIZE, (ROWS, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@contextmanager
def replay_fp32_routing(combination: Combination, rank: int, steps: int) -> Iterator[None]:
    """In half precision tokens go to the experts that they chose in a plain run.

    bf16 sends a token in hundreds to another expert, and what follows from that is as far from fp32 in one
    process: docs/decisions/2026-11-21-the-matrix.md.
    """
    if "ep" not in combination.degrees or not {"bf16", "fp16"} & combination.degrees.keys():
        yield
        return
    assert not {"sp", "cp", "pp", "remat"} & combination.degrees.keys(), "which tokens are whose?"
    route, recorded_experts = layer.route, []

    def record_routing(logits: Tensor, *args: Any) -> layer.Routing:
        routing = route(logits, *args)
        recorded_experts.append(routing.experts)
        return routing

    local_rows = slice(rank // combination.degree("tp") % combination.degree("dp"), None, combination.degree("dp"))

    def replay_routing(logits: Tensor, *args: Any) -> layer.Routing:
        routing = route(logits, *args)
        experts = recorded_experts.pop(0).view(ROWS, -1, routing.experts.shape[1])[local_rows].flatten(0, 1)
        experts = experts.to(logits.device)
        weights = logits.float().softmax(-1).gather(1, experts)
        return replace(routing, experts=experts, weights=weights / weights.sum(-1, keepdim=True))

    try:
        layer.route = record_routing
        train_plain(build_model(combination), steps)
        layer.route = replay_routing
        yield
    finally:
        layer.route = route
    assert not recorded_experts


def run_plain(combination: Combination, steps: int) -> TrainResult:
    """One process, fp32, plain PyTorch; combinations with the same model share it."""
    tied, ep, lora = get_model_key(combination)
    return _run_plain(tied, ep > 0, lora, steps)


@cache
def _run_plain(tied: bool, experts: bool, lora: bool, steps: int) -> TrainResult:
    return train_plain(_build_model(tied, int(experts), lora), steps)


def train_plain(model: nn.Module, steps: int) -> TrainResult:
    """Plain PyTorch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        loss = model(*make_batch(step))
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainResult(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def num_micro_batches(combination: Combination) -> int:
    """Of a window: a pipeline needs several."""
    return 2 * combination.degree("pp") if "pp" in combination.degrees else 1


def make_config(combination: Combination, folder: str, **changes: Any) -> dict[str, Any]:
    """The ds_config of the same run."""
    num_slices = combination.degree("dp") * num_micro_batches(combination)
    return {
        "train_micro_batch_size_per_gpu": ROWS // num_slices,
        "gradient_accumulation_steps": num_micro_batches(combination),
        "gradient_clipping": 1.0,
        "cpu_kernels": "torch",
        "log_level": "warning",
        "health": {"replica_check_steps": 1},  # what ranks hold alike is the same to the bit after each step
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        **combination.config(folder),
        **changes,
    }


def run_engine(
    combination: Combination, rank: int, world: int, folder: str, steps: int = STEPS, **changes: Any
) -> TrainResult:
    """The engine on all ranks; what it ends with, gathered over all but pipeline stages."""
    import thalweg

    engine, *_ = thalweg.initialize(
        model=copy.deepcopy(build_model(combination)), config=make_config(combination, folder, **changes)
    )
    engine.train()
    ranks, inner = combination.degree("dp"), prod(combination.degree(key) for key in ("tp", "sp", "cp"))
    local_rows = slice(rank // inner % ranks, None, ranks)
    losses, gradients = [], {}
    update = engine.optimizer.step

    def capture(*args: Any) -> Any:
        if not losses:
            inspect.finalize_grads(engine)
            named = engine.module.named_parameters()
            found = full_named((n, p.grad) for n, p in named if p.grad is not None)
            gradients.update({n: value.float() for n, value in found.items()})
        return update(*args)

    engine.optimizer.step = capture
    for step in range(steps):
        rows = [part[local_rows] for part in make_batch(step)]
        if "pp" in combination.degrees:
            micros = zip(*(part.chunk(num_micro_batches(combination)) for part in rows), strict=True)
            losses.append(float(engine.train_batch(iter(list(micros)))))
            continue
        loss = engine(*rows)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    parameters = {n: value.float() for n, value in full_named(engine.module.named_parameters()).items()}
    engine.close()
    return TrainResult(losses, gradients, parameters)


def compare_to_plain(
    rank: int, world: int, names: list[str], folder: str, steps: int = STEPS, **changes: Any
) -> dict[str, dict[str, float]]:
    """Largest relative differences of each combination; all on rank 0."""
    torch.set_num_threads(1)
    differences = {}
    for name in names:
        combination = Combination.parse(name)
        try:
            with replay_fp32_routing(combination, rank, steps):
                run = run_engine(combination, rank, world, folder, steps, **changes)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        torch._dynamo.reset()
        differences[name] = _differences(combination, run, rank, world)
    return differences if rank == 0 else {}


def _differences(combination: Combination, run: TrainResult, rank: int, world: int) -> dict[str, float]:
    """Against plain PyTorch, on the first rank of each pipeline stage; rank 0 gets the largest of all."""
    stages = combination.degree("pp")
    local: dict[str, float] = {}
    assert run.gradients, "nothing to compare"
    if rank % (world // stages) == 0:
        plain = run_plain(combination, len(run.losses))
        parts = TrainResult(
            plain.losses,
            {name: plain.gradients[name] for name in run.gradients},
            {name: plain.parameters[name] for name in run.parameters},
        )
        local = run.max_differences(parts)
        if stages == 1:
            assert run.parameters.keys() == plain.parameters.keys()
            assert run.gradients.keys() == plain.gradients.keys()
    if stages == 1:
        return local
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (local, list(run.parameters), list(run.gradients)))
    every = dict(build_model(combination).named_parameters())
    trained = [name for name, parameter in every.items() if parameter.requires_grad]
    for kind, expected in ((1, every), (2, trained)):  # each parameter and each gradient is on some stage
        names = {name for item in everyone for name in item[kind]}
        assert names == set(expected), names ^ set(expected)
    return {key: max(item[0].get(key, 0.0) for item in everyone) for key in FP32_TOLERANCE}


def get_tolerance(combination: Combination) -> dict[str, float]:
    """What it may differ by."""
    if {"bf16", "fp16"} & combination.degrees.keys():
        return HALF_TOLERANCE
    return {key: bound * FP32_SLACK for key, bound in FP32_TOLERANCE.items()}


def collect_errors(rank: int, world: int, names: list[str]) -> list[str]:
    """The error of each combination that must not start."""
    import thalweg

    errors = []
    for name in names:
        combination = Combination.parse(name)
        try:
            thalweg.initialize(model=build_model(combination), config=make_config(combination, "."))
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


compare_with_wrong_lr = partial(
    compare_to_plain, optimizer={"type": "SGD", "params": {"lr": 1.01 * LR, "momentum": 0.9}}
)
compare_with_wrong_mean = partial(compare_to_plain, gradient_allreduce_op="sum", gradient_clipping=1e9)
