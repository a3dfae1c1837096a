"""Layers split over two ranks by tp_model_init and autotp_size."""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import mse_loss
from user_model import WIDTH, batches, config


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


deepspeed.init_distributed()
torch.manual_seed(0)
net = deepspeed.tp_model_init(Tower(), tp_size=2, dtype=torch.float32)
ds_config = config(train_micro_batch_size_per_gpu=4, tensor_parallel={"autotp_size": 2})
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses = []
for x, y in batches():  # tensor ranks see the same rows
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "batch": engine.train_batch_size()}
