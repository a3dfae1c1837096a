"""Optimisers, schedules, loss scaling and clipping, right on sharded parameters.

The picture: the engine holds parameters that are ``DTensor`` s (stages 1 to 3) or plain replicated tensors
(stage 0), and their mean gradients in the same layout. A step is then

    norm = global_grad_norm(params)            norms.py      one all-reduce of a few numbers
    scaler.update(not isfinite(norm))          loss_scaler.py a state machine; skips the step on all ranks
    factor = clip_factor(norm, max_norm)       norms.py      a number that the gradients are multiplied by
    optimizer.step()                           algorithms/   local; Lamb and Muon talk to other ranks
    schedule.step()                            lr_scheduler.py a function of the number of updates

Invariants: every rank computes the same verdict, norm and rate, bit for bit; an optimiser's result does not
depend on how its parameters are cut; what ``optimizer.state`` holds for a parameter has that parameter's
logical shape and layout (or no shape at all), so that a checkpoint sees logical tensors.
"""

from thalweg.optim.build import build_optimizer

__all__ = ["build_optimizer"]
