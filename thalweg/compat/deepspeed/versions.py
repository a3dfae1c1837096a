"""What programs ask of a DeepSpeed's build."""

import torch

from thalweg.compat.deepspeed.surface import DEEPSPEED_VERSION

version = DEEPSPEED_VERSION
version_major, version_minor, version_patch = map(int, DEEPSPEED_VERSION.split("."))
git_hash = git_branch = "unknown"
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}
