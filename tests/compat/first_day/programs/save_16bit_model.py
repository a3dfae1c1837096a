"""The weights alone, whole and in 16 bits, for inference."""

import os
import tempfile

import deepspeed
from safetensors.torch import load_file
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(bf16={"enabled": True})
ds_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
for x, y in batches(engine.global_rank, engine.world_size):
    engine.backward(mse_loss(engine(x.bfloat16()).float(), y))
    engine.step()
folder = [tempfile.mkdtemp()]
deepspeed.comm.broadcast_object_list(folder, src=0)
assert engine.save_16bit_model(folder[0])
deepspeed.comm.barrier()
state = load_file(os.path.join(folder[0], "model.safetensors"))
report = {
    "dtypes": sorted({str(value.dtype) for value in state.values()}),
    "norms": {name: value.float().norm().item() for name, value in sorted(state.items())},
}
