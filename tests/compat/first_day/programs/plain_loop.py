"""The loop of the getting-started page: forward, backward, step."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
model_engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses = []
for x, y in batches(model_engine.global_rank, model_engine.world_size):
    loss = mse_loss(model_engine(x.to(model_engine.device)), y.to(model_engine.device))
    model_engine.backward(loss)
    model_engine.step()
    losses.append(loss.item())
report = {"losses": losses, "steps": model_engine.global_steps}
