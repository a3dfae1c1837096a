"""A model cut by ``layer_specs`` trains as the same model cut by the plan that it has, bit for bit."""

from __future__ import annotations

from typing import Any

from tests.dist.tensor_models import build_model
from tests.dist.tensor_parity import run_engine, run_plain
from tests.harness import run_ranks

ROWS, STEPS = 4, 3
_SPECS: list[dict[str, Any]] = [
    {"patterns": [r".*\.attention\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r".*\.mlp\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(proj|down)\.weight$"], "partition_type": "row"},
]


def _train(rank: int, world: int, table: dict[str, Any] | None) -> Any:
    tensor = {"autotp_size": world, "partition_config": table}
    model = build_model("reference")
    return run_engine(model, rank, world, stage=1, tensor=world, rows=ROWS, steps=STEPS, tensor_parallel=tensor)


def _runs(rank: int, world: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    plain, known = run_plain(build_model("reference"), ROWS, STEPS), _train(rank, world, None)
    given = _train(rank, world, {"layer_specs": _SPECS})
    alone = _train(rank, world, {"layer_specs": _SPECS, "use_default_specs": False})
    skip = {"patterns": [r".*\.mlp\."], "partition_type": "skip"}
    skipped = _train(rank, world, {"layer_specs": [skip]})
    try:
        _train(rank, world, {"layer_specs": [{**_SPECS[2], "patterns": [r".*\.mlp\.up\."]}]})
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    worst = {name: max(run.max_differences(plain).values()) for name, run in (("alone", alone), ("skipped", skipped))}
    same = all(torch.equal(value, known.parameters[name]) for name, value in given.parameters.items())
    return {"same": same and given.losses == known.losses, "refused": refused, **worst}


def test_specs_train_as_the_plan_that_is_known() -> None:
    for found in run_ranks(_runs, 2):
        assert found["same"]
        assert found["alone"] < 1e-5 and found["skipped"] < 1e-5
        # The control: a row where a column belongs is another model, and is not trained.
        assert "layer_specs does not fit GPT" in found["refused"], found["refused"]
