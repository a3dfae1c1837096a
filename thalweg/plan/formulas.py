"""Formulas of the literature, for comparison with what the plan counts on the model at hand."""

from __future__ import annotations


def zero_state_bytes(num_parameters: float, world_size: int, stage: int, optimizer_bytes: int = 12) -> float:
    """Bytes of model states on one rank in mixed precision (Rajbhandari et al. 2020, "ZeRO", figure 1).

    Two bytes a parameter, two a gradient, and K = ``optimizer_bytes`` of optimizer state (12 for
    Adam: fp32 master, momentum, variance); stage 1 shards the last, 2 the gradients, 3 all.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; it must be 0, 1, 2 or 3")
    shard_factors = [1 / world_size if stage >= level else 1.0 for level in (3, 2, 1)]
    return num_parameters * (2 * shard_factors[0] + 2 * shard_factors[1] + optimizer_bytes * shard_factors[2])


def transformer_activation_bytes(
    hidden_size: int, num_layers: int, sequence_length: int, batch: int, itemsize: int = 2
) -> float:
    """Bytes of activations of a GPT without recomputation: 12 x hidden x batch x sequence x layers elements.

    (Rajbhandari et al. 2020, "ZeRO", section 3.2.)  GPT-2 of 1.5 billion parameters at sequence 1,024 and
    batch 32: 60 GB.  It counts the large tensors alone; what a given implementation saves is more.
    """
    return 12.0 * hidden_size * batch * sequence_length * num_layers * itemsize
