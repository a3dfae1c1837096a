"""A mixture of experts, its parameters in groups of their own."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn.functional import mse_loss
from user_model import WIDTH, batches, config


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=1, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x, balance, _counts = self.moe(torch.tanh(self.first(x)))
        return self.head(x).squeeze(-1), balance


deepspeed.init_distributed()
torch.manual_seed(0)
net = Sparse()
assert has_moe_layers(net)[0]
groups = {"params": list(net.parameters()), "name": "parameters"}
groups = split_params_into_different_moe_groups_for_optimizer(groups)
num_moe = sum(is_moe_param(p) for p in net.parameters())
engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config())
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    output, balance = engine(x)
    loss = mse_loss(output, y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "groups": len(groups), "experts": num_moe > 0}
