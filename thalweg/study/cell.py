"""One process of one cell: load, warm up, measure, write one JSON file.

    python -m thalweg.study.cell SPEC.json

The spec holds all there is to know, and the file that it names gets a result whatever happens: a ``status`` other than
``ok`` comes with a ``reason``.  Peers run this file with their own interpreter, which needs torch and transformers.
"""

import resource
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from thalweg.study.prepare import check_free_memory, load_tokenizer, read_json, write_json
from thalweg.utils.log import enable_console
from thalweg.utils.procfs import end_with_parent, resident_bytes


def run_cell(spec_path: str) -> None:
    """Measure a cell and publish its result."""
    spec = read_json(Path(spec_path))
    enable_console("INFO")  # why the engine has chosen a runner, say: the log is beside the result
    try:
        result = {"status": "ok", **measure(spec)}
    except Exception as error:  # whatever it is, it is the reason in the row
        traceback.print_exc()  # into the cell's log
        result = describe_failure(error)
    write_json(Path(spec["result"]), result)


def describe_failure(error: Exception) -> dict[str, Any]:
    """Return the status and the reason of a cell that could not be measured."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:600]
    if kind == "UnsupportedTechnique":
        return {"status": "unsupported", "reason": text}
    no_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in text
    return {"status": "out of memory" if no_memory else "failed", "reason": f"{kind}: {text}"}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what one process measured; see :func:`measure_inference` and ``training.measure_training``."""
    import torch
    import transformers

    from thalweg.study.techniques import UnsupportedTechnique

    torch.set_num_threads(spec["hardware"]["threads"])
    torch.manual_seed(spec["seed"])
    if spec["task"] == "inference" and spec["hardware"]["ranks"] > 1:
        raise UnsupportedTechnique("ranks are of training; for inference name a technique such as tensor parallel 2")
    spec["rows"] = read_json(Path(spec["data"]))["rows"][: spec["dataset"]["samples"]]
    if spec["hardware"]["planned"]:
        from thalweg.study.training import plan_training

        return plan_training(spec)
    check_memory(spec)
    meter = ResourceMeter(spec["hardware"]["device"], max(1, spec["hardware"]["ranks"] - 1))
    if spec["task"] == "training":
        from thalweg.study.training import measure_training

        measured = measure_training(spec, meter)
    else:
        measured = measure_inference(spec, meter)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    return {**measured, "versions": versions}


def check_memory(spec: dict[str, Any]) -> None:
    """Raise MemoryError where the weights cannot fit in the form that the technique gives them."""
    from thalweg.study.techniques import count_weight_bytes

    options, shape = spec["technique"]["options"], spec["model"]["shape"]
    if spec["task"] == "training":  # fp32 weights, their gradients and two moments beside them
        needed = 16 * spec["hardware"]["ranks"] * shape["parameters"]
    else:
        needed = count_weight_bytes(options, shape)
    if not options.get("weight_offload"):
        check_free_memory(needed, "weights and states", spec["hardware"]["memory"])


class ResourceMeter:
    """Peak memory by tier, and energy where the machine tells it: Intel's RAPL counters, on NVIDIA's devices NVML's."""

    def __init__(self, device: str, num_children: int = 1) -> None:
        self.device, self.num_children = device, num_children
        self.imports = resident_bytes()
        self.load_peak = 0
        self._energy: int | None = None

    def begin(self) -> None:
        """The load is over: the peak and the energy of the measurement begin here."""
        import torch

        self.load_peak = resident_bytes(peak=True)
        with suppress(OSError):  # without it, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")
        if self.device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        self._energy = _energy_microjoules(self.device)

    def end(self, disk_folder: Path) -> dict[str, Any]:
        """Return bytes by tier, and joules since :meth:`begin` (None where nobody tells)."""
        import torch

        energy = _energy_microjoules(self.device)
        # The largest child, for each of them: ranks are alike.
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 * self.num_children
        files = [file for file in disk_folder.rglob("*") if file.is_file()] if disk_folder.is_dir() else []
        return {
            "host_peak": max(self.load_peak, resident_bytes(peak=True)),
            "host_run_peak": resident_bytes(peak=True),
            "host_imports": self.imports,
            "host_children_peak": children,
            "device_peak": torch.accelerator.max_memory_allocated() if self.device != "cpu" else None,
            "disk": sum(file.stat().st_size for file in files),
            "joules": None if None in (energy, self._energy) else (energy - self._energy) / 1e6,  # type: ignore
        }


