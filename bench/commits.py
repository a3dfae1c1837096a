"""Two checkouts of Thalweg in turns: a step at stages 0 to 3 and on NVMe, decoding, serving, the start.

Every turn is a fresh process with one checkout on its path; the checkouts alternate, and which begins alternates too.
`ours` is this checkout, `theirs` the other one; the ratio is of the smallest CPU seconds (all processes of a turn
together), and of the smallest clock beside it.

    git worktree add /tmp/before 75d6da9
    python bench/commits.py /tmp/before --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _interleaved import log_stderr
from _peers import ROOT
from _report import Row, compare, format_machine, make_result, rows_table, write_result

CASES = ("stage 0", "stage 1", "stage 2", "stage 3", "NVMe", "decode", "serve", "start")
_WARM, _STEPS = 3, 10


def train(case: str, folder: str) -> dict[str, float]:
    """Clock and CPU seconds of a step on this rank; run by `thalweg run` on two of them."""
    import torch

    import thalweg
    from thalweg.nn.transformer import GPT, GPTConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": 3 if case == "NVMe" else int(case[-1])}
    if case == "NVMe":
        tier = {"device": "nvme", "nvme_path": folder}
        zero |= {"offload_param": {**tier, "max_in_cpu": 0}, "offload_optimizer": tier}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "log_level": "error",
    }
    model = GPT(GPTConfig(vocab_size=4096, n_layer=4, n_head=4, n_embd=256, block_size=128))
    engine, *_ = thalweg.initialize(model=model, config=config)
    rank = torch.distributed.get_rank()
    tokens = torch.randint(0, 4096, (4, 128), generator=torch.Generator().manual_seed(rank))
    for step in range(_WARM + _STEPS):
        if step == _WARM:
            torch.distributed.barrier()
            clock, cpu = time.perf_counter(), time.process_time()
        engine.backward(engine(tokens, tokens))
        engine.step()
    torch.distributed.barrier()
    found = {"clock": (time.perf_counter() - clock) / _STEPS, "cpu": (time.process_time() - cpu) / _STEPS}
    engine.close()
    return found


def make_model(folder: str) -> None:
    """A Llama of 30 million random parameters with a tokenizer of bytes, as Hugging Face writes it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = LlamaConfig(**shape, vocab_size=len(alphabet), bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)


def decode(folder: str) -> dict[str, float]:
    """Seconds a token of eight greedy texts at once."""
    import torch
    from transformers import AutoModelForCausalLM

    import thalweg

    torch.set_num_threads(2)
    engine = thalweg.init_inference(AutoModelForCausalLM.from_pretrained(folder), dtype="fp32")
    prompts = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(1))
    engine.generate(prompts, max_new_tokens=8, do_sample=False)
    clock, cpu = time.perf_counter(), time.process_time()
    made = engine.generate(prompts, max_new_tokens=64, do_sample=False)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    assert made.shape == (8, 96)
    return {"clock": clock / (8 * 64), "cpu": cpu / (8 * 64)}


def serve(folder: str) -> dict[str, float]:
    """Seconds a token of 32 completions, eight at a time, through `thalweg serve`."""
    command = [sys.executable, "-m", "thalweg", "serve", folder, "--port", "0", "--json"]
    before = _children_cpu()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"]

        def ask(number: int, count: int) -> None:
            body = {"prompt": f"request {number:3}", "max_tokens": count, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == count

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(lambda n: ask(n, 4), range(8)))
            clock = time.perf_counter()
            list(clients.map(lambda n: ask(n, 48), range(32)))
            clock = time.perf_counter() - clock
    finally:
        server.terminate()
        server.wait(60)
    cpu = _children_cpu() - before  # its start and end included
    return {"clock": clock / (32 * 48), "cpu": cpu / (32 * 48)}


