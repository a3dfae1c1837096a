"""Frozen blocks stay as they are; one is thawed later by a new engine."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
for parameter in net.blocks[0].parameters():
    parameter.requires_grad = False
before = net.blocks[0].weight.detach().clone()
trained = [p for p in net.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config())
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(net.blocks[0].weight):
    same = torch.equal(before, net.blocks[0].weight.detach())
report = {"losses": losses, "same": same}
