"""What a training run is besides its tensors, saved and loaded with them.

Counters, loss scale, schedule and loader position go into the checkpoint's state tree
under one key, beside the user's ``client_state``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thalweg.assemble import Parts
from thalweg.checkpoint.hf import save_16bit
from thalweg.checkpoint.load import load
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.save import save
from thalweg.checkpoint.stages import everywhere, under_stored_names
from thalweg.checkpoint.state import collect, model_tensors, restore
from thalweg.comm.arena import tag_of
from thalweg.config import Config
from thalweg.utils.log import get_logger
from thalweg.zero.logical import full_state_dict, load_full_state_dict

_log = get_logger(__name__)
_KEY = "engine"


class TrainingState:
    """Counters of a run, and its way to disk and back; every method but the counters is collective."""

    def __init__(self, parts: Parts, config: Config, loader: Any) -> None:
        self.parts, self.config, self.loader = parts, config, loader
        self.global_steps = 0
        self.global_samples = 0

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        latest: bool,
        frozen: bool,
    ) -> Path:
        """Commit a checkpoint; see ``Engine.save_checkpoint``."""
        parts, keep = self.parts, self.config.checkpoint.keep
        tag = tag or f"global_step{self.global_steps}"
        self._check_tag(tag)
        parts.sharded.finish_window()
        state = {"client_state": dict(client_state or {}), _KEY: self._own()}
        path = save(
            directory,
            tag,
            collect(parts.module, parts.optimizer, state=state, frozen=frozen, naming=parts.naming),
            step=self.global_steps,
            group=parts.axes.everyone,
            keep=None if keep == "all" else keep,
            latest=latest,
        )
        parts.sharded.begin_anew()
        return path

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        *,
        strict: bool,
        with_optimizer: bool,
        with_schedule: bool,
        only_module: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; see ``Engine.load_checkpoint``."""
        parts, group = self.parts, self.parts.axes.everyone
        found = load(directory, tag, resume=self.config.checkpoint.resume, group=group)
        if found is None:
            return None, None
        with found:
            parts.sharded.finish_window()
            optimizer = parts.optimizer if with_optimizer and not only_module else None
            state = restore(
                found,
                parts.module,
                optimizer,
                strict=strict,
                group=group,
                rng=not only_module,
                naming=parts.naming,
            )
            parts.sharded.begin_anew()
            if not only_module:
                self._take(state.get(_KEY, {}), with_schedule)
            return str(found.path), state.get("client_state", {})

    def save_16bit(self, directory: str | Path) -> None:
        """Write the weights in 16 bits in the Hugging Face layout."""
        dtype = torch.float16 if self.config.fp16.enabled else torch.bfloat16
        self.parts.sharded.finish_window()
        parts = self.parts
        save_16bit(parts.module, directory, dtype, parts.axes.everyone, naming=parts.naming)

    def full_state(self) -> dict[str, Any]:
        """The whole model's tensors on the CPU, under the names of the plain model."""
        module, naming = self.parts.module, self.parts.naming
        if naming.group is None:
            return {name: v for name, v in full_state_dict(module).items() if name not in naming.hidden}
        tensors, aliases = under_stored_names(*model_tensors(module), naming)
        full = {name: fetch().detach().cpu().clone() for name, *_, fetch in everywhere(tensors, naming)}
        named = [alias for part in Ranks.of(naming.group).exchange(list(aliases.items())) for alias in part]
        return full | {alias: full[name] for alias, name in named}

    def load_state(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load full tensors, or shards of this layout, into what this rank has of the model."""
        module, naming = self.parts.module, self.parts.naming
        if naming.group is not None:
            own = {name for name in module.state_dict() if name not in naming.hidden}
            found = {
                name: state_dict.get(name, state_dict.get(naming.canonical.get(name, name))) for name in own
            }
            missing = sorted(name for name in own if found[name] is None)
            if strict and missing:
                raise ValueError(f"the state dict lacks {', '.join(missing[:8])}: pass strict=False to go on")
            state_dict, strict = {name: v for name, v in found.items() if v is not None}, False
        elif naming.hidden:
            state_dict, strict = dict(state_dict), False
        return load_full_state_dict(module, state_dict, strict)

    def _own(self) -> dict[str, Any]:
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.parts.window.micro_steps,
            "skipped_steps": self.parts.optimizer.skipped_steps if self.parts.optimizer else 0,
            "scaler": self.parts.scaler.state_dict(),
            "lr_scheduler": _state_of(self.parts.lr_scheduler),
            "loader": _state_of(self.loader),
        }

    def _take(self, own: dict[str, Any], with_schedule: bool) -> None:
        parts = self.parts
        self.global_steps = own.get("global_steps", self.global_steps)
        self.global_samples = own.get("global_samples", self.global_samples)
        parts.window.micro_steps = own.get("micro_steps", parts.window.micro_steps)
        if parts.optimizer is not None:
            parts.optimizer.skipped_steps = own.get("skipped_steps", 0)
        if own.get("scaler"):
            parts.scaler.load_state_dict(own["scaler"])
            parts.sharded.set_loss_scale(parts.scaler.scale)
        if with_schedule and parts.lr_scheduler is not None and own.get("lr_scheduler"):
            parts.lr_scheduler.load_state_dict(own["lr_scheduler"])
        if own.get("loader") and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(own["loader"])

    def _check_tag(self, tag: str) -> None:
        """Rank 0's tag counts; ``checkpoint.tag_validation`` says what a rank that differs means."""
        wanted = self.config.checkpoint.tag_validation
        if wanted == "Ignore" or self.parts.axes.size == 1:
            return
        ends = torch.tensor([tag_of(tag), -tag_of(tag)])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.parts.axes.everyone)
        if int(ends[0]) == -int(ends[1]):
            return
        message = f"the ranks save under different tags (here {tag!r}): give every rank the same one"
        if wanted == "Fail":
            raise ValueError(message)
        _log.warning("%s; rank 0's is used", message)


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else None
