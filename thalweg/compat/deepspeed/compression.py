"""``deepspeed.compression``'s helpers in front of :mod:`thalweg.compression`."""

from typing import Any

from torch import nn

from thalweg.compression import init_student
from thalweg.config import load

recursive_getattr, recursive_setattr = nn.Module.get_submodule, nn.Module.set_submodule


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> None:
    """Fill a student with the layers of its teacher that ``layer_reduction`` names."""
    section: Any = load(deepspeed_config).compression_training
    init_student(student_model, teacher_model, section.layer_reduction)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type) -> nn.Module:
    """The model as it is: Hugging Face's Conv1D is compressed in its own form."""
    return model
