"""Two micro-batches for an update; the engine divides the loss."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(gradient_accumulation_steps=2)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses, boundaries = [], []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    boundaries.append(engine.is_gradient_accumulation_boundary())
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "boundaries": boundaries, "steps": engine.global_steps, "micro": engine.micro_steps}
