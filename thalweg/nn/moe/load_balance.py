"""Experts balanced without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664).

A router adds a bias to its scores where it chooses experts, and nowhere else.  After each step the bias of every expert
that got fewer tokens than the mean goes up by a fixed amount, of one that got more down; tokens are those of all ranks
and micro-batches.  The bias is a buffer ``e_score_correction_bias``, which checkpoints hold: our own layer gets one,
and Hugging Face's models have it in the gate or beside it, where they choose by one (DeepSeek-V3, GLM-4 MoE, MiniMax).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.config.schema.parallel import ExpertParallel
from thalweg.nn.moe.layer import MoE
from thalweg.ops.grouped_mm import count_groups
from thalweg.parallel.expert.detect import is_stacked, positional_args

_BIAS = "e_score_correction_bias"


class LoadBalancer:
    """Counts the tokens of each expert of a model in training, and moves the biases by ``coeff``.

    ``group``: the ranks that see other tokens.

    Raises:
        ValueError: no router of ``model`` has a bias.
    """

    def __init__(
        self, model: nn.Module, section: ExpertParallel, coeff: float, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.coeff, self.group, self._device = coeff, group, device
        self._routers: list[nn.Module] = []  # a bias is looked up in its module, as sharding may move it
        self._counts: list[Tensor] = []
        modules = dict(model.named_modules())
        for name, module in modules.items():
            if isinstance(module, MoE):
                module.register_buffer(_BIAS, torch.zeros(module.num_experts, device=device))
                self._watch(module, module, lambda args, kwargs, output: output[2])
            elif is_stacked(module, section):
                layer, key = modules[name.rpartition(".")[0]], positional_args(module)[1]
                router = next((one for one in (layer, *layer.children()) if _BIAS in one._buffers), None)
                if router is not None:
                    self._watch(module, router, lambda args, kwargs, _, key=key: (*args[1:2], kwargs.get(key))[0])
        if not self._routers:
            raise ValueError(
                f"expert_parallel.load_balance_coeff is {coeff:g}, but no router of {type(model).__name__} has a bias "
                f"to choose by: thalweg.moe.MoE has, and Hugging Face's models with {_BIAS}; leave it out"
            )

    def _watch(self, module: nn.Module, router: nn.Module, read: Callable[..., Tensor]) -> None:
        """Count what ``read`` finds in a call of ``module``: counts (E,), or chosen experts (N, k)."""
        index, size = len(self._routers), len(router.get_buffer(_BIAS))
        self._routers.append(router)
        self._counts.append(torch.zeros(size, dtype=torch.int64, device=self._device))

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module.training:  # a recomputed layer counts twice, which leaves each expert's side of the mean
                new = read(args, kwargs, output)
                if new.ndim > 1:
                    new = count_groups(new.flatten().long().clamp(max=size), size)[:size]
                self._counts[index] += new

        module.register_forward_hook(hook, with_kwargs=True)

    @torch.no_grad()
    def update(self, *_: Any) -> None:
        """Move each bias after a step; collective over the group."""
        counts = torch.cat(self._counts)
        dist.all_reduce(counts, group=self.group)
        for router, own in zip(self._routers, counts.float().split([len(c) for c in self._counts]), strict=True):
            bias = router.get_buffer(_BIAS)
            bias += self.coeff * (own.mean() - own).sign().to(bias)
        self._counts = [torch.zeros_like(own) for own in self._counts]
