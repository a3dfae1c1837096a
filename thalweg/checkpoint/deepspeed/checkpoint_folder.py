"""DeepSpeed's checkpoint folders, as logical tensors.

::

    mp_rank_MM_model_states.pt                        stages 0 to 2: the module, counters, names and shapes
    zero_pp_rank_R_mp_rank_MM_model_states.pt         stage 3: the same for each rank, its module's parameters empty
    [bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt  rank R's share of the fp32 parameters and of the moments
    layer_LL-model_MM-model_states.pt                 a pipeline's layers, in place of the module
    layer_LL_expert_EE_mp_rank_MM_model_states.pt     expert EE of the LLth layer of experts
    zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    universal: each parameter whole

``MM`` counts the stages of a pipeline and the ranks of tensor parallelism.  At stages 1 and 2 a parameter group is
one vector, its parameters in the order of ``param_shapes``, padded at its end and cut into equal shares; at stage 3
each parameter is cut, each padded, and a rank's shares of a (sub-)group are one vector.  The fp32 values are taken
for the parameters where there are some; the module's 16-bit ones are a copy of these.  Experts are rows of stacks, as
in ``thalweg.moe``: of EP expert-parallel ranks, rank R holds those of team ``R % EP``, which shares its vectors; with
``use_data_before_expert_parallelism`` in its config teams are neighbours.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thalweg.checkpoint.deepspeed import flat_tensors
from thalweg.checkpoint.deepspeed.flat_tensors import Fragment, LogicalTensor
from thalweg.checkpoint.deepspeed.torch_file import InertObject, TorchFile
from thalweg.checkpoint.errors import CheckpointMismatchError, CorruptCheckpointError
from thalweg.checkpoint.filesystem import FileSystem, list_if_there
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_MASTER = "fp32"  # DeepSpeed's word for the values that the optimiser updates
_TIED = "tied_modules."
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_EXPERT_FILE = re.compile(r"(?:layer_-?\d+_)?expert_\d+_mp_rank_(\d+)_model_states\.pt")
_EXPERT_NAME = re.compile(r"(.+)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")
_GATE = ".deepspeed_moe.gate.wg."
_RESIDUAL = re.compile(r"(.+)\.mlp\.(.+)")
UNIVERSAL_FOLDER = "zero"

# What DeepSpeed itself writes into a model file; everything else there is the user's client_state.
_OWN_KEYS = frozenset(tomllib.loads(Path(__file__).with_name("own_keys.toml").read_text(encoding="utf-8"))["keys"])
_GROUP_BOOKKEEPING = frozenset({"params", "param_names", "step"})


def is_deepspeed_folder(io: FileSystem, path: Path) -> bool:
    """Whether ``path`` is one checkpoint of DeepSpeed's."""
    return any(_MODEL_FILE.fullmatch(name) or _OPTIM_FILE.fullmatch(name) for name in list_if_there(io, path))


@dataclass
class _Part:
    """The files of one ``mp_rank``: the model's tree, each rank's where there are several, and the optimiser's."""

    model: dict[str, Any]
    models: list[dict[str, Any]]
    optims: list[dict[str, Any]]


