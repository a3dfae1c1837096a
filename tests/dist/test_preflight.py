"""What the preflight knows of an optimizer, by whatever name or hand it came."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import run_ranks
from thalweg.config import load, resolve
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.plan.preflight import Preflight

SHAPE = GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=64)


class Own(torch.optim.AdamW):
    """A class of the user's, whose state is anybody's guess."""


def _bytes_of_state(rank: int, world: int) -> dict[str, float]:
    mesh, model = init_device_mesh("cpu", (world,)), GPT(SHAPE)
    numel = sum(parameter.numel() for parameter in model.parameters())
    parameters = list(model.parameters())

    def state(optimizer: object, given: object = None, **more: object) -> float:
        config = {"train_batch_size": 2, "memory": {"host_limit": "100GiB"}, "optimizer": optimizer, **more}
        resolved = resolve(load({key: value for key, value in config.items() if value}), world_size=world)
        found = Preflight(model, mesh, resolved, torch.device("cpu"), given)
        gradients = 4 * numel if optimizer or given else 0
        return (found._state_bytes - found._process_bytes - 4 * numel - gradients) / numel

    found = {kind: state({"type": kind}) for kind in ("AdamW", "adam", "sgd", "LION", "muon", "RMSprop", "Adafactor")}
    for kept in ("int8", "bf16"):
        found[kept] = state({"type": "AdamW", "params": {"state_dtype": kept}})
    found["momentum"] = state({"type": "SGD", "params": {"momentum": 0.9}})
    found["given"] = state(None, torch.optim.AdamW(parameters))
    found["given momentum"] = state({"type": "AdamW"}, torch.optim.SGD(parameters, momentum=0.9))
    found["made"] = state(None, partial(torch.optim.Adam, amsgrad=True))
    found["none"] = state(None)
    own = Preflight(
        model,
        mesh,
        resolve(load({"train_batch_size": 2, "memory": {"host_limit": "100GiB"}}), world_size=world),
        torch.device("cpu"),
        Own(parameters),
    )
    found["own"] = (own._state_bytes - own._process_bytes - 4 * numel) / numel
    return found


def test_row21_states_are_counted_as_the_optimizer_keeps_them() -> None:
    (found,) = run_ranks(_bytes_of_state, 1)
    wanted = {"AdamW": 8, "adam": 8, "sgd": 0, "LION": 4, "muon": 4, "RMSprop": 4, "Adafactor": 0}
    wanted |= {"int8": 2, "bf16": 4, "momentum": 4, "given": 8, "given momentum": 4, "made": 12}
    wanted |= {"none": 0, "own": 0}
    assert found == wanted


class ReadsValues(torch.nn.Module):
    """Control flow that depends on values: no plan can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() if x.sum().item() > 0 else self.layer(-x).sum()


class CannotBeCopied(torch.nn.Linear):
    """A module whose copy fails."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("holds a socket")


def _warnings_of_checks(rank: int, world: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (world,))
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler = Lines()
    loggers = [logging.getLogger(f"thalweg.plan.{name}") for name in ("runtime", "preflight")]
    for logger in loggers:
        logger.addHandler(handler)

    def check(model: torch.nn.Module, **more: object) -> list[str]:
        lines.clear()
        source = {"train_batch_size": 2, "memory": {"host_limit": "100GiB"}, "optimizer": {"type": "AdamW"}, **more}
        preflight = Preflight(model, mesh, resolve(load(source), world_size=world), torch.device("cpu"))
        preflight.check_first_batch(model)
        model.train()(torch.ones(2, 64)).sum().backward()
        return list(lines)

    found = {
        "plain": check(torch.nn.Linear(64, 64)),
        "reads values": check(ReadsValues()),
        "cannot be copied": check(CannotBeCopied(64, 64)),
        "not counted": check(torch.nn.Linear(64, 64), compile={"enabled": True}),
    }
    for logger in loggers:
        logger.removeHandler(handler)
    return found


def test_a_memory_check_that_is_skipped_says_so_and_why() -> None:
    """None of the ways in which the check is switched off is silent."""
    (found,) = run_ranks(_warnings_of_checks, 1)
    assert found.pop("plain") == []
    reasons = {"reads values": "ReadsValues", "cannot be copied": "holds a socket", "not counted": "compile.enabled"}
    for name, lines in found.items():
        assert len(lines) == 1, (name, lines)
        assert lines[0].startswith("Memory check skipped: ") and reasons[name] in lines[0], lines
