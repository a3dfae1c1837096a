"""Faults put into the package at run time, and the tests that must catch each: ``python -m tests.faults [NAME ...]``.

A fault replaces one function (or method) as its module is imported, in every process of a test run: pytest itself,
forked ranks, programs started by the command line (tests/fault_injection/sitecustomize.py).  The script runs the tests
named beside a fault, with the fault, prints which of them fail, and ends with 1 if some fault passes them all.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIN = "tests/dist/test_engine_pain_points.py"
DEVICE = "tests/dist/test_devices.py"
LATE = f"{DEVICE}::test_a_device_trains_as_the_cpu_does[late]"
SGD = "tests/dist/test_parity_sgd.py::test_first_gradients_and_updates_are_those_of_one_process"


@dataclass(frozen=True)
class Fault:
    """``make(original)`` gives what stands in for ``target`` of ``module``; ``tests`` must not all pass."""

    module: str
    target: str
    make: Callable[[Any], Any]
    tests: tuple[str, ...]

    def apply(self, module: ModuleType) -> None:
        """Put the fault in."""
        *owners, name = self.target.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, self.make(getattr(owner, name)))


def _scaled(key: str, factor: float) -> Callable[[Any], Any]:
    """Keywords of the optimiser with one multiplied."""

    def make(original: Any) -> Any:
        @wraps(original)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            keywords = original(*args, **kwargs)
            return {**keywords, key: factor * keywords[key]} if key in keywords else keywords

        return faulty

    return make


def _with(**extra: Any) -> Callable[[Any], Any]:
    """Keywords of the optimiser with some more."""
    return lambda original: wraps(original)(lambda *args, **kwargs: {**original(*args, **kwargs), **extra})


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda original: wraps(original)(lambda *args, **kwargs: value)


def _times_ranks(original: Any) -> Any:
    return lambda self, num_ranks: num_ranks * original(self, num_ranks)


def _forgets(label: str) -> Callable[[Any], Any]:
    """The plan's memory counts nothing under one label."""
    return lambda original: (
        lambda self, num_bytes, of, mapped: original(self, 0 if of == label else num_bytes, of, mapped)
    )


def _on_shards(original: Any) -> Any:
    """Each rank works on its own piece of a matrix as if it were the whole."""

    def faulty(shardings: Any, group: Any, get_shard: Any, compute: Any, **kwargs: Any) -> Any:
        for i, _ in original(shardings, group, get_shard, lambda i, matrix: matrix, **kwargs):
            yield i, compute(i, get_shard(i).clone())

    return faulty


def _only_weights(original: Any) -> Any:
    """A load that leaves the optimizer's state as it is."""

    def faulty(self: Any, tensors: Any, **kwargs: Any) -> Any:
        weights = [(name, tensor) for name, tensor in tensors if not name.startswith("optim/")]
        return original(self, weights, **kwargs)

    return faulty


def _old_one_first(original: Any) -> Any:
    """A commit that removes what the tag held before the new checkpoint stands."""

    def faulty(io: Any, directory: Any, temporary: Any, manifest: Any, **kwargs: Any) -> Any:
        remove_tree = importlib.import_module("thalweg.checkpoint.filesystem").remove_tree
        if io.exists(directory / manifest.head.tag):
            remove_tree(io, directory / manifest.head.tag)
        return original(io, directory, temporary, manifest, **kwargs)

    return faulty


def _needs_hidden_size(original: Any) -> Any:
    def faulty(path: str, default: Any, config: Any, hidden: int | None) -> Any:
        if path.endswith("bucket_size") and hidden is None:
            raise AttributeError("the model's config has no hidden_size")
        return original(path, default, config, hidden)

    return faulty


# ---- of devices, tried on the simulated one; C and W: the audit of device paths ---------------------


def _gathers_a_copy(original: Any) -> Any:
    """Shards on the host are page-locked as FSDP2 did: a copy that the optimizer does not write."""

    def faulty(root: Any, *args: Any, **kwargs: Any) -> None:
        original(root, *args, **kwargs)
        for group in importlib.import_module("thalweg.zero.fsdp2.private_api").get_fsdp_groups(root):
            for inner in (param._inner for param in group.params):
                if inner.sharded_param._local_tensor.device.type != group._inner.device.type:
                    inner._sharded_param_data = inner._sharded_param_data.clone().pin_memory()

    return faulty


