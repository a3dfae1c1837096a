"""A loader without an end."""

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
rows = list(batches(engine.global_rank, engine.world_size, count=3))
loader = iter(RepeatingLoader(torch.utils.data.DataLoader(rows, batch_size=None)))
losses = []
for _ in range(8):
    x, y = next(loader)
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses}
