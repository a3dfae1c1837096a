"""A layer that only every second micro-batch uses, in bf16 with accumulation."""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import mse_loss
from user_model import WIDTH, batches, config


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, use_extra):
        x = torch.tanh(self.first(x))
        if use_extra:
            x = torch.tanh(self.extra(x))
        return self.head(x).squeeze(-1)


torch.manual_seed(0)
net = Sometimes()
ds_config = config(gradient_accumulation_steps=2, bf16={"enabled": True})
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses = []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    loss = mse_loss(engine(x.bfloat16(), step % 2 == 1).float(), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses}
