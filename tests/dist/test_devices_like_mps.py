"""What one process needs on a device that has what Apple's MPS has: one stream, no fp64, no page-locked memory, no
library for collectives, and a module without the names that meshes and FSDP2 ask for.

On a simulated one: no MPS has run this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import simdevice
from tests.dist.models import make_batch, tiny_gpt
from tests.dist.parity import full_tensors
from tests.harness import run_ranks
from tests.marks import nightly

_ON_HOST = {"device": "cpu"}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "host": {"zero_optimization": {"stage": 3, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST}},
    "tokens": {"token_weighted_loss": True, "gradient_accumulation_steps": 2},
    "adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
}


def _register(device: str) -> None:
    if device == "mps-like":
        simdevice.register(like_mps=True)


def _train(rank: int, world: int, device: str, names: tuple[str, ...], lr: float = 1e-2) -> dict[str, Any]:
    import thalweg

    _register(device)
    found = {}
    for name in names:
        config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": lr}}, **CONFIGS[name]}
        config |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.05}
        engine = thalweg.initialize(model=tiny_gpt(), config=config)[0]
        assert engine.device.type == ("sim" if device == "mps-like" else "cpu")
        losses = []
        for step in range(4):
            loss = engine(*(t.to(engine.device) for t in make_batch(step, 4)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found[name] = losses, [p.numpy() for p in full_tensors(engine.module.parameters())]
        engine.close()
    return found


def _difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The worst of losses and parameters."""
    pairs = [pair for name in first for pair in zip(first[name][0], second[name][0], strict=True)]
    arrays = [pair for name in first for pair in zip(first[name][1], second[name][1], strict=True)]
    return max([abs(a - b) for a, b in pairs] + [float(abs(a - b).max()) for a, b in arrays])


def _run(fn: Any, *args: Any) -> Any:
    if (reason := simdevice.missing_tool()) is not None:
        pytest.skip(reason)
    return run_ranks(fn, 1, *args, device="cpu", init=False, reuse=False)[0]


@pytest.mark.parametrize("names", [("stage 0", "stage 3", "tokens", "lamb"), nightly(*[tuple(CONFIGS)])])
def test_one_process_trains_as_on_the_cpu(names):
    """The bound is fp32's: norms are added up in it there.  Of the control the learning rate is off by 1%."""
    on_host, device = _run(_train, "cpu", names), _run(_train, "mps-like", names)
    assert _difference(on_host, device) < 2e-5
    control = _run(_train, "mps-like", names[:1], 1.01e-2)
    assert _difference({names[0]: on_host[names[0]]}, control) > 2e-5


def _decode(rank: int, world: int, device: str) -> dict[str, list[int]]:
    from tests.unit.infer_models import tiny_decoder
    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

    _register(device)
    options = EngineConfig(
        device="sim" if device == "mps-like" else "cpu", dtype="fp32", max_num_seqs=8, max_model_len=100
    )
    engine = load_engine(tiny_decoder("llama"), options, runner="torch")
    drawn = {"temperature": 0.9, "seed": 3}
    for name, fields in {"greedy": {"temperature": 0}, "nucleus": {**drawn, "top_p": 0.8}, "all": drawn}.items():
        engine.add(Request(name, [1, 2, 3], SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_decoding_gives_the_tokens_of_the_cpu():
    """Greedy and drawn ones."""
    pytest.importorskip("transformers")
    on_host = _run(_decode, "cpu")
    assert _run(_decode, "mps-like") == on_host
    assert on_host["greedy"] != on_host["nucleus"] and {len(tokens) for tokens in on_host.values()} == {8}


def _what_it_lacks(rank: int, world: int) -> list[str]:
    _register("mps-like")
    said = []
    for attempt in (
        lambda: torch.ones(2, device="sim").double(),
        lambda: torch.ones(2, device="sim").sum(dtype=torch.float64),
        lambda: torch.ones(2).pin_memory(),
        lambda: torch.get_device_module("sim").Stream(),
        lambda: torch.get_device_module("sim").is_initialized(),
    ):
        try:
            attempt()
        except (TypeError, RuntimeError, AttributeError) as error:
            said.append(type(error).__name__)
    return said


def test_the_device_lacks_what_mps_lacks():
    """The control of the others."""
    assert _run(_what_it_lacks) == ["TypeError", "TypeError", "RuntimeError", "AttributeError", "AttributeError"]
