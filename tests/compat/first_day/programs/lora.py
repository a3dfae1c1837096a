"""Low-rank adapters written by hand: everything else is frozen."""

import deepspeed
from torch import nn
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net


class Adapter(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        for parameter in base.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


net = make_net()
for index, block in enumerate(net.blocks):
    net.blocks[index] = Adapter(block)
net.head.requires_grad_(False)
trained = [p for p in net.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config())
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "trained": sum(p.numel() for p in net.parameters() if p.requires_grad)}
