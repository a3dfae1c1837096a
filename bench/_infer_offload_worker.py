"""One contestant of bench/infer_offload.py, in a process of its own: prints one JSON object.

python bench/_infer_offload_worker.py '{"model": DIR, "stream": "nvme", ...}'
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class PeakMemory:
    """The largest anonymous memory of this process, sampled; what is mapped from files is not in it."""

    def __init__(self) -> None:
        self.anonymous = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_loop, daemon=True)
        self._thread.start()

    def _sample_loop(self) -> None:
        while not self._stop.wait(0.01):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.anonymous = max(self.anonymous, 1024 * int(line.split()[1]))

    def stop(self) -> int:
        """Return the peak."""
        self._stop.set()
        self._thread.join()
        return self.anonymous


def write_model(folder: Path, kind: str, sizes: dict[str, Any], dtype: str) -> None:
    """Write a model with random weights as a safetensors file, a block at a time."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}{suffix}")(config)
    config.architectures = [type(model).__name__]
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    width, names, at = {"float32": 4, "bfloat16": 2}[dtype], {}, 0
    tensors = list(model.named_parameters())
    for name, parameter in tensors:
        end = at + parameter.numel() * width
        label = {"float32": "F32", "bfloat16": "BF16"}[dtype]
        names[name] = {"dtype": label, "shape": list(parameter.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **names}).encode()
    header += b" " * (-len(header) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, parameter in tensors:
            for start in range(0, parameter.numel(), 2**22):
                count = min(2**22, parameter.numel() - start)
                block = torch.randn(count, generator=generator) * 0.02
                if parameter.dim() == 1:
                    block = torch.zeros(count) if name.endswith("bias") else torch.ones(count)
                file.write(block.to(config.dtype).view(torch.uint8).numpy().tobytes())


def random_prompts(vocab: int, batch: int, length: int) -> list[list[int]]:
    """Return random prompts, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocab, (batch, length), generator=generator).tolist()


def run_thalweg(case: dict[str, Any]) -> dict[str, Any]:
    """Decode with the engine: once to warm up, then ``rounds`` times."""
    import torch

    from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

    torch.set_num_threads(case["threads"])
    fields = {"quantize": case["form"]} if case["form"].startswith("int") else {"dtype": case["form"]}
    options = EngineConfig(
        max_num_seqs=case["batch"], max_model_len=case["prompt"] + case["new"], weight_offload=case["stream"],
        weight_offload_dir=case["folder"], weight_offload_bytes=case.get("memory"),
        kv_cache_bytes=case.get("kv_memory"), max_num_batched_tokens=case.get("max_step_tokens", 512),
        enable_prefix_caching=False, **fields,
    )  # fmt: skip
    start = time.perf_counter()
    engine = load_engine(case["model"], options)
    result: dict[str, Any] = {"load_s": time.perf_counter() - start, "tokens": [], "tok_s": []}
    meter: Any = getattr(getattr(engine.runner, "_weights", None), "file", None)
    for number in range(case["rounds"] + 1):
        found: dict[str, list[int]] = {}
        for i, prompt in enumerate(random_prompts(engine.metadata.vocab_size, case["batch"], case["prompt"])):
            engine.add(Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=case["new"])))
        decoded, since, read = 0, 0.0, 0
        while engine.has_work():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
                decoded += bool(since)
            if not since and len(found) == case["batch"]:
                since, read = time.perf_counter(), meter.reads.nbytes if meter else 0
        seconds = time.perf_counter() - since
        result["tokens"] = [found[str(i)] for i in range(case["batch"])]
        if number:
            result["tok_s"].append(decoded / seconds)
            if meter and case["stream"] == "nvme":
                result.setdefault("read_rate", []).append((meter.reads.nbytes - read) / seconds)
    result["weight_bytes"] = getattr(engine.runner, "weight_bytes", None)
    engine.close()
    return result


def run_accelerate(case: dict[str, Any]) -> dict[str, Any]:
    """Decode with Hugging Face's generate, accelerate's ``disk_offload`` below it."""
    import torch
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(case["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(case["model"], dtype="auto")
    if case["stream"]:
        disk_offload(model, case["folder"], offload_buffers=False, execution_device=torch.device("cpu"))
    tokens = torch.tensor(random_prompts(model.config.vocab_size, case["batch"], case["prompt"]))
    result: dict[str, Any] = {"tok_s": []}
    for number in range(case["rounds"] + 1):
        times = []
        for count in (1, case["new"]):
            start = time.perf_counter()
            out = model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            times.append(time.perf_counter() - start)
        result["tokens"] = out[:, tokens.shape[1] :].tolist()
        if number:
            result["tok_s"].append(case["batch"] * (case["new"] - 1) / (times[1] - times[0]))
    return result


def main() -> None:
    """Run the case."""
    case = json.loads(sys.argv[1])
    if case["who"] == "write":
        write_model(Path(case["model"]), case["kind"], case["sizes"], case["dtype"])
        print("{}")
        return
    peak = PeakMemory()
    result = {"thalweg": run_thalweg, "accelerate": run_accelerate}[case["who"]](case)
    result["peak_anonymous"] = peak.stop()
    result["peak_resident"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result["tok_s"] = statistics.median(result["tok_s"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
