"""Two of the three batch sizes give the third."""

import deepspeed
from user_model import config, make_net

sizes = []
for keys in (
    {"train_batch_size": 8},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
    {"train_batch_size": 8, "gradient_accumulation_steps": 4},
    {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
):
    ds_config = config()
    del ds_config["train_micro_batch_size_per_gpu"]
    net = make_net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config | keys)
    info = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    assert tuple(engine.get_batch_info()) == info
    sizes.append(info)
report = {"sizes": sizes}
