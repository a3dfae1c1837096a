"""fp16 with a dynamic loss scale: an update that overflows is skipped and halves it."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 1000, "hysteresis": 1}
net = make_net()
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(fp16=fp16))
losses = []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    if step == 2:
        x = x * 1e6
    loss = mse_loss(engine(x.half()).float(), y)
    engine.backward(loss)
    engine.step()
    if torch.isfinite(loss):
        losses.append(loss.item())
facts = {"fp16": engine.fp16_enabled(), "skipped": engine.skipped_steps, "scale": optimizer.cur_scale}
report = {"losses": losses, **facts}
