"""Two engines: a generator and a discriminator."""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from user_model import ROWS, WIDTH, batches, config, make_net

torch.manual_seed(4)
generator_net = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
discriminator_net = make_net()
generator, *_ = deepspeed.initialize(model=generator_net, model_parameters=generator_net.parameters(), config=config())
discriminator, *_ = deepspeed.initialize(
    model=discriminator_net, model_parameters=discriminator_net.parameters(), config=config()
)
rank, world = generator.global_rank, generator.world_size
draw = torch.Generator().manual_seed(9)
losses, losses_g = [], []
for real, _ in batches(rank, world):
    noise = torch.randn(ROWS, 4, generator=draw)[rank * ROWS // world : (rank + 1) * ROWS // world]
    fake = generator(noise)
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
    discriminator.backward(loss)
    discriminator.step()
    losses.append(loss.item())

    on_fake = discriminator(generator(noise))
    loss_g = bce(on_fake, torch.ones_like(on_fake))
    generator.backward(loss_g)
    generator.step()
    discriminator.zero_grad()
    losses_g.append(loss_g.item())
report = {"losses": losses, "losses of the generator": losses_g}
