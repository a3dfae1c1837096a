"""Code that names no device."""

import torch
from deepspeed.accelerator import get_accelerator

accelerator = get_accelerator()
device = torch.device(accelerator.device_name())
x = torch.ones(3, device=accelerator.current_device_name()).to(accelerator.current_device())
accelerator.synchronize()
accelerator.empty_cache()
accelerator.manual_seed_all(3)
state = accelerator.get_rng_state()
first = torch.rand(2)
accelerator.set_rng_state(state)
with accelerator.stream(accelerator.current_stream()):
    second = torch.rand(2)
accelerator.range_push("a range")
accelerator.range_pop()
report = {
    "same": bool((first == second).all()),
    "on": accelerator.on_accelerator(x),
    "memory": accelerator.memory_allocated() >= 0 and accelerator.total_memory() > 0,
    "dtypes": torch.float32 in accelerator.supported_dtypes(),
    "backend": accelerator.communication_backend_name() in ("gloo", "nccl"),
    "available": accelerator.is_available(),
    "bf16": accelerator.is_bf16_supported(),
}
