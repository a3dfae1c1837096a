"""engine.compile()."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
before = engine.is_compiled
engine.compile(backend="eager")
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "compiled": [before, engine.is_compiled]}
