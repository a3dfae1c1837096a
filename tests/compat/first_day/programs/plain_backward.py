"""`loss.backward()` in place of `engine.backward(loss)`, with accumulation: the engine divides here too."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(gradient_accumulation_steps=2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses = []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    loss = mse_loss(engine(x), y)
    (engine.scale(loss) if step % 2 else loss).backward()
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "steps": engine.global_steps}
