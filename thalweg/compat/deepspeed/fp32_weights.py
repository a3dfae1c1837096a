"""``zero_to_fp32``: the whole fp32 weights of a checkpoint that Thalweg wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thalweg.checkpoint import Checkpoint
from thalweg.checkpoint.directory import MANIFEST
from thalweg.utils.atomic_file import publish_file
from thalweg.zero.whole_parameter import WholeParameter
from thalweg.zero.whole_tensors import load_full_state_dict

_PREFIX = "model/"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's whole tensors on the CPU, floating ones in fp32."""
    with Checkpoint.open(checkpoint_dir, tag) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensor_names(_PREFIX)}
        tensors |= {alias: tensors[name] for alias, name in checkpoint.manifest.aliases.items() if name in tensors}
    tensors = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    """The file of the model's states in the folder of one tag, for ``torch.load(file)["module"]``.

    Thalweg's folders have safetensors: the first rank's file is made of them, whole and in fp32, when it is asked for.
    """
    path = Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt"
    if int(mp_rank_str) == 0 and (path.parent / MANIFEST).is_file() and not path.exists():
        states = {"module": get_fp32_state_dict_from_zero_checkpoint(path.parents[1], path.parent.name)}
        publish_file(path, lambda file: torch.save(states, file))
    return str(path)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The plain model on the CPU with those weights, or an engine's model where it is, which stays usable."""
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if any(isinstance(parameter, DTensor | WholeParameter) for parameter in model.parameters()):
        load_full_state_dict(model, state_dict, strict=False)
    else:
        plain = model if isinstance(model, FSDPModule) else model.cpu()  # gathered for now, or no engine's
        plain.load_state_dict(state_dict, strict=False)
    return model
