"""What scripts ask of their engine."""

import os

import deepspeed
import torch
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
ds_config = config(gradient_clipping=1.0, gradient_accumulation_steps=2, steps_per_print=7)
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds_config)
stage = int(os.environ["STAGE"])
applied, losses, rates = [], [], []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    applied.append(engine.was_step_applied())
    if step == 1:
        engine.set_lr(0.02)
    rates.append(engine.get_lr()[0])
    engine.empty_partition_cache()
assert engine.local_rank == engine.global_rank == deepspeed.comm.get_rank()
assert (engine.world_size, engine.dp_world_size) == (2, 2)
assert engine.zero_optimization() == (stage > 0)
assert engine.zero_optimization_partition_gradients() == (stage >= 2)
assert engine.zero_optimization_partition_weights() == (stage >= 3)
assert engine.zero_optimization_stage() == stage
assert engine.gradient_clipping() == 1.0 and engine.steps_per_print() == 7
assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and not engine.amp_enabled()
assert engine.optimizer_name() == "adam" and engine.optimizer_params() == {"lr": 0.01}
assert engine.scheduler_name() is None and engine.scheduler_params() is None
assert not engine.zero_offload_optimizer() and not engine.zero_offload_param()
assert not engine.monitor.enabled and not engine.wall_clock_breakdown()
assert engine.dynamic_loss_scale() is False and engine.loss_scale() == 1.0
assert engine.get_mom() == [(0.9, 0.999)]
assert engine.module is net or isinstance(engine.module, type(net))
assert engine.config["steps_per_print"] == 7 and engine.zero_cpu_offload() is False
assert engine.global_samples == 24 and engine.get_data_types()[0] == torch.float32
assert engine.sequence_parallel_size == 1 and engine.mp_world_size == 1
state = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module_state_dict()
if engine.global_rank == 0:
    assert list(state) == list(make_net().state_dict())
report = {"losses": losses, "applied": applied, "rates": rates}
