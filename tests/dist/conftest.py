"""Tests with one body and many parameters share one fork of the ranks; what runs on a device, and what does not."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

Params = dict[str, Any]

# What ``--device sim`` and ``--device cuda`` leave out, by the reason: files, or tests of a file.  All else of this
# folder runs there, and a new test does so by itself.
OF_PROCESSORS: dict[str, tuple[str, ...]] = {
    "the memory that ranks of one host share, which holds no tensors of a device": ("test_comm_shared_memory.py",),
    "the copy of the parameters that a host's ranks share, and what crosses to it": (
        "test_zeropp_state.py::test_all_three_send_less_than_a_quarter_between_hosts",
        "test_zeropp_state.py::test_homes_on_two_hosts_agree_and_stay_near_the_master",
        "test_zeropp_state.py::test_what_has_not_changed_is_not_sent_again",
    ),
    "kernels and threads of processors": ("test_async_reduce.py", "test_comm_onebit.py"),
    "counts the host's memory, in which a device has no tensors": (
        "test_adapters.py::test_rows_21_22_lora_on_a_base_in_few_bits_over_tensor_ranks_against_its_plan",
        "test_offload_memory.py",
        "test_zero_init.py::test_memory_is_that_of_one_tensor",
    ),
    "plans, layouts and norms of the processor that it names": (
        "test_optim_norm.py",
        "test_plan.py",
        "test_plan_mesh.py",
        "test_plan_ranks.py",
        "test_preflight.py",
        "test_shard_spec.py",
    ),
    "the engine's head, which rounds logits to bf16 on a device (docs/decisions/2026-11-24-what-bf16-rounds.md)": (
        "test_rlhf_packing.py::test_log_probabilities_in_bf16_are_not_those_of_rounded_logits",
    ),
    "one copy in a host's memory: a rank that writes to it alone, gathers that it saves, codes that it spares": (
        "test_generate_sharded.py::test_row06_the_hybrid_engine_gathers_each_weight_once_however_many_tokens",
        "test_whole_parameters.py::test_a_rank_that_writes_alone_is_told",
        "test_zeropp.py::test_every_mix_on_every_layout_trains_as_one_process_does",
    ),
    "rollouts by other tensor ranks one step ahead, which devices refuse": (
        "test_rlhf_policy.py::test_rollouts_one_step_ahead_have_the_samples_of_older_weights_and_go_on_with_them",
        "test_rlhf_steps.py::test_every_step_over_tensor_and_data_ranks_equals_data_ranks_alone",
    ),
    "bits of a sum over four ranks, whose order a device's library chooses": (
        "test_frozen.py::test_row45_a_frozen_base_in_few_bits_trains_its_adapters_and_thaws",
        "test_optim_onebit.py::test_zero_one_adam_without_bits_is_adam_to_the_bit",
    ),
    "forks ranks, which CUDA takes from no process that has used it": (
        "test_checkpoint_faults.py::test_row36_an_engine_killed_in_its_own_save_resumes_from_the_last_one_or_this_one",
        "test_rlhf_commit.py",
    ),
    "Hugging Face's Trainer, which takes no device from outside of torch": (
        "test_documentation.py::test_a_page_that_speaks_of_the_users_own_runs",
    ),
    "how ranks meet, before one has a device": ("test_launchers.py",),
    "programs of its own, or the text of sources": ("test_count_files.py", "test_fsdp2_private_names.py"),
}

# What ``--device sim`` alone leaves out.
UNSIMULATED: dict[str, tuple[str, ...]] = {
    "FSDP2 without this library, which moves a model by assigning to .data, across kinds of tensors there": (
        "test_activation_checkpointing_sharded.py",
        "test_checkpoint_export.py::test_sharded_models_are_written_as_the_whole_ones",
        "test_checkpoint_reshard.py",
    ),
    "convolutions, which it has none of": (
        "test_amp.py::test_a_level_trains_as_the_blocks_that_it_is_read_as",
        "test_rlhf_packing.py::test_every_family_gives_a_row_the_numbers_of_the_row_alone",
        "test_tier_draws.py::test_draws_give_the_bits_of_none_and_the_losses_of_one_process",
    ),
    "memory of a fused attention, which is made of parts there": (
        "test_ring_attention.py::test_a_sequence_n_times_as_long_takes_the_same_memory_on_n_ranks",
    ),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a device, leave out what says something of processors alone."""
    if config.getoption("--device") == "cpu":
        return
    reasons, unsimulated = (
        {name: reason for reason, names in table.items() for name in names} for table in (OF_PROCESSORS, UNSIMULATED)
    )
    for item in items:
        file, function = item.path.name, getattr(item, "originalname", item.name)
        reason = reasons.get(file) or reasons.get(f"{file}::{function}")
        if config.getoption("--device") == "sim":
            reason = reason or unsimulated.get(file) or unsimulated.get(f"{file}::{function}")
            reason = "torch.compile, which makes no code for the simulated device" if "compile" in item.name else reason
        if item.path.parent == Path(__file__).parent and reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"of processors alone: {reason}"))


def _run_cases(rank: int, world: int, fn: Callable[..., Any], cases: list[Params]) -> list[Any]:
    """``fn`` for each of ``cases``; each begins with the environment and the random numbers of the first."""
    results, environment = [], dict(os.environ)
    for params in cases:
        torch.manual_seed(0)
        try:
            results.append(fn(rank, world, **params))
        except BaseException as error:
            raise AssertionError(f"{fn.__name__} with {params}: {type(error).__name__}: {error}") from error
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
    return results


@pytest.fixture(scope="module")
def _finished() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def together(request: pytest.FixtureRequest, _finished: dict[tuple[str, int], Any]) -> Callable[..., list[Any]]:
    """``together(fn, world, timeout=...)``: what ``fn(rank, world, **parameters)`` returns on each rank, the
    parameters being those of the test but ``world``.

    All selected tests of the same function and world run in one fork, when the first of them asks.  An
    error in one of them is an error of all.  For what ends ranks, measures their memory or changes a module
    for good, each test needs ranks of its own: ``run_ranks``.
    """

    def run_case(fn: Callable[..., Any], world: int, timeout: float = 240.0) -> list[Any]:
        def get_params(item: Any) -> Params:
            return {key: value for key, value in item.callspec.params.items() if key != "world"}

        function = request.node.originalname
        items = [
            item
            for item in request.session.items
            if getattr(item, "originalname", None) == function
            and item.path == request.node.path
            and item.callspec.params.get("world", world) == world
        ]
        key = (f"{function} {fn.__name__}", world)
        if key not in _finished:
            cases = [get_params(item) for item in items]
            try:
                _finished[key] = run_ranks(_run_cases, world, fn, cases, timeout=timeout)
            except AssertionError as error:
                _finished[key] = error
        results = _finished[key]
        if isinstance(results, AssertionError):
            raise results
        index = items.index(request.node)
        return [rank[index] for rank in results]

    return run_case
