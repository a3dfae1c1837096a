"""What the tests of ZeRO++ share: mixes, layouts of hosts, engines.

Hosts are faked by ``THALWEG_HOST``, which keeps ranks from sharing memory.
"""

from __future__ import annotations

import os

import torch

from tests.dist.models import make_batch
from thalweg.nn.transformer import GPT, GPTConfig

QW = {"zero_quantized_weights": True}
QG = {"zero_quantized_gradients": True}
QN = {"zero_quantized_nontrainable_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
LOCO = {**QG, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
MICS = {"mics_shard_size": 2}
ALL = {**QW, **QG, **HPZ}

# By rank: the host it is on.
LAYOUTS = {
    "2 on one host": (0, 0),
    "1 + 1": (0, 1),
    "2 + 1": (0, 0, 1),
    "1 + 1 + 1": (0, 1, 2),
    "2 + 2": (0, 0, 1, 1),
    "3 + 1": (0, 0, 0, 1),
    "4 on one host": (0, 0, 0, 0),
}
FEATURE_SETS = {"qwZ": QW, "qgZ": QG, "LoCo": LOCO, "hpZ": HPZ, "MiCS": MICS, "qwZ hpZ": {**QW, **HPZ}}
FEATURE_SETS |= {"qwZ qgZ": {**QW, **QG}, "qgZ hpZ": {**QG, **HPZ}, "all": ALL, "frozen": QN}
FEATURE_SETS |= {"all MiCS": {**QW, **QG, **MICS}, "LoCo all": {**ALL, **LOCO}}


def set_fake_host(layout, rank):
    """Put this rank on its host."""
    os.environ["THALWEG_HOST"] = f"host {layout[rank]}"


def make_config(mix, stage=3, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **mix},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "cpu_kernels": "torch",
        "log_level": "error",
        **more,
    }


def init_engine(model, mix, stage=3, **more):
    import thalweg

    return thalweg.initialize(model=model, config=make_config(mix, stage, **more))[0]


def train_steps(engine, rank, world, count, first=0):
    losses = []
    for step in range(first, first + count):
        tokens, labels = make_batch(step, 2 * world)
        loss = engine(tokens[rank::world], labels[rank::world])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def wide_gpt():
    """A GPT whose parameters outweigh the scales of their codes."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=512, n_layer=3, n_head=4, n_embd=128, block_size=12, tied=True))
