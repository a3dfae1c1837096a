"""Arguments from the launcher, the config from a file that they name."""

import argparse

import deepspeed
from torch.nn.functional import mse_loss
from user_model import batches, make_net

parser = argparse.ArgumentParser(description="a first script")
parser.add_argument("--local_rank", type=int, default=-1, help="passed by the launcher")
parser.add_argument("--seed", type=int, default=0)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

net = make_net(args.seed)
parameters = filter(lambda p: p.requires_grad, net.parameters())
engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
losses = []
for x, y in batches(engine.global_rank, engine.world_size):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "flag": args.deepspeed}
