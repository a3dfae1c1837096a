"""What DeepSpeed's engine shows at stage 3, on Thalweg's parameters and optimizer; the gates as functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks

REUSE_RANKS = True


class _Net(nn.Module):
    """Reads what its parameters say of themselves within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.note = "of the model"
        self.seen: list[Any] = []

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run_blocks(x)
        weight: Any = self.blocks[1].weight
        self.seen.append((weight.ds_status.name, weight.ds_id, tuple(weight.ds_shape)))
        return x


def _engine(stage: int = 3, **sections: Any) -> Any:
    from thalweg.compat.deepspeed.initialization import initialize

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model=_Net() if stage == 3 else nn.Linear(5, 5), config=config | sections)[0]


def _views(rank: int, world: int) -> dict[str, Any]:
    from thalweg.compat.deepspeed.param_views import DeepSpeedGatheredParameters, ZeroParamStatus

    torch.manual_seed(0)
    whole = _Net()
    engine = _engine()
    params = dict(engine.module.named_parameters())
    weight: Any = params["blocks.1.weight"]
    found: dict[str, Any] = {
        "ids": len({p.ds_id for p in params.values()}) == len(params),
        "shape": (tuple(weight.ds_shape), weight.ds_numel, weight.partition_numel()),
        "status": weight.ds_status is ZeroParamStatus.NOT_AVAILABLE,
        "summary": weight.ds_summary()["status"],
        "of the model": engine.note,
    }
    engine.backward(engine(torch.ones(1, 5)).sum())
    found["within"] = engine.module.seen == [("AVAILABLE", weight.ds_id, (5, 5))]
    found["after"] = weight.ds_status.name
    with DeepSpeedGatheredParameters(weight):
        found["gathered"] = (weight.ds_status.name, tuple(weight.shape), tuple(weight.ds_shape))
        found["same values"] = torch.equal(weight, whole.state_dict()["blocks.1.weight"])
    # As TRL generates at stage 3: it takes DeepSpeed's hooks off, and puts them on again.
    with torch.no_grad():
        with DeepSpeedGatheredParameters(list(params.values())):
            offload = engine.optimizer.parameter_offload
            found["hooks within"] = len(offload.forward_hooks)
            for _, param in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
                param.ds_active_sub_modules.clear()
            for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks = offload.backward_hooks = []
            generated = engine.module(torch.ones(1, 5))
            offload._register_deepspeed_module(offload.module)
        found["hooks"] = len(engine.optimizer.parameter_offload.forward_hooks)
        found["generated"] = torch.equal(generated, engine(torch.ones(1, 5)))
    # What is written to this rank's part counts.
    weight.ds_tensor.fill_(rank)
    handle = weight.all_gather_coalesced([weight])
    handle.wait()
    found["written"] = weight.detach().mean(1).tolist()
    found["close"] = torch.allclose(weight, weight.detach().clone())
    with torch.no_grad():
        weight.mul_(2).add_(1)
    weight.partition(has_been_updated=True)
    found["kept"] = (weight.ds_status.name, weight.ds_tensor.unique().tolist())
    found["compared"] = torch.allclose(weight, weight), torch.allclose(weight, params["blocks.0.weight"])
    found["copied"] = copy.deepcopy(weight).ds_status if hasattr(copy.deepcopy(weight), "ds_id") else "a plain DTensor"
    engine.step()
    engine.close()
    return found


def test_parameters_at_stage_3_answer_as_deepspeeds_do() -> None:
    for rank, found in enumerate(run_ranks(_views, 2)):
        rows = 3 if rank == 0 else 2
        assert found == {
            "ids": True, "shape": ((5, 5), 25, rows * 5), "status": True, "summary": "NOT_AVAILABLE",
            "of the model": "of the model", "within": True, "after": "NOT_AVAILABLE",
            "gathered": ("AVAILABLE", (5, 5), (5, 5)), "same values": True, "generated": True,
            "hooks within": 0, "hooks": 3,
            "written": [0.0] * 3 + [1.0] * 2, "close": True,
            "kept": ("NOT_AVAILABLE", [2.0 * rank + 1]), "compared": (True, False), "copied": "a plain DTensor",
        }  # fmt: skip


