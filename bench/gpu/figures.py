"""The checks of `run.py` that measure: each prints one JSON object and raises where what must hold does not.

python bench/gpu/figures.py syncs --device cuda
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]


def _model(small: bool, layers: int = 12, width: int = 768) -> torch.nn.Module:
    from _llama import Llama

    if small:
        return Llama(layers=2, heads=4, kv_heads=2, width=64, hidden=128, vocabulary=512)
    return Llama(layers=layers, heads=12, kv_heads=12, width=width, hidden=8 * width // 3, vocabulary=32000)


def _tokens(small: bool, device: torch.device, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 512 if small else 32000, (rows, 32 if small else 1024), device=device)


def _engine(model: torch.nn.Module, stage: int = 0, **config: Any) -> Any:
    import thalweg

    zero = {"stage": stage, **config.pop("zero_optimization", {})}
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        **config,
    }
    return thalweg.initialize(model=model, config=found)[0]


def _step(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    return loss


def _step_seconds(run: Callable[[], Any], repeats: int = 8) -> float:
    for _ in range(3):
        run()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / repeats


def start(device: torch.device, small: bool) -> dict[str, Any]:
    """Versions, what doctor says, and the device against the table of data sheets."""
    from thalweg.plan.spec.devices import local_device, measure_device

    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import thalweg"], check=True)
    seconds = time.perf_counter() - begin
    doctor = subprocess.run([sys.executable, "-m", "thalweg", "doctor", "--json"], capture_output=True, text=True)
    known, measured = local_device(device), measure_device(device, seconds=0.3 if small else 5.0)
    found: dict[str, Any] = {"import_s": seconds, "torch": torch.__version__, "table": known.name, "from": known.source}
    for key, value in measured.flops.items():
        found[f"{key}_tflops"], found[f"{key}_of_table"] = (
            value / 1e12,
            value / known.flops.get(key, known.flops["fp32"]),
        )
    found["memory_gb_s"], found["memory_of_table"] = (
        measured.memory_bandwidth / 1e9,
        measured.memory_bandwidth / known.memory_bandwidth,
    )
    found["host_link_gb_s"] = measured.host_bandwidth / 1e9
    found["doctor"] = {check["name"]: check["status"] for check in json.loads(doctor.stdout)["checks"]}
    assert doctor.returncode == 0, doctor.stdout
    # The sheets' peaks are not reached, and nothing is faster than them: else the table is wrong.  A simulated device's
    # figures are made up, and a processor may be faster.
    from_sheet = known.source not in ("measured", "made up")
    assert not from_sheet or all(value < 1.1 for key, value in found.items() if key.endswith("of_table")), found
    return found


def device_group_alone(device: torch.device, small: bool) -> dict[str, Any]:
    """A step with a monitor, and a save, where no group of the program's own reaches the host."""
    import torch.distributed as dist

    backend = "simccl" if small else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        monitor = {"enabled": True, "output_path": f"{folder}/csv", "job_name": "check"}
        engine = _engine(_model(small), 2, csv_monitor=monitor, gradient_clipping=1.0)
        losses = [float(_step(engine, _tokens(small, device)))]
        engine.save_checkpoint(f"{folder}/saved")
        engine.load_checkpoint(f"{folder}/saved")
        losses.append(float(_step(engine, _tokens(small, device))))
        engine.close()
        dist.destroy_process_group()
    return {"backend": backend, "losses": str(losses)}


