"""Scalars in a CSV file: the engine's own and the user's."""

import csv
import os
import tempfile

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

folder = [tempfile.mkdtemp()]
deepspeed.init_distributed()
deepspeed.comm.broadcast_object_list(folder, src=0)
ds_config = config(csv_monitor={"enabled": True, "output_path": folder[0], "job_name": "first"}, steps_per_print=1)
net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if engine.monitor.enabled and engine.global_rank == 0:
        engine.monitor.write_events([("Train/my_scalar", 2.0 * engine.global_steps, engine.global_samples)])
engine.destroy()
deepspeed.comm.barrier()
rows = []
for path, _, names in os.walk(folder[0]):
    for name in names:
        with open(os.path.join(path, name)) as file:
            rows += list(csv.reader(file))
text = repr(rows)
report = {"losses": losses, "written": "my_scalar" in text and "12.0" in text, "rows": len(rows) > 6}
