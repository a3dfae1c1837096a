"""How much arithmetic a model asks for, and how much memory this process holds."""

from pathlib import Path

import torch

from thalweg.config import ModelSize


def flops_per_token(model_size: ModelSize, sequence_length: int | None = None) -> float:
    """Return the floating-point operations of one training token, forward and backward.

    ``6 N + 12 L d T``: two operations a weight forward and four backward, and the two
    products of attention (Chowdhery et al. 2022, "PaLM", appendix B, whose ``H Q`` is
    the width ``d`` here).  The causal half is not subtracted and recomputed activations
    are not added, so this is *model* arithmetic, the numerator of MFU.  ``model_size`` is a
    ``ModelSize`` (``num_parameters, hidden_size, num_layers``); without a width, a depth
    or a length the attention term is left out.  A weight that is only looked up (positions, an
    untied input embedding) does no arithmetic: subtract it from ``num_parameters`` where it matters.
    """
    dense = 6.0 * model_size.num_parameters
    if not (model_size.hidden_size and model_size.num_layers and sequence_length):
        return dense
    return dense + 12.0 * model_size.num_layers * model_size.hidden_size * sequence_length


def resident_mib(*, peak: bool = False) -> float:
    """Return this process's resident memory in MiB, or its highest so far; 0.0 where unknown."""
    key = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status")  # not by utils/procfs.py: a measured batch enters few files
    if status.exists():
        for row in status.read_text().splitlines():
            if row.startswith(key):
                return int(row.split()[1]) / 1024
    return 0.0


def peak_memory_mib(device: torch.device) -> float:
    """Return the most MiB that this process has held on ``device``; on the CPU, its resident memory's peak."""
    if device.type == "cpu":
        return resident_mib(peak=True)
    return torch.accelerator.max_memory_allocated(device) / 2**20


def memory_text(device: torch.device) -> str:
    """Say how many MiB this process holds on ``device`` and has held at most; on the CPU, resident."""
    held = resident_mib() if device.type == "cpu" else torch.accelerator.memory_allocated(device) / 2**20
    return f"{held:.0f} MiB on {device}, {peak_memory_mib(device):.0f} at the peak"
