"""The optimizer on the host, with DeepSpeedCPUAdam."""

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config()
del ds_config["optimizer"]
ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
optimizer = DeepSpeedCPUAdam(net.parameters(), lr=0.02, weight_decay=0.1)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses}