def _compile(rank: int, world: int) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    engine = _engine()
    engine.module.forward = engine.module.run_blocks  # without what reads the names
    engine.compile(backend="eager")
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 5)).sum())
        engine.step()
    assert engine.module.blocks[1].weight.ds_status.name == "NOT_AVAILABLE"
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": list(counters["graph_break"])}


def test_the_names_are_not_traced_by_torch_compile() -> None:
    for found in run_ranks(_compile, 2, reuse=False):
        assert found["graphs"] > 0
        assert not [reason for reason in found["breaks"] if "set tensor attribute" in reason], found["breaks"]


def _deferred(rank: int, world: int) -> dict[str, Any]:
    from thalweg.compat.deepspeed import param_views as views

    outside = nn.Linear(3, 3)
    with views.DeepSpeedInit():
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(70, 70))  # values of the second are not computed yet
    small, large = net[0].weight, net[1].weight
    with views.DeepSpeedGatheredParameters([small, large], modifier_rank=1):
        gathered = [param.ds_status.name for param in (small, large)]
        if rank == 1:
            nn.init.constant_(large, 7.0)
    views.MultipleAllGatherHandles([views.GatherHandle(), views.GatherHandle()]).wait(handle_dependency=False)
    return {
        "outside": hasattr(outside.weight, "ds_status"),
        "status": [param.ds_status.name for param in net.parameters()],
        "ids": len({param.ds_id for param in net.parameters()}),
        "whole": [tuple(small.ds_shape), large.ds_numel],
        "gathered": gathered,
        "rows": small.ds_tensor.numel(),
        "written": (large.ds_tensor.numel(), large.ds_tensor.unique().tolist()),
    }


def test_parameters_of_zero_init_answer_before_initialize() -> None:
    for rank, found in enumerate(run_ranks(_deferred, 2)):
        assert found == {
            "outside": False, "status": ["NOT_AVAILABLE"] * 4, "ids": 4, "whole": [(3, 3), 4900],
            "gathered": ["AVAILABLE"] * 2, "rows": 6 if rank == 0 else 3, "written": (2450, [7.0]),
        }  # fmt: skip


def _load_gathered(rank: int, world: int) -> list[float]:
    import thalweg

    engine = _engine()
    with thalweg.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if rank == 0:
            state = {name: torch.full_like(value, 3.0) for name, value in engine.module.state_dict().items()}
            engine.module.load_state_dict(state)
    result = [float(value.mean()) for value in engine.state_dict().values()]
    engine.close()
    return result


def test_a_state_dict_is_loaded_into_gathered_parameters() -> None:
    """As DeepSpeed's documentation loads a checkpoint at stage 3: on one rank, in GatheredParameters."""
    assert run_ranks(_load_gathered, 2) == [[3.0] * 4] * 2


CLASSES = {(0, ""): "AdamW", (0, "bf16"): "BF16_Optimizer", (0, "fp16"): "FP16_Optimizer",
           (2, ""): "DeepSpeedZeroOptimizer", (3, "bf16"): "DeepSpeedZeroOptimizer_Stage3"}  # fmt: skip
EXPECTED = {"written": True, "state": [7.0]}


