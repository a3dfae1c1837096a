"""Older spellings, moved to today's before anything is checked.

Each move is remembered, so that a later complaint names the path that the user wrote.
"""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.config.errors import ConfigProblem, to_json_snippet
from thalweg.config.schema.base import AUTO, canonical_dtype

ZERO = "zero_optimization"
DEPRECATED_KEYS: dict[str, str] = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))
_OFFLOAD_FLAGS = {"cpu_offload": "offload_optimizer"}
_OFFLOAD_FLAGS |= dict.fromkeys(("cpu_offload_param", "cpu_offload_params"), "offload_param")


@dataclass
class KeyAliases:
    """Pairs of a path as given and the path as it is called today."""

    pairs: list[tuple[str, str]] = field(default_factory=list)

    def to_user_path(self, path: str) -> str:
        """The path as the user wrote it."""
        return self._replace_prefix(path, [(today, given) for given, today in self.pairs])

    def to_schema_path(self, path: str) -> str:
        """The path as the schema has it."""
        return self._replace_prefix(path, self.pairs)

    def describe(self) -> tuple[str, ...]:
        """One line for each older spelling that was read."""
        return tuple(f"{given} is read as {today}" for given, today in self.pairs)

    @staticmethod
    def _replace_prefix(path: str, pairs: list[tuple[str, str]]) -> str:
        for old, new in pairs:
            if path == old or path.startswith((f"{old}.", f"{old}[")):
                return new + path[len(old) :]
        return path


def apply_key_aliases(tree: dict[str, Any]) -> tuple[dict[str, Any], KeyAliases, list[ConfigProblem]]:
    """Move every older spelling in ``tree`` (changed in place) and say what could not be moved."""
    aliases = KeyAliases()
    problems: list[ConfigProblem] = []
    if isinstance(tree.get(ZERO), bool):  # true was stage 1
        tree[ZERO] = {"stage": 1 if tree[ZERO] else 0}
        aliases.pairs.append((ZERO, f"{ZERO}.stage"))
    for old, new in DEPRECATED_KEYS.items():
        _move(tree, old, new, aliases, problems)
    _expand_offload_flags(tree, aliases, problems)
    _translate_amp(tree, aliases, problems)
    return tree, aliases, problems


def find_parent(tree: dict[str, Any], path: str, make: bool = False) -> tuple[dict[str, Any] | None, str]:
    """The block of a plain tree in which the last key of ``path`` stands, or would, and that key; with ``make`` what is
    missing on the way is made."""
    *blocks, name = path.split(".")
    node: Any = tree
    for block in blocks:
        if make and isinstance(node, dict):
            node = node.setdefault(block, {})
        else:
            node = node.get(block) if isinstance(node, dict) else None
    return (node if isinstance(node, dict) else None), name


def _move(tree: dict[str, Any], old: str, new: str, aliases: KeyAliases, problems: list[ConfigProblem]) -> None:
    parent, name = find_parent(tree, old)
    if parent is None or name not in parent:
        return
    value = parent.pop(name)
    new_parent, key = find_parent(tree, new, make=True)
    if new_parent is None:
        problems.append(ConfigProblem(old, value, f"to be written as {new}"))
    elif key in new_parent:
        problems.append(ConfigProblem(old, value, f"only one of {old} and {new}, which mean the same"))
    else:
        new_parent[key] = value
        aliases.pairs.append((old, new))


def _expand_offload_flags(tree: dict[str, Any], aliases: KeyAliases, problems: list[ConfigProblem]) -> None:
    zero = tree.get(ZERO)
    if not isinstance(zero, dict):
        return
    pin_memory = zero.pop("cpu_offload_use_pin_memory", None)
    for old, block in _OFFLOAD_FLAGS.items():
        value = zero.pop(old, None)
        path = f"{ZERO}.{old}"
        if value is None or value is False or value == "auto":
            continue
        if value is not True:
            problems.append(ConfigProblem(path, value, "true or false"))
        elif block in zero:
            problems.append(ConfigProblem(path, value, f"only one of {path} and {ZERO}.{block}"))
        else:
            zero[block] = {"device": "cpu"}
            aliases.pairs.append((path, f"{ZERO}.{block}.device"))
    if pin_memory is None or pin_memory == "auto":
        return
    path = f"{ZERO}.cpu_offload_use_pin_memory"
    if not isinstance(pin_memory, bool):
        problems.append(ConfigProblem(path, pin_memory, "true or false"))
        return
    for block in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(block), dict):
            zero[block].setdefault("pin_memory", pin_memory)
    aliases.pairs.append((path, f"pin_memory = {to_json_snippet(pin_memory)} of the offload blocks"))


