"""A DataLoader of the program's own, whose forked workers import deepspeed and are started while the engine trains."""

import os

import deepspeed
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from user_model import batches, config, make_net


class Rows(Dataset):
    """This rank's batches; each comes with the process that made it and what a library asks of deepspeed there."""

    def __init__(self, rank, world):
        self.batches = list(batches(rank, world))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        from deepspeed.accelerator import get_accelerator

        asked = deepspeed.__version__.startswith("0.19") and get_accelerator().device_count() >= 0
        return *self.batches[index], os.getpid(), asked


net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
rows = Rows(engine.global_rank, engine.world_size)
losses, processes, answers = [], set(), []
for first, last in ((0, 2), (2, len(rows))):  # workers before the first step, and others after it
    part = torch.utils.data.Subset(rows, range(first, last))
    loader = DataLoader(part, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for x, y, process, asked in loader:
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        processes.add(process)
        answers.append(asked)
report = {"losses": losses, "workers": len(processes - {os.getpid()}), "asked": all(answers)}
