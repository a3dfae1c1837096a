"""fp16 with a dynamic loss scale: the first steps overflow, are skipped, and halve the scale."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
net = make_net()
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(fp16=fp16))
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x.half()).float(), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {
    "losses": losses,
    "fp16": engine.fp16_enabled(),
    "skipped": engine.skipped_steps,
    "scale": optimizer.cur_scale,
}