class DeepSpeedFolder:
    """What a folder holds: tensors under ``model/<fqn>`` and ``optim/<key>/<fqn>``, names of tied weights, the state
    tree, and what is said about its origin.  Its tensors are mapped, not read."""

    def __init__(self, io: FileSystem, path: Path) -> None:
        self.io, self.path = io, path
        self.names = list_if_there(io, path)
        self.tensors: dict[str, LogicalTensor] = {}
        self.aliases: dict[str, str] = {}
        self.files: dict[str, TorchFile] = {}
        self.groups: list[dict[str, Any]] = []
        self.expert_values: dict[str, torch.Tensor] = {}  # by DeepSpeed's names, with the experts' global numbers
        self.stacks: dict[str, dict[int, tuple[tuple[int, ...], list[Fragment]]]] = {}
        mp_ranks = sorted({int(match.group(2)) for match in self._matches(_MODEL_FILE)})
        self._refuse_tensor_parallelism(mp_ranks)
        parts = [self._read_part(mp_rank) for mp_rank in mp_ranks]
        common = parts[0].model
        # The tensors of a pipeline's layers, under the names that a PipelineModule has for them.
        layers = {
            f"layers.{int(match.group(1))}.{key}": value
            for match in self._matches(_LAYER_FILE)
            for key, value in self._load(match.string).items()
        }
        self.canonical: dict[str, str] = self._name_layers(parts, layers) if layers else {}
        for match in self._matches(_EXPERT_FILE):
            self.expert_values |= self._load(match.string)
        if other := next((name for name in self.expert_values if not _EXPERT_NAME.fullmatch(name)), None):
            raise CheckpointMismatchError(
                f"{self.path} holds experts that AutoEP took out of a Hugging Face model ({other}): join them with "
                "DeepSpeed's ds_to_universal.py, and load the folder that it writes"
            )
        is_universal = self.io.exists(self.path / UNIVERSAL_FOLDER)
        for part in parts:
            if is_universal:
                self._add_universal(part)
            elif part.optims:
                self._add_zero(part)
            elif part.model.get("optimizer"):
                # Its numbers follow the user's groups, which no file names: a guess could give moments to others.
                _log.warning(
                    "%s: stage 0 numbers the optimiser's parameters and does not name them, so only the weights can "
                    "be loaded (load_optimizer_states=False); saved at stage 1 to 3 all of it can",
                    self.path,
                )
            self._add_module(part)
        for name, value in layers.items():
            if f"model/{name}" not in self.aliases:
                self._add_stored(f"model/{name}", value)
        for key, value in self.expert_values.items():
            name, row = self._place(key)
            self._add_row(f"model/{name}", row, value.shape, [Fragment(0, value.numel(), value)])
        self._add_stacks()
        self.aliases = {
            alias: name for alias, name in self.aliases.items() if name in self.tensors and alias not in self.tensors
        }
        self.step = int(common.get("global_steps", 0))
        self.world_size = int(common.get("dp_world_size") or 1) * int(common.get("mp_world_size") or 1)
        self.writer = f"deepspeed {common.get('ds_version', '(version unknown)')}"
        self.state = self._state(common, parts)

    def _load_any(self, name: str) -> Any:
        file = self.files[name] = TorchFile(self.io, self.path / name)
        return file.tree()

    def _load(self, name: str) -> dict[str, Any]:
        tree = self._load_any(name)
        if not isinstance(tree, dict):
            raise CorruptCheckpointError(f"{self.path / name} holds a {type(tree).__name__} where a dict is expected")
        return tree

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        """The files whose names are of this form."""
        return [match for name in self.names if (match := pattern.fullmatch(name))]

    def _refuse_tensor_parallelism(self, mp_ranks: list[int]) -> None:
        layers = self._matches(_LAYER_FILE)
        if not mp_ranks:
            raise CorruptCheckpointError(f"{self.path} has optimiser states of DeepSpeed's, but no *_model_states.pt")
        if (len(mp_ranks) > 1 and not layers) or any(int(m.group(2) or 0) for m in layers):
            raise CheckpointMismatchError(
                f"{self.path} was saved under tensor parallelism ({len(mp_ranks)} files for each tensor): merge "
                "it with DeepSpeed's ds_to_universal.py and its parameters' patterns, or save it with a "
                "tensor-parallel size of 1"
            )

    def _read_part(self, mp_rank: int) -> _Part:
        def load_by_rank(pattern: re.Pattern[str]) -> dict[int, dict[str, Any]]:
            own = {int(m.group(1) or 0): m.string for m in self._matches(pattern) if int(m.group(2)) == mp_rank}
            return {rank: self._load(name) for rank, name in sorted(own.items())}

        models = list(load_by_rank(_MODEL_FILE).values())
        by_rank = load_by_rank(_OPTIM_FILE)
        ranks, optims = list(by_rank), [tree["optimizer_state_dict"] for tree in by_rank.values()]
        if optims:
            count = optims[0].get("partition_count")
            count = max(count, default=0) if isinstance(count, list) else count
            if ranks != list(range(len(ranks))) or (count and count != len(ranks)):
                raise CorruptCheckpointError(
                    f"{self.path} has optimiser states of the ranks {', '.join(map(str, ranks))}, but {count} ranks "
                    "saved: a file is missing, or one is left over from an earlier save"
                )
        return _Part(models[0], models, optims)

    # The tensors of the model.

    def _add(self, name: str, tensor: LogicalTensor) -> None:
        self.tensors.setdefault(name, tensor)  # of a pipeline's tied weights each stage has a copy

    def _place(self, raw_name: str, first_expert: int = 0) -> tuple[str, int | None]:
        """Our name of a parameter, and its row where it is an expert's; ``first_expert`` is its team's."""
        if (expert := _EXPERT_NAME.fullmatch(raw_name)) is not None:
            return f"{expert.group(1)}.experts.stack.{expert.group(3)}", first_expert + int(expert.group(2))
        residual = _RESIDUAL.fullmatch(raw_name)
        layer = residual and f"{residual.group(1)}.deepspeed_moe."
        if residual and layer and any(name.startswith(layer) for name in self.expert_values):
            return f"{residual.group(1)}.residual.{residual.group(2)}", None
        return self.canonical.get(raw_name, raw_name).replace(_GATE, ".gate."), None

    def _add_row(self, stored: str, row: int | None, shape: tuple[int, ...], fragments: list[Fragment]) -> None:
        """A tensor, or one row of a stack; what is there already stays."""
        if row is None:
            self._add(stored, LogicalTensor.of(shape, fragments, stored))
        else:
            self.stacks.setdefault(stored, {}).setdefault(row, (shape, fragments))

    def _add_stacks(self) -> None:
        for stored, rows in self.stacks.items():
            fragments = [
                Fragment(row * math.prod(shape) + f.start, row * math.prod(shape) + f.stop, f.source, f.first)
                for row, (shape, parts) in sorted(rows.items())
                for f in parts
            ]
            self._add(stored, LogicalTensor.of((max(rows) + 1, *rows[min(rows)][0]), fragments, stored))

    def _add_stored(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add(name, LogicalTensor.whole(value))

    def _add_step(self, name: str, step: float) -> None:
        self._add(f"optim/step/{name}", LogicalTensor.whole(torch.tensor(step, dtype=torch.float32)))

    def _add_module(self, part: _Part) -> None:
        """What the module's own state dict adds: buffers, frozen parameters, all of it where there is no fp32."""
        module, is_stage3 = part.model.get("module") or {}, _stage(part) == 3
        shared = dict(part.model.get("shared_params") or {})
        self.aliases |= {f"model/{alias}": f"model/{name}" for alias, name in shared.items()}
        for name, fragments in (part.model.get("frozen_param_fragments") or {}).items():
            shape = tuple(part.model["frozen_param_shapes"][name])
            shares = [model["frozen_param_fragments"][name] for model in part.models]
            cut = (
                next(flat_tensors.cut_parameter_shares({name: shape}, shares))[2]
                if is_stage3
                else flat_tensors.whole_fragments(fragments)
            )
            self._add(f"model/{self._place(name)[0]}", LogicalTensor.of(shape, cut, name))
        buffers = part.model.get("buffer_names")
        for name, value in module.items():
            if name not in shared and not (is_stage3 and buffers is not None and name not in buffers):
                self._add_stored(f"model/{self._place(name)[0]}", value)

    def _name_layers(self, parts: list[_Part], layers: dict[str, torch.Tensor]) -> dict[str, str]:
        """By DeepSpeed's name of each parameter that of ours; tied layers beyond the first become aliases."""
        shapes = {name: tuple(shape) for part in parts for group in part.model.get("param_shapes") or []
                  for name, shape in group.items()}  # fmt: skip
        names = {name: f"layers.{name}" for name in shapes if not name.startswith(_TIED)}
        unclaimed = [name for name in layers if name not in names.values()]
        for name in shapes:
            if name.startswith(_TIED):
                attribute = name.split(".", 2)[2]
                places = [n for n in unclaimed if n.split(".", 2)[2] == attribute and layers[n].shape == shapes[name]]
                names[name] = places[0] if places else name
                self.aliases |= {f"model/{other}": f"model/{places[0]}" for other in places[1:]}
                unclaimed = [n for n in unclaimed if n not in places]
        return names

    # The optimiser.

    def _add_zero(self, part: _Part) -> None:
        """fp32 parameters and moments of stages 1 to 3 out of the ranks' shares."""
        is_stage3 = _stage(part) == 3
        shapes: list[dict[str, Any]] = part.model.get("param_shapes") or []
        ranks = [_read_shares(optim, is_stage3) for optim in part.optims]
        vectors = len(ranks[0])
        if any(len(shares) != vectors for shares in ranks) or vectors != len(shapes):
            raise CorruptCheckpointError(
                f"{self.path}: the ranks' files hold {sorted({len(shares) for shares in ranks})} groups of optimiser "
                f"state where the model's file lists {len(shapes)}; they come from different saves"
            )
        for index, members in enumerate(shapes):
            members = {name: tuple(shape) for name, shape in members.items()}
            is_data_first = bool((part.model.get("ds_config") or {}).get("use_data_before_expert_parallelism"))
            teams, num_local = self._divide_into_teams(members, [rank[index] for rank in ranks], is_data_first)
            for number, shares in enumerate(teams):
                for key in shares[0].vectors:
                    parts = [share.vectors.get(key, shares[0].vectors[key]) for share in shares]
                    cut = flat_tensors.cut_parameter_shares if is_stage3 else flat_tensors.cut_concatenation
                    for raw_name, shape, fragments in cut(members, parts):
                        name, row = self._place(raw_name, number * num_local)
                        self._add_row(_stored_name(key, name), row, shape, fragments)
            names = list(dict.fromkeys(self._place(name)[0] for name in members))
            if (step := teams[0][0].step) is not None:
                for name in names:
                    self._add_step(name, step)
            self._add_group(teams[0][0].group, teams[0][0].hyper, names)

    def _divide_into_teams(
        self, members: Mapping[str, tuple[int, ...]], shares: list[_Share], is_data_first: bool
    ) -> tuple[list[list[_Share]], int]:
        """The ranks that share a group's vectors: all, or of experts those that have the same ones; how many a team
        has of a layer's experts."""
        matches = [match for name in members if (match := _EXPERT_NAME.fullmatch(name))]
        if not matches:
            return [shares], 0
        layer = matches[0].group(1)
        num_local = len({match.group(2) for match in matches if match.group(1) == layer})
        of_layer = (match for name in self.expert_values if (match := _EXPERT_NAME.fullmatch(name)))
        num_experts = len({match.group(2) for match in of_layer if match.group(1) == layer})
        num_teams = num_experts // num_local
        if not num_teams or len(shares) % num_teams or num_experts % num_local:
            raise CorruptCheckpointError(
                f"{self.path}: {len(shares)} ranks with {num_local} experts each do not make up the {num_experts} "
                f"experts of {layer} whose files are there: one is missing, or left over from another save"
            )
        size = len(shares) // num_teams
        if is_data_first:
            return [shares[number * size : (number + 1) * size] for number in range(num_teams)], num_local
        return [shares[number::num_teams] for number in range(num_teams)], num_local

    def _add_group(self, index: int, hyper: Mapping[str, Any], members: list[str]) -> None:
        """Members of a parameter group of the optimiser: stage 3 has several vectors for one."""
        while len(self.groups) <= index:
            self.groups.append({"params": [], "hyper": {}})
        self.groups[index]["params"] += [name for name in members if name not in self.groups[index]["params"]]
        self.groups[index]["hyper"] = {key: v for key, v in hyper.items() if key not in _GROUP_BOOKKEEPING}

    def _add_universal(self, part: _Part) -> None:
        """Parameters that were merged one by one into files of their own."""
        folder = self.path / UNIVERSAL_FOLDER
        common = self._load(f"{UNIVERSAL_FOLDER}/optimizer_state.pt")
        numbered = (common.get("optimizer_state_dict") or {}).get("state") or {}
        steps = [float(state["step"]) for state in numbered.values() if "step" in state]
        param_groups = common.get("param_groups") or []
        for index, members in enumerate(part.model.get("param_shapes") or []):
            if any(_EXPERT_NAME.fullmatch(name) for name in members):
                raise CheckpointMismatchError(
                    f"{self.path} was made of a folder with experts, which ds_to_universal.py leaves out: load the "
                    "folder that it was made of, at any number of ranks"
                )
            named = {}
            for raw_name, shape in members.items():
                name = named[raw_name] = self._place(raw_name)[0]
                for file_name in sorted(list_if_there(self.io, folder / raw_name)):
                    key = file_name.removesuffix(".pt")
                    value = self._load_any(f"{UNIVERSAL_FOLDER}/{raw_name}/{file_name}")
                    value = value["param"] if isinstance(value, dict) else value
                    if key == "step":
                        steps.append(float(value))
                        continue
                    if isinstance(value, torch.Tensor):
                        whole = flat_tensors.whole_fragments(value, math.prod(shape))  # a stored one may be padded
                        self._add_row(_stored_name(key, name), None, shape, whole)
                if steps:
                    self._add_step(name, steps[-1])
            group = next((i for i, g in enumerate(param_groups) if index in g.get("params", ())), 0)
            self._add_group(group, param_groups[group] if param_groups else {}, list(named.values()))
        part.optims.append(common)

    # What is not a tensor.

    def _state(self, common: dict[str, Any], parts: list[_Part]) -> dict[str, Any]:
        """The state tree, as ``TrainingState`` keeps one."""
        skipped = int(common.get("skipped_steps") or 0)
        engine: dict[str, Any] = {
            "global_steps": self.step,
            "skipped_steps": skipped,
            "lr_scheduler": common.get("lr_scheduler"),
        }
        if common.get("global_samples") is not None:
            engine["global_samples"] = int(common["global_samples"])
        scaler = parts[0].optims[0].get("loss_scaler") if parts[0].optims else None
        if isinstance(scaler, InertObject) and vars(scaler).get("dynamic"):
            engine["scaler"] = {
                "scale": float(vars(scaler)["cur_scale"]),
                "iteration": int(vars(scaler)["cur_iter"]),
                "overflowed": int(vars(scaler)["last_overflow_iter"]),
                "allowance": int(vars(scaler)["cur_hysteresis"]),
            }
        own: dict[str, Any] = {}
        if self.groups:
            keys = {name.split("/")[1] for name in self.tensors if name.startswith("optim/")}
            forms = {key: ["plain"] if key == "step" else ["dtensor"] for key in sorted(keys)}
            own["optim"] = {"groups": self.groups, "values": {}, "loose": {}, "forms": forms}
        client_state = {key: value for key, value in common.items() if key not in _OWN_KEYS}
        return {"client_state": client_state, "engine": engine, "thalweg": own}


@dataclass
class _Share:
    """A rank's part of one flat vector: its fp32 values and moments, the group that it belongs to."""

    vectors: dict[str, torch.Tensor]
    step: float | None
    group: int
    hyper: dict[str, Any]


def _read_shares(optim: dict[str, Any], is_stage3: bool) -> list[_Share]:
    """The flat vectors of one rank's file."""
    masters = optim["fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"]
    base = optim["optimizer_state_dict" if is_stage3 else "base_optimizer_state"]
    if isinstance(base, dict):
        groups = base["param_groups"]
        place = {number: g for g, group in enumerate(groups) for number in group["params"]}
        states = [base["state"].get(number, {}) for number in place]
        group_of = list(place.values())
    else:  # elastic: the states alone, without padding
        groups, states, group_of = [{} for _ in base], base, list(range(len(base)))
    shares = []
    for index, master in enumerate(masters):
        state = states[index] if index < len(states) else {}
        group = group_of[index] if index < len(group_of) else index
        hyper = groups[group] if group < len(groups) else {}
        tensors = {str(key): value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape}
        vectors = {_MASTER: master} | {key: v for key, v in tensors.items() if v.numel() >= master.numel()}
        step = state.get("step", hyper.get("step", optim.get("base_optimizer_state_step")))
        shares.append(_Share(vectors, None if step is None else float(step), group, dict(hyper)))
    return shares


def _stored_name(key: str, name: str) -> str:
    return f"model/{name}" if key == _MASTER else f"optim/{key}/{name}"


def _stage(part: _Part) -> int:
    stage = part.optims[0].get("zero_stage", 1) if part.optims else 0
    return int(stage.args[0] if isinstance(stage, InertObject) else stage)
