"""Read whole parameters, and write them on one rank for all."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
with deepspeed.zero.GatheredParameters(net.head.weight, modifier_rank=0):
    if deepspeed.comm.get_rank() == 0:
        net.head.weight.data.fill_(0.25)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(list(net.parameters())), torch.no_grad():
    norms = [parameter.norm().item() for parameter in net.parameters()]
    shapes = [list(parameter.shape) for parameter in net.parameters()]
report = {"losses": losses, "norms": norms, "shapes": shapes}
