"""Row 45 of PAIN_POINTS.md as people meet it: LoRA beside a base in few bits, PEFT's own classes, every stage and tier.

The reference is a plain loop of one process over the whole batch; adapters are then saved in PEFT's layout and loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench._plan_worker import proc_status_mib
from tests.dist.test_plan import peak_mib
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.adapt.quantized_weight import QuantizedWeight, quantize_linears

REUSE_RANKS = True

LR, STEPS = 1e-2, 3
TARGETS = ["q_proj", "v_proj", "down_proj"]
PLACES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 2": {"stage": 2},
    "host": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "nvme": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
}


# Whole blocks of 64 inputs for both of two tensor ranks, three of them for the MLP's.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}


def make_model(weight_format: str | None = "nf4", sizes: dict[str, int] | None = None, **lora: Any) -> Any:
    import peft

    model = tiny_decoder("llama", **(sizes or {}))
    if weight_format is not None:
        assert len(quantize_linears(model, weight_format)) == 7 * model.config.num_hidden_layers  # type: ignore[arg-type]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM", **lora)
    return peft.get_peft_model(model, config)


def batch(step: int) -> torch.Tensor:
    return torch.randint(2, 131, (4, 12), generator=torch.Generator().manual_seed(step))


def train_plain(model: Any, lr: float = LR) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop of one process: its losses, and the adapters at its end."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _train(
    rank: int, world: int, weight_format: str, place: str, folder: str, tensor: int = 1, lr: float = LR
) -> dict[str, Any]:
    import thalweg

    data, sizes = world // tensor, WIDE if tensor > 1 else None

    zero = {
        key: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
        for key, value in PLACES[place].items()
    }
    config = {
        "train_micro_batch_size_per_gpu": 4 // data, "zero_optimization": zero, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "tensor_parallel": {"autotp_size": tensor},
    }  # fmt: skip
    model = make_model(weight_format, sizes)
    engine, *_ = thalweg.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        ids = batch(step).chunk(data)[rank // tensor]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.state_dict()
    if rank == 0:
        model.save_pretrained(f"{folder}/adapter", state_dict=state)
    held = {
        name: p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes
        for name, p in engine.module.named_parameters()
    }
    optimizer: Any = engine.optimizer.inner  # type: ignore[union-attr]
    moments = [v for of in optimizer.state.values() for v in of.values() if isinstance(v, torch.Tensor)]
    engine.close()
    lora = {k: v for k, v in state.items() if "lora_" in k}
    return {"losses": losses, "lora": lora, "held": held, "optimizer": _local_bytes(moments), "config": config}


@pytest.mark.parametrize(
    ("weight_format", "place"),
    [("nf4", "stage 3")]
    + [nightly("int8", place) for place in PLACES]
    + [nightly("nf4", place) for place in ("host", "nvme", "stage 2")],
)
def test_row45_adapters_on_a_sharded_base_in_few_bits_train_as_in_one_process(
    weight_format: str, place: str, tmp_path: Path
) -> None:
    losses, lora = train_plain(make_model(weight_format))
    results = run_ranks(_train, 2, weight_format, place, str(tmp_path))
    mean = torch.tensor([found["losses"] for found in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    assert results[0]["lora"].keys() == lora.keys()

    def gap(other: dict[str, torch.Tensor]) -> float:
        return max(float((results[0]["lora"][name] - other[name]).abs().max()) for name in other)

    # AdamW's first steps go by the sign of a gradient: what is nearly none may go either way.
    assert gap(lora) < 1e-4 < 1e-3 < gap(train_plain(make_model(weight_format), lr=1.2 * LR)[1])
    model = make_model(weight_format)
    weights = [m.weight for m in model.modules() if isinstance(getattr(m, "weight", None), QuantizedWeight)]
    whole = _local_bytes(weights)
    if place == "stage 3":  # each rank's part of the codes; a row that two ranks cannot share is padded
        codes = [sum(size for name, size in found["held"].items() if ".original" in name) for found in results]
        assert max(codes) <= whole / 2 * 1.02
        import thalweg

        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        sizes = {"devices_per_node": 2, "device": "cpu", "sequence_length": 12, "process_bytes": 0}
        planned = thalweg.plan(make_model(weight_format), config, **sizes).per_rank.parameters
        assert planned == pytest.approx(max(sum(found["held"].values()) for found in results), rel=0.02)
    _check_saved(tmp_path / "adapter", results[0]["lora"], weight_format)


@pytest.mark.parametrize(
    ("weight_format", "world", "place"),
    [("nf4", 2, "host"), nightly("nf4", 4, "host"), nightly("nf4", 4, "stage 3"), nightly("int8", 4, "host"),
     nightly("int8", 2, "stage 2")],
)  # fmt: skip
def test_row45_lora_on_a_base_in_few_bits_over_tensor_ranks_trains_as_in_one_process(
    weight_format: str, world: int, place: str, tmp_path: Path
) -> None:
    losses, lora = train_plain(make_model(weight_format, WIDE))
    results = run_ranks(_train, world, weight_format, place, str(tmp_path), 2)
    mean = torch.tensor([found["losses"] for found in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    assert results[0]["lora"].keys() == lora.keys()

    def gap(other: dict[str, torch.Tensor]) -> float:
        return max(float((results[0]["lora"][name] - other[name]).abs().max()) for name in other)

    assert gap(lora) < 1e-4 < 1e-3 < gap(train_plain(make_model(weight_format, WIDE), lr=1.2 * LR)[1])
    if "nvme" not in place and "2" not in place:  # by tier: what rests, and the state of what is trained
        import thalweg

        sizes = {"devices_per_node": world, "device": "cpu", "sequence_length": 12, "process_bytes": 0}
        planned = thalweg.plan(make_model(weight_format, WIDE), results[0]["config"], **sizes).per_rank
        # The plan is of the rank that has most: three blocks of the MLP are two and one.
        held = max(sum(found["held"].values()) for found in results)
        assert held == pytest.approx(planned.parameters, rel=0.02)
        assert max(found["optimizer"] for found in results) == pytest.approx(planned.optimizer, rel=0.05)
        plain = thalweg.plan(make_model(None, WIDE), results[0]["config"], **sizes).per_rank
        times = 3 if weight_format == "nf4" else 2.5  # beside LoRA, and norms, in numbers
        assert plain.parameters > times * planned.parameters  # the control: a base in numbers
    for found in results[1:]:
        assert all(torch.equal(found["lora"][name], value) for name, value in results[0]["lora"].items())
    _check_saved(tmp_path / "adapter", results[0]["lora"], weight_format, WIDE)


FAMILIES = {  # fused sections, a Conv1D's other way round, fewer key-value heads than ranks
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "llama, one": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
}


def _build(family: str, **lora: Any) -> Any:
    import peft

    name, _, one = family.partition(", ")
    model = tiny_decoder(name, **({"num_key_value_heads": 1} if one else {}))
    torch.manual_seed(1)
    lora = {"r": 4, "lora_alpha": 16, "target_modules": FAMILIES[family], "init_lora_weights": False} | lora
    return peft.get_peft_model(model.train("lora_dropout" in lora), peft.LoraConfig(task_type="CAUSAL_LM", **lora))


def _train_cut(rank: int, world: int, family: str, lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    import thalweg

    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "tensor_parallel": {"autotp_size": world},
    }  # fmt: skip
    engine, *_ = thalweg.initialize(model=_build(family, **lora), config=config)
    for step in range(STEPS):
        engine.backward(engine(input_ids=batch(step), labels=batch(step)).loss)
        engine.step()
    state = {name: value for name, value in engine.state_dict().items() if "lora_" in name}
    engine.close()
    return state


@pytest.mark.parametrize("family", [nightly(family) for family in FAMILIES])
def test_lora_is_cut_as_its_layer_is(family: str) -> None:
    want, other = train_plain(_build(family))[1], train_plain(_build(family), lr=1.2 * LR)[1]
    first, second = run_ranks(_train_cut, 2, family, {})
    assert first.keys() == want.keys() and all(torch.equal(first[name], second[name]) for name in first)

    def gap(reference: dict[str, torch.Tensor]) -> float:
        return max(float((first[name] - reference[name]).abs().mean()) for name in reference)

    assert gap(want) < 1e-5 < 1e-4 < gap(other), (gap(want), gap(other))


@pytest.mark.nightly
def test_dropout_before_whole_factors_is_alike_on_tensor_ranks() -> None:
    first, second = run_ranks(_train_cut, 2, "llama, one", {"lora_dropout": 0.5})
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(Exception, match="that is not plain LoRA cannot be cut over tensor ranks; use LoRA"):
        run_ranks(_train_cut, 2, "llama, one", {"use_dora": True}, reuse=False)


def _check_saved(
    folder: Path, lora: dict[str, torch.Tensor], weight_format: str, sizes: dict[str, int] | None = None
) -> None:
    """Row 11: PEFT loads the files beside a base made anew, with the same logits."""
    import peft

    base = tiny_decoder("llama", **(sizes or {}))
    quantize_linears(base, weight_format)  # type: ignore[arg-type]
    loaded, trained = peft.PeftModel.from_pretrained(base, folder).eval(), make_model(weight_format, sizes).eval()
    plain = trained(input_ids=batch(9)).logits
    trained.load_state_dict(lora, strict=False)
    with torch.no_grad():
        want, got = trained(input_ids=batch(9)).logits, loaded(input_ids=batch(9)).logits
    assert torch.equal(got, want) and not torch.equal(want, plain)


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "ia3": {},
    "prefix": {},
    "bottleneck": {},
}


def make_adapted(kind: str) -> Any:
    import peft

    from thalweg.infer.bottleneck import add_bottleneck_adapters

    if kind in ("dora", "rslora"):
        return make_model(None, **KINDS[kind])
    model = tiny_decoder("llama")
    torch.manual_seed(1)
    if kind == "bottleneck":
        add_bottleneck_adapters(model, 4)
        return model
    if kind == "ia3":
        modules = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        return peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM", **modules))
    return peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def _train_kinds(
    rank: int, world: int, zero: dict[str, Any], kinds: list[str], bf16: bool = False, lr: float = LR
) -> dict[str, dict[str, torch.Tensor]]:
    import thalweg

    found = {}
    for kind in kinds:
        config = {
            "train_micro_batch_size_per_gpu": 4 // world, "zero_optimization": zero, "log_level": "error",
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}}, "bf16": {"enabled": bf16},
        }  # fmt: skip
        model = make_adapted(kind)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        engine, *_ = thalweg.initialize(model=model, config=config)
        for step in range(STEPS):
            ids = batch(step).chunk(world)[rank]
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        found[kind] = {name: value for name, value in engine.state_dict().items() if name in trained}
        engine.close()
    return found


@pytest.mark.parametrize("stage", [nightly(0), nightly(1), nightly(2), 3])
def test_peft_s_other_kinds_and_bottlenecks_train_as_in_one_process(stage: int) -> None:
    for kind, got in run_ranks(_train_kinds, 2, {"stage": stage}, list(KINDS))[0].items():
        want, other = train_plain(make_adapted(kind))[1], train_plain(make_adapted(kind), lr=1.2 * LR)[1]
        assert got.keys() == want.keys()

        def gap(reference: dict[str, torch.Tensor], got: dict[str, torch.Tensor] = got) -> float:
            return max(float((got[name] - reference[name]).abs().mean()) for name in reference)

        assert gap(want) < 1e-5 < 1e-4 < gap(other), (kind, gap(want), gap(other))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rslora"])
def test_peft_s_other_kinds_and_bottlenecks_in_bf16_on_the_host_train_as_in_one_process(kind: str) -> None:
    """One process computes in bf16 as well; halves of a batch are rounded otherwise than the whole, so what is asked is
    to be much nearer to it than to a rate a fifth higher."""
    got = run_ranks(_train_kinds, 2, PLACES["host"], [kind], True)[0][kind]
    want, other = (run_ranks(_train_kinds, 1, {"stage": 0}, [kind], True, lr)[0][kind] for lr in (LR, 1.2 * LR))
    assert got.keys() == want.keys() and all(value.dtype == want[name].dtype for name, value in got.items())

    def gap(reference: dict[str, torch.Tensor]) -> float:
        total = sum(float((got[name] - reference[name]).abs().sum()) for name in reference)
        return total / sum(value.numel() for value in reference.values())

    assert gap(want) < 0.4 * gap(other), (gap(want), gap(other))


def _two_adapters(rank: int, world: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Two adapters, the second trained after the first; then the base is thawed; losses by step."""
    import thalweg

    model = make_model(None)
    losses = []
    torch.manual_seed(2)
    model.add_adapter("second", model.peft_config["default"])
    if world == 1:
        engine, optimizer = None, torch.optim.AdamW(_lora(model, "default"), lr=LR, weight_decay=0.0)
    else:
        config = {
            "train_micro_batch_size_per_gpu": 4 // world, "zero_optimization": {"stage": 3}, "log_level": "error",
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        }  # fmt: skip
        engine, optimizer, *_ = thalweg.initialize(model=model, model_parameters=_lora(model, "default"), config=config)
    for step in range(6):
        if step == 2:
            model.set_adapter("second")
            optimizer.add_param_group({"params": _lora(model, "second")})
        if step == 4:
            base = [p for name, p in model.named_parameters() if name.endswith("o_proj.weight")]
            for p in base:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": base})
        ids = batch(step).chunk(world)[rank]
        loss = (engine or model)(input_ids=ids, labels=ids).loss
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    state = engine.state_dict() if engine is not None else dict(model.state_dict())
    if engine is not None:
        engine.close()
    return {key: value for key, value in state.items() if "lora_B" in key or "o_proj" in key}, losses


