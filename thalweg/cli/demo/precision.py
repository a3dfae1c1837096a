"""Whether this processor is fast at bf16: measured, since every flag's name belongs to one vendor."""

import time
import timeit

import torch
import torch.nn.functional as F

from thalweg.device import resolve_device


def has_fast_bf16(device: str = "auto") -> bool:
    """Return whether a device's matrix products are clearly faster in bf16 than in fp32.

    On a GPU, whether it has bf16 at all.  On a processor, a linear layer of 512 x 256 x
    1,024 on one thread, forward and backward, the best of several by the
    processor's clock (a busy machine must not decide): with AVX512_BF16 or
    AMX bf16 takes half the time or less; where it is emulated it takes longer.
    """
    if (found := resolve_device(device)).type != "cpu":
        return getattr(torch.get_device_module(found), "is_bf16_supported", lambda: True)()
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
