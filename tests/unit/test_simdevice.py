"""The simulated accelerator: each thing that tests count on it for, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.harness import run_ranks

REUSE_RANKS = True


def on_device(fn: Callable[..., Any], world: int = 1, **options: Any) -> list[Any]:
    return run_ranks(fn, world, device="sim", timeout=60, **options)


def refused(what: Callable[[], object]) -> str:
    try:
        what()
    except RuntimeError as error:
        return str(error).split("\n")[0]
    raise AssertionError("nothing was refused")


# ---- memory -----------------------------------------------------------------------------------------


def _mixes(rank: int, world: int) -> list[str]:
    here, host, other = torch.ones(3, device="sim"), torch.ones(3), torch.ones(3, device=f"sim:{1 - rank}")
    assert torch.equal((here + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))  # a number
    assert torch.equal(here[torch.tensor([0, 2])].cpu(), torch.ones(2))  # indices
    steps = [torch.ones((), device="sim"), torch.ones(())]
    fused = [[host.clone().to("sim")] for _ in range(4)]
    return [
        refused(lambda: here + host),
        refused(lambda: here + other),
        refused(lambda: torch.stack(steps)),
        refused(lambda: torch.ones(()).add_(steps[0])),
        refused(
            lambda: torch._fused_adam_(
                *fused, [], [torch.ones(())],
                lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )
        ),
    ]  # fmt: skip


def test_host_and_device_tensors_do_not_mix():
    messages = on_device(_mixes, 2)[0]
    assert all("Expected all tensors to be on the same device" in message for message in messages), messages


def _kernels_of_the_cpu_alone(rank: int, world: int) -> str:
    with torch.library._scoped_library("simtest", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        assert torch.ops.simtest.double(torch.ones(2)).tolist() == [2.0, 2.0]
        return refused(lambda: torch.ops.simtest.double(torch.ones(2, device="sim")))


def test_an_operator_for_the_cpu_alone_is_refused():
    assert "kernel for the CPU alone" in on_device(_kernels_of_the_cpu_alone)[0]


def _memory(rank: int, world: int) -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.zeros(1000, device="sim")
    y = x + 1
    assert torch.accelerator.memory_allocated() == before + 8000
    del y
    assert torch.accelerator.memory_allocated() == before + 4000
    assert torch.accelerator.max_memory_allocated() >= before + 8000
    free, total = torch.accelerator.get_memory_info()
    assert total - free == before + 4000
    assert bool(torch.empty(4, device="sim").isnan().all()), "fresh memory has no values"
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, device="sim")
    with torch.accelerator.device_index(1 - rank):
        z = torch.zeros(10, device="sim")
        assert z.device == torch.device("sim", 1 - rank)
        assert torch.accelerator.memory_allocated() == 40
    assert torch.accelerator.memory_allocated() == before + 4000


def test_memory_is_counted_and_bounded():
    on_device(_memory, 2)


def _pinned(rank: int, world: int) -> None:
    x = torch.ones(4)
    assert not x.is_pinned()
    for pinned in (
        x.pin_memory(),
        torch.empty(4, pin_memory=True),
        torch.ones(4, device="sim").to("cpu", non_blocking=True),
    ):
        assert pinned.is_pinned() and pinned[1:].is_pinned() and not pinned.clone().is_pinned()


def test_pinned_memory_is_known():
    on_device(_pinned)


def _copies(rank: int, world: int) -> None:
    x = torch.arange(6.0, device="sim").view(2, 3)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    for again in (
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        torch.load(buffer, weights_only=True),
        x.T.clone().T,
    ):
        assert again.device == x.device and again.data_ptr() != x.data_ptr()
        assert torch.equal(again.cpu(), x.cpu())
    layer = torch.nn.Linear(3, 2).to("sim")
    twin = copy.deepcopy(layer)
    x.untyped_storage().resize_(0)
    assert twin(torch.ones(1, 3, device="sim")).device == torch.device("sim", 0)


def test_tensors_are_copied_and_pickled():
    on_device(_copies)


# ---- numbers ----------------------------------------------------------------------------------------


def _as_on_the_cpu(rank: int, world: int) -> None:
    def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 11)
        )
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for step in range(4):
            tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=step == 3):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [p.detach().cpu() for p in model.parameters()]

    (host_losses, host), (losses, device) = train("cpu"), train("sim")
    assert losses == host_losses
    assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


def test_training_equals_the_cpus_in_every_bit():
    on_device(_as_on_the_cpu)


def _rotated(pairs: torch.Tensor, angles: torch.Tensor) -> list[torch.Tensor]:
    """A rotation by complex numbers, its gradient, and what is conjugated in name alone: copied, and worked on."""
    given = pairs.clone().requires_grad_()
    numbers = torch.polar(torch.ones_like(angles), angles)
    rotated = torch.view_as_real(torch.view_as_complex(given) * numbers)
    rotated.square().sum().backward()
    assert given.grad is not None and numbers.conj().is_conj()
    back = torch.view_as_real(torch.view_as_complex(rotated.detach()) * numbers.conj())
    return [rotated.detach(), given.grad, back, numbers.conj().clone(), numbers.conj().imag, numbers.conj().cpu()]


def _complex(rank: int, world: int) -> None:
    torch.manual_seed(0)
    pairs, angles = torch.randn(4, 3, 2), torch.randn(4, 3)
    on_host, here = _rotated(pairs, angles), _rotated(pairs.to("sim"), angles.to("sim"))
    for want, got in zip(on_host, here, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0.0, atol=0.0)
    assert not torch.equal(here[0].cpu(), pairs)
    torch.testing.assert_close(here[2].cpu(), pairs)


def test_complex_numbers_and_their_conjugates_are_the_cpus():
    on_device(_complex)


def _generators(rank: int, world: int) -> None:
    torch.manual_seed(3)
    host, device = torch.rand(5), torch.rand(5, device="sim")
    assert torch.equal(host, device.cpu()), "one seed, the same numbers"
    state = torch.get_device_module("sim").get_rng_state()
    host_state = torch.get_rng_state()
    first = F.dropout(torch.ones(64, device="sim"))
    assert torch.equal(torch.get_rng_state(), host_state), "the host's generator is another one"
    second = F.dropout(torch.ones(64, device="sim"))
    torch.get_device_module("sim").set_rng_state(state)
    again = F.dropout(torch.ones(64, device="sim"))
    assert torch.equal(first, again) and not torch.equal(first, second)
    own = torch.Generator(device="sim").manual_seed(7)
    assert own.device == torch.device("sim", 0)
    drawn = torch.randn(3, device="sim", generator=own)
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(7)))
    refused(lambda: torch.rand(3, device="sim", generator=torch.Generator()))


def test_generators_are_of_the_device():
    on_device(_generators)


# ---- late work --------------------------------------------------------------------------------------


def _missing_waits(rank: int, world: int) -> None:
    from tests.simdevice import late_work

    sim = torch.get_device_module("sim")
    with late_work():
        x, side = torch.ones(4, device="sim"), sim.Stream()
        with sim.stream(side):
            late = x * 2 + 1
            back = late.to("cpu", non_blocking=True)
            back.fill_(-1.0)
            event = side.record_event()
            sent = torch.full((4,), 5.0).pin_memory()
            arrived = sent.to("sim", non_blocking=True)
        assert bool(late.isnan().all()), "nobody has waited"
        assert back.tolist() == [-1.0] * 4, "the host did not wait"
        event.synchronize()
        assert back.tolist() == [3.0] * 4
        assert torch.equal(late.cpu(), torch.full((4,), 3.0))
        sent.fill_(6.0)  # before the copy's turn
        sim.current_stream().wait_stream(side)
        assert arrived.cpu().tolist() == [6.0] * 4
        other = sim.Stream()
        with sim.stream(side):
            first = x + 10
        other.wait_stream(side)
        with sim.stream(other):
            second = first + 1
        other.synchronize()
        assert second.cpu().tolist() == [12.0] * 4, "waits go through streams"


def test_a_missing_wait_gives_a_wrong_number():
    on_device(_missing_waits)


def _early_frees(rank: int, world: int) -> None:
    from tests.simdevice import late_work

    sim = torch.get_device_module("sim")
    with late_work():
        for recorded in (False, True):
            x, side = torch.ones(4, device="sim"), sim.Stream()
            with sim.stream(side):
                late = x + 100
            if recorded:
                x.record_stream(side)
            del x
            sim.current_stream().wait_stream(side)
            assert late.cpu().isnan().tolist() == [not recorded] * 4
        # in one stream's own order memory may be given back at once
        with sim.stream(side):
            late = (torch.ones(4, device="sim") + 1) * 3
        side.synchronize()
        assert late.cpu().tolist() == [6.0] * 4


def test_memory_given_back_too_early_gives_a_wrong_number():
    on_device(_early_frees)


def _random_late(rank: int, world: int) -> None:
    from tests.simdevice import late_work

    sim = torch.get_device_module("sim")
    expected = []
    for stack in (ExitStack(), late_work()):
        with stack:
            torch.manual_seed(1)
            side, x = sim.Stream(), torch.ones(32, device="sim")
            with sim.stream(side):
                first = F.dropout(x)
                noise = torch.rand(4, device="sim")
            second = F.dropout(x)
            side.synchronize()
            expected.append([first.cpu(), noise.cpu(), second.cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*expected, strict=True))


def test_late_random_numbers_are_those_of_their_place():
    on_device(_random_late)


def _syncs(rank: int, world: int) -> None:
    from tests import simdevice

    x = torch.ones(8, device="sim")
    simdevice.reset_counts()
    y = (x * 2).sum()
    torch.full((3,), 1.0).pin_memory().to("sim", non_blocking=True)
    assert simdevice.num_syncs() == (0, {})
    assert simdevice.num_launches() == 3
    float(y)
    x.cpu()
    x[x > 0]
    x.nonzero()
    counts = torch.tensor([1, 2]).pin_memory().to("sim", non_blocking=True)
    torch.repeat_interleave(counts, output_size=3)
    causes = {"item": 1, "copy to the host": 1, "aten::nonzero": 2}  # a mask's places too
    assert simdevice.num_syncs() == (4, causes), simdevice.num_syncs()
    torch.repeat_interleave(counts)
    torch.ones(3).to("sim", non_blocking=True)
    assert simdevice.num_syncs()[0] == 6


def test_host_syncs_and_launches_are_counted():
    on_device(_syncs)


def _asked_at_once(rank: int, world: int) -> list[bool]:
    x = torch.ones(8, device="sim")
    found = []
    for launches in (0, 1):
        event = torch.get_device_module("sim").current_stream().record_event()
        for _ in range(launches):
            x + 1
        found += [event.query(), event.query()]
    return found


def test_an_event_is_not_done_at_once():
    assert on_device(_asked_at_once) == [[False, True, True, True]]


def _times(rank: int, world: int) -> float:
    import time

    sim = torch.get_device_module("sim")
    begin, end = (sim.Event(enable_timing=True) for _ in range(2))
    begin.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_events_tell_time():
    assert 20 <= on_device(_times)[0] < 2000


# ---- collectives ------------------------------------------------------------------------------------


def _collectives(rank: int, world: int) -> None:
    from tests.simdevice import late_work

    def values() -> list[torch.Tensor]:
        x = torch.arange(4.0, device="sim") + rank
        total, mean = x.clone(), x.clone()
        works = [dist.all_reduce(total, async_op=True), dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)]
        scaled, gathered = torch.empty(2, device="sim"), torch.empty(8, device="sim")
        dist.reduce_scatter_tensor(scaled, x.clone(), op=dist._make_nccl_premul_sum(0.5))
        dist.all_gather_into_tensor(gathered, x)
        swapped, theirs = torch.empty(4, device="sim"), torch.empty(4, device="sim")
        dist.all_to_all_single(swapped, x)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        works += dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        return [t.cpu() for t in (total, mean, scaled, gathered, swapped, theirs)]

    expected = [
        torch.tensor([1.0, 3.0, 5.0, 7.0]),
        torch.tensor([0.5, 1.5, 2.5, 3.5]),
        torch.tensor([0.5, 1.5]) if rank == 0 else torch.tensor([2.5, 3.5]),
        torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]),
        torch.tensor([0.0, 1.0, 1.0, 2.0]) if rank == 0 else torch.tensor([2.0, 3.0, 3.0, 4.0]),
        torch.arange(4.0) + 1 - rank,
    ]
    for stack in (ExitStack(), late_work()):
        with stack:
            assert all(torch.equal(a, b) for a, b in zip(values(), expected, strict=True))
    with late_work():
        x = torch.ones(4, device="sim")
        work = dist.all_reduce(x, async_op=True)
        assert x.cpu().tolist() == [1.0] * 4, "nobody has waited"
        work.wait()
        assert x.cpu().tolist() == [2.0] * 4


def test_collectives_equal_their_definition_in_order_and_late():
    on_device(_collectives, 2)


def _device_alone(rank: int, world: int) -> str:
    x = torch.ones(2, device="sim")
    dist.all_reduce(x)
    assert x.cpu().tolist() == [2.0, 2.0]
    dist.barrier()
    return refused(lambda: dist.all_reduce(torch.ones(2)))


def test_a_group_of_the_device_alone_refuses_host_tensors():
    for message in on_device(_device_alone, 2, backend="simccl"):
        assert "No backend type associated with device type cpu" in message


def _one_device_for_two(rank: int, world: int) -> str:
    torch.accelerator.set_device_index(0)
    return refused(lambda: dist.all_reduce(torch.ones(2, device="sim")))


def test_two_ranks_on_one_device_are_refused():
    for message in on_device(_one_device_for_two, 2, reuse=False):
        assert "Duplicate GPU detected" in message
