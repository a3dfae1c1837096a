"""Recompute blocks by deepspeed.checkpointing."""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import mse_loss
from user_model import WIDTH, batches, config


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.calls = 0

    def run(self, block, x):
        self.calls += 1
        return torch.tanh(block(x))

    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(lambda x, block=block: self.run(block, x), x)
        return self.head(x).squeeze(-1)


torch.manual_seed(0)
net = Deep()
ds_config = config(activation_checkpointing={"partition_activations": False, "number_checkpoints": 3})
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=ds_config)
assert deepspeed.checkpointing.is_configured()
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x.requires_grad_()), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "calls": net.calls}
