"""Build without memory, or in a dtype, by OnDevice."""

import deepspeed
import torch
from user_model import Net

with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
    shapes = Net()
torch.manual_seed(0)
with deepspeed.OnDevice(dtype=torch.bfloat16, device="cpu"):
    half = Net()
with deepspeed.OnDevice(dtype=torch.float16, device="meta", enabled=False):
    plain = Net()
report = {
    "meta": [str(p.device) + str(p.dtype) for p in shapes.parameters()],
    "half": sorted({str(p.device) + str(p.dtype) for p in half.parameters()}),
    "plain": sorted({str(p.device) + str(p.dtype) for p in plain.parameters()}),
    "default": str(torch.get_default_dtype()),
}
