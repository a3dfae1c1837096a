"""Recomputation and measured kernels under FSDP2: freed and gathered parameters, mixed precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.marks import nightly
from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.ops import patch_linear_layers
from thalweg.ops.linear import functional
from thalweg.ops.linear.kernels import REFERENCE, is_usable

REUSE_RANKS = True

needs_onednn = pytest.mark.skipif(
    not is_usable("nt", "onednn", torch.float32), reason="this torch build has no mkldnn::_linear_pointwise"
)


class _Always:
    """A table that answers one candidate wherever it is usable, and counts its questions by dtype."""

    def __init__(self, name: str) -> None:
        self.name, self.dtypes = name, set[torch.dtype]()

    def best_kernel(self, kind: str, dtype: torch.dtype, *_dims: int) -> str:
        self.dtypes.add(dtype)
        return self.name if is_usable(kind, self.name, dtype) else REFERENCE


def _force(name: str) -> _Always:
    table = _Always(name)
    functional.get_autotune_cache = lambda: table
    functional.MIN_FLOPS = 0.0
    return table


def _model(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=97, n_layer=3, n_head=2, n_embd=32, block_size=16, dropout=dropout))


def _batch(step: int, ranks: slice) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(97, (4, 17), generator=torch.Generator().manual_seed(step))[ranks]
    return tokens[:, :-1], tokens[:, 1:]


def _shard(model: GPT, dtype: torch.dtype | None, reshard: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)


def _full(parameter: nn.Parameter) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()  # type: ignore[attr-defined]


def _train(model: GPT, ranks: slice, average: bool, steps: int = 4) -> list[np.ndarray]:
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(11)
    losses = []
    for step in range(steps):
        loss = model(*_batch(step, ranks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        if average:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        losses.append(value)
    # As arrays: a tensor sent to another process lives only as long as its sender.
    return [tensor.detach().float().numpy() for tensor in (*losses, *map(_full, model.parameters()))]


def _sharded(rank: int, world: int, options: dict[str, Any]) -> list[np.ndarray]:
    table = _force(options.get("kernel", REFERENCE))
    model = _model(options.get("dropout", 0.0))
    names = [name for name, _ in model.named_parameters()]
    if "kernel" in options:
        assert patch_linear_layers(model) == 13
    apply_activation_checkpointing(model, list(model.blocks), options.get("policy", ActivationCheckpointPolicy()))
    dtype = options.get("dtype")
    _shard(model, dtype, options.get("reshard", True))
    assert [name for name, _ in model.named_parameters()] == names
    share = 4 // world
    results = _train(model, slice(rank * share, (rank + 1) * share), average=True)
    assert "kernel" not in options or table.dtypes == {dtype or torch.float32}
    return results


def _sharded_each(rank: int, world: int, cases: list[dict[str, Any]]) -> list[list[np.ndarray]]:
    return [_sharded(rank, world, case) for case in cases]


def _same(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return len(mine) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _close(mine: list[np.ndarray], theirs: list[np.ndarray], tolerance: float) -> bool:
    pairs = zip(mine, theirs, strict=True)
    return all(np.abs(a - b).max() < tolerance for a, b in pairs)


@pytest.mark.parametrize("reshard", [True, nightly(False)], ids=["stage3", "stage2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_recomputation_changes_no_bit(reshard: bool, dtype: torch.dtype | None) -> None:
    common = {"reshard": reshard, "dtype": dtype, "dropout": 0.2}
    policies = (
        ActivationCheckpointPolicy("full"),
        ActivationCheckpointPolicy("selective"),
        ActivationCheckpointPolicy("selective", every=2),
    )
    cases = [common, *({**common, "policy": policy} for policy in policies), {**common, "dropout": 0.3}]
    for plain, *recomputed, other in run_ranks(_sharded_each, 2, cases):
        assert all(_same(got, plain) for got in recomputed)
        assert not _same(other, plain)


@needs_onednn
def test_measured_kernels_on_shards_match_one_process() -> None:
    torch.set_num_threads(1)
    want = _train(_model(), slice(0, 4), average=False)
    wrong = _train(_model(), slice(0, 2), average=False)
    policies = (
        ActivationCheckpointPolicy(),
        ActivationCheckpointPolicy("full"),
        ActivationCheckpointPolicy("selective"),
    )
    results = run_ranks(_sharded_each, 2, [{"kernel": "onednn", "policy": policy} for policy in policies])
    for got in (*results[0], *results[1]):
        assert _close(got[:4], want[:4], 1e-5) and not _close(got[:4], wrong[:4], 1e-5)
        assert _close(got, want, 2e-4) and not _close(got, wrong, 2e-4)
    assert _same(results[0][0], results[0][1]) and _same(results[0][0], results[0][2])


@needs_onednn
def test_measured_kernels_in_mixed_precision() -> None:
    kernels = [(torch.bfloat16, "onednn"), (torch.bfloat16, "fp32"), (torch.float16, "fp32_onednn")]
    cases: list[dict[str, Any]] = []
    for dtype, kernel in kernels:
        cases.append({"dtype": dtype})
        cases.append({"dtype": dtype, "kernel": kernel, "policy": ActivationCheckpointPolicy("full")})
        cases.append({"dtype": dtype, "dropout": 0.5})
    (results, _) = run_ranks(_sharded_each, 2, cases)
    for plain, got, other in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert _close(got[:4], plain[:4], 4e-3)
        assert not _close(other[:4], plain[:4], 4e-3)


def _storages(rank: int, world: int) -> tuple[list[int], list[int], bool]:
    """Bytes behind one block's gathered weight after the forward and in the backward pass."""
    _force("onednn")
    model = _model()
    patch_linear_layers(model)
    seen: list[Tensor] = []
    sizes: list[int] = []
    layer = model.blocks[1].mlp.up
    plain = type(layer).forward

    def spy(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(layer.weight)
        output.register_hook(lambda _grad: sizes.append(seen[0].untyped_storage().size()))

    layer.register_forward_hook(spy)
    _shard(model, None, True)
    loss = model(*_batch(0, slice(rank, rank + 1)))
    freed = [seen[0].untyped_storage().size()]
    loss.backward()
    return freed, sizes, plain is type(layer).forward


@needs_onednn
def test_the_saved_weight_is_the_one_that_is_freed_and_gathered_again() -> None:
    for freed, gathered, switched in run_ranks(_storages, 2):
        assert switched
        assert freed == [0]
        assert gathered == [4 * 128 * 32]
