"""Random damage to real configs, for the strictness tests.

``mutate(rng, tree)`` changes a copy of ``tree`` at several places and says what was done where.
"""

from __future__ import annotations

import copy
import json
import random
import string
from dataclasses import dataclass
from typing import Any

BASE_CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 100,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e5,
            "leaf_module": {"classes": ["a.B"], "names": []},
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
        "activation_checkpointing": {"policy": "selective", "every": 2, "number_checkpoints": None},
        "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "x"},
        "checkpoint": {"tag_validation": "Warn", "keep": 3, "resume": "must"},
    },
    {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "cpu_offload": False,
        },
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "compile": {"enabled": False, "mode": "default", "kwargs": {"options": {"x": 1}}},
    },
    {
        "train_batch_size": 8,
        "bfloat16": {"enabled": False},
        "zero_optimization": True,
        "tensor_parallel": {
            "autotp_size": 1,
            "partition_config": {"layer_specs": [{"patterns": ["a"], "shape": [2, -1]}]},
        },
        "data_efficiency": {
            "enabled": False,
            "data_sampling": {
                "curriculum_learning": {
                    "curriculum_metrics": {"seqlen": {"min_difficulty": 8, "schedule_config": {"difficulty_step": 8}}}
                }
            },
        },
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {"enabled": False},
                "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["attention.self"]}},
            }
        },
        "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4, 6]},
        "aio": {"block_size": 1048576, "queue_depth": 8},
        "flops_profiler": {"enabled": False, "output_file": None},
        "wandb": {"enabled": False, "team": None},
        "seed": 7,
    },
)

WRONG_VALUES: tuple[Any, ...] = (
    "abc",
    "1e-5",
    "true",
    "",
    -1,
    0,
    2.5,
    10**30,
    -(10**30),
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    True,
    None,
    [],
    [1, "a", None],
    [[[]]],
    {},
    {"a": 1},
    {"enabled": {"enabled": True}},
    {"": None},
    "\ud800",
    "\x00",
    "auto",
    ["auto"],
    b"bytes",
    {1, 2},
    object(),
    3 + 4j,
    range(3),
)


@dataclass(frozen=True)
class Mutation:
    """One change: what was done where."""

    kind: str
    path: tuple[str | int, ...]


def all_paths(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every key and list item."""
    paths = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        paths += [(*path, key), *all_paths(value, (*path, key))]
    return paths


def mutate(rng: random.Random, base: dict[str, Any]) -> tuple[dict[str, Any], list[Mutation]]:
    """A damaged copy of ``base`` and the list of damages, one to four of them."""
    tree = copy.deepcopy(base)
    mutations = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("typo", "value", "add", "move", "drop", "key"))
        mutation = _mutate_once(rng, tree, kind)
        if mutation:
            mutations.append(mutation)
    return tree, mutations


def _mutate_once(rng: random.Random, tree: dict[str, Any], kind: str) -> Mutation | None:
    paths = all_paths(tree)
    if not paths:
        return None
    path = rng.choice(paths)
    holder: Any = tree
    for part in path[:-1]:
        holder = holder[part]
    key = path[-1]
    if kind == "value":
        holder[key] = copy.deepcopy(rng.choice(WRONG_VALUES))
    elif kind == "drop":
        del holder[key]
    elif kind == "move":
        holder[key] = copy.deepcopy(tree.get(rng.choice(list(tree))))
    elif isinstance(holder, dict):
        return _mutate_key(rng, holder, key, path, kind)
    return Mutation(kind, path)


def _mutate_key(
    rng: random.Random, holder: dict[Any, Any], key: Any, path: tuple[str | int, ...], kind: str
) -> Mutation:
    if kind == "add":
        name: Any = "".join(rng.choices(string.ascii_lowercase + "_.-", k=rng.randint(1, 12)))
        holder[name] = 1
        return Mutation(kind, (*path[:-1], name))
    if kind == "key":
        name = rng.choice((None, 3, "", " ", "\ud800", "a.b", ("x",), key))
        holder[name] = holder.pop(key)
        return Mutation(kind, (*path[:-1], str(name)))
    name = misspell(rng, str(key))
    holder[name] = holder.pop(key)
    return Mutation(kind, (*path[:-1], name))


def misspell(rng: random.Random, word: str) -> str:
    """The word with one letter doubled, dropped, swapped or changed, never the same."""
    at = rng.randrange(len(word)) if word else 0
    letter = rng.choice(string.ascii_lowercase)
    return rng.choice((word[:at] + letter + word[at:], word[:at] + "Q" + word[at + 1 :], word + "s_", "x" + word))


def mutate_text(rng: random.Random, base: dict[str, Any]) -> str:
    """The JSON text of ``base`` with a few characters deleted, inserted or doubled."""
    text = json.dumps(base, indent=rng.choice((None, 1)))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        cut = rng.choice((0, 0, 1, 3))
        bit = rng.choice(
            ("", '"', "{", "}", "[", "]", ",", ":", "//", "/*", "*/", "#", "\n", "'", "\\", "nan", "-", "é")
        )
        text = text[:at] + bit + text[at + cut :]
    return text
