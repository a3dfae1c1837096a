"""init_inference around a model of transformers, and its generate."""

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
shape = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=39)
model = GPT2LMHeadModel(shape).eval()
prompt = torch.tensor([[5, 6, 7, 8]])
engine = deepspeed.init_inference(
    model, dtype=torch.float32, tensor_parallel={"tp_size": 1}, replace_with_kernel_inject=False
)
with torch.no_grad():
    logits = engine(prompt).logits
tokens = engine.generate(prompt, max_new_tokens=8, do_sample=False)
report = {"tokens": tokens[0].tolist(), "logits": logits.norm().item(), "module": engine.module is model}