def inference(device: torch.device, small: bool) -> dict[str, Any]:
    """Tokens a second at batch 1 and 32 beside Hugging Face, with int8 and int4, and with weights on the host."""
    from decode import build

    import thalweg

    model = build(small, device)
    found: dict[str, Any] = {}
    new, past = (8, 16) if small else (32, 128)

    def speed(generate: Callable[[torch.Tensor], torch.Tensor], rows: int) -> float:
        prompt = torch.randint(1, model.config.vocab_size, (rows, past), device=device)
        generate(prompt)
        begin = time.perf_counter()
        tokens = generate(prompt)
        torch.accelerator.synchronize()
        assert tokens.shape == (rows, past + new)
        return rows * new / (time.perf_counter() - begin)

    options = {"max_new_tokens": new, "do_sample": False}
    for rows in (1, 32):
        with torch.no_grad():
            found[f"hf_{rows}"] = speed(
                lambda prompt: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options), rows
            )
    forms = {"bf16": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
    for name, asked in {**forms, "host": {"weight_offload": "cpu"}}.items():
        print(f"{time.perf_counter():.1f} s: {found}; next {name}", file=sys.stderr, flush=True)
        try:
            engine = thalweg.init_inference(copy.deepcopy(model), {"dtype": "bf16", "device": device.type, **asked})
            for rows in (1, 32):
                found[f"{name}_{rows}"] = speed(lambda prompt, e=engine: e.generate(prompt, **options), rows)
            engine.close()
        except ValueError as error:  # refused by name: told, not failed
            found[f"{name}_refused"] = str(error)[:200]
    if "host_1" in found:
        weights = sum(p.nbytes for p in model.model.layers.parameters())
        found["streamed_gb_s"] = weights * found["host_1"] / 1e9
    return found


def mfu(device: torch.device, small: bool) -> dict[str, Any]:
    """`bench/gpu_mfu.py` in its short form."""
    if small:
        return {"left_out": "a simulated device has no speed"}
    command = [sys.executable, str(ROOT / "bench" / "gpu_mfu.py"), "--rounds", "2", "--steps", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    data = json.loads(done.stdout)
    failed = {one["contestant"]: one["note"] for one in data["contestants"] if one["note"]}
    assert not failed, failed
    keys = ("mfu", "share_of_matmul", "gpu_peak_mib")
    return {f"{one['contestant']}_{key}": one.get(key) for one in data["contestants"] for key in keys}


def offload_overlap(device: torch.device, small: bool) -> dict[str, Any]:
    """A step with parameters and optimizer on the host, against its products alone and its bytes over the link."""
    from thalweg.plan.spec.devices import local_device

    tokens = _tokens(small, device, rows=8)
    found: dict[str, Any] = {}
    host = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    for name, section in {"device": {}, "host": host}.items():
        model = _model(small, layers=24)
        engine = _engine(model, 3, zero_optimization=section, train_micro_batch_size_per_gpu=8)
        found[f"{name}_ms"] = 1e3 * _step_seconds(lambda e=engine: _step(e, tokens), 3 if small else 8)
        count = sum(p.numel() for p in model.parameters())
        engine.close()
    link = local_device(device).host_bandwidth
    found["link_ms"] = 1e3 * 2 * 2 * count / link  # bf16, for the forward and the backward pass
    found["of_bound"] = found["host_ms"] / max(found["device_ms"], found["link_ms"])
    return found


def syncs(device: torch.device, small: bool) -> dict[str, Any]:
    """Host syncs and launches of one step of each optimizer."""
    from tests.simdevice import num_launches, num_syncs, reset_counts

    tokens, found = _tokens(small, device), {}
    for name in ("AdamW", "Lion", "Adafactor", "Muon", "SGD"):
        engine = _engine(
            _model(small), 2, optimizer={"type": name, "params": {"lr": 1e-4}}, gradient_clipping=1.0, steps_per_print=0
        )
        for _ in range(3):
            _step(engine, tokens)
        reset_counts()
        _step(engine, tokens)
        count, causes = num_syncs()
        found[f"{name}_syncs"], found[f"{name}_launches"] = count, num_launches()
        found[f"{name}_causes"] = causes
        engine.close()
    assert found["AdamW_syncs"] == 0, found["AdamW_causes"]
    return found


def compiled(device: torch.device, small: bool) -> dict[str, Any]:
    """`torch.compile` at stages 2 and 3 and deterministic runs, against the plain ones."""
    tokens, found = _tokens(small, device), {}
    for stage in (2, 3):
        losses = {}
        for name, extra in {
            "plain": {},
            "compiled": {"compile": {"enabled": True}},
            "again": {"deterministic": True},
        }.items():
            torch.use_deterministic_algorithms(False)
            if small and name == "compiled":
                continue
            torch.manual_seed(1)
            engine = _engine(_model(small), stage, **extra)
            losses[name] = [float(_step(engine, tokens)) for _ in range(4)]
            found[f"stage_{stage}_{name}_ms"] = 1e3 * _step_seconds(lambda e=engine: _step(e, tokens), 4)
            engine.close()
        for name, values in losses.items():
            assert all(abs(a - b) < 0.02 for a, b in zip(values, losses["plain"], strict=True)), (stage, name, losses)
    return found


def _smi_used_mib() -> float | None:
    """What the driver says is in use on this process' first device, by all programs; None without its tool."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return float(found.stdout.split()[0]) if found.returncode == 0 else None
    except (OSError, ValueError, IndexError):  # no such tool, or it knows no number
        return None


def _library_mib(device: torch.device, used_before: float | None) -> dict[str, Any]:
    """The context's bytes, and the workspaces of products: the plan's constants of ``spec/devices.py``.

    ``context_mib``: what the driver has given since ``used_before``, read before CUDA began, less what torch's
    allocator holds: wrong where another program comes or goes meanwhile.  ``cublas_mib``, ``cublas_backward_mib``: what
    the first product of this thread takes, and the first of autograd's, which has a handle of its own.
    """
    here = torch.accelerator
    found: dict[str, Any] = {}
    a, b = (torch.ones(512, 512, dtype=torch.bfloat16, device=device) for _ in range(2))
    result = a + b
    here.synchronize()
    if used_before is not None and (used := _smi_used_mib()) is not None:
        found["context_mib"] = used - used_before - here.memory_reserved() / 2**20
    alive = here.memory_allocated()
    torch.mm(a, b, out=result)
    found["cublas_mib"] = (here.memory_allocated() - alive) / 2**20
    a.requires_grad_(True)
    a.grad = torch.zeros_like(a)
    result = a @ b
    alive = here.memory_allocated()
    result.backward(torch.ones_like(result))
    here.synchronize()
    found["cublas_backward_mib"] = (here.memory_allocated() - alive) / 2**20
    return found


def _kernel_bytes(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[float]:
    """Bytes for each element of the first input: kept for the backward pass beside the result, and the peaks of the two
    passes over what was there before each."""
    here, count = torch.accelerator, inputs[0].numel()
    for leaf in inputs:
        leaf.requires_grad_(leaf.is_floating_point())
    here.reset_peak_memory_stats()
    before = here.memory_allocated()
    out = run(*inputs)
    kept, forward = here.memory_allocated() - before - out.nbytes, here.max_memory_allocated() - before
    grad = torch.ones_like(out)
    here.reset_peak_memory_stats()
    before = here.memory_allocated()
    out.backward(grad)
    here.synchronize()
    return [round(value / count, 3) for value in (kept, forward, here.max_memory_allocated() - before)]


def _kernels(device: torch.device, small: bool) -> dict[str, list[float]]:
    """:func:`_kernel_bytes` of what processors and GPUs have different kernels for."""
    rows, width, heads, vocabulary = (64, 64, 2, 512) if small else (4096, 768, 12, 32000)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    split = (4, heads, rows // 4, width // heads)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    return {
        "rms_norm": _kernel_bytes(
            lambda x, w: F.rms_norm(x, (width,), w, 1e-5), torch.randn(rows, width, **bf16), torch.ones(width, **bf16)
        ),
        "layer_norm": _kernel_bytes(
            lambda x, w: F.layer_norm(x, (width,), w), torch.randn(rows, width, **bf16), torch.ones(width, **bf16)
        ),
        "sdpa": _kernel_bytes(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            *(torch.randn(split, **bf16) for _ in range(3)),
        ),
        "cross_entropy": _kernel_bytes(
            lambda x: F.cross_entropy(x.float(), labels), torch.randn(rows, vocabulary, **bf16)
        ),
        "silu": _kernel_bytes(F.silu, torch.randn(rows, width, **bf16)),
        "dropout": _kernel_bytes(lambda x: F.dropout(x, 0.1), torch.randn(rows, width, **bf16)),
        "embedding": _kernel_bytes(lambda w: F.embedding(labels, w), torch.randn(vocabulary, width, **bf16)),
        "linear": _kernel_bytes(F.linear, torch.randn(rows, width, **bf16), torch.randn(width, width, **bf16)),
    }


def memory(device: torch.device, small: bool) -> dict[str, Any]:
    """The peak against the plan's, whole and by phase; the bytes of libraries, and of kernels by themselves."""
    used_before = None if small else _smi_used_mib()
    import thalweg

    found = _library_mib(device, used_before)
    found["kernel_bytes"] = _kernels(device, small)
    here, mib = torch.accelerator, 2.0**20
    for stage in (0, 3):
        model, tokens = _model(small), _tokens(small, device)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {}},
            "zero_optimization": {"stage": stage},
        }
        planned = thalweg.plan(copy.deepcopy(model), config, device="auto", batch=(tokens.cpu(), tokens.cpu()))
        by_phase: dict[str, int] = {}
        for sample in planned.timeline:
            alive = sample.resident_bytes - planned.per_rank.process
            by_phase[sample.phase] = max(by_phase.get(sample.phase, 0), alive)
        here.reset_peak_memory_stats()
        before = here.memory_allocated()
        engine = _engine(model, stage)
        here.synchronize()
        peaks: dict[str, float] = {"initialize": here.max_memory_allocated() - before}
        loss: Any = None

        def run_forward(engine: Any = engine, tokens: torch.Tensor = tokens) -> None:
            nonlocal loss
            loss = engine(tokens, tokens)

        def run_backward(engine: Any = engine) -> None:
            nonlocal loss
            engine.backward(loss)
            loss = None

        phases = {"forward": run_forward, "backward": run_backward, "update": engine.step}
        for _ in range(4):
            rest = here.memory_allocated() - before
            for phase, run in phases.items():
                here.reset_peak_memory_stats()
                run()
                here.synchronize()
                peaks[phase] = max(peaks.get(phase, 0), here.max_memory_allocated() - before)
                if phase == "forward":
                    saved = here.memory_allocated() - before - rest
        peak = max(peaks.values())
        per_rank = planned.per_rank
        expected = per_rank.total - per_rank.process - per_rank.fragmentation
        figures = {"peak": peak, "planned": expected}
        figures |= {phase: peaks[phase] for phase in peaks}
        figures |= {f"planned_{phase}": by_phase[phase] for phase in phases}
        # At rest nothing but states is there: gradients that stay would be seen here, and the plan's are not there.
        states = per_rank.parameters + per_rank.gathered + per_rank.optimizer
        figures |= {"rest": rest, "planned_rest": states, "saved": saved}
        found |= {f"stage_{stage}_{name}_mib": value / mib for name, value in figures.items()}
        found[f"stage_{stage}_planned_of_peak"] = expected / peak
        engine.close()
        del engine, model, phases, run, run_forward, run_backward
    if used_before is not None and (used := _smi_used_mib()) is not None:
        found["context_after_training_mib"] = used - used_before - here.memory_reserved() / mib
    assert small or all(0.95 < found[f"stage_{stage}_planned_of_peak"] < 1.08 for stage in (0, 3)), found
    return found