def _hooks_at_once(original: Any) -> Any:
    """What reads gradients of the host does not wait until they have come."""

    def faulty(self: Any, before: Any, after: Any) -> None:
        self._has_reduction_hooks = True
        self._wrap_post_backward(before, after)

    return faulty


def _cast_at_once(original: Any) -> Any:
    def faulty(self: Any) -> None:
        self._wide.copy_(self._sent)
        self._has_come = True
        del self._sent, self._wide

    return faulty


def _fetch_at_once(original: Any) -> Any:
    """The computing stream does not wait for the copy that brings an activation back."""

    def faulty(self: Any) -> Any:
        self.read_ahead()
        (tensor, _), self._prefetched = self._prefetched, None
        self._offloader.on_fetch(self)
        return tensor

    return faulty


def _read_at_once(original: Any) -> Any:
    def faulty(self: Any, norm: Any, *others: Any) -> None:
        original(self, norm, *others)
        norm.item()

    return faulty


def _from_local(original: Any) -> Any:
    """torch's way to make a DTensor, which takes a piece that rests on the host to the mesh's device."""

    def faulty(local: Any, placements: Any, like: Any, shape: Any = None) -> Any:
        layout = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        return type(like).from_local(local, like.device_mesh, placements, **layout)

    return faulty


def _on_the_host(original: Any) -> Any:
    return lambda arrays, device: original(arrays, importlib.import_module("torch").device("cpu"))


def _unpacked_off_the_host(original: Any) -> Any:
    def faulty(weight: Any, bias: Any, *form: Any) -> Any:
        if weight.device.type == "cpu":
            return original(weight, bias, *form)
        return importlib.import_module("thalweg.ops.linear.packed")._pack_plain(weight, bias)

    return faulty


def _stale_tables(original: Any) -> Any:
    """A graph's replay sees new tokens and positions, and the block tables of its capture."""

    class Inputs:
        def __init__(self, captured: Any, num_rows: int) -> None:
            self._seen = captured[: 2 * num_rows]

        def copy_(self, inputs: Any) -> None:
            self._seen.copy_(inputs[: len(self._seen)])

    def faulty(self: Any, key: Any, inputs: Any) -> Any:
        found = original(self, key, inputs)
        if found is not None:
            found.inputs = Inputs(found.inputs, key[0])
        return found

    return faulty


