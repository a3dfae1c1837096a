"""What tests look at inside an engine, by one name each.

Tests reach through here and nowhere else, so that a part which moves is followed in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def sharded_model(engine: Any) -> Any:
    """The ``ShardedModel``: parameters, gradients and their reducers."""
    return engine._components.sharded


def finalize_grads(engine: Any) -> None:
    """Wait for reductions, so that ``.grad`` is what the step will use."""
    sharded_model(engine).finalize_grads()


def comm_entries(engine: Any) -> Sequence[Any]:
    """What was communicated, an entry a kind and module."""
    return engine.ledger.entries()


def data_mesh(engine: Any) -> Any:
    """The 1-D mesh of ranks with other rows."""
    return engine._components.meshes.dp


def tensor_mesh(engine: Any) -> Any:
    """The 1-D mesh of ranks that split each layer."""
    return engine._components.meshes.tp


def excluded_names(engine: Any) -> Any:
    """Parameters that a checkpoint does not name."""
    return engine._components.param_naming.excluded


def swap_file(engine: Any) -> Any:
    """The parameters' swap file, or None."""
    return sharded_model(engine).swap


def pager(engine: Any) -> Any:
    """What brings parameters in from the swap file."""
    return sharded_model(engine).paging.pager


def gradient_memory(engine: Any) -> Any:
    """The pools of blocks from which reducers take their inputs and outputs."""
    return sharded_model(engine)._collectives.memory


def step_strategy(engine: Any) -> Any:
    """How the optimizer updates: in memory, piecewise on the host, through the disk."""
    return engine.optimizer._strategy


def wait_for_updates(engine: Any) -> None:
    """Wait for updates that another thread makes, where the strategy has one."""
    error = getattr(step_strategy(engine), "wait_for_updates", lambda: None)()
    if error is not None:
        raise error


def optimizer_swap_file(engine: Any) -> Any:
    """The optimizer's swap file, or None."""
    strategy = step_strategy(engine)
    return getattr(getattr(strategy, "inner", strategy), "swap", None)