def start() -> dict[str, float]:
    """Seconds from nothing to an engine that has made one step."""
    program = (
        "import torch, thalweg\n"
        "optimizer = {'type': 'AdamW', 'params': {'lr': 1e-3}}\n"
        "config = {'train_batch_size': 2, 'optimizer': optimizer, 'log_level': 'error'}\n"
        "engine, *_ = thalweg.initialize(model=torch.nn.Linear(4, 1), config=config)\n"
        "engine.backward(engine(torch.ones(2, 4)).sum()); engine.step(); engine.close()\n"
    )
    before, clock = _children_cpu(), time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {"clock": time.perf_counter() - clock, "cpu": _children_cpu() - before}


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def work(case: str, folder: str, model: str) -> int:
    """One turn, in a process of its own: the last line of standard output is what it took."""
    if case.startswith("stage") or case == "NVMe":
        found = train(case, folder)
        path = Path(folder) / f"rank{os.environ['RANK']}.json"
    else:
        found = decode(model) if case == "decode" else serve(model) if case == "serve" else start()
        path = Path(folder) / "rank0.json"
    path.write_text(json.dumps(found))
    return 0


def take_turn(tree: Path, case: str, model: str) -> dict[str, float]:
    """Run a case on a checkout: the slowest rank's clock, all ranks' CPU seconds."""
    # Bytecode is kept by checkout, so that the first turn alone compiles.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(Path(model) / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "thalweg", "run", "--nproc", "2"] if case.startswith("stage") or case == "NVMe" else []
        words = [sys.executable, *launch, __file__, "--worker", case, folder, model]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, env=environment)
        if done.returncode:
            raise RuntimeError(f"{case} on {tree} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    return {"clock": max(one["clock"] for one in ranks), "cpu": sum(one["cpu"] for one in ranks)}


def keep_others(data: dict[str, Any]) -> dict[str, Any]:
    """Add the cases that the results have of the same commit and that were not measured again."""
    path = ROOT / "results" / "commits.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("commit") != data["commit"]:
        return data
    measured = {row["case"] for row in data["rows"]}
    rows = [*data["rows"], *(row for row in old["rows"] if row["case"] not in measured)]
    rows.sort(key=lambda row: CASES.index(row["case"]))
    return data | {"rows": rows, "turns": old["turns"] | data["turns"]}


def render(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    counts = {case: len(turns) for name, turns in data["turns"].items() for case in [name.rpartition(",")[0]]}
    usual = statistics.mode(counts.values())
    unlike = "".join(f", of {case} {count}" for case, count in counts.items() if count != usual)
    text = f"# This commit and {data['rows'][0]['peer']}, in turns\n\n{data['date']}, commit {data['commit']}, "
    return text + f"{format_machine(data['machine'])}; {usual} turns each{unlike}.\n\n{rows_table(data['rows'])}\n"


def main() -> int:
    """Parse, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="write results/commits.{json,md}")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(*args.worker)
    if args.other is None or not (args.other / "thalweg" / "__init__.py").exists():
        parser.error("give the other checkout's folder")
    trees = {"ours": ROOT, "theirs": args.other.resolve()}
    taken: dict[tuple[str, str], list[dict[str, float]]] = {(c, who): [] for c in args.cases for who in trees}
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        for turn in range(args.rounds):
            for case in args.cases:
                for who in list(trees) if turn % 2 else list(trees)[::-1]:
                    taken[case, who].append(take_turn(trees[who], case, model))
                log_stderr(f"round {turn + 1} of {args.rounds}: {case}")
    other = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=args.other, capture_output=True, text=True, check=False
    ).stdout.strip()
    rows: list[Row] = []
    for case in args.cases:
        for metric in ("cpu", "clock"):
            ours, theirs = ([turn[metric] for turn in taken[case, who]] for who in trees)
            rows.append(compare(case, other, f"{metric}_ms_min", 1e3 * min(ours), 1e3 * min(theirs)))
            medians = 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)
            rows.append(compare(case, other, f"{metric}_ms_median", *medians))
    data = keep_others(
        make_result("commits", rows, turns={f"{c}, {who}": values for (c, who), values in taken.items()})
    )
    text = render(data)
    if args.write:
        write_result("commits", data, text)
    print(json.dumps(data) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
