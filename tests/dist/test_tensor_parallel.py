"""Tensor parallelism against one process: families, uneven heads, stages, checkpoints, traffic."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.parity import full_named, full_tensors
from tests.dist.tensor_models import MODELS, build_model, compute_loss, make_batch
from tests.dist.tensor_parity import TrainResult, make_config, run_engine, run_plain
from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.deferred_init.op_graph import is_meta
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.tensor.tensor_parallel import apply_tensor_parallel
from thalweg.parallel_dims import ParallelDims, build_meshes
from thalweg.zero import Init

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}


def _wrong(name: str, found: TrainResult, plain: TrainResult) -> list[str]:
    differences = found.max_differences(plain)
    return [f"{name}: {key} {value:.1e}" for key, value in differences.items() if not value <= TOLERANCE[key]]


def _families(rank: int, world: int, names: tuple[str, ...], steps: int) -> list[str]:
    torch.set_num_threads(1)
    failures = []
    for name in names:
        model = build_model(name)
        plain = run_plain(model, rows=2, steps=steps)
        found = run_engine(model, rank, world, stage=0, tensor=world, rows=2, steps=steps)
        failures += _wrong(name, found, plain)
    return failures


@pytest.mark.parametrize(("world", "every"), [(2, 3), nightly(2, 1), nightly(4, 1)])
def test_every_family_equals_one_process(world, every):
    pytest.importorskip("transformers")
    for failures in run_ranks(_families, world, tuple(MODELS)[::every], 3, timeout=300):
        assert failures == []


def _stages(rank: int, world: int, cases: list[tuple[str, int, int, dict[str, Any]]], steps: int) -> list[str]:
    torch.set_num_threads(1)
    failures, plain = [], {}
    for name, tensor, stage, extra in cases:
        model = build_model(name)
        if name not in plain:
            plain[name] = run_plain(model, rows=8, steps=steps)
        found = run_engine(model, rank, world, stage=stage, tensor=tensor, rows=8, steps=steps, **extra)
        failures += _wrong(f"{name}, tp {tensor}, stage {stage}, {extra}", found, plain[name])
    return failures


@pytest.mark.parametrize(("steps", "every"), [nightly(4, 3), nightly(20, 1)])
def test_all_stages_equal_one_process_at_four_ranks(steps, every):
    names = ("reference, 5 heads", "llama, 4 heads on 1")
    cases = [(name, 2, stage, {}) for name in names for stage in (0, 1, 2, 3)][::every]  # 0 and 3, and 2 of the other
    cases += [
        ("reference", 2, 3, {"activation_checkpointing": {"policy": "full"}}),
        ("reference", 4, 2, {"cpu_kernels": "auto"}),
    ]
    for failures in run_ranks(_stages, 4, cases, steps, timeout=300):
        assert failures == []


@pytest.mark.nightly
def test_eight_ranks():
    cases = [("reference", tensor, stage, {}) for tensor, stage in ((2, 1), (2, 3), (4, 0), (4, 2))]
    for failures in run_ranks(_stages, 8, cases, 20, timeout=300):
        assert failures == []


def _negative_controls(rank: int, world: int) -> dict[str, float]:
    torch.set_num_threads(1)
    model = build_model("reference")
    plain = run_plain(model, rows=4, steps=5)

    def parameter(**changes: Any) -> float:
        found = run_engine(model, rank, world, stage=1, tensor=2, rows=4, steps=5, **changes)
        return found.max_differences(plain)["parameter"]

    other = build_model("reference", seed=1)
    alien = run_engine(other, rank, world, stage=1, tensor=2, rows=4, steps=5).max_differences(plain)
    return {
        "right": parameter(),
        "learning rate": parameter(lr=0.0501),
        "averaging": parameter(gradient_allreduce_op="sum", gradient_clipping=0.0),
        "weights": alien["parameter"],
    }


def test_negative_controls_fail():
    for found in run_ranks(_negative_controls, 4, timeout=120):
        assert found.pop("right") <= TOLERANCE["parameter"]
        assert all(value > 1e-4 for value in found.values()), found


def _checkpoint(
    rank: int, world: int, name: str, hops: list[tuple[int, int]], start: str | None, save_to: str
) -> list[list[np.ndarray]]:
    """Load ``start`` (or train a little), then save and load through each (tensor, stage); all values."""
    import thalweg

    torch.set_num_threads(1)
    values = []
    at = start
    for index, (tensor, stage) in enumerate(hops):
        config = make_config(stage, tensor, 8, world // tensor)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        engine, *_ = thalweg.initialize(model=build_model(name, seed=index), config=config)
        if at is None:
            for step in range(2):
                engine.backward(compute_loss(engine, make_batch(step, 8)[rank // tensor :: world // tensor]))
                engine.step()
        else:
            engine.load_checkpoint(at)
        at = f"{save_to}/{world}-{index}"
        engine.save_checkpoint(at)
        state = engine.optimizer.state
        own = list(engine.module.parameters())
        moments = [state[p][key] for p in own for key in ("exp_avg", "exp_avg_sq")]
        values.append([t.numpy() for t in full_tensors((*own, *moments))])
        engine.close()
    return values


@pytest.mark.parametrize("name", [nightly("llama, 4 heads on 1"), nightly("reference, 5 heads")])
def test_checkpoints_go_between_tensor_layouts_and_back(tmp_path, name):
    pytest.importorskip("transformers")
    one = run_ranks(_checkpoint, 1, name, [(1, 0)], None, str(tmp_path))[0]
    start = str(tmp_path / "1-0")
    hops = [(2, 3), (4, 1), (1, 2), (2, 0), (4, 3), (1, 3)]
    many = run_ranks(_checkpoint, 4, name, hops, start, str(tmp_path), timeout=120)
    back = run_ranks(_checkpoint, 1, name, [(1, 0)], str(tmp_path / "4-5"), str(Path(tmp_path) / "back"))
    for values in (*(value for of_rank in many for value in of_rank), *back[0]):
        assert all(np.array_equal(a, b) for a, b in zip(values, one[0], strict=True))


def _values(model: torch.nn.Module, world: int) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the loss after a step of an engine on ``world`` tensor ranks."""
    import thalweg

    engine, *_ = thalweg.initialize(model=model, config=make_config(1, world, 2, 1))
    found = full_named(engine.module.named_parameters())
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for step in range(2):
        loss = compute_loss(engine, make_batch(step, 2))
        engine.backward(loss)
        engine.step()
    engine.close()
    return found | {"loss": loss.detach()}


