"""Whole weights, gradients and optimizer states, read and written between the steps; at stage 3 a rank's parts, too."""

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from torch.nn.functional import mse_loss
from user_model import batches, config, make_net

net = make_net()
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
local = engine.zero_optimization_stage() == 3
weight = net.blocks[0].weight
get_param, set_param = safe_get_full_fp32_param, safe_set_full_fp32_param
get_grad, set_grad = safe_get_full_grad, safe_set_full_grad
get_state, set_state = safe_get_full_optimizer_state, safe_set_full_optimizer_state
if local:
    get_param, set_param = safe_get_local_fp32_param, safe_set_local_fp32_param
    get_grad, set_grad = safe_get_local_grad, safe_set_local_grad
    get_state, set_state = safe_get_local_optimizer_state, safe_set_local_optimizer_state


def whole_sum(part):
    """Of the squares, of this rank's part at stage 3, over all ranks."""
    total = torch.tensor([(part.double() ** 2).sum()])
    if local:
        dist.all_reduce(total)
    return total.item()


losses, grads, moments, weights, squares = [], [], [], [], []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    loss = mse_loss(engine(x), y)
    engine.backward(loss)
    grads.append([safe_get_full_grad(p).norm().item() for p in net.parameters()])
    squares.append(whole_sum(get_grad(weight)))
    if step == 1:
        set_grad(weight, get_grad(weight) * 0.25)
        safe_set_full_grad(net.blocks[1].weight, safe_get_full_grad(net.blocks[1].weight) * 3.0)
        safe_update_full_grad_vectorized(net.head.parameters(), lambda grad, param: grad.sign() * 0.5)
    engine.step()
    losses.append(loss.item())
    moments.append(safe_get_full_optimizer_state(net.head.weight, "exp_avg").norm().item())
    weights.append(safe_get_full_fp32_param(net.head.weight).norm().item())
    squares += [whole_sum(get_param(weight)), whole_sum(get_state(weight, "exp_avg"))]
    if step == 2:
        safe_set_full_fp32_param(net.head.weight, safe_get_full_fp32_param(net.head.weight) * 0.5)
        moment = safe_get_full_optimizer_state(net.head.weight, "exp_avg")
        safe_set_full_optimizer_state(net.head.weight, moment * 0.0, "exp_avg")
    if step == 3:
        set_param(weight, get_param(weight) * -1.5)
        set_state(weight, get_state(weight, "exp_avg") + 0.01, "exp_avg")
refused = local
try:
    if not local:
        safe_set_local_fp32_param(weight, safe_get_local_fp32_param(weight))
except ValueError:
    refused = True
report = {
    "refused": refused,
    "losses": losses,
    "grads": grads,
    "moments": moments,
    "weights": weights,
    "squares": squares,
}
