"""A user's own model, data and config: what the programs beside this file import."""

import os

import torch
from torch import nn

WIDTH = 8
ROWS = 4  # of a batch over all ranks
STEPS = 6


class Net(nn.Module):
    def __init__(self, width=WIDTH, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).squeeze(-1)


def make_net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batches(rank=0, world=1, count=STEPS, seed=1):
    """This rank's rows of each batch."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(ROWS, WIDTH, generator=draw)
        rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        yield x[rows], x.sum(1).tanh()[rows]


class Pairs(torch.utils.data.Dataset):
    """The same rows one by one, dealt out so that two ranks see the batches above."""

    def __init__(self, count=STEPS):
        rows = [row for x, y in batches(count=count) for row in zip(x, y, strict=True)]
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def config(**sections):
    """The config that most programs begin with; the stage is that of the run."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": int(os.environ.get("STAGE", "1"))},
    } | sections


def make_text_pipeline():
    """A pipeline of transformers over a small GPT-2 whose words are w0 to w39."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, pipeline

    words = Tokenizer(WordLevel({f"w{n}": n for n in range(40)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w1", bos_token="w0", eos_token="w39", pad_token="w2"
    )
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=39)
    model = GPT2LMHeadModel(shape).eval()
    # Weights that tell one token from another: by the default ones, small as they are, words follow by chance.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