def _deferred(rank: int, world: int, names: tuple[str, ...], folder: str) -> list[str]:
    import transformers

    torch.set_num_threads(1)
    wrong = []

    def compare(name: str, whole: dict[str, torch.Tensor], model: torch.nn.Module, seed: int) -> None:
        found, other = _values(model, world), _values(build_model(name, seed=seed), world)
        if found.keys() != whole.keys() or not all(torch.equal(found[key], whole[key]) for key in whole):
            wrong.append(name)
        if torch.equal(found["loss"], other["loss"]):
            wrong.append(f"{name}: the same with other values")

    for name in names:
        whole = _values(build_model(name, seed=5), world)
        with Init():
            model = build_model(name, seed=5 + rank)  # rank 0's values count
        assert all(parameter.is_meta for parameter in model.parameters())
        compare(name, whole, model, seed=6)
    saved = build_model("llama", seed=7)
    if rank == 0:
        saved.save_pretrained(folder)
    torch.distributed.barrier()
    with Init():
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    compare("llama", _values(saved, world), model, seed=8)
    return wrong


@pytest.mark.parametrize("names", [("reference",), nightly(tuple(MODELS))])
def test_a_model_that_is_never_whole_has_the_values_of_one_that_is(names, tmp_path):
    """Built under ``zero.Init``, from a seed or a checkpoint: bit for bit as cut from the whole model."""
    pytest.importorskip("transformers")
    for wrong in run_ranks(_deferred, 2, names, str(tmp_path), timeout=300):
        assert wrong == []


