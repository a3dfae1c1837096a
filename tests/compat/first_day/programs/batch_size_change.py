"""A larger batch later in the run, by more accumulation."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses, sizes = [], []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    if step == 2:
        engine.set_train_batch_size(8)
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    sizes.append((engine.train_batch_size(), engine.gradient_accumulation_steps()))
report = {"losses": losses, "sizes": sizes, "steps": engine.global_steps}
