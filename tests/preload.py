"""What the fork server imports once, so that no rank pays for it."""

import contextlib
import gc

import torch
import torch._dynamo

import thalweg.engine  # noqa: F401

torch.set_num_threads(1)
with contextlib.suppress(ImportError):  # absent in the smallest installations
    import transformers

    # Named, as the package imports what it is asked for.
    for family in ("GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration"):
        getattr(transformers, family, None)
# What is there now stays: a rank's collector need not look at it, nor touch (and so copy) its pages.
gc.collect()
gc.freeze()