class _LiveBytes(TorchDispatchMode):
    """The bytes of tensors in memory that operators made, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and not is_meta(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return results

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _peak_of_cutting(rank: int, world: int, deferred: bool) -> tuple[int, int, int]:
    """Bytes of a model, of its largest tensor, and at the peak of building it and keeping this rank's part."""
    meshes = build_meshes(torch.device("cpu"), dims=ParallelDims(tp=world))
    assert meshes.tp is not None and meshes.tp_fsdp is not None
    with Init(enabled=deferred), nullcontext() if deferred else _LiveBytes() as building:
        model = GPT(GPTConfig(vocab_size=64, n_layer=8, n_head=4, n_embd=64, block_size=8))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    with building or _LiveBytes() as cutting:
        group = ParallelGroup(meshes.tp.get_group())
        apply_tensor_parallel(model, group, meshes.tp_fsdp, meshes.world_group, check=False)
    assert not any(is_meta(parameter) for parameter in model.parameters())
    return sum(sizes), max(sizes), cutting.peak


def test_no_rank_holds_the_whole_of_a_deferred_model():
    for total, largest, peak in run_ranks(_peak_of_cutting, 2, True):
        assert peak < 0.55 * total + 3 * largest < 0.7 * total, (peak, total)  # norms are whole
    for total, _, peak in run_ranks(_peak_of_cutting, 2, False):
        assert peak > total  # the control: the meter sees a whole model


class _Unknown(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _unplanned(rank: int, world: int) -> str:
    import thalweg

    with thalweg.zero.Init():
        model = _Unknown()
    with pytest.raises(ValueError, match=r"before it has values; build it outside of zero\.Init") as caught:
        thalweg.initialize(model=model, config=make_config(0, world, 2, 1))
    return str(caught.value)


def test_a_plan_that_only_a_run_shows_needs_values():
    assert all("_Unknown" in message for message in run_ranks(_unplanned, 2))


def _facts(rank: int, world: int) -> dict[str, Any]:
    """State dict, gathered parameters, evaluation, logits, and the ledger of one step."""
    import thalweg
    from thalweg.zero import GatheredParameters

    torch.set_num_threads(1)
    model = build_model("llama")
    tokens = make_batch(0, 2)
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    engine, *_ = thalweg.initialize(model=copy.deepcopy(model), config=make_config(1, world, 2, 1))
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits.cpu()
    found = {
        "logits": float((logits - expected).abs().max()),
        "sampled": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
        "state_dict": all(torch.equal(value, whole[key]) for key, value in engine.state_dict().items()),
        "shapes": all(p.shape == whole[name].shape for name, p in engine.module.named_parameters()),
    }
    parameter = engine.module.model.layers[0].self_attn.q_proj.weight
    with GatheredParameters(parameter, modifier_rank=0):
        parameter.data.mul_(2.0 if rank == 0 else 7.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    found["modified"] = torch.equal(engine.state_dict()[name], 2.0 * whole[name])
    engine.load_state_dict(whole)
    found["loaded"] = all(torch.equal(value, whole[key]) for key, value in engine.state_dict().items())
    engine.train()
    before = {(e.kind, e.module): e.full_bytes for e in engine.ledger.entries() if e.transport == "tensor"}
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    after = [e for e in engine.ledger.entries() if e.transport == "tensor"]
    layer = [e for e in after if ".layers.0." in e.module and e.kind == "all_reduce"]
    found["layer_bytes"] = sum(e.full_bytes - before.get((e.kind, e.module), 0) for e in layer)
    found["sent"] = {e.module: e.sent_bytes * world == 2 * (world - 1) * e.full_bytes for e in layer}
    found["activation_bytes"] = tokens.numel() * model.config.hidden_size * 4
    engine.close()
    return found


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_state_logits_and_traffic(world):
    pytest.importorskip("transformers")
    for found in run_ranks(_facts, world):
        assert found["logits"] < 1e-4 and found["sampled"]
        assert found["state_dict"] and found["shapes"] and found["modified"] and found["loaded"]
        # Megatron-LM: two all-reduces forward and two backward, each of one activation.
        assert found["layer_bytes"] == 4 * found["activation_bytes"]
        assert all(found["sent"].values())
