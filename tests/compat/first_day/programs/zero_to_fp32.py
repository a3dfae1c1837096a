"""A checkpoint becomes the plain model's fp32 weights."""

import tempfile

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
for x, y in batches(engine.global_rank, engine.world_size):
    engine.backward(mse_loss(engine(x), y))
    engine.step()
folder = [tempfile.mkdtemp()]
deepspeed.comm.broadcast_object_list(folder, src=0)
engine.save_checkpoint(folder[0])
state = get_fp32_state_dict_from_zero_checkpoint(folder[0])
plain = load_state_dict_from_zero_checkpoint(make_net(5), folder[0])
with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
    for parameter in net.parameters():
        parameter.data.zero_()
load_state_dict_from_zero_checkpoint(engine.module, folder[0])  # into the engine's own model
with torch.no_grad():
    rows = batches(engine.global_rank, engine.world_size, seed=2)
    losses = [mse_loss(engine(x), y).item() for x, y in rows]
report = {
    "losses": losses,
    "norms": {name: value.norm().item() for name, value in state.items()},
    "loss": [mse_loss(plain(x), y).item() for x, y in batches(seed=2)],
}
