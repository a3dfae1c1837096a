"""One rank that trains a small GPT on the standard library's sources and says how its loss went.

Bytes are the tokens.  Every run sees the same batches; the last twentieth of the text is held out.  The
ranks meet through a file and take their host from THALWEG_HOST.  Rank 0 prints one JSON object:

    {"losses": [steps], "held_out": loss, "inter_mib": MiB sent between hosts a step, all ranks together}
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
import torch.distributed as dist

from thalweg.comm.quantization import BlockQuantizer

SEQ_LEN, MICRO_BATCH_SIZE, VOCAB_SIZE = 64, 4, 256
TEXT_BYTES = 6_000_000


class CrudeQuantizer(BlockQuantizer):
    """The negative control: 2 bits (three values) and one scale for a whole tensor."""

    def quantize(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """As its base does, of values rounded to -max, 0 and max."""
        peak = values.float().abs().max().clamp(min=1e-30)
        super().quantize((values / peak).round() * peak, payload)


def use_crude_quantizers() -> None:
    """Put the control in the place of every quantizer."""
    from thalweg.comm.collectives import quantized
    from thalweg.zero.storage import cross_host_sync

    names = ("WEIGHT_QUANTIZER", "GRADIENT_QUANTIZER", "INTRA_HOST_GRADIENT_QUANTIZER", "DELTA_QUANTIZER")
    replaced = set()
    for module in (quantized, cross_host_sync):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, CrudeQuantizer(getattr(module, name).bits))
                replaced.add(name)
    assert replaced == set(names), f"not where the control looks for them: {set(names) - replaced}"


def load_text() -> torch.Tensor:
    """The sources as bytes, in the library's order."""
    from thalweg.data.corpus import stdlib_documents

    data = bytearray()
    for document in stdlib_documents():
        data += document.text.encode()
        if len(data) >= TEXT_BYTES:
            break
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).long()


def make_batch(source: torch.Tensor, seed: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens_BT, labels_BT) of one rank; ``seed`` picks the global batch."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(source) - SEQ_LEN - 1, (world * MICRO_BATCH_SIZE,), generator=generator)
    rows = torch.stack([source[i : i + SEQ_LEN + 1] for i in starts[rank::world].tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(job: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train for ``job["steps"]`` with ``job["zero"]`` as zero_optimization."""
    import thalweg
    from thalweg.nn.transformer import GPT, GPTConfig

    source = load_text()
    split_at = len(source) * 19 // 20
    torch.manual_seed(job["seed"])
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, n_layer=4, n_head=4, n_embd=128, block_size=SEQ_LEN, tied=True))
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "gradient_clipping": 1.0,
        "zero_optimization": job["zero"],
        "log_level": "error",
    }
    engine = thalweg.initialize(model=model, config=config)[0]
    losses = []
    for step in range(job["steps"]):
        tokens_BT, labels_BT = make_batch(source[:split_at], 10_000 * job["seed"] + step, rank, world)
        loss = engine(tokens_BT, labels_BT)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        if step == 0:
            engine.ledger.reset()
    sent = torch.tensor([engine.ledger.total().inter_bytes / max(1, job["steps"] - 1)])
    engine.eval()
    with torch.no_grad():
        held_out_losses = [engine(*make_batch(source[split_at:], index, rank, world)).float() for index in range(20)]
    means = torch.stack([*losses, torch.stack(held_out_losses).mean()])
    dist.all_reduce(means)
    dist.all_reduce(sent)
    *curve, held_out = (means / world).tolist()
    engine.close()
    return {"losses": curve, "held_out": held_out, "inter_mib": float(sent) / 2**20}


def main() -> int:
    """Train; rank 0 prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, help='JSON: {"zero", "steps", "seed", "crude"}')
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = json.loads(args.job)
    if job.get("crude"):
        use_crude_quantizers()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world)
    result = train(job, args.rank, args.world)
    assert not any(math.isnan(loss) for loss in result["losses"]) or job.get("crude")
    if args.rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
