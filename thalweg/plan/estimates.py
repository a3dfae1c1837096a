"""How much memory the states of a model need, by the rules of thumb that DeepSpeed's users know.

They take a model of 16-bit weights under mixed-precision Adam: 2 bytes a parameter for the weights, 2 for gradients,
4 each for masters, momentum, variance and fp32 gradients, and ``additional_buffer_factor`` on the host.  They know
neither activations nor this machine nor the config; :func:`thalweg.plan` does.
"""

import sys
from collections.abc import Callable
from itertools import product

from torch import nn

_GIB = 2**30


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


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a host and of a device at stage 2."""
    num_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * num_gpus, 16) * additional_buffer_factor), 2 * total_params
    device = 2 * total_params + int(18 * total_params / num_gpus)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), device


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a host, of a device, and of the largest layer at stage 3."""
    num_gpus, largest_layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    device = largest_layer
    if cpu_offload:
        on_host = (18 if cpu_offload_params else 16) / num_nodes
        host = total_params * (on_host if zero_init else max(4 * num_gpus_per_node, on_host))
        if not cpu_offload_params:
            device += int(2 * total_params / num_gpus)
    else:
        host = (largest_layer_params if zero_init else total_params) * 4 * num_gpus_per_node
        device += int(18 * total_params / num_gpus)
    return int(host * additional_buffer_factor), device, largest_layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model, with offload and without."""
    total = _count_params(model)[0]
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for so many parameters."""
    hardware = (num_gpus_per_node, num_nodes)

    def row(offload: bool) -> tuple[int, int]:
        return estimate_zero2_model_states_mem_needs(total_params, *hardware, offload, additional_buffer_factor)

    rows = [(*row(offload), f"offload_optimizer={_device(offload)}") for offload in (True, False)]
    _print_table(*hardware, f"{int(total_params / 1e6)}M total params.", rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model, with offload and ``zero.Init`` and without."""
    counts = _count_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(*counts, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for so many parameters, so many of them in one layer."""
    hardware = (num_gpus_per_node, num_nodes)
    rows = []
    for (offload, offload_params), zero_init in product(((True, True), (True, False), (False, False)), (True, False)):
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params, largest_layer_params, *hardware, offload, offload_params, zero_init, additional_buffer_factor
        )
        options = f"offload_param={_device(offload_params)}, offload_optimizer={_device(offload)}"
        rows.append((host, device, f"{options}, zero_init={int(zero_init)}"))
    largest = int(largest_layer_params / 1e6)
    _print_table(*hardware, f"{int(total_params / 1e6)}M total params, {largest}M largest layer params.", rows)


def _count_params(model: nn.Module) -> tuple[int, int]:
    """Of the model and of its largest layer, shared ones once."""
    own: Callable[[nn.Module], int] = lambda module: sum(p.numel() for p in module.parameters(recurse=False))
    return sum(p.numel() for p in model.parameters()), max(map(own, model.modules()))


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _print_table(num_gpus_per_node: int, num_nodes: int, model: str, rows: list[tuple[int, int, str]]) -> None:
    """These functions are for their output, wherever they are called."""
    nodes, gpus = "nodes" if num_nodes > 1 else "node", "GPUs" if num_gpus_per_node > 1 else "GPU"
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.",
        f"SW: Model with {model}",
        "  per CPU  |  per GPU |   Options",
    ]
    lines += [f"  {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}" for host, device, options in rows]
    sys.stdout.write("\n".join(lines) + "\n")
