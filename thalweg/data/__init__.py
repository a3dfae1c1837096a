"""Tokens to blocks, blocks to each rank's batches."""

from thalweg.data.batches import cycle
from thalweg.data.loader import StatefulLoader, build_loader
from thalweg.data.packing import PackedDataset, open_tokens, pack, save_tokens
from thalweg.data.sampler import EpochSampler, permutation
from thalweg.data.wrap_loader import PassthroughLoader, wrap_dataloader

__all__ = [
    "EpochSampler",
    "PackedDataset",
    "PassthroughLoader",
    "StatefulLoader",
    "build_loader",
    "cycle",
    "open_tokens",
    "pack",
    "permutation",
    "save_tokens",
    "wrap_dataloader",
]
