"""Save with a tag and a state of one's own, load into a new engine, go on."""

import os
import tempfile

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net


def build(seed):
    net = make_net(seed)
    ds_config = config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}})
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)[0]


def train(engine, rows):
    losses = []
    for x, y in rows:
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


engine = build(0)
rows = list(batches(engine.global_rank, engine.world_size))
folder = [tempfile.mkdtemp()]
deepspeed.comm.broadcast_object_list(folder, src=0)
losses = train(engine, rows[:2])
engine.save_checkpoint(folder[0], client_state={"step": 2, "note": "two"})
losses += train(engine, rows[2:4])
engine.save_checkpoint(folder[0], tag="four", client_state={"step": 4})
with open(os.path.join(folder[0], "latest")) as file:
    latest = file.read().strip()

other = build(7)
path, client_state = other.load_checkpoint(folder[0])
assert path is not None and client_state["step"] == 4 and other.global_steps == 4
losses += train(other, rows[4:])

third = build(8)
_, client_state = third.load_checkpoint(folder[0], tag="global_step2")
assert client_state["note"] == "two"
again = train(third, rows[2:4])
missing = build(9)
report = {"losses": losses, "losses from two": again, "latest": latest}
