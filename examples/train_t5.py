"""An encoder and decoder of FLAN-T5's shape: read half a block of source text, write the other half.

    python examples/train_t5.py
    thalweg run --nproc 2 examples/train_t5.py --size small --stage 3

FLAN-T5 is T5 version 1.1 (Chung et al. 2022): gated GELU, an output head of its own,
relative positions, no biases. `--size small` has google/flan-t5-small's sizes (its weights are
not downloaded), `tiny` the same in a form for a quick look.
"""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration

import thalweg
from thalweg.data import cycle, pack, stdlib_documents, train_tokenizer

SIZES = {
    "tiny": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 1024},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128},
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
args = parser.parse_args()

texts = [document.text for document in stdlib_documents(tests=False)][::8]
tokenizer = train_tokenizer(texts, 1024)
blocks = pack(tokenizer.encode_batch(texts), 128, end_id=tokenizer.end_id, tail="drop")

torch.manual_seed(0)
model = T5ForConditionalGeneration(
    T5Config(
        **SIZES[args.size],
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        pad_token_id=tokenizer.end_id,
        decoder_start_token_id=tokenizer.end_id,
        use_cache=False,
    )
)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "seed": 0,
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
}
if args.precision != "fp32":
    config[args.precision] = {"enabled": True}
engine, _, loader, _ = thalweg.initialize(model=model, training_data=blocks, config=config)
for step, batch in enumerate(islice(cycle(loader), args.steps), start=1):
    read, write = (half.contiguous() for half in batch["input_ids"].to(engine.device).chunk(2, dim=1))
    loss = engine(input_ids=read, labels=write).loss
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and (step % 10 == 0 or step in (1, args.steps)):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
engine.close()
dist.destroy_process_group()
