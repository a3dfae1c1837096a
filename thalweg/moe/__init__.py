"""``thalweg.moe``: the names that DeepSpeed's users know."""

from thalweg.moe.layer import MoE
from thalweg.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer

__all__ = ["MoE", "has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]
