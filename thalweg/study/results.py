"""From the files of a study to rows: medians with intervals, ratios to the baseline, and why they are what they are."""

import statistics
from pathlib import Path
from typing import Any

from thalweg.study.config import StudyConfig, StudyHardware
from thalweg.study.metrics import MISSING, agreement, estimate, interval, log_ratios
from thalweg.study.prepare import read_json
from thalweg.study.run import CellGroup, StudyCell, list_groups, result_path
from thalweg.utils.formatting import format_bytes


def collect(folder: Path) -> dict[str, Any]:
    """Return all that a report says, as JSON has it: ``rows`` (one a cell), ``planned`` (those of machines that are
    not here), ``noise`` (the null comparison of each group), ``recommended`` (one a group), ``explored``, the config
    and the provenance.

    A study that has not ended gives the rows of what there is; the others are ``not measured``.
    """
    study = read_json(folder / "study.json")
    config = StudyConfig.model_validate(study["config"])
    explored = folder / "explored.json"
    groups = [_group_rows(config, folder, group) for group in list_groups(config) if not group.is_planned]
    planned = [row for group in list_groups(config) if group.is_planned for row in _group_rows(config, folder, group)]
    rows = [row for *techniques, _ in groups for row in techniques]
    _predict([row for row in rows if "work" in row])
    noise, recommended = [], []
    for baseline, *others, null in groups:
        place = {key: null[key] for key in ("hardware", "model", "dataset", "task")}
        known = [
            one for *_, other in groups if all(other[key] == null[key] for key in ("hardware", "task"))
            for one in other.get("log_ratios", ())
        ]  # fmt: skip
        found = null.get("log_ratios")
        noise.append({**place, "status": null["status"], "ratio": estimate(found) if found else None})
        for row in (baseline, *others):
            if "log_ratios" in row:
                row["ratio"] = (1.0, 1.0, 1.0) if row is baseline else estimate(row["log_ratios"], known)
            if row["status"] == "ok":
                row["why"] = explain(row, baseline)
        if baseline["status"] == "ok":
            recommended.append({**place, **_recommend([baseline, *others])})
    return {
        "name": config.name,
        "provenance": study["provenance"],
        "config": study["config"],
        "explored": read_json(explored) if explored.exists() else {},
        "rows": rows,
        "planned": planned,
        "noise": noise,
        "recommended": recommended,
        "notes": [MISSING] if any(None in row.get("quality", {}).values() for row in rows) else [],
    }