def _flat(rank: int, world: int) -> dict[Any, Any]:
    from thalweg.compat.deepspeed import zero_optimizers

    found: dict[Any, Any] = {}
    for stage in (1, 3):
        sections = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        engine = _engine(stage, **sections)
        optimizer = engine.optimizer
        assert isinstance(optimizer, zero_optimizers.BF16_Optimizer) == (stage == 1)
        whole = torch.cat([value.flatten() for value in engine.state_dict().values()])
        (flat,), (parts,) = optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups
        factor = world * optimizer.nccl_start_alignment_factor
        assert torch.equal(flat[: len(whole)].float(), whole.bfloat16().float()) or stage == 3
        assert len(flat) % factor == 0 and not flat[len(whole) :].any()
        assert torch.equal(torch.cat(parts), flat) and len({len(part) for part in parts}) == 1
        if stage == 1:
            assert flat.dtype == torch.bfloat16 and all(part.data_ptr() % 4 == 0 for part in parts)
            engine.backward((rank + 1) * engine(torch.ones(1, 5, dtype=torch.bfloat16)).sum())
            (grad,) = optimizer.fp32_groups_gradients_flat
            found["grad"] = (grad.dtype, grad[: len(whole)].unique().tolist())
        engine.close()
    return found


def test_what_deepspeed_has_flat_on_every_rank_is_put_together() -> None:
    assert run_ranks(_flat, 2) == [{"grad": (torch.float32, [1.5])}] * 2


def _optimizers(rank: int, world: int) -> dict[Any, Any]:
    from thalweg.compat.deepspeed import zero_optimizers
    from thalweg.optim.step import EngineOptimizer

    found: dict[Any, Any] = {}
    for stage, dtype in CLASSES:
        engine = _engine(stage, **({dtype: {"enabled": True}} if dtype else {}))
        found[stage, dtype] = type(engine.optimizer).__name__
        assert isinstance(engine.optimizer, type(engine.optimizer.inner) if not (stage or dtype) else EngineOptimizer)
        assert isinstance(engine.optimizer, zero_optimizers.ZeROOptimizer) == (stage > 0 or dtype == "bf16")
        if stage:
            engine.backward(engine(torch.ones(1, 5, dtype=engine.get_data_types()[0])).sum())
            (grads,) = engine.optimizer.averaged_gradients.values()
            name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
            masters = getattr(engine.optimizer, name)
            assert [grad.shape for grad in grads] == [master.shape for master in masters]
            masters[0].zero_()
            first = next(iter(engine.state_dict().values()))
            found["written", stage] = bool((first == 0).all())
            engine.step()
            assert engine.tput_timer.global_step_count == 1
            params = engine.optimizer.param_groups[0]["params"]
            states = engine.optimizer.optimizer.state
            assert [states[master]["exp_avg"].shape for master in masters] == [master.shape for master in masters]
            states[masters[1]]["exp_avg"].fill_(7.0)
            found["state", stage] = engine.optimizer.state[params[1]]["exp_avg"].to_local().unique().tolist()
            assert states[masters[0]]["step"] == 1 and not states[torch.ones(1)], "no other tensor finds a state"
            if stage == 3:
                assert [len(group) for group in engine.optimizer.fp16_groups] == [1] * len(masters)
        engine.close()
    return found


def test_an_optimizer_is_of_the_class_that_deepspeed_takes() -> None:
    stages = {stage for stage, _ in CLASSES if stage}
    for found in run_ranks(_optimizers, 2):
        written, state = ({(what, stage): value for stage in stages} for what, value in EXPECTED.items())
        assert found == CLASSES | written | state


