"""What a training run is besides its tensors, saved and loaded with them.

Counters, loss scale, schedule and loader position go into the checkpoint's state tree
under one key, beside the user's ``client_state``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thalweg.checkpoint.background_save import BackgroundSave, join_saves
from thalweg.checkpoint.export_hf import save_16bit
from thalweg.checkpoint.load import open_verified
from thalweg.checkpoint.model_state import build_snapshot, model_tensors, restore_module
from thalweg.checkpoint.pipeline_state import iter_full_tensors, to_canonical_names
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.checkpoint.save import save_snapshot
from thalweg.config import Config
from thalweg.optim.step import TrainingDivergedError
from thalweg.parallel.tensor.tensor_parallel import sync_rng
from thalweg.parallelize import Components
from thalweg.utils.log import get_logger
from thalweg.zero.replica_check import check_replicas
from thalweg.zero.storage.nvme import prefers_low_memory
from thalweg.zero.whole_tensors import full_state_dict, load_full_state_dict

_log = get_logger(__name__)
_KEY = "engine"
_REWINDS_EACH = 3  # to the last checkpoint, and then to the one before


class TrainingState:
    """A run's way to disk and back; every method is collective.  ``counters`` has ``global_steps`` and
    ``global_samples``, an engine's."""

    def __init__(self, components: Components, config: Config, loader: Any, counters: Any) -> None:
        self.components, self.config, self.loader, self.counters = components, config, loader, counters
        self.load_position = getattr(loader, "load_state_dict", None)
        self.background = BackgroundSave()
        self._known: list[tuple[str | Path, str]] = []  # folder and tag of what was saved or loaded, the newest last
        self._num_rewinds = 0  # since something was saved
        self._is_asynchronous = config.checkpoint.asynchronous and not prefers_low_memory(config)
        if config.checkpoint.asynchronous and not self._is_asynchronous:
            _log.warning(
                "checkpoint.asynchronous: what lies on NVMe is not copied into memory, so save_checkpoint() returns "
                "when the checkpoint is committed"
            )

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        save_latest: bool,
        include_frozen: bool,
    ) -> Path:
        """Commit a checkpoint; see ``Engine.save_checkpoint``."""
        self.background.wait()
        components, keep_latest_k = self.components, self.config.checkpoint.keep
        module, optimizer, naming = components.module, components.optimizer, components.param_naming
        tag = self._agree_on_tag(str(f"global_step{self.counters.global_steps}" if tag is None else tag))
        self._finalize()
        if self.config.health.replica_check_steps:
            check_replicas(components.sharded, components.meshes.world_group, f"before checkpoint {tag}")
        state = {"client_state": dict(client_state or {}), _KEY: self._state_dict()}
        # At stage 3 each rank gets its own back, as from DeepSpeed's; below, and in another world, the first rank's.
        own = {"client_state": state["client_state"]} if self.config.zero_optimization.stage == 3 else {}
        snapshot = build_snapshot(
            module, optimizer, state=state, per_rank=own, include_frozen=include_frozen, naming=naming
        )
        path = save_snapshot(
            directory,
            tag,
            snapshot,
            step=self.counters.global_steps,
            group=components.meshes.world_group,
            keep_latest_k=None if keep_latest_k == "all" else keep_latest_k,
            save_latest=save_latest,
            background=self.background if self._is_asynchronous else None,
        )
        components.sharded.reset_compression()
        earlier = self._known[-1:] if keep_latest_k != 1 else []
        self._known, self._num_rewinds = [*earlier, (directory, tag)], 0
        return path

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        *,
        strict: bool = True,
        load_optimizer: bool = True,
        load_lr_scheduler: bool = True,
        module_only: bool = False,
        rewinds: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; see ``Engine.load_checkpoint``.  ``rewinds``: the run goes back, and on in its data."""
        join_saves()
        components, group = self.components, self.components.meshes.world_group
        resume = "must" if rewinds else self.config.checkpoint.resume
        checkpoint = open_verified(directory, tag, resume=resume, group=group)
        if checkpoint is None:
            return None, None
        with checkpoint:
            components.sharded.finalize_grads()
            if components.optimizer is not None:
                components.optimizer.settle()
            optimizer = components.optimizer if load_optimizer and not module_only else None
            if not (module_only or rewinds) and self.load_position is not None:
                position = checkpoint.state.get(_KEY, {}).get("loader")  # first, as it may refuse
                if position:
                    self.load_position(position)
            state = restore_module(
                checkpoint,
                components.module,
                optimizer,
                strict=strict,
                group=group,
                rng=not module_only,
                naming=components.param_naming,
            )
            components.sharded.reset_compression()
            if components.optimizer is not None:
                components.optimizer.adopt_state()
            components.sharded.publish_params()
            if not module_only:
                if components.meshes.tp is not None:  # the saving job may have had other teams, or none
                    sync_rng(components.meshes.tp.get_group())
                self._load_state_dict(state.get(_KEY, {}), load_lr_scheduler)
                self._known += [] if rewinds else [(directory, checkpoint.tag)]
            ranks = RankGroup.from_group(group)
            own = checkpoint.per_rank(ranks.rank) if checkpoint.world_size == ranks.world_size else None
            return str(checkpoint.path), {**state, **(own or {})}.get("client_state", {})

    def rewind(self, reason: str) -> None:
        """Go back to the last checkpoint, for want of success to the one before, and on with the data that come next.

        Raises:
            TrainingDivergedError: there is none, or that did not help three times each.
        """
        self.background.wait()
        known, attempt = self._known[-2:], self._num_rewinds // _REWINDS_EACH
        if attempt >= len(known):
            rewound = f"{self._num_rewinds} times back at a checkpoint did not help"
            tried = rewound if known else "no checkpoint was saved"
            raise TrainingDivergedError(
                f"{reason}; {tried}. Lower the learning rate, set gradient_clipping, or look at the data"
            )
        self._num_rewinds += 1
        directory, tag = known[-1 - attempt]
        path, _ = self.load(directory, tag, rewinds=True)
        _log.warning("%s; back at step %d (%s)", reason, self.counters.global_steps, path)

    def save_16bit(self, directory: str | Path, *, include_frozen: bool = True) -> None:
        """Write the weights in 16 bits in the Hugging Face layout."""
        dtype = torch.float16 if self.config.fp16.enabled else torch.bfloat16
        components, group = self.components, self.components.meshes.world_group
        self._finalize()
        naming = components.param_naming
        save_16bit(components.module, directory, dtype, group, naming=naming, include_frozen=include_frozen)

    def get_model_state_dict(self) -> dict[str, Any]:
        """The whole model's tensors on the CPU, under the names of the plain model."""
        module, naming = self.components.module, self.components.param_naming
        self.components.sharded.sync_params()
        if self.components.optimizer is not None:
            self.components.optimizer.consolidate_state_dict()
        if naming.group is None:
            return {name: v for name, v in full_state_dict(module).items() if name not in naming.excluded}
        tensors, aliases = to_canonical_names(*model_tensors(module), naming)
        full = {name: fetch().detach().cpu().clone() for name, *_, fetch in iter_full_tensors(tensors, naming)}
        parts = RankGroup.from_group(naming.group).all_gather_json(list(aliases.items()))
        return full | {alias: full[name] for part in parts for alias, name in part}

    def set_model_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load full tensors, or shards of this layout, into what this rank has of the model."""
        module, naming = self.components.module, self.components.param_naming
        if naming.group is not None:
            names = {name for name in module.state_dict() if name not in naming.excluded}
            selected = {name: state_dict.get(name, state_dict.get(naming.canonical.get(name, name))) for name in names}
            missing = sorted(name for name in names if selected[name] is None)
            if strict and missing:
                raise ValueError(f"the state dict lacks {', '.join(missing[:8])}: pass strict=False to go on")
            state_dict, strict = {name: v for name, v in selected.items() if v is not None}, False
        elif naming.excluded:
            state_dict, strict = dict(state_dict), False
        self.components.sharded.sync_params()
        result = load_full_state_dict(module, state_dict, strict)
        if self.components.optimizer is not None:
            self.components.optimizer.adopt_state()
        self.components.sharded.publish_params()
        return result

    def _finalize(self) -> None:
        """Reduce what is not reduced yet, and bring optimizer and parameters to one state on all ranks."""
        self.components.sharded.finalize_grads()
        if self.components.optimizer is not None:
            self.components.optimizer.consolidate_state_dict()

    def _state_dict(self) -> dict[str, Any]:
        return {
            "global_steps": self.counters.global_steps,
            "global_samples": self.counters.global_samples,
            "micro_steps": self.components.window.micro_steps,
            "skipped_steps": self.components.optimizer.skipped_steps if self.components.optimizer else 0,
            "scaler": self.components.scaler.state_dict(),
            "lr_scheduler": _get_state_dict(self.components.lr_scheduler),
            "grad_norms": self.components.optimizer.guard.state_dict() if self.components.optimizer else [],
            "loader": _get_state_dict(self.loader),
        }

    def _load_state_dict(self, state: dict[str, Any], load_lr_scheduler: bool) -> None:
        components = self.components
        self.counters.global_steps = state.get("global_steps", self.counters.global_steps)
        self.counters.global_samples = state.get("global_samples", self.counters.global_samples)
        components.window.micro_steps = state.get("micro_steps", components.window.micro_steps)
        components.window.num_steps = self.counters.global_steps
        if components.optimizer is not None:
            components.optimizer.skipped_steps = state.get("skipped_steps", 0)
            components.optimizer.guard.load_state_dict(state.get("grad_norms", ()))
        if state.get("scaler"):
            components.scaler.load_state_dict(state["scaler"])
            components.sharded.set_loss_scale(components.scaler.scale)
        if load_lr_scheduler and components.lr_scheduler is not None and state.get("lr_scheduler"):
            components.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _agree_on_tag(self, tag: str) -> str:
        """Rank 0's tag, which counts; ``checkpoint.tag_validation`` says what a rank that differs means."""
        mode = self.config.checkpoint.tag_validation
        tags = RankGroup.from_group(self.components.meshes.world_group).all_gather_json(tag)
        if len({*tags}) > 1 and mode != "Ignore":
            message = f"the ranks save under different tags (here {tag!r}): give every rank the same one"
            if mode == "Fail":
                raise ValueError(message)
            _log.warning("%s; rank 0's is used", message)
        return tags[0]


def _get_state_dict(obj: Any) -> Any:
    return obj.state_dict() if hasattr(obj, "state_dict") else None
