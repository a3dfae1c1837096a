"""Whole configs as DeepSpeed 0.9 took them, unchanged: what its successors dropped loads and acts.

Every case is a complete file of that time: the keys below, which all runs had, and one feature as its tutorial writes
it, with the keys that mean nothing here (``cuda_aware``, ``quantizer_kernel``) left in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.models import SEQ_LEN, VOCAB_SIZE, make_batch, tiny_gpt, token_rows, write_length_index
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.test_compression import technique
from thalweg.compression import redundancy_clean
from thalweg.compression.layers import iter_compressed

REUSE_RANKS = True
STEPS = 8

OF_THAT_TIME: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 1000,
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "dump_state": False,
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
    "tensorboard": {"enabled": False, "output_path": "output/", "job_name": "bert"},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
}
_BACKEND = {"cuda_aware": False, "comm_backend_name": "nccl"}
_BITS = {"lr": 1e-2, "weight_decay": 0.01, **_BACKEND}
_EIGENVALUE = {
    "enabled": True,
    "verbose": True,
    "max_iter": 6,
    "tol": 1e-1,
    "stability": 0,
    "gas_boundary_resolution": 1,
}
_EIGENVALUE |= {"layer_name": "blocks", "layer_num": 3}
_MOQ = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize_type": "symmetric",
    "quantize_groups": 1,
    "quantize_bits": {"start_bits": 8, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
    "quantize_algo": {"q_type": "symmetric", "rounding": "nearest"},
    "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
}
_PACE = {"total_curriculum_step": 4, "difficulty_step": 2}


def _compression() -> dict[str, Any]:
    bits = {"start_bits": 6, "target_bits": 4, "quantization_period": 2}
    config: dict[str, Any] = {"compression_training": {}}
    for part in (
        technique("weight_quantization", ["qkv$"], bits, quantizer_kernel=True, quantize_weight_in_forward=True),
        technique("activation_quantization", ["up$"], {"bits": 6}, range_calibration="dynamic"),
        technique("sparse_pruning", ["down$"], {"dense_ratio": 0.5}, method="l1"),
    ):
        config["compression_training"] |= part["compression_training"]
    return config


def _data_efficiency(index: str) -> dict[str, Any]:
    schedule = {"min_value": 4, "max_value": SEQ_LEN, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 6, "seq_per_step": 2}
    ltd = {"enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1]}
    ltd |= {"model_mask_name": "attention_mask", "model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
    ltd |= {"random_ltd_schedule": schedule, "layer_token_lr_schedule": {"enabled": False}}
    metric = {"index_to_sample_path": f"{index}/seqlen/seqlen_index_to_sample", "difficulty_type": "value"}
    metric |= {"index_to_metric_path": f"{index}/seqlen/seqlen_index_to_metric", "clustering_type": "schedule_based"}
    metric |= {"min_difficulty": 8, "max_difficulty": SEQ_LEN, "schedule_type": "fixed_linear"}
    metric["schedule_config"] = {"total_curriculum_step": 40, "difficulty_step": 1}
    sampling = {"enabled": True, "num_epochs": 3, "num_workers": 0}
    sampling["curriculum_learning"] = {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
    sampling["curriculum_learning"] |= {"data_cluster_path": f"{index}/clusters"}
    routing = {"enabled": True, "random_ltd": ltd}
    return {"data_efficiency": {"enabled": True, "seed": 1234, "data_routing": routing, "data_sampling": sampling}}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 2}}
    return {"optimizer": {"type": name, "params": {**_BITS, **params}}, "scheduler": schedule}


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "OneBitAdam": lambda _: _optimizer("OneBitAdam", freeze_step=5),
    "OneBitLamb": lambda _: _optimizer(
        "OneBitLamb", freeze_step=2, max_coeff=0.3, min_coeff=0.01, coeff_beta=0.9, factor_max=4.0, factor_min=0.5,
        factor_threshold=0.1, bias_correction=False,
    ),
    "ZeroOneAdam": lambda _: _optimizer(
        "ZeroOneAdam", var_freeze_step=6, var_update_scaler=4, local_step_scaler=1, local_step_clipper=2,
        bias_correction=False,
    ),
    "sparse_attention fixed": lambda _: {
        "sparse_attention": {
            "mode": "fixed", "block": 2, "different_layout_per_head": True, "num_local_blocks": 3,
            "num_global_blocks": 1, "attention": "unidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 2,
        }
    },
    "sparse_attention bigbird": lambda _: {
        "sparse_attention": {
            "mode": "bigbird", "block": 2, "different_layout_per_head": True, "num_random_blocks": 1,
            "num_sliding_window_blocks": 1, "num_global_blocks": 1, "attention": "unidirectional",
        }
    },
    "progressive_layer_drop": lambda _: {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 1.0}},
    "curriculum_learning": lambda _: {
        "curriculum_learning": {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": 8,
            "schedule_type": "fixed_linear", "schedule_config": _PACE,
        }
    },
    "MoQ with eigenvalue": lambda _: {"quantize_training": {**_MOQ, "eigenvalue": _EIGENVALUE}},
    "MoQ and an eigenvalue block": lambda _: {"quantize_training": _MOQ, "eigenvalue": _EIGENVALUE},
    "random_ltd with sampling": _data_efficiency,
    "compression_training": lambda _: _compression(),
}  # fmt: skip


def _rows() -> list[dict[str, torch.Tensor]]:
    """Token ids of lengths 4 to 12."""
    return token_rows(48, SEQ_LEN + 1, VOCAB_SIZE)


def _train(rank: int, world: int, feature: dict[str, Any], on_rows: bool) -> tuple[list[float], dict[str, Any]]:
    """The losses, and what has been seen of the feature from outside."""
    import thalweg
    from thalweg.data.dynamic_batching import pad_collate

    os.environ["THALWEG_HOST"] = f"host {rank}"
    model = tiny_gpt()
    lengths: list[int] = []  # of what the attention of each block that runs is given
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    config = {**OF_THAT_TIME, "log_level": "error", **feature}
    engine, _, loader, _ = thalweg.initialize(model=model, config=config, training_data=_rows() if on_rows else None)
    batches: Any = None
    if on_rows:
        loader.collate_fn = pad_collate
        batches = iter(loader)
    losses = []
    for _ in range(STEPS):
        if on_rows:
            loss = engine(**next(batches))
        else:
            tokens, labels = make_batch(0, 2 * world)
            loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    layers = iter_compressed(engine.module)
    found = {
        "transports": {entry.transport for entry in engine.ledger.entries() if entry.kind == "all_reduce"},
        "lengths": list(lengths),
        "bits": {name: layer.compression.bits for name, layer in layers.items()},
        "switches": {layer.compression.next_switch for layer in layers.values()},
    }
    x = torch.randn(1, SEQ_LEN, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    engine.module.blocks[0](x)[0, -1].sum().backward()
    assert x.grad is not None
    found["seen by the last token"] = int(x.grad.abs().sum(-1).count_nonzero())
    cleaned = redundancy_clean(engine, engine.config) if layers else engine.module
    found["zeros"] = float((cleaned.blocks[0].mlp.down.weight == 0).float().mean())
    engine.close()
    return losses, found


def _run(rank: int, world: int, case: str, index: str) -> dict[str, Any]:
    on_rows = case == "random_ltd with sampling"
    plain, seen_without = _train(rank, world, {}, on_rows)
    losses, seen = _train(rank, world, CASES[case](index), on_rows)
    return {"plain": plain, "losses": losses, "without": seen_without, "with": seen}


def _acts(case: str, seen: dict[str, Any]) -> bool:
    """Whether what the feature does has happened, as seen from outside."""
    if case.startswith(("OneBit", "ZeroOne")):
        return "onebit" in seen["transports"]
    if case == "progressive_layer_drop":
        return len(seen["lengths"]) < 3 * STEPS  # of blocks that ran
    if case == "curriculum_learning":
        return (
            seen["lengths"][0] == 4 and set(seen["lengths"]) == {4, 6, 8} and seen["lengths"] == sorted(seen["lengths"])
        )
    if case.startswith("MoQ"):
        return min(seen["bits"].values(), default=8) < 8 and len(seen["switches"]) > 1
    if case.startswith("random_ltd"):
        first, routed = seen["lengths"][::3], seen["lengths"][1::3]
        return routed[0] == 4 < first[0] and all(map(int.__le__, routed, first)) and max(first[:2]) <= 8
    if case == "compression_training":
        return 4 in seen["bits"].values() and seen["zeros"] == 0.5
    return seen["seen by the last token"] < SEQ_LEN


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_length_index(_rows(), str(tmp_path_factory.mktemp("index")))


@pytest.mark.parametrize("case", [nightly(case) if "eigenvalue" in case else case for case in CASES])
def test_a_config_of_that_time_loads_and_acts(case: str, index: str) -> None:
    for found in run_ranks(_run, 2, case, index):
        assert _acts(case, found["with"]), found["with"]
        assert not _acts(case, found["without"]), "the check is blind: it holds of a run without the feature"
        assert found["losses"] != pytest.approx(found["plain"], abs=1e-5)
        assert found["losses"][-1] < found["losses"][0]
