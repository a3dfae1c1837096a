"""What the preflight knows of an optimizer, by whatever name or hand it came."""

from __future__ import annotations

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
