"""A schedule of torch's: an object over the user's optimizer, and a function of the engine's."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net


def halve(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(engine):
    losses, rates = [], []
    for x, y in batches(engine.global_rank, engine.world_size):
        rates.append(engine.get_lr()[0])
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, rates


net = make_net()
engine, _, _, scheduler = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), lr_scheduler=halve, config=config()
)
losses, rates = train(engine)

net = make_net()
ds_config = config()
del ds_config["optimizer"]
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
engine, _, _, scheduler = deepspeed.initialize(
    model=net, optimizer=optimizer, lr_scheduler=halve(optimizer), config=ds_config
)
report = {"losses": losses, "rates": rates, "again": train(engine) == (losses, rates)}
