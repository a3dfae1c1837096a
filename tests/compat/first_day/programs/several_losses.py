"""Two losses of one forward pass, a graph that is kept."""

import deepspeed
from torch.nn.functional import l1_loss, mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    output = engine(x)
    first, second = mse_loss(output, y), l1_loss(output, y)
    engine.backward(first + 0.5 * second)
    engine.step()
    losses.append((first + 0.5 * second).item())
report = {"losses": losses}
