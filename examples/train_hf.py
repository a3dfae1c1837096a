"""A Hugging Face model from a configuration alone: GPT-2 or Llama, nothing is downloaded.

    python examples/train_hf.py --model gpt2
    thalweg run --nproc 2 examples/train_hf.py --model llama --stage 3

The model is the library's own, unchanged: Thalweg shards its layers by what it says of itself.
"""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import thalweg
from thalweg.data import cycle, pack, stdlib_documents, train_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
args = parser.parse_args()

texts = [document.text for document in stdlib_documents(tests=False)][::8]
tokenizer = train_tokenizer(texts, 1024)
blocks = pack(tokenizer.encode_batch(texts), 128, end_id=tokenizer.end_id, tail="drop")
vocabulary = tokenizer.vocab_size

torch.manual_seed(0)
if args.model == "gpt2":
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=128, n_embd=192, n_layer=2, n_head=4, use_cache=False)
    )
else:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
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
    tokens = batch["input_ids"].to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss  # these models shift the labels themselves
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and (step % 10 == 0 or step in (1, args.steps)):
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
engine.close()
dist.destroy_process_group()
