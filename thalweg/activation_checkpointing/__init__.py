"""Activation checkpointing: which units recompute their forward in the backward pass.

The picture: a model is a row of units (its transformer blocks, as a rule).  A unit that is
checkpointed keeps its inputs alone; when the backward pass reaches it, its forward runs
again, with the random state and autocast of the first time, and then its backward.  In
between stands the per-op policy: results of named operators (matrix products, attention)
are kept too, and only the cheap rest is computed twice.  Chen et al. 2016, "Training Deep
Nets with Sublinear Memory Cost"; selective: Korthikanti et al. 2022.

All of it is ``torch.utils.checkpoint`` in its non-reentrant form.  What is ours is where it
goes in: the unit itself gets a subclass of its class whose forward is the checkpointed one.

The invariants:

- Parameter names, repr, hooks and state dict are those of the plain model.
- Hooks stay outside of the recomputed region.  FSDP's hooks on a unit thus run once: its
  pre-backward hook has gathered the parameters again before the recomputation begins.
- Gradients equal those without checkpointing bit for bit, dropout included.
- Without gradients, or in ``eval()``, a unit runs its plain forward.
- A unit whose own (Hugging Face) checkpointing is on is left to it: nothing runs three times.
- Inputs that are put away (``offload.py``) come back with the same bits; units inside of such a unit keep
  theirs.

Files: ``checkpoint_wrapper.py`` the units and their policy; ``offloaded_forward.py`` one call whose inputs
leave; ``offload.py`` where to.
"""

from thalweg.activation_checkpointing.checkpoint_wrapper import (
    ActivationCheckpointPolicy,
    apply_activation_checkpointing,
)

__all__ = ["ActivationCheckpointPolicy", "apply_activation_checkpointing"]
