"""Gradient clipping by the config, and the norm before it."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(gradient_clipping=0.1, optimizer={"type": "SGD", "params": {"lr": 0.5}})
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses, norms = [], []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    norms.append(float(engine.get_global_grad_norm()))
report = {"losses": losses, "norms": norms, "clipping": engine.gradient_clipping()}
