"""An optimizer of torch's, and a function that makes one."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

ds_config = config()
del ds_config["optimizer"]


def train(net, optimizer):
    engine, returned, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config)
    losses = []
    for x, y in batches(engine.global_rank, engine.world_size):
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert returned.param_groups[0]["lr"] == 0.02
    return losses


net = make_net()
losses = train(net, torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1))
made = train(make_net(), lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1))
report = {"losses": losses, "losses of the made": made}
