"""DTensor's cache of layouts must never take one cut of a shape for another, and states keep their cut."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache

from tests.dist.auto_plan_models import build_model
from tests.dist.tensor_parity import make_config
from tests.harness import run_ranks
from thalweg.parallel.shard_spec import RaggedShard, ShardSpec, contiguous_spec, split_evenly
from thalweg.parallel_dims import ParallelDims, build_meshes

SIZES = range(8, 8 + 4 * 40, 4)
MANY_SIZES = range(8, 8 + 4 * 4000, 4)  # torch's hashes differ from process to process: forty may miss by chance


def _in_sections(size: int, world: int) -> ShardSpec:
    """Two sections of ``size`` rows, each cut evenly."""
    return ShardSpec(0, 2 * size, tuple(((a, b), (size + a, size + b)) for a, b in split_evenly(size, world)))


def _laid_out(cut: ShardSpec, placement: Placement, mesh) -> DTensor:
    full = torch.arange(float(cut.size))
    own = cut.local_slice(full, mesh.get_local_rank(0))
    layout = (placement, Replicate())
    return DTensor.from_local(own, mesh, layout, run_check=False, shape=full.shape, stride=(1,))


def _mistaken(mesh, size: int, plain: bool) -> int:
    """How many of two tensors of one shape, one in halves and one in two sections, get the other's layout."""
    halves = contiguous_spec(0, size, 2)
    fused = _in_sections(size // 2, 2)
    first: Placement = Shard(0) if plain else halves.placement()
    _clear_fast_path_sharding_prop_cache()  # a small table has few buckets
    wrong = 0
    for cut, placement in ((halves, first), (fused, fused.placement())):
        found = _laid_out(cut, placement, mesh).detach()
        own = repr(found.placements[0]) == repr(placement)
        if not plain:  # ranks that disagree on a layout cannot gather it
            own = own and torch.equal(found.full_tensor(), torch.arange(float(size)))
        wrong += not own
    return wrong


def _cached(rank: int, world: int) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("tp", "dp"))
    wrong = sum(_mistaken(mesh, size, plain=False) for size in SIZES)
    return wrong, any(_mistaken(mesh, size, plain=True) for size in MANY_SIZES)


def test_cuts_of_one_shape_are_not_mistaken_for_each_other():
    for wrong, control in run_ranks(_cached, 2):
        assert wrong == 0
        assert control  # with a plain Shard beside Pieces it happens: the reason for this rule


def _turned(rank: int, world: int) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(24.0).view(8, 3)
    cut = _in_sections(4, world)
    own = cut.local_slice(full, rank)
    held = DTensor.from_local(own, mesh, [cut.placement()], run_check=False, shape=full.shape, stride=full.stride())
    columns = held.redistribute(placements=[Shard(1)])
    return torch.equal(columns.to_local(), full.chunk(world, 1)[rank])


def test_sections_are_redistributed_by_another_dim():
    assert all(run_ranks(_turned, 2))


def _largest(rank: int, world: int, keeps_cuts: bool) -> bool:
    """Whether the largest of each row, a row a line of an uneven cut, comes together again.  torch 2.13 makes the
    placement of this result anew, 2.15 that of nearly every one."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    plain = type(propagator).propagate_op_sharding_non_cached.__get__(propagator)
    mesh, full = init_device_mesh("cpu", (world,)), (torch.arange(24) * 7 % 24).view(8, 3)
    cut = ShardSpec(0, 8, (((0, 2), (4, 7)), ((2, 4), (7, 8))))
    own, placement = cut.local_slice(full, rank), cut.placement()
    if not keeps_cuts:
        propagator.propagate_op_sharding_non_cached = plain
        propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(plain)
    held = DTensor.from_local(own, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())
    largest = held.max(1).values
    if not isinstance(largest.placements[0], RaggedShard):
        return False
    return torch.equal(largest.full_tensor(), full.max(1).values)


def test_results_of_operations_keep_the_cuts():
    assert run_ranks(_largest, 2, True) == [True, True]
    assert run_ranks(_largest, 2, False) == [False, False]


def _no_plain_shard(rank: int, world: int) -> tuple[set[str], set[str]]:
    """Kinds of placement on the tensor axis: of parameters, and of an optimiser's state of 16-bit ones."""
    import thalweg
    from thalweg.optim.algorithms.lion import Lion

    torch.set_num_threads(1)
    config = make_config(0, world, 2, 1)
    engine, *_ = thalweg.initialize(model=build_model("convolved"), config=config)
    held = list(engine.module.parameters())
    kinds = {type(p.placements[0]).__name__ for p in held}
    fused = next(p for p in held if isinstance(p.placements[0], RaggedShard) and not p.placements[0].chunked)
    engine.close()

    param = _half(fused.detach())
    param.grad = _half(torch.zeros_like(fused))
    kept: set[str] = set()
    for optimizer in (torch_adam([param]), Lion([param], lr=0.1)):
        optimizer.step()
        for _ in range(2):
            states = [v for v in optimizer.state[param].values() if isinstance(v, DTensor)]
            assert states
            kept |= {str(v.placements == param.placements and v.placements[0] == param.placements[0])
                     + type(v.placements[0]).__name__ for v in states}  # fmt: skip
            optimizer.load_state_dict(optimizer.state_dict())
    return kinds, kept


def torch_adam(params) -> torch.optim.Optimizer:
    """The engine's own AdamW."""
    from thalweg.optim.build import build_optimizer

    return build_optimizer("AdamW", params, {"lr": 0.1})


def _half(value: DTensor) -> DTensor:
    return DTensor.from_local(
        value.to_local().bfloat16(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def test_no_tensor_axis_has_a_plain_shard():
    for kinds, kept in run_ranks(_no_plain_shard, 2):
        assert kinds == {"RaggedShard", "Replicate"}
        assert kept == {"TrueRaggedShard"}


def _rejoin(rank: int, world: int, folder: str) -> list[bool]:
    """Two jobs in one process, one after the other; the second makes a group of its own before its mesh."""
    same = []
    for job in range(2):
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=world)
        for _ in range(3 * job):
            torch.distributed.new_group([0])
        mesh = build_meshes(torch.device("cpu"), dims=ParallelDims(tp=world)).tp
        assert mesh is not None
        doubled = DTensor.from_local(torch.full((2,), float(rank)), mesh, (Shard(0),)) * 2
        same.append(doubled.device_mesh is mesh)
        assert doubled.full_tensor().tolist() == [0.0, 0.0, 2.0, 2.0]
        torch.distributed.destroy_process_group()
    return same


def test_ranks_that_form_a_second_job_in_one_process_forget_the_groups_of_the_first(tmp_path):
    """Meshes of the same ranks are equal, whatever groups they have; layouts in DTensor's cache have the old ones."""
    assert run_ranks(_rejoin, 2, str(tmp_path), init=False) == [[True, True]] * 2


def test_a_cut_knows_whether_it_is_chunks():
    assert contiguous_spec(0, 10, 2).placement().chunked
    assert contiguous_spec(0, 5, 4, 1).placement().chunked is False  # 2, 1, 1, 1: chunk would give 2, 2, 1, 0
    assert _in_sections(4, 2).placement().chunked is False
    assert ShardSpec(0, 3, (((0, 1),), ((1, 2),), ((2, 3),), ((3, 3),))).placement().chunked
