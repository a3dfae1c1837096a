"""bfloat16 over fp32 masters."""

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=config(bf16={"enabled": True})
)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    output = engine(x.bfloat16())
    assert output.dtype == torch.bfloat16
    loss = mse_loss(output.float(), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "bf16": engine.bfloat16_enabled(), "fp16": engine.fp16_enabled()}