def _energy_microjoules(device: str = "cpu") -> int | None:
    """The counters of processor packages and, for another ``device``, of all that are visible, together.

    None where there are none, or they are for root alone.
    """
    total, found = 0, False
    if device != "cpu":
        with suppress(Exception):  # no pynvml, no driver of NVIDIA's, or a device that does not count
            import pynvml  # type: ignore
            import torch

            pynvml.nvmlInit()
            devices = torch.get_device_module(device)
            for index in range(devices.device_count()):
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{devices.get_device_properties(index).uuid}")
                total, found = total + 1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), True
    for counter in Path("/sys/class/powercap").glob("intel-rapl:[0-9]*/energy_uj"):
        if counter.parent.name.count(":") == 1:
            with suppress(OSError):
                total, found = total + int(counter.read_text()), True
    return total if found else None


def measure_inference(spec: dict[str, Any], meter: ResourceMeter) -> dict[str, Any]:
    """Return the turns of one process: in each, all samples once.

    ``turns``: seconds in all, medians over batches of the seconds until first tokens and of those of a later step,
    and how many tokens came.  ``outputs``: tokens of each sample, which must be the same in each turn.
    """
    import statistics

    from thalweg.study.metrics import score
    from thalweg.study.schemas import SCHEMAS
    from thalweg.study.techniques import build_generator

    dataset, start = spec["dataset"], time.perf_counter()
    tokenizer = load_tokenizer(spec["model"]["path"])
    texts = [row["input"] for row in spec["rows"]]
    prompts = tokenizer(texts, truncation=True, max_length=dataset["max_prompt_tokens"])["input_ids"]
    generator = build_generator(spec)
    size = len(prompts) if getattr(generator, "continuous", False) else dataset["batch_size"]
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    load_seconds = time.perf_counter() - start
    turns, outputs = [], []
    try:
        for number in range(spec["turns"] + 1):
            if number == 1:
                meter.begin()
            made = [generator.generate(batch, dataset["new_tokens"]) for batch in batches]
            tokens = [one for batch in made for one in batch.outputs]
            if number:
                assert tokens == outputs, "greedy outputs differ from turn to turn"
                steps = [(g.seconds - g.first_seconds) / max(1, max(map(len, g.outputs)) - 1) for g in made]
                turns.append({
                    "seconds": sum(g.seconds for g in made), "tokens": sum(map(len, tokens)),
                    "first_seconds": statistics.median(g.first_seconds for g in made),
                    "step_seconds": statistics.median(steps),
                })  # fmt: skip
            outputs = tokens
        resources = meter.end(Path(spec["scratch"]))
    finally:
        generator.close()
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in outputs]
    quality = score(SCHEMAS[dataset["schema"]].metrics, texts, [row["references"] for row in spec["rows"]])
    return {
        "turns": turns, "outputs": outputs, "quality": quality, "load_seconds": load_seconds, **resources,
        "samples": len(prompts), "batch_size": size, "prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "work": describe_work(spec, generator, size, prompts),
    }  # fmt: skip


def describe_work(spec: dict[str, Any], generator: Any, batch_size: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what a decoding step and a first token move and compute, and the speeds that the plan measures here.

    A step reads the decoder's weights once, and the keys and values of each sequence; what comes from another tier
    comes at that tier's speed.  Bytes and operations are counted, not measured: ``results.predict`` divides them.
    """
    import torch

    from thalweg.plan.spec.cluster import build_cluster

    hardware, dataset = spec["hardware"], spec["dataset"]
    cluster = build_cluster(device=hardware["device"])
    shape, itemsize = spec["model"]["shape"], generator.weight_itemsize
    precision = torch.float32 if itemsize == 4 else torch.bfloat16
    longest, batch = max(map(len, prompts)), min(batch_size, dataset["batch_size"])
    # Half of what is generated is there at the mean step.
    positions = longest + dataset["new_tokens"] / 2
    first_parameters = shape["parameters"] if shape["encoder_decoder"] else shape["decoding_parameters"]
    return {
        "weight_bytes": shape["decoding_parameters"] * itemsize * generator.copies,
        "cache_bytes": batch * positions * shape["kv_elements"] * precision.itemsize,
        "streamed_bytes": generator.streamed_bytes, "tier": generator.tier,
        "runner": getattr(generator, "runner_name", ""),
        "step_flop": 2 * shape["decoding_parameters"] * batch, "first_flop": 2 * first_parameters * batch * longest,
        "first_bytes": first_parameters * itemsize * generator.copies, "precision": str(precision),
        "speeds": {
            "memory": cluster.memory_bandwidth, "host": cluster.host_bandwidth, "disk": cluster.disk_read_bandwidth,
            str(precision): cluster.peak_flops(precision) * (hardware["threads"] if cluster.device == "cpu" else 1),
        },
    }  # fmt: skip


if __name__ == "__main__":
    end_with_parent()
    run_cell(sys.argv[1])