def attention(device: torch.device, small: bool) -> dict[str, Any]:
    """Blockwise attention against SDPA; what flash kernels do not take: fp32, and documents, beside the formula."""
    from thalweg.ops.attention.block import block_backward, block_forward, reference_forward

    size = (1, 4, 64, 32) if small else (2, 16, 8192, 128)
    q, k, v = (torch.randn(size, device=device, dtype=torch.float32 if small else torch.bfloat16) for _ in range(3))
    scale = size[-1] ** -0.5
    out, lse = block_forward(q, k, v, causal=True, mask=None, scale=scale)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    difference = float((out.float() - plain.float()).abs().max())
    assert difference < 0.05, difference
    flops = 2 * 2 * size[0] * size[1] * size[2] ** 2 * size[3] / 2
    grad = torch.randn_like(out)
    forward = _step_seconds(lambda: block_forward(q, k, v, causal=True, mask=None, scale=scale))
    backward = _step_seconds(lambda: block_backward(grad, q, k, v, out, lse, causal=True, mask=None, scale=scale))
    theirs = _step_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    documents = torch.arange(size[2], device=device) // 1000
    mask = (documents[:, None] == documents)[None, None]
    wide = [x.float() for x in (q, k, v)]
    options = {"causal": False, "scale": scale}
    masked = _step_seconds(lambda: block_forward(q, k, v, mask=mask, **options), 3)
    masked_back = _step_seconds(lambda: block_backward(grad, q, k, v, out, lse, mask=mask, **options), 3)
    fp32 = _step_seconds(lambda: block_forward(*wide, mask=None, **options), 3)
    formula = _step_seconds(lambda: reference_forward(q, k, v, mask=mask, **options), 3)
    return {
        "masked_forward_tflops": 2 * flops / masked / 1e12,
        "masked_backward_tflops": 2 * 2.5 * flops / masked_back / 1e12,
        "formula_forward_tflops": 2 * flops / formula / 1e12,
        "fp32_forward_tflops": 2 * flops / fp32 / 1e12,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
        "sdpa_tflops": flops / theirs / 1e12,
        "difference": difference,
    }