_BATCH_NORMS = ["auto", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"]
_PRECISION = ("fp16", "bf16", "torch_autocast", "data_types")
_SCALES = ("loss_scale", "min_loss_scale", "max_loss_scale")
_TRANSLATED = ("enabled", "opt_level", "cast_model_type", "keep_batchnorm_fp32", "master_weights", *_SCALES)


def _translate_amp(tree: dict[str, Any], aliases: KeyAliases, problems: list[ConfigProblem]) -> None:
    """Put what ``amp`` asks of NVIDIA's Apex into the blocks that mean it here.

    O0 is fp32.  O1 is torch's autocast over fp32 parameters.  O2 and O3 compute with parameters of 16 bits and keep
    fp32 masters (unless ``master_weights`` is false), O2 with batch norms in fp32.  The loss scale is Apex's: it starts
    at 2**16 at most, each overflow halves it and 2,000 good steps double it, to 2**24 at most; bf16 needs none.
    """
    given = tree.get("amp")
    if not isinstance(given, dict) or given.get("enabled") is not True:
        return
    amp = {key: value for key, value in given.items() if value not in (AUTO, None)}
    level, dtype = amp.get("opt_level", "O1"), canonical_dtype(amp.get("cast_model_type", "fp16"))
    before = {name: tree[name] for name in _PRECISION if isinstance(tree.get(name), dict)}
    on = [f"{name}.enabled" for name, block in before.items() if block.get("enabled") is True]
    problems += [ConfigProblem(path, True, "false, because amp.enabled is true; keep one of the two") for path in on]
    if dtype not in ("fp16", "bf16", "fp32"):
        problems.append(ConfigProblem("amp.cast_model_type", amp["cast_model_type"], "fp16, bf16 or fp32"))
    elif not on and level in ("O0", "O1", "O2", "O3"):
        tree["amp"] = {key: value for key, value in given.items() if key not in _TRANSLATED}
        words = []
        for name, values in _precision_blocks(amp, level, dtype).items():
            old = before.get(name, {})  # which meant nothing where the block was switched off
            tree[name] = values | old if name == "data_types" else old | values
            words += [f"{name}.{key} {to_json_snippet(tree[name][key])}" for key in values]
        aliases.pairs += [(f"amp.{key}", f"fp16.{key}") for key in _SCALES if key in amp]
        aliases.pairs.append((f"amp.opt_level {level}", ", ".join(words)))


def _precision_blocks(amp: dict[str, Any], level: str, dtype: str) -> dict[str, dict[str, Any]]:
    half: dict[str, Any] = {"enabled": True}
    if dtype == "fp16":
        half |= {"loss_scale": 1.0 if level == "O3" else 0.0, "loss_scale_window": 2000, "hysteresis": 1}
        half |= {"max_loss_scale": 2.0**24, "auto_cast": True}
        half |= {key: 0.0 if amp[key] == "dynamic" else amp[key] for key in _SCALES if key in amp}
        if isinstance(top := half["max_loss_scale"], int | float):
            half["initial_scale_power"] = int(math.log2(min(max(top, 1), 2.0**16)))
    if level == "O0" or dtype == "fp32":
        return {"data_types": {"param_dtype": "fp32"}}
    if level == "O1":
        autocast = {"torch_autocast": {"enabled": True, "dtype": dtype}, "data_types": {"param_dtype": "fp32"}}
        return autocast | ({"fp16": half} if dtype == "fp16" else {})
    if amp.get("master_weights") is False:
        half[f"{dtype}_master_weights_and_grads"] = True
    keeps_norms = str(amp.get("keep_batchnorm_fp32", level == "O2")) == "True"
    # Apex cast inputs, and buffers with the rest; a batch norm takes its statistics in the dtype of its weights.
    return {
        "fp16": {"auto_cast": True},
        dtype: half,
        "data_types": {"keep_in_fp32_modules": _BATCH_NORMS} if keeps_norms else {"buffer_dtype": dtype},
    }