def _group_rows(config: StudyConfig, folder: Path, group: CellGroup) -> list[dict[str, Any]]:
    rounds_by_technique = {}
    for cell in group.cells:
        paths = [result_path(folder, cell, number) for number in range(config.rounds)]
        rounds_by_technique[cell.technique.name] = [read_json(path) for path in paths if path.exists()]
    baseline = rounds_by_technique[group.cells[0].technique.name]

    def make_row(cell: StudyCell) -> dict[str, Any]:
        rounds = rounds_by_technique[cell.technique.name]
        model = folder / "models" / f"{Path(cell.name).parts[1]}.json"
        row: dict[str, Any] = {
            "hardware": cell.hardware.name, "model": cell.model.name, "dataset": cell.dataset.name, "task": group.task,
            "random_weights": cell.model.config is not None, "technique": cell.technique.name,
            "kind": cell.technique.kind, "options": cell.technique.options,
            "parameters": read_json(model).get("shape", {}).get("parameters") if model.exists() else None,
        }  # fmt: skip
        bad = next((one for one in rounds if "reason" in one), None)
        if bad is not None or not rounds:
            return row | ({"status": "not measured", "reason": "the study has not come to it"} if bad is None else bad)
        samples = rounds[0]["samples"]
        if rounds[0]["status"] == "planned":
            cost = _cost(cell.hardware, rounds[0]["plan"]["seconds"] / samples)
            return row | rounds[0] | {"random_weights": False} | cost

        def per_sample(which: list[dict[str, Any]]) -> list[list[float]]:
            # Of training a turn is a step; of inference it is all samples once.
            return [[turn["seconds"] / one["samples"] for turn in one["turns"]] for one in which]

        seconds = per_sample(rounds)
        row |= {
            "status": "ok", "rounds": len(rounds), "samples": samples, "batch_size": rounds[0]["batch_size"],
            "seconds_per_sample": interval(seconds),
            "tokens_per_second": statistics.median(
                turn["tokens"] / turn["seconds"] for one in rounds for turn in one["turns"]
            ),
            "load_seconds": statistics.median(one["load_seconds"] for one in rounds),
            "host_peak": max(one["host_peak"] + one["host_children_peak"] for one in rounds),
            "host_run_peak": max(one["host_run_peak"] for one in rounds),
            "host_imports": min(one["host_imports"] for one in rounds),
            "device_peak": rounds[0]["device_peak"], "disk": max(one["disk"] for one in rounds),
            "quality": rounds[0]["quality"], "versions": rounds[0]["versions"],
        }  # fmt: skip
        for key in ("first_seconds", "step_seconds"):
            if key in rounds[0]["turns"][0]:
                row[key] = interval([[turn[key] for turn in one["turns"]] for one in rounds])
        joules = [one["joules"] / (one["samples"] * len(one["turns"])) for one in rounds if one["joules"] is not None]
        row["joules_per_sample"] = statistics.median(joules) if joules else None
        row |= _cost(cell.hardware, row["seconds_per_sample"][0])
        if baseline and all(one["status"] == "ok" for one in baseline):
            row["log_ratios"] = log_ratios(seconds, per_sample(baseline))
            if "outputs" in rounds[0]:
                row["equal_outputs"] = agreement(rounds[0]["outputs"], baseline[0]["outputs"])
                # Equality says little where all samples give the same.
                row["different_outputs"] = len({tuple(one) for one in rounds[0]["outputs"]})
        if group.task == "training":
            row |= {"losses": rounds[0]["losses"], "plan": rounds[0]["plan"]}
        else:
            row["work"] = {**rounds[0]["work"], "speeds": _best([one["work"]["speeds"] for one in rounds])}
        return row

    return [make_row(cell) for cell in group.cells]


def _cost(hardware: StudyHardware, seconds_per_sample: float) -> dict[str, Any]:
    """The price of 1,000 samples, in the currency of the machine's."""
    price = hardware.price_per_hour
    cost = None if price is None else 1000 * seconds_per_sample * price / 3600
    return {"cost_per_1000": cost, "currency": hardware.currency}


def _best(speeds: list[dict[str, float]]) -> dict[str, float]:
    """The best reading of each speed: neighbours only ever make a reading worse."""
    return {key: max(one.get(key, 0.0) for one in speeds) for key in {key for one in speeds for key in one}}


def _predict(rows: list[dict[str, Any]]) -> None:
    """Give rows of inference ``predicted``: seconds of a step and of a first token at the best speeds that any process
    of the study read on the same hardware."""
    speeds = {
        name: _best([row["work"]["speeds"] for row in rows if row["hardware"] == name])
        for name in {row["hardware"] for row in rows}
    }
    for row in rows:
        work, speed = row["work"], speeds[row["hardware"]]
        memory = (work["weight_bytes"] + work["cache_bytes"]) / speed["memory"]
        streamed = work["streamed_bytes"] / speed[work["tier"] or "memory"]
        compute, first = work["step_flop"] / speed[work["precision"]], work["first_flop"] / speed[work["precision"]]
        row["predicted"] = {
            "step_seconds": max(memory, compute, streamed), "memory_seconds": memory, "compute_seconds": compute,
            "streamed_seconds": streamed, "first_seconds": max(first, work["first_bytes"] / speed["memory"], streamed),
            "memory_bandwidth": speed["memory"], "flops": speed[work["precision"]],
        }  # fmt: skip


