"""Each schedule of the config: the rate of every update."""

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {
        "warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 8, "warmup_type": "linear"
    },
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 8, "cos_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
}  # fmt: skip

report = {}
for name, params in SCHEDULES.items():
    net = make_net()
    ds_config = config(scheduler={"type": name, "params": params})
    engine, _, _, scheduler = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
    losses, rates = [], []
    for x, y in batches(engine.global_rank, engine.world_size):
        rates.append(engine.get_lr()[0])
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report[f"losses of {name}"], report[f"rates of {name}"] = losses, rates
    assert scheduler.get_last_lr() == engine.get_lr()