FAULTS = {
    "a sum in place of a mean": Fault(
        "thalweg.comm.collectives.reducer", "Reducer.mean_scale", _times_ranks, (f"{SGD}[2-fp32]",)
    ),
    "a rate 1.1 times too high": Fault(
        "thalweg.optim.build", "_make_keywords", _scaled("lr", 1.1), (f"{SGD}[2-fp32]", f"{SGD}[2-bf16]")
    ),
    "clipping dropped": Fault("thalweg.optim.step", "clip_factor", _returns(1.0), (f"{SGD}[2-fp32]", f"{SGD}[2-fp16]")),
    "decay nobody asked for": Fault(
        "thalweg.optim.build", "_make_keywords", _with(weight_decay=0.01), (f"{SGD}[2-fp32]",)
    ),
    "a rate 1.25 times too high under ZeRO++": Fault(
        "thalweg.optim.build",
        "_make_keywords",
        _scaled("lr", 1.25),
        ("tests/dist/test_parity_sgd.py::test_quantized_gradients_keep_the_scale_of_an_update",),
    ),
    "a short window divided as a full one": Fault(
        "thalweg.optim.accumulation",
        "AccumulationWindow.mean_factor",
        lambda original: property(lambda self: 1.0),
        (f"{SGD}[2-fp32]",),
    ),
    "a dead engine reported healthy (row 42)": Fault(
        "thalweg.serve.replicas.pool",
        "ReplicaPool.health",
        _returns((True, "")),
        ("tests/unit/test_serve_engine.py::test_row42_overload_completes_and_a_broken_engine_fails_health",),
    ),
    "a client's mistake answered as the server's (R23)": Fault(
        "thalweg.serve.errors",
        "BadRequest.status",
        lambda original: 500,
        ("tests/unit/test_serve_engine.py::test_r23_bad_requests_are_the_clients_fault_and_harm_no_engine",),
    ),
    "a request keeps a block when it ends (R24)": Fault(
        "thalweg.infer.engine.scheduler",
        "BlockPool.release",
        lambda original: lambda self, blocks: original(self, blocks[1:]),
        ("tests/unit/test_serve_engine.py::test_r24_cancellations_leave_no_block_and_harm_nobody",),
    ),
    "the old checkpoint removed before the new one stands (row 36)": Fault(
        "thalweg.checkpoint.directory",
        "commit",
        _old_one_first,
        (
            "tests/unit/test_checkpoint_crash.py"
            "::test_row36_killed_at_every_operation_the_previous_or_the_new_one_loads[same tag]",
        ),
    ),
    "an asynchronous save that copies nothing": Fault(
        "thalweg.checkpoint.background_save",
        "BackgroundSave.copy_to_host",
        lambda original: lambda self, shards: None,
        ("tests/dist/test_checkpoint_async.py::test_an_asynchronous_save_holds_what_was_true_at_the_call",),
    ),
    "a save that does not wait for the one under way": Fault(
        "thalweg.checkpoint.background_save",
        "join_saves",
        lambda original: lambda: None,
        (
            "tests/dist/test_checkpoint_async.py"
            "::test_two_engines_of_a_process_do_not_take_each_others_save_for_left_over",
        ),
    ),
    "moments left behind by a resume (row 1)": Fault(
        "thalweg.checkpoint.reader",
        "Checkpoint.read_into",
        _only_weights,
        ("tests/dist/test_checkpoint_engine.py::test_row01_an_engine_resumes_at_another_world_and_stage[2-stages1]",),
    ),
    "auto asks the model for hidden_size (row 18)": Fault(
        "thalweg.config.resolve",
        "_resolve_auto",
        _needs_hidden_size,
        (f"{PAIN}::test_row18_a_model_without_hidden_size_takes_auto",),
    ),
    "a mismatch without the launcher's variable (row 19)": Fault(
        "thalweg.config.batch_size",
        "_launcher_hint",
        _returns(""),
        (
            "tests/unit/test_config_resolve.py"
            "::test_row19_a_mismatch_shows_both_sides_and_the_missing_launcher_variable",
        ),
    ),
    "a plan without the optimizer's state (row 21)": Fault(
        "thalweg.plan.memory.rank_memory",
        "RankMemory._adjust",
        _forgets("optimizer"),
        ("tests/dist/test_plan.py::test_row21_offload_stays_within_the_plan_and_saves_what_it_says",),
    ),
    "gradients that leave keep a block for each unit (row 21)": Fault(
        "thalweg.comm.collectives.reducer",
        "GradientMemory.share",
        _returns(None),
        ("tests/dist/test_plan.py::test_row21_offload_stays_within_the_plan_and_saves_what_it_says",),
    ),
    "a plan without activations (row 22)": Fault(
        "thalweg.plan.memory.rank_memory",
        "RankMemory._adjust",
        _forgets("activations"),
        ("tests/dist/test_plan.py::test_row22_the_activations_of_many_tokens_are_in_the_plan",),
    ),
    "what exceeds a buffer is dropped (row 24)": Fault(
        "thalweg.optim.offload.io_pipeline",
        "split_into_chunks",
        lambda original: lambda *args: original(*args)[: max(1, len(original(*args)) - 1)],
        ("tests/unit/test_optim_nvme_step.py::test_row24_a_tensor_larger_than_the_buffer",),
    ),
    "every rank logs (row 28)": Fault(
        "thalweg.utils.log",
        "_filter_by_rank",
        lambda original: lambda record: original(record) or True,
        ("tests/e2e/test_run_concurrent.py::test_row28_ranks_that_train_stay_within_a_budget_of_lines",),
    ),
    # Loading compares a model with its Hugging Face one, and takes that where they differ: the fault is in company.
    "requests share a block of keys and values (row 41)": Fault(
        "thalweg.infer.engine.scheduler",
        "BlockPool.allocate_many",
        lambda original: lambda self, count: [block // 2 for block in original(self, count)],
        ("tests/unit/test_serve_engine.py::test_row41_the_server_gives_what_hugging_face_gives",),
    ),
    "a matrix's update computed on shards (row 44)": Fault(
        "thalweg.optim.algorithms.distributed_matrices",
        "compute_on_owners",
        _on_shards,
        (f"{PAIN}::test_row44_each_optimiser_at_each_stage",),
    ),
    "recomputed with other random numbers (row 12)": Fault(
        "thalweg.activation_checkpointing.checkpoint_wrapper",
        "checkpoint",
        lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, "preserve_rng_state": False}),
        ("tests/dist/test_engine_pain_points.py::test_row12_recomputation_with_dropout_changes_no_bit",),
    ),
    "compilation switched off (row 40)": Fault(
        "thalweg.parallelize",
        "_apply_compile",
        _returns(None),
        ("tests/dist/test_engine_pain_points.py::test_row40_compiled_equals_eager",),
    ),
    "a copy of pinned shards is gathered (W1)": Fault(
        "thalweg.zero.fsdp2.private_api", "lazy_init", _gathers_a_copy, (LATE,)
    ),
    "memory of the reduction's stream is given away (W2)": Fault(
        "thalweg.zero.collectives",
        "reduce_held",
        lambda original: lambda reducer, output: reducer.reduce_or_keep(output),
        (f"{DEVICE}::test_what_the_all_reduce_stream_reads_is_not_given_away",),
    ),
    "gradients on their way to the host are used (W3)": Fault(
        "thalweg.zero.fsdp2.private_api", "FSDPGroupHandle.add_reduction_hooks", _hooks_at_once, (LATE,)
    ),
    "gradients on their way to the host are widened (W3)": Fault(
        "thalweg.zero.fsdp2.private_api",
        "ArrivingGrad.cast",
        _cast_at_once,
        (f"{DEVICE}::test_gradients_are_cast_when_they_have_come_and_in_their_order",),
    ),
    "a device's random numbers are not drawn again (W4)": Fault(
        "thalweg.activation_checkpointing.offloaded_forward",
        "checkpoint",
        lambda original: partial(original, preserve_rng_state=False),
        (f"{DEVICE}::test_recomputation_draws_the_same_dropout_wherever_inputs_wait",),
    ),
    "an activation that comes back is not waited for": Fault(
        "thalweg.activation_checkpointing.offload",
        "_PinnedTensor.fetch",
        _fetch_at_once,
        (f"{DEVICE}::test_recomputation_draws_the_same_dropout_wherever_inputs_wait",),
    ),
    "an activation is written to the disk before it has come": Fault(
        "thalweg.activation_checkpointing.offload",
        "_NvmeTensor._wait_for_arrival",
        _returns(None),
        (f"{DEVICE}::test_recomputation_draws_the_same_dropout_wherever_inputs_wait",),
    ),
    "split layers seed the host alone (W5)": Fault(
        "thalweg.parallel.comm_group",
        "seed_rng",
        lambda original: lambda seed: importlib.import_module("torch").default_generator.manual_seed(seed),
        (f"{DEVICE}::test_dropout_of_split_layers_differs_and_of_whole_ones_agrees[None]",),
    ),
    "packed weights are plain off the processor (W6)": Fault(
        "thalweg.infer.quantization.modules",
        "pack_linear",
        _unpacked_off_the_host,
        ("tests/unit/test_infer_devices.py::test_packed_weights_on_a_device_are_those_numbers[llama-int8]",),
    ),
    "phases end before the device has (W7)": Fault(
        "thalweg.utils.timing",
        "PhaseTimer._now",
        lambda original: lambda self: time.perf_counter(),
        (f"{DEVICE}::test_phases_and_memory_are_the_devices",),
    ),
    "an unknown device is planned as an H100 (W8)": Fault(
        "thalweg.plan.spec.devices",
        "find_device",
        lambda original: lambda name: original(name) or original("NVIDIA H100 80GB HBM3"),
        (f"{DEVICE}::test_a_device_that_nobody_knows_is_measured",),
    ),
    "what rests on the host is counted against the device (C1)": Fault(
        "thalweg.plan.preflight",
        "shards_on_host",
        _returns(False),
        (f"{DEVICE}::test_preflight_counts_what_rests_on_the_host_there",),
    ),
    "state of shards on the host lies on the device (C2)": Fault(
        "thalweg.optim.dtensor_local", "make_dtensor", _from_local, (LATE,)
    ),
    "the host's tensors go to the device's library (C3)": Fault(
        "thalweg.parallel_dims",
        "takes_tensors_of",
        _returns(True),
        (f"{DEVICE}::test_a_checkpoint_goes_on_to_the_bit[AdamW-simccl]",),
    ),
    "penalties rest on the host (C4)": Fault(
        "thalweg.infer.engine.sampler",
        "arrays_to_device",
        _on_the_host,
        ("tests/unit/test_infer_devices.py::test_penalties_biases_and_structures_on_a_device",),
    ),
    "two ranks share a device (C5)": Fault(
        "thalweg.device",
        "_may_share",
        _returns(True),
        (f"{DEVICE}::test_a_rank_without_a_device_of_its_own_is_refused_with_the_cure",),
    ),
    "a 0-dim gradient is counted on the host (C7)": Fault(
        "thalweg.zero.expert_params",
        "ScalarParams._known_part",
        lambda original: lambda self, parameter: original(self, parameter).cpu(),
        (LATE,),
    ),
    "a step reads its norm at once (S3)": Fault(
        "thalweg.optim.accumulation",
        "StepResult.__init__",
        _read_at_once,
        ("tests/dist/test_device_syncs.py::test_a_step_of_adamw_waits_for_nothing[2-names0]",),
    ),
    "a start of a job keeps what the last one left in the store": Fault(
        "thalweg.launch.rendezvous",
        "_open_start",
        lambda original: lambda store, restart: store.set("thalweg-start/number", str(restart)) or restart,
        ("tests/unit/test_launch_multi_node.py::test_the_next_start_has_host_0_s_number_and_nothing_of_the_last_one",),
    ),
    "a resume leaves the device's random numbers": Fault(
        "thalweg.checkpoint.model_state",
        "set_rng_state",
        _returns(None),
        (f"{DEVICE}::test_a_checkpoint_goes_on_to_the_bit[AdamW-None]",),
    ),
    "a decoding graph keeps the block tables of its capture": Fault(
        "thalweg.infer.runners.torch_runner",
        "TorchRunner._capture",
        _stale_tables,
        ("tests/unit/test_infer_decode_graph.py::test_tokens_are_those_of_single_launches[llama]",),
    ),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the usual loaders load the one module, then applies the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None, fullname
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self.fault.apply(module)


