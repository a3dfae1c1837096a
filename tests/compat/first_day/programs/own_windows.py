"""The program says by its step() where a window of micro-batches ends, and takes more or fewer of them."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(gradient_accumulation_steps=2, managed_gradient_accumulation=False)
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
rows = batches(engine.global_rank, engine.world_size)
losses, applied, samples = [], [], []
for size in (2, 3, 1):
    for _ in range(size):
        x, y = next(rows)
        loss = mse_loss(engine(x), y)
        engine.backward(loss / size, scale_wrt_gas=False)
        losses.append(loss.item())
    engine.step()
    applied.append(engine.was_step_applied())
    samples.append(engine.global_samples)
try:
    engine.set_gradient_accumulation_boundary(True)
    refused = False
except AssertionError:
    refused = True
report = {"losses": losses, "applied": applied, "samples": samples, "managed": engine.managed_gradient_accumulation()}
report |= {"steps": engine.global_steps, "micro": engine.micro_steps, "refused": refused}
