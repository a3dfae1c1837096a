"""Parameter groups: no decay for biases, a rate of its own for the head."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
weights = [p for name, p in net.blocks.named_parameters() if name.endswith("weight")]
biases = [p for name, p in net.blocks.named_parameters() if name.endswith("bias")]
groups = [
    {"params": weights, "weight_decay": 0.1},
    {"params": biases, "weight_decay": 0.0},
    {"params": list(net.head.parameters()), "lr": 0.05, "weight_decay": 0.0},
]
ds_config = config(optimizer={"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-7}})
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=groups, config=ds_config)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "rates": engine.get_lr(), "groups": len(optimizer.param_groups)}