def install(name: str) -> None:
    """Have the fault put in as its module is imported."""
    sys.meta_path.insert(0, _Finder(FAULTS[name]))


@cache  # tests without a fault, which several faults name
def run(name: str | None, tests: tuple[str, ...]) -> list[str]:
    """The tests that fail, with a fault or without one (None)."""
    paths = [str(ROOT / "tests" / "fault_injection"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if name is not None:
        environ["THALWEG_FAULT"] = name
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rf", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    # A fault that no longer fits what it replaces would be caught by any test.
    for made_by, text in re.findall(r"TypeError: (\w+)\.<locals>(\S* (?:takes|missing|got) .*)", done.stdout):
        if made_by in globals():
            raise RuntimeError(f"{name}: a function of {made_by} is called otherwise: {text}")
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if failed and name is None:  # which should not be: what there is to see is seen now, and perhaps never again
        print(done.stdout[-20_000:], flush=True)
    return failed


def main(names: Sequence[str]) -> int:
    """Run each fault; 1 if one is not caught, or if its tests fail without it."""
    missed = 0
    for name in names or FAULTS:
        fault = FAULTS[name]
        healthy, caught = run(None, fault.tests), run(name, fault.tests)
        verdict = "caught by " + ", ".join(caught) if caught and not healthy else "NOT CAUGHT"
        if healthy:
            verdict += f" (fails without it: {', '.join(healthy)})"
        missed += not caught or bool(healthy)
        print(f"{name} ({fault.module}.{fault.target}): {verdict}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