def serve(device: torch.device, small: bool) -> dict[str, Any]:
    """`thalweg serve` on the device, eight clients, some requests each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if small else {}
        shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, **shape}
        config = LlamaConfig(**shape, num_attention_heads=8, vocab_size=512, max_position_embeddings=512)
        LlamaForCausalLM(config).save_pretrained(folder)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        if small:  # the server's processes must know the device before they do anything else
            site = Path(folder, "site")
            site.mkdir()
            (site / "sitecustomize.py").write_text("from tests import simdevice\n\nsimdevice.register()\n")
            path = os.pathsep.join([str(site), path])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log, environment = Path(folder, "log"), {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-m", "thalweg", "serve", folder, "--port", str(port), "--device", device.type]
        with log.open("w") as out:
            server = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment)
        try:
            deadline = time.monotonic() + 90
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(log.read_text()[-2000:]) from None
                    time.sleep(0.3)
            counts, errors = [], []

            def client(number: int, num_requests: int) -> None:
                body = {
                    "model": folder,
                    "prompt": [number + 1] * 64,
                    "max_tokens": 32,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json"},
                )
                try:
                    for _ in range(num_requests):
                        answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
                        counts.append(answer["usage"]["completion_tokens"])
                except OSError as error:
                    errors.append(str(error))

            def serve_all(num_requests: int) -> float:
                begin = time.perf_counter()
                clients = [threading.Thread(target=client, args=(number, num_requests)) for number in range(8)]
                for one in clients:
                    one.start()
                for one in clients:
                    one.join()
                return time.perf_counter() - begin

            first = serve_all(1)  # kernels are compiled and graphs captured in it
            counts.clear()
            seconds = serve_all(4)
        finally:
            server.terminate()
            server.wait(20)
    assert not errors and sum(counts) == 8 * 4 * 32, (errors, counts)
    return {"tokens_a_second": sum(counts) / seconds, "requests": len(counts), "first_round_s": first}


FIGURES = {
    one.__name__: one
    for one in (
        start, device_group_alone, inference, mfu, offload_overlap, syncs, compiled, memory, attention, serve,
    )
}  # fmt: skip


def main() -> int:
    """Run one; prints its JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    args = parser.parse_args()
    small = args.device == "sim"
    if small:
        from tests import simdevice

        simdevice.register()
    if args.figure == "compiled":  # cuBLAS reads it with its first product, and "deterministic" comes later
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(60, repeat=True)  # what runs out of its time says where
    torch.manual_seed(0)
    print(json.dumps(FIGURES[args.figure](torch.device(args.device, 0), small)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
