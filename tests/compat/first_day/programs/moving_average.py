"""A moving average of the weights beside the run, as diffusion programs keep one."""

import copy

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
average = copy.deepcopy(net).requires_grad_(False)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        for kept, now in zip(average.parameters(), engine.module.parameters(), strict=True):
            kept.lerp_(now.detach().cpu(), 0.25)
report = {"losses": losses, "norms": [p.norm().item() for p in average.parameters()]}
