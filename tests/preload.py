"""What the fork server imports once, so that no rank pays for it."""

import contextlib

import torch
import torch._dynamo

import thalweg.engine  # noqa: F401

torch.set_num_threads(1)
with contextlib.suppress(ImportError):  # absent in the smallest installations
    import transformers  # noqa: F401