class _ByRank(nn.Module):
    """Each rank runs another one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[torch.distributed.get_rank()](x)


def _leaf(rank: int, world: int, leaf: type) -> list[list[float]]:
    from thalweg.compat.deepspeed.initialization import initialize
    from thalweg.zero.leaf_modules import set_z3_leaf_modules

    torch.manual_seed(0)
    model = _ByRank()
    set_z3_leaf_modules(model, [leaf])
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }  # fmt: skip
    engine = initialize(model=model, config=config)[0]
    before = engine.state_dict()
    engine.backward(engine(torch.full((1, 4), rank + 1.0, requires_grad=True)).sum())
    engine.step()
    moved = [value - before[name] for name, value in engine.state_dict().items() if "weight" in name]
    engine.close()
    return [[float(value.min()), float(value.max())] for value in moved]


@pytest.mark.parametrize("leaf", [_ByRank, nn.ModuleList])
def test_ranks_use_other_parts_of_a_leaf_module(leaf: type) -> None:
    """Each layer's gradient is the mean of one rank's and of nothing."""
    for moved in run_ranks(_leaf, 2, leaf):
        assert [pytest.approx(values) for values in ([-0.5, -0.5], [-1.0, -1.0])] == moved


LOGITS = torch.tensor([[2.0, 0.0, 1.0], [2.1, 0.1, 1.0], [2.2, 0.3, 0.0], [0.0, 0.2, 3.0]])


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_the_gate_of_k_experts_keeps_what_its_policy_says(policy: str) -> None:
    """Expert 0 is chosen by tokens 0, 1, 2 and has room for two of them."""
    from thalweg.compat.deepspeed.gating import topkgating

    loss, combine, mask, counts = topkgating(LOGITS, 1, 1.0, 0, drop_policy=policy)
    assert counts.tolist() == [3, 0, 1] and combine.shape == (4, 3, 2) and mask.dtype == torch.bool
    kept = {"probs": [1, 2], "position": [0, 1]}[policy]
    assert mask[:, 0].any(-1).nonzero().flatten().tolist() == kept
    assert [int(mask[token, 0].nonzero()) for token in kept] == [0, 1], "places in the buffer follow the tokens"
    assert float(combine[3, 2].sum()) == 1.0 and 1.0 < float(loss) < 3.0
    with pytest.raises(ValueError, match="drop_policy"):
        topkgating(LOGITS, 1, 1.0, 0, drop_policy="none")


def test_sparse_routes_say_what_the_dense_gate_says() -> None:
    from thalweg.compat.deepspeed.gating import top1gating, top2gating, topkgating

    gates: list[Callable[[bool], Any]] = [
        lambda sparse: top1gating(LOGITS, 1.0, 0, use_rts=False, sparse_routes=sparse),
        lambda sparse: top2gating(LOGITS, 0.5, 0, top2_2nd_expert_sampling=False, sparse_routes=sparse),
        lambda sparse: topkgating(LOGITS, 2, 0.5, 0, sparse_routes=sparse),
    ]
    for gate in gates:
        dense, sparse = gate(False), gate(True)
        _, capacity, num_experts, experts, places, weights, counts = sparse
        rebuilt = torch.zeros(len(LOGITS), num_experts, int(capacity))
        for route in zip(experts.tolist(), places.tolist(), weights.tolist(), strict=True):
            for token, (expert, place, weight) in enumerate(zip(*route, strict=True)):
                if expert >= 0:
                    rebuilt[token, expert, place] += weight
        torch.testing.assert_close(rebuilt, dense[1])
        assert torch.equal(counts, dense[3]) and 0 < int(dense[2].sum()) < 8


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_go_to_experts_and_back_by_sparse_routes(k: int) -> None:
    """As by the products with the dense gate's masks, dropped choices among them."""
    from thalweg.compat.deepspeed.gating import _route_slots, _sparse_decode, _sparse_encode, topkgating

    tokens = torch.arange(8.0).view(4, 2)
    dense = topkgating(LOGITS, k, 0.5, 0)
    _, capacity, num_experts, experts, places, weights, _ = topkgating(LOGITS, k, 0.5, 0, sparse_routes=True)
    slots = _route_slots(experts, places, num_experts, int(capacity))
    buffers = _sparse_encode(tokens, slots, num_experts, int(capacity))
    torch.testing.assert_close(buffers, torch.einsum("sec,sm->ecm", dense[2].float(), tokens))
    back = _sparse_decode(buffers.flatten(0, 1) + 1, slots, weights, len(tokens))
    torch.testing.assert_close(back, torch.einsum("sec,ecm->sm", dense[1], buffers + 1))
    assert (experts < 0).any()
