"""What the fork server imports once, so that no rank pays for it."""

import contextlib
import gc
from importlib import import_module

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.pipelining
import torch.distributed.tensor.debug

from tests.harness import GC_THRESHOLD
from thalweg.ops.onebit import get_onebit_code

# What an engine imports when it is first asked for it.
for name in ("engine", "infer.engine.engine", "infer.loader.load", "plan.preflight", "plan.runtime"):
    import_module(f"thalweg.{name}")
torch.set_num_threads(1)
get_onebit_code(torch.device("cpu"))  # generates its kernels, in 0.4 s
with contextlib.suppress(ImportError):  # absent in the smallest installations
    import transformers

    # Named, as the package imports what it is asked for.
    for name in (
        *("GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration"),
        *("BertModel", "BloomModel", "FalconModel", "get_scheduler"),
    ):
        getattr(transformers, name, None)
# What is there now stays: a rank's collector need not look at it, nor touch (and so copy) its pages.  It looks seldom.
gc.collect()
gc.freeze()
gc.set_threshold(*GC_THRESHOLD)