def explain(row: dict[str, Any], baseline: dict[str, Any]) -> str:
    """Return why a technique takes the time it takes: the plan's bytes and arithmetic beside the measurement."""
    if row["task"] == "training":
        return _explain_training(row)
    work, predicted = row["work"], row["predicted"]
    step, model = row["step_seconds"][0], predicted["step_seconds"]
    parts = [
        f"a step moves {format_bytes(work['weight_bytes'])} of weights and {format_bytes(work['cache_bytes'])} of keys"
        f" and values, {1e3 * predicted['memory_seconds']:.2f} ms at {predicted['memory_bandwidth'] / 1e9:.0f} GB/s;"
        f" its arithmetic takes {1e3 * predicted['compute_seconds']:.2f} ms at {predicted['flops'] / 1e9:.0f} GFLOP/s"
    ]
    if work.get("runner") == "TransformersRunner":
        parts.append("the engine leaves this model to transformers' own code: the log beside the result says why")
    if row["kind"] == "zero3":
        parts.append(
            "stage 3 gathers each parameter before its use and frees it after: read, written and read again for every"
            " token, which a model that fits into memory pays for nothing"
        )
    elif work["streamed_bytes"]:
        ms = 1e3 * predicted["streamed_seconds"]
        parts.append(f"{format_bytes(work['streamed_bytes'])} come from the {work['tier']} in each step, {ms:.2f} ms")
    elif work["tier"] == "host":
        parts.append("weights are read from the page cache itself, and nothing is copied")
    elif work["tier"]:
        parts.append("the ring of buffers holds all weights, so that none is read again")
    if step > model:
        share = 1 - model / step
        parts.append(f"measured {1e3 * step:.2f} ms, of which {share:.0%} is neither: Python, dispatch, waiting")
    else:
        parts.append(f"measured {1e3 * step:.2f} ms, less than the model of the machine gives: weights stay in a cache")
    if baseline is not row and baseline["status"] == "ok":
        times, first = (baseline[key][0] / row[key][0] for key in ("step_seconds", "first_seconds"))
        parts.append(f"the baseline's step takes {times:.2f} times as long, its first token {first:.2f} times")
    return "; ".join(parts) + "."


def _explain_training(row: dict[str, Any]) -> str:
    predicted = row["plan"]
    if "seconds" not in predicted:
        return f"no plan: {predicted.get('error', 'LoRA is not planned')}"
    step = row["seconds_per_sample"][0] * row["samples"]
    memory = row["host_run_peak"] if row["device_peak"] is None else row["device_peak"]
    parts = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in predicted["time"].items() if value)
    return (
        f"the plan says {1e3 * predicted['seconds']:.1f} ms a step ({parts}), limited by {predicted['bottleneck']}, and"
        f" {format_bytes(predicted['bytes'])}; measured {1e3 * step:.1f} ms and {format_bytes(memory)}."
    )


def _recommend(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest technique that costs no quality, and the one that needs the least memory.

    No quality is lost where outputs are the baseline's (and not one for all samples, which any technique would give),
    or where no metric of trained weights is more than a hundredth below; in training, where each loss differs from the
    baseline's by at most a tenth of what that has learned: LoRA and accumulation are other trainings.  A gain whose
    interval holds 1 is none: the baseline stays.  Of techniques as fast as the fastest, by its interval, the study's
    first is it.
    """
    baseline = rows[0]

    def keeps_quality(row: dict[str, Any]) -> bool:
        if row["task"] == "training":
            losses = baseline["losses"]
            learned = abs(losses[0] - losses[-1])
            return all(abs(a - b) <= learned / 10 for a, b in zip(row["losses"], losses, strict=True))
        if row is baseline or (row["equal_outputs"] == 1 and row["different_outputs"] > 1):
            return True
        pairs = [(row["quality"][key], value) for key, value in baseline["quality"].items() if value is not None]
        return not row["random_weights"] and bool(pairs) and all(ours > value - 0.01 for ours, value in pairs)

    candidates = [row for row in rows if row["status"] == "ok" and keeps_quality(row)]
    fastest = max(candidates, key=lambda row: row["ratio"][0])
    fastest = next(row for row in candidates if row["ratio"][0] >= (fastest["ratio"][1] or 0))
    if (fastest["ratio"][1] or 0) <= 1:
        fastest = baseline
    bytes_of, leanest = min(((r["host_peak"] + (r["device_peak"] or 0), r) for r in candidates), key=lambda one: one[0])
    return {
        "fastest": fastest["technique"], "ratio": fastest["ratio"],
        "config": {"kind": fastest["kind"], **fastest["options"]},
        "least_memory": leanest["technique"], "least_memory_bytes": bytes_of,
        "least_memory_config": {"kind": leanest["kind"], **leanest["options"]},
    }  # fmt: skip
