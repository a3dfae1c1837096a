"""Muon: orthogonalised momentum for the hidden matrices, AdamW for the rest (Jordan, 2024), right on shards.

A Muon step of a matrix W with gradient G:

    B = mu B + (1 - mu) G                    momentum, elementwise, on the local piece
    D = (1 - mu) G + mu B (Nesterov) or B    on the local piece
    O = orthogonalize(D)                     on the LOGICAL matrix, at one owner rank (``distributed_matrices.py``)
    W = (1 - lr weight_decay) W - lr scale O     on the local piece

with ``scale`` = sqrt(max(1, rows / cols)) ("original") or 0.2 sqrt(max(rows, cols)) ("match_rms_adamw"; Liu
et al., 2025, arXiv:2502.16982). A tensor of three dims is a stack of matrices, as of experts; one of more, or of
a convolution, counts as the matrix of its first dim against the others. The result does not depend on how the
matrices are cut, and no work is done twice.

Which parameters are hidden matrices: what the group says (``use_muon: true|false``), else the rule of
``muon_params.is_hidden_matrix``. For a model, ``muon_params.muon_groups`` decides by the modules' types,
which is exact where names and shapes guess.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from thalweg.optim import dtensor_local
from thalweg.optim.algorithms.distributed_matrices import MatrixSharding, compute_on_owners, get_matrix_sharding
from thalweg.optim.algorithms.elementwise import has_fused_kernel
from thalweg.optim.algorithms.lamb import init_adam_state
from thalweg.optim.algorithms.lion import check_hyperparameters
from thalweg.optim.algorithms.muon_params import split_group
from thalweg.optim.algorithms.newton_schulz import COEFFICIENTS, METHODS, orthogonalize
from thalweg.optim.dtensor_local import to_local
from thalweg.parallel_dims import control_group
from thalweg.utils.dtypes import parse_dtype
from thalweg.zero.full_state_dict import distribute_like


class Muon(dtensor_local.StepMixin, torch.optim.Optimizer):
    """Muon on hidden matrices, AdamW on the others.

    ``lr`` is for both, ``muon_lr`` and ``adam_lr`` go before it; without any of them 0.02 and 3e-4
    (Jordan's). ``momentum``, ``nesterov``, ``ns_*`` and ``adjust_lr_fn`` belong to Muon, ``betas`` and
    ``eps`` to AdamW, ``weight_decay`` (decoupled) to both. ``ns_method``: see ``newton_schulz.py``.
    ``ns_dtype``: "fp32", "bf16", or "auto": bf16 on a GPU, where it is several times as fast and what the
    method was made with, and fp32 elsewhere, so that runs agree to rounding however they are cut. Pieces
    travel in that dtype.

    ``params``: parameters, (name, parameter) pairs or group dicts; a group may set ``use_muon`` for all its
    members and override any setting. Groups without it are split in two. ``replicate_group``: ranks that hold
    the plain parameters as copies; they then share the matrices out among them instead of each doing all.

    State: ``momentum_buffer``, or ``step``, ``exp_avg``, ``exp_avg_sq``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_method: str = "gram",
        ns_dtype: str = "auto",
        adjust_lr_fn: str | None = None,
        replicate_group: dist.ProcessGroup | None = None,
    ) -> None:
        rates = {  # the first that is given
            True: next(rate for rate in (muon_lr, lr, 0.02) if rate is not None),
            False: next(rate for rate in (adam_lr, lr, 3e-4) if rate is not None),
        }
        for rate in rates.values():
            check_hyperparameters("Muon", rate, betas, weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon: momentum must be in [0, 1), got {momentum!r}")
        if ns_method not in METHODS:
            raise ValueError(f"Muon: ns_method must be one of {', '.join(METHODS)}, not {ns_method!r}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Muon: adjust_lr_fn must be 'original' or 'match_rms_adamw', not {adjust_lr_fn!r}")
        if len(ns_coefficients) != 3 or not 1 <= ns_steps < 100:
            raise ValueError("Muon: ns_coefficients are three numbers and ns_steps is between 1 and 99")
        self._ns_dtype = None if ns_dtype == "auto" else parse_dtype(ns_dtype)
        self._replicate_group = replicate_group
        defaults = {
            "lr": rates[True],
            "use_muon": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_method": ns_method,
            "adjust_lr_fn": adjust_lr_fn or "original",
        }
        self._rates = rates
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters: as it is if it says ``use_muon``, else split in two by the rule."""
        for half in split_group(param_group):
            super().add_param_group({"lr": self._rates[half["use_muon"]], **half})

    def configure_like_torch(self, replicate_group: dist.ProcessGroup | None) -> None:
        """Go on with the groups of a ``torch.optim.Muon``: only matrices, the plain iteration, in bf16."""
        self._replicate_group = replicate_group
        self._ns_dtype = torch.bfloat16
        for group in self.param_groups:
            settings = {"use_muon": True, "ns_method": "standard"}
            group.update(settings, adjust_lr_fn=group.get("adjust_lr_fn") or "original")

    def _update_params(self) -> None:
        """Two all-to-alls for each round of matrices, and one small all-reduce, on each process group."""
        for group in self.param_groups:
            if group["use_muon"]:
                self._step_matrices(group)
            else:
                self._step_adamw(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_group: dict[dist.ProcessGroup | None, list[tuple[Tensor, MatrixSharding]]] = {}
        for param in group["params"]:
            placement = get_matrix_sharding(param, self._replicate_group)
            if placement is not None:
                by_group.setdefault(placement[0], []).append((param, placement[1]))
            elif param.grad is not None:
                self._step_gathered(group, param)
        for process_group, members in by_group.items():
            has_grad = [param.grad is not None for param, _ in members]
            if process_group is not None and dist.get_world_size(process_group) > 1:
                # On any rank: all of them must exchange the same matrices.
                flags = torch.tensor(has_grad, dtype=torch.int32)
                dist.all_reduce(flags, dist.ReduceOp.MAX, control_group(process_group))
                has_grad = [flag > 0 for flag in flags.tolist()]
            stepped = [member for member, flag in zip(members, has_grad, strict=True) if flag]
            if not stepped:
                continue
            directions = {i: self._update_momentum(group, param) for i, (param, _) in enumerate(stepped)}
            device = to_local(stepped[0][0]).device
            finished = compute_on_owners(
                [sharding for _, sharding in stepped],
                process_group,
                lambda i, directions=directions: directions.pop(i)(),
                lambda i, whole: self._orthogonalize(group, whole),
                dtype=self._compute_dtype(device),
                device=device,
            )
            for i, piece in finished:
                self._apply(group, stepped[i][0], piece)

    def _step_gathered(self, group: dict[str, Any], param: Tensor) -> None:
        """A layout that ``distributed_matrices.py`` does not know: every rank gathers and computes all of it."""
        direction: Any = dtensor_local.as_dtensor_like(self._update_momentum(group, param)(), param)
        result = distribute_like(self._orthogonalize(group, direction.full_tensor()), direction, src_rank=None)
        self._apply(group, param, result.to_local())

    def _update_momentum(self, group: dict[str, Any], param: Tensor) -> Callable[[], Tensor]:
        """Update the momentum of the local piece; returns what gives the piece to orthogonalise."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = dtensor_local.zeros_state_like(param)
        buffer, momentum = to_local(state["momentum_buffer"]), group["momentum"]
        grad = torch.zeros_like(buffer) if param.grad is None else dtensor_local.local_grad(param).to(buffer.dtype)
        buffer.lerp_(grad, 1 - momentum)
        return (lambda: grad.lerp(buffer, momentum)) if group["nesterov"] else (lambda: buffer)

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        return self._ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)

    def _orthogonalize(self, group: dict[str, Any], full_matrix: Tensor) -> Tensor:
        if _is_stack(group, full_matrix):
            return torch.stack([self._orthogonalize(group, matrix) for matrix in full_matrix])
        matrix = full_matrix.reshape(full_matrix.size(0), -1)
        result = orthogonalize(
            matrix,
            steps=group["ns_steps"],
            coefficients=group["ns_coefficients"],
            method=group["ns_method"],
            dtype=self._compute_dtype(full_matrix.device),
        )
        return result.reshape(full_matrix.shape)

    @staticmethod
    def _apply(group: dict[str, Any], param: Tensor, update: Tensor) -> None:
        rows, cols = param.shape[-2:] if _is_stack(group, param) else (param.shape[0], param.shape[1:].numel())
        scale = math.sqrt(max(1.0, rows / cols))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, cols))
        lr = float(group["lr"])
        with dtensor_local.working_pieces([param]) as (work,):
            work.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for param in params:
            init_adam_state(self.state[param], param, 0)
        states = [self.state[p] for p in params]
        first, second = ([to_local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        fused = has_fused_kernel("AdamW", params)
        for param in params:  # steps begin, and a checkpoint brings them, on the host: no device's kernel reads them
            self.state[param]["step"] = self.state[param]["step"].to(to_local(param).device)
        options = {"eps": group["eps"], "lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
        options["beta1"], options["beta2"] = group["betas"]
        steps = [state["step"] for state in states]
        with dtensor_local.working_copies(params) as (work, grads):
            adamw(work, grads, first, second, [], steps, fused=fused, amsgrad=False, maximize=False, **options)


def _is_stack(group: dict[str, Any], param: Tensor) -> bool:
    return param.ndim == 3 and not group.get("is_convolution", False)
