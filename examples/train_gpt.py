"""A GPT learns the source text of Python's standard library.

    python examples/train_gpt.py
    thalweg run --nproc 2 examples/train_gpt.py --steps 200 --stage 2

The same program on one process or many; the stage is one number in the configuration.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import thalweg
from thalweg.config import load
from thalweg.data import cycle, pack, stdlib_documents, train_tokenizer
from thalweg.nn.transformer import GPT, GPTConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="in place of the configuration's")
parser.add_argument("--config", type=Path, default=Path(__file__).with_name("ds_config.json"))
parser.add_argument("--out", type=Path, default=Path("example-out"), help="tokenizer and checkpoint")
args = parser.parse_args()

# Data: text -> tokens -> blocks of 128 with the next token as label.
texts = [document.text for document in stdlib_documents(tests=False)][::4]
tokenizer = train_tokenizer(texts, 2048, cache_dir=args.out)
blocks = pack(tokenizer.encode_batch(texts), 128, end_id=tokenizer.end_id, tail="drop")

# Model and engine.
config = load(args.config).to_dict()
if args.stage is not None:
    config["zero_optimization"]["stage"] = args.stage
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, n_layer=2, n_embd=192, block_size=128))
engine, _, loader, _ = thalweg.initialize(model=model, training_data=blocks, config=config)

# The loop.
for step, batch in enumerate(islice(cycle(loader), args.steps), start=1):
    loss = engine(batch["input_ids"].to(engine.device), batch["labels"].to(engine.device))
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and (step % 10 == 0 or step in (1, args.steps)):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

path = engine.save_checkpoint(args.out / "checkpoint", client_state={"vocabulary": tokenizer.vocab_size})
if dist.get_rank() == 0:
    print(json.dumps({"checkpoint": str(path), "stage": engine.zero_optimization_stage()}))
engine.close()
dist.destroy_process_group()
