"""Train, evaluate without gradients, go on."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses, evaluated = [], []
for x, y in batches(engine.global_rank, engine.world_size):
    engine.train()
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        evaluated.append(sum(mse_loss(engine(x), y).item() for x, y in batches(seed=2)))
report = {"losses": losses, "evaluated": evaluated, "training": engine.training}
