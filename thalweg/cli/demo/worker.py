"""One rank of the demo: ``python -m thalweg.cli.demo.worker train|reload SETTINGS.json``.

``train`` runs on all ranks and ends with a checkpoint; ``reload`` runs in one fresh
process.  Both measure the held-out loss by :func:`held_out_loss`, from the full fp32
weights, on one thread: the same kernels on the same numbers, so equal weights give an
equal loss to the last digit.  A loss may hide a changed last bit of a weight, so the
weights' digests are compared as well.
"""

import hashlib
import json
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thalweg
from thalweg.cli.demo.settings import DemoSettings, build_engine_config
from thalweg.data.batch_feed import cycle
from thalweg.data.packing import PackedDataset, open_tokens
from thalweg.data.tokenizer import BytePairTokenizer
from thalweg.nn.transformer import GPT, GPTConfig


def build_model(settings: DemoSettings) -> GPT:
    """Return the plain GPT, the same on every rank."""
    torch.manual_seed(settings.seed)
    return GPT(
        GPTConfig(
            vocab_size=settings.vocabulary,
            n_layer=settings.num_layers,
            n_head=settings.num_heads,
            n_embd=settings.width,
            block_size=settings.block_size,
        )
    )


def train(settings: DemoSettings) -> None:
    """Train, save a checkpoint, and on rank 0 write ``trained.json`` with the facts."""
    out = Path(settings.out)
    blocks = PackedDataset(open_tokens(out / "tokens.npy"), settings.block_size, tail="drop")
    config = build_engine_config(settings)
    engine, _, loader, _ = thalweg.initialize(model=build_model(settings), training_data=blocks, config=config)
    device, started = engine.device, time.perf_counter()
    for batch in islice(cycle(loader), settings.steps):
        loss = engine(batch["input_ids"].to(device), batch["labels"].to(device))
        engine.backward(loss)
        engine.step()
    seconds = time.perf_counter() - started
    path = engine.save_checkpoint(out / "checkpoint", client_state={"settings": {"seed": settings.seed}})
    weights = engine.state_dict()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine.close()
    if rank == 0:
        tokens = settings.steps * settings.micro_batch * settings.block_size * world
        facts = {
            "checkpoint": str(path),
            "loss_saved": held_out_loss(build_plain_model(settings, weights), settings),
            "weights_saved": hash_weights(weights),
            "parameters": sum(weight.numel() for weight in build_model(settings).parameters()),
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
        }
        (Path(settings.results) / "trained.json").write_text(json.dumps(facts), encoding="utf-8")


def reload_and_evaluate(settings: DemoSettings) -> None:
    """Load the checkpoint at world size 1, measure the same loss, write a sample to ``reloaded.json``."""
    quiet = {"jsonl_monitor": {"enabled": False}, "steps_per_print": None, "log_level": "warning"}
    config = build_engine_config(settings) | quiet
    fresh_model = build_model(replace(settings, seed=settings.seed + 1))  # other weights: nothing may survive
    engine, _, _, _ = thalweg.initialize(model=fresh_model, config=config)
    engine.load_checkpoint(Path(settings.out) / "checkpoint")
    weights = engine.state_dict()
    model = build_plain_model(settings, weights)
    engine.close()
    tokenizer = BytePairTokenizer.load(Path(settings.out) / "tokenizer.json")
    facts = {
        "loss_reloaded": held_out_loss(model, settings),
        "weights_reloaded": hash_weights(weights),
        "sample": settings.prompt + generate(model, tokenizer, settings),
    }
    (Path(settings.results) / "reloaded.json").write_text(json.dumps(facts), encoding="utf-8")


def build_plain_model(settings: DemoSettings, weights: dict[str, Tensor]) -> GPT:
    """Return an unsharded fp32 GPT on the CPU with the given full weights."""
    model = build_model(settings)
    model.load_state_dict(weights)
    return model.float().eval()


def hash_weights(weights: dict[str, Tensor]) -> str:
    """Return a hash of every weight's name, dtype, shape and bits."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in sorted(weights.items()):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.detach().contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


@torch.no_grad()
def held_out_loss(model: GPT, settings: DemoSettings) -> float:
    """Mean cross-entropy in nats over blocks spread evenly over the held-out text."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    blocks = PackedDataset(open_tokens(Path(settings.out) / "held_out.npy"), settings.block_size, tail="drop")
    losses = []
    count = min(settings.held_out_blocks, len(blocks))
    for index in range(count):
        block = blocks[index * len(blocks) // count]
        losses.append(model(block["input_ids"][None], block["labels"][None]).double())
    torch.set_num_threads(threads)
    return torch.stack(losses).mean().item()


@torch.no_grad()
def generate(model: GPT, tokenizer: BytePairTokenizer, settings: DemoSettings, *, top_k: int = 20) -> str:
    """Return a continuation of the prompt, sampled at temperature 0.8 from the ``top_k`` likeliest tokens."""
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = [tokenizer.end_id, *tokenizer.encode(settings.prompt).tolist()]
    length = len(tokens)
    for _ in range(settings.sample_tokens):
        logits = model(torch.tensor([tokens[-settings.block_size :]]))[0, -1] / 0.8
        logits[tokenizer.end_id] = -torch.inf  # the sample has the length that was asked for
        likeliest, ids = logits.topk(top_k)
        choice = torch.multinomial(likeliest.softmax(0), 1, generator=generator)
        tokens.append(int(ids[choice]))
    return tokenizer.decode(tokens[length:])


def main(arguments: list[str]) -> None:
    """Run one part of the demo."""
    phases: dict[str, Any] = {"train": train, "reload": reload_and_evaluate}
    phase, path = arguments
    phases[phase](DemoSettings(**json.loads(Path(path).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(sys.argv[1:])
