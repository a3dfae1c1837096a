"""The usual start of a script: load what is there, else begin."""

import tempfile

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
folder = [tempfile.mkdtemp()]
deepspeed.comm.broadcast_object_list(folder, src=0)
path, client_state = engine.load_checkpoint(folder[0])
start = 0 if path is None else client_state["step"]
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "start": start, "nothing": path is None}
