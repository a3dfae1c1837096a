"""Whole weights, gradients and optimizer states, read and written between the steps."""

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
losses, grads, moments, weights = [], [], [], []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    grads.append([safe_get_full_grad(p).norm().item() for p in net.parameters()])
    engine.step()
    losses.append(loss.item())
    moments.append(safe_get_full_optimizer_state(net.head.weight, "exp_avg").norm().item())
    weights.append(safe_get_full_fp32_param(net.head.weight).norm().item())
    if step == 2:
        safe_set_full_fp32_param(net.head.weight, safe_get_full_fp32_param(net.head.weight) * 0.5)
        moment = safe_get_full_optimizer_state(net.head.weight, "exp_avg")
        safe_set_full_optimizer_state(net.head.weight, moment * 0.0, "exp_avg")
report = {"losses": losses, "grads": grads, "moments": moments, "weights": weights}
