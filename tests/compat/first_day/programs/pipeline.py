"""Two stages of a list of layers, the embedding tied to the output."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn.functional import cross_entropy
from user_model import WIDTH, config

VOCAB = 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def unembed(embedding, x):
    return x @ embedding.weight.t()


deepspeed.init_distributed()
layers = [
    TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH),
    LayerSpec(Block, WIDTH),
    LayerSpec(Block, WIDTH),
    TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH, forward_fn=unembed),
]
net = PipelineModule(
    layers=layers,
    num_stages=2,
    loss_fn=lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()),
    partition_method="uniform",
    base_seed=3,
)
ds_config = config(gradient_accumulation_steps=2)
engine, *_ = deepspeed.initialize(
    model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=ds_config
)


def data():
    draw = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, VOCAB, (2, 5), generator=draw)
        yield tokens[:, :-1], tokens[:, 1:]


source = data()
losses = [float(engine.train_batch(data_iter=source)) for _ in range(4)]
report = {
    "losses": losses,
    "evaluated": float(engine.eval_batch(data_iter=data())),
    "stages": engine.num_stages,
    "ends": (engine.is_first_stage(), engine.is_last_stage()) in [(True, False), (False, True)],
}
