"""Whether this processor is fast at bf16: measured, since every flag's name belongs to one vendor."""

from __future__ import annotations

import time
import timeit

import torch
import torch.nn.functional as F

from thalweg.device import current_accelerator


def has_fast_bf16() -> bool:
    """Return whether the device's matrix products are clearly faster in bf16 than in fp32.

    On a GPU, whether it has bf16 at all.  On a processor, a linear layer of 512 x 256 x
    1,024 on one thread, forward and backward, the best of several by the
    processor's clock (a busy machine must not decide): with AVX512_BF16 or
    AMX bf16 takes half the time or less; where it is emulated it takes longer.
    """
    if (accelerator := current_accelerator()).type != "cpu":
        return torch.get_device_module(accelerator).is_bf16_supported()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_linear(torch.bfloat16) * 1.2 < _time_linear(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _time_linear(dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(1024, 256, generator=generator).to(dtype).requires_grad_()
    grad = torch.ones(512, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: F.linear(x, weight).backward(grad), timer=time.thread_time, number=1, repeat=7))
