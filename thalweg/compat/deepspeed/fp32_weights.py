"""``zero_to_fp32``: the whole fp32 weights of a checkpoint, Thalweg's or DeepSpeed's."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thalweg.checkpoint.background_save import join_saves
from thalweg.checkpoint.directory import MANIFEST
from thalweg.checkpoint.load import open_checkpoint
from thalweg.utils.atomic_file import publish_file
from thalweg.zero.whole_parameter import WholeParameter
from thalweg.zero.whole_tensors import load_full_state_dict

_PREFIX = "model/"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's whole tensors on the CPU, floating ones in fp32.

    Raises:
        ValueError: frozen parameters are to be left out, which the save alone can do.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "a checkpoint does not say which parameters were frozen: leave them out where it is made, with "
            "engine.save_checkpoint(DIR, exclude_frozen_parameters=True)"
        )
    join_saves()  # an asynchronous one of this program's may be what is asked for
    with open_checkpoint(checkpoint_dir, tag) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensor_names(_PREFIX)}
        tensors |= {alias: tensors[name] for alias, name in checkpoint.manifest.aliases.items() if name in tensors}
    tensors = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole fp32 weights as Hugging Face's files of ``max_shard_size``; a name that ends in .bin is one file.

    Tensors that are tied stay so in files of torch.save; in safetensors one of their names is left out.
    """
    from huggingface_hub import save_torch_state_dict  # comes with transformers

    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    pattern = "model{suffix}.safetensors" if safe_serialization else "pytorch_model{suffix}.bin"
    if folder.suffix == ".bin":
        folder, pattern, max_shard_size = folder.parent, folder.name.replace(".bin", "{suffix}.bin"), "1000TB"
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        state_dict,
        folder,
        filename_pattern=pattern,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
    )


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    """The file of the model's states in the folder of one tag, for ``torch.load(file)["module"]``.

    Thalweg's folders have safetensors: the first rank's file is made of them, whole and in fp32, when it is asked for.
    """
    join_saves()
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
