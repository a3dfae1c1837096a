"""An embedding that is the output layer too."""

import deepspeed
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from user_model import WIDTH, config

VOCAB = 12


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(torch.tanh(self.block(self.embedding(tokens))))


torch.manual_seed(0)
net = Language()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
draw = torch.Generator().manual_seed(1)
losses = []
for _ in range(6):
    tokens = torch.randint(0, VOCAB, (4, 6), generator=draw)
    mine = tokens[engine.global_rank * 2 : engine.global_rank * 2 + 2]
    loss = cross_entropy(engine(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report = {"losses": losses, "tied": net.output.weight is net.embedding.weight}