def _lora(model: Any, adapter: str) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if f".{adapter}." in name]


def test_row45_several_adapters_one_after_the_other_and_a_base_that_thaws() -> None:
    want, losses = run_ranks(_two_adapters, 1)[0]
    results = run_ranks(_two_adapters, 2)
    mean = torch.tensor([found for _, found in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-4, atol=1e-4)
    got = results[0][0]
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().mean()) for name in want) < 1e-5
    for adapter in ("default", "second"):
        assert all(value.abs().max() > 0 for name, value in want.items() if f".{adapter}." in name)


def _merge(rank: int, world: int, place: str, weight_format: str | None, folder: str) -> dict[str, Any]:
    """PEFT's own merge and unmerge between steps: logits and states before, merged and after, and the adapters."""
    import thalweg

    zero = {k: v | {"nvme_path": folder} if isinstance(v, dict) else v for k, v in PLACES[place].items()}
    config = {
        "train_micro_batch_size_per_gpu": 4 // world, "zero_optimization": zero, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
    }  # fmt: skip
    engine, *_ = thalweg.initialize(model=make_model(weight_format), config=config)
    model: Any = engine.module

    def logits() -> torch.Tensor:
        engine.eval()
        with torch.no_grad():
            return engine(input_ids=batch(9)).logits

    def train(step: int) -> None:
        engine.train()
        ids = batch(step).chunk(world)[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    for step in range(2):
        train(step)
    found: dict[str, Any] = {"before": logits(), "untouched": engine.state_dict()}
    model.merge_adapter()
    found |= {"merged": logits(), "merged state": engine.state_dict()}
    model.unmerge_adapter()
    found |= {"after": logits(), "unmerged state": engine.state_dict()}
    train(2)
    found["lora"] = {k: v for k, v in engine.state_dict().items() if "lora_" in k}
    engine.close()
    return found


@pytest.mark.parametrize("place", ["stage 3", nightly("stage 2"), nightly("host"), nightly("nvme")])
def test_peft_s_own_merge_and_unmerge_act_on_shards_as_on_a_whole_model(place: str, tmp_path: Path) -> None:
    results = run_ranks(_merge, 2, place, None, str(tmp_path))
    want = train_plain(make_model(None))[1]
    for found in results:
        plain, weights = make_model(None).eval(), found["merged state"]
        plain.load_state_dict(found["untouched"])
        plain.merge_adapter()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        name = next(name for name in weights if "q_proj.base_layer.weight" in name)
        assert (weights[name] - found["untouched"][name]).abs().max() > 1e-4  # something was merged
        for state in ("merged", "after"):
            torch.testing.assert_close(found[state], found["before"], rtol=1e-4, atol=1e-4)
        for name, value in found["untouched"].items():
            torch.testing.assert_close(found["unmerged state"][name], value, rtol=1e-5, atol=1e-6)
        gap = max(float((found["lora"][name] - want[name]).abs().max()) for name in want)
        assert gap < 1e-4, gap  # and trains on as if it had never been merged


def _recompute(rank: int, world: int, policy: str, place: str, dropout: float) -> tuple[list[float], dict[str, Any]]:
    import thalweg

    config = {
        "train_micro_batch_size_per_gpu": 4 // world, "zero_optimization": PLACES[place], "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}, "seed": 3,
        "activation_checkpointing": {"policy": policy},
    }  # fmt: skip
    engine, *_ = thalweg.initialize(model=make_model("nf4", lora_dropout=dropout), config=config)
    engine.train()
    losses = []
    for step in range(STEPS):
        ids = batch(step).chunk(world)[rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    lora = {k: v for k, v in engine.state_dict().items() if "lora_" in k}
    engine.close()
    return losses, lora


@pytest.mark.parametrize("place", ["stage 3", nightly("host"), nightly("stage 2")])
def test_row12_recomputation_with_lora_and_dropout_changes_no_bit(place: str) -> None:
    kept, again, other = (
        run_ranks(_recompute, 2, policy, place, dropout)
        for policy, dropout in (("none", 0.3), ("full", 0.3), ("full", 0.0))
    )
    for (losses, lora), (want, values), (control, _) in zip(again, kept, other, strict=True):
        assert losses == want != control  # the control: dropout is there, and is drawn as before
        assert lora.keys() == values.keys() and all(torch.equal(lora[name], values[name]) for name in values)


# Large beside what a process has anyway; the base's numbers would be 110 MiB.
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


def _local_bytes(tensors: Any) -> int:
    """What this rank holds of them; of a weight in few bits its codes and scales, not the numbers that it shows."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    parts = [(t.codes, t.scales) if isinstance(t, QuantizedWeight) else (t,) for t in local]
    return sum(part.nbytes for of in parts for part in of)


def _measure(rank: int, world: int, place: str, weight_format: str) -> dict[str, tuple[int, int]]:
    """(found, planned) bytes of a rank, by tier, and of its peak with all that the process has anyway; over two tensor
    ranks."""
    import ctypes
    import gc

    import thalweg
    from thalweg.observe.flops import resident_mib

    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": PLACES[place], "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": LR}}, "tensor_parallel": {"autotp_size": 2},
    }  # fmt: skip
    model = make_model(weight_format, LARGE)
    ids = torch.randint(2, 131, (4, 128), generator=torch.Generator().manual_seed(rank // 2))
    # LLVM and its kernels are the process's, not the model's.
    QuantizedWeight.quantize(torch.randn(1024, 1024), "nf4").dequantize()
    batch = {"input_ids": ids, "labels": ids}
    sizes: dict[str, Any] = {"devices_per_node": world, "device": "cpu", "suggest": False}
    thalweg.plan(model, config, batch=batch, process_bytes=0, **sizes)  # loads 40 MiB of modules, as initialize() would
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what quantising has left behind is not the run's
    base, code = int(resident_mib() * 2**20) - _local_bytes(model.parameters()), proc_status_mib()["RssFile"]
    planned = thalweg.plan(model, config, batch=batch, process_bytes=base, **sizes)
    Path("/proc/self/clear_refs").write_text("5")
    engine, *_ = thalweg.initialize(model=model, config=config)
    del model
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    peak = int(peak_mib(code) * 2**20)
    state: Any = engine.optimizer.inner.state  # type: ignore[union-attr]
    found = {
        "parameters": (_local_bytes(engine.module.parameters()), planned.per_rank.parameters),
        "optimizer": (
            _local_bytes(v for of in state.values() for v in of.values() if isinstance(v, torch.Tensor)),
            planned.per_rank.optimizer,
        ),
        "peak": (peak, planned.per_rank.total),
        "without activations": (peak, planned.per_rank.total - planned.per_rank.activations),
    }
    engine.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_rows_21_22_lora_on_a_base_in_few_bits_over_tensor_ranks_against_its_plan(world: int) -> None:
    """What rests is what was planned; the peak of a process within 5%.  It is 0.92 to 1.03 of the plan (of 50 measured;
    5 are below 0.95, which is too little): holes in glibc's heap differ from rank to rank and turn to turn."""
    for found in run_ranks(_measure, world, "host", "nf4", reuse=False):
        for tier in ("parameters", "optimizer"):
            held, planned = found[tier]
            assert held == pytest.approx(planned, rel=0.02), (tier, found)
        peak, planned = found["peak"]
        assert 0.95 * planned <= peak <= 1.05 * planned, found
        peak, planned = found["without activations"]
        assert peak > 1.1 * planned  # the control: what such a plan would miss is seen
