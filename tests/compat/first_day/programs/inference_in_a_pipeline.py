"""An engine of init_inference in the place of the model, in transformers' pipeline for text generation."""

import deepspeed
import torch
from user_model import make_text_pipeline

pipe = make_text_pipeline()
model = pipe.model
pipe.model = deepspeed.init_inference(pipe.model, dtype=torch.float32, replace_with_kernel_inject=False)
texts = ["w5 w6 w7 w8", "w9 w3"]
greedy = [pipe(text, max_new_tokens=8, do_sample=False)[0]["generated_text"] for text in texts]
report = {"texts": greedy, "several": len(pipe(texts, max_new_tokens=4)), "module": pipe.model.module is model}
