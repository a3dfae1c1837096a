"""From a model to its plan: which layers are cut, how, and what else must change with them.

Sources, in this order: our own families; the model's own plan (``base_model_tp_plan`` of a
Hugging Face config), whose roles say less about heads, so they are read off the widths; the
graph of its linear layers (:mod:`.auto_plan.infer_plan`).  A config's ``layer_specs`` go before any.  The vocabulary
is added wherever the model's embedding and head allow it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from thalweg.config.schema.parallel import TPLayerSpec
from thalweg.parallel.shard_spec import ShardSpec, aligned_spec, contiguous_spec, sections_spec
from thalweg.parallel.tensor.families import HEAD_ROLES, LOCAL_ATTRIBUTES, Family, get_family
from thalweg.parallel.tensor.heads import (
    AttentionHeads,
    HeadAssignment,
    assign_heads,
    gqa_interleaved_spec,
    kv_spec,
    query_spec,
)
from thalweg.parallel.tensor.layers import SharedRows
from thalweg.utils.trees import first_positive_int

LayerKind = Literal[
    "column", "row", "embedding", "head", "grad_all_reduce", "experts", "head_columns", "replicated",
    "whole_dropout", "part_dropout",
]  # fmt: skip


@dataclass(frozen=True)
class LayerPlan:
    """One module of a plan: what it does, its parameters' cuts by key, and rows it shares."""

    kind: LayerKind
    shard_specs: Mapping[str, ShardSpec] = field(default_factory=dict)
    shared_rows: SharedRows | None = None


@dataclass
class TpPlan:
    """Layers and attributes by module name; ``per_head_args``: modules with arguments that carry heads."""

    source: str
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    local_attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    per_head_args: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head_assignment: HeadAssignment | None = None

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks: by module how it is cut, and under "" where that comes from."""
        text = {"": self.source}
        for name, layer in self.layers.items():
            specs = (f"{key} in dim {spec.dim} at {spec.spans}" for key, spec in sorted(layer.shard_specs.items()))
            text[name] = ", ".join((layer.kind, *specs))
        for name, values in self.local_attributes.items():
            text[name] = "; ".join(filter(None, (text.get(name), f"local {sorted(values)}")))
        return text


class UnshardableModelError(ValueError):
    """A model cannot be cut; the message names the module and the cure."""


def build_tp_plan(model: nn.Module, world_size: int, rank: int) -> TpPlan | None:
    """The plan for this rank of ``world_size``, or None where neither a family nor the model itself has one.

    Raises:
        ValueError: the model has fewer heads than ranks.
    """
    family, config = get_family(model), getattr(model, "config", None)
    own_plan = getattr(config, "base_model_tp_plan", None) or {}
    hf_rules = {key: value for key, value in own_plan.items() if isinstance(value, str)}
    if family is None and not hf_rules:
        return None
    heads = heads_from_config(config)
    is_interleaved = family is not None and "gqa_interleaved" in family.rules.values()
    assignment = None if heads is None else assign_heads(heads, world_size, is_interleaved)
    block = _scale_block(model)
    if family is not None and assignment is not None:
        model_type = getattr(config, "model_type", type(model).__name__)
        plan = TpPlan(f"the {model_type} family", head_assignment=assignment)
        attention: dict[str, None] = {}
        for name, module in model.named_modules():
            role = next((role for end, role in family.rules.items() if f".{name}".endswith(f".{end}")), None)
            if role is not None:
                plan.layers |= _plan_layers(name, module, role, assignment, world_size, rank, block)
            if role in HEAD_ROLES:
                attention[name.rpartition(".")[0]] = None
        _add_local_attributes(plan, model, attention, family.local_attributes, rank)
        if family.per_head_args:
            plan.per_head_args = dict.fromkeys(attention, family.per_head_args)
    elif hf_rules:
        plan = TpPlan(f"the plan of {type(model).__name__}", head_assignment=assignment)
        base = getattr(model, "base_model_prefix", "")
        prefix = f"{base}." if base and hasattr(model, base) else ""
        if hasattr(model, "peft_config"):
            prefix = f"base_model.model.{prefix}"
        patterns = {
            re.compile("^" + re.escape(prefix + key).replace(r"\*", r"[^.]+") + "$"): role
            for key, role in hf_rules.items()
        }

        def get_role(name: str) -> str | None:
            return next((role for pattern, role in patterns.items() if pattern.match(name)), None)

        for name, module in model.named_modules():
            role = get_role(name)
            if role is None:
                continue
            if role == "moe_tp_experts":
                plan.layers[name] = LayerPlan("experts", dict(_expert_specs(name, module, get_role, world_size)))
                continue
            mapped_role = _HF_ROLES.get(role)
            if mapped_role is None:
                raise UnshardableModelError(f"{name}: the model's own plan calls it {role!r}, which is not built yet")
            if mapped_role in ("column", "row") and assignment is not None and "attn" in name.rpartition(".")[0]:
                mapped_role = _per_head_role(module, mapped_role, assignment.heads)
            assert assignment is not None or mapped_role in ("column", "row", "gate_up_fused", "grad_all_reduce")
            by_heads = assignment or assign_heads(AttentionHeads(world_size, world_size, 1), world_size)
            plan.layers |= _plan_layers(name, module, mapped_role, by_heads, world_size, rank, block)
        if assignment is not None:
            parents = dict.fromkeys(name.rpartition(".")[0] for name in plan.layers if "attn" in name)
            _add_local_attributes(plan, model, parents, LOCAL_ATTRIBUTES, rank)
    else:
        return None
    add_vocab_parallel(plan, model, world_size)
    return plan


def heads_from_config(config: Any) -> AttentionHeads | None:
    """The heads that a config describes, or None."""
    get_text_config = getattr(config, "get_text_config", None)
    config = get_text_config() if callable(get_text_config) else config
    num_heads = first_positive_int(config, "num_attention_heads", "n_head", "num_heads")
    hidden_size = first_positive_int(config, "hidden_size", "n_embd", "d_model")
    if num_heads is None or hidden_size is None:
        return None
    num_kv_heads = first_positive_int(config, "num_key_value_heads", "num_kv_heads") or num_heads
    if getattr(config, "model_type", None) == "falcon" and not config.new_decoder_architecture:
        num_kv_heads = 1 if config.multi_query else num_heads
    head_dim = first_positive_int(config, "head_dim", "d_kv") or hidden_size // num_heads
    return AttentionHeads(num_heads, num_kv_heads, head_dim)


# Roles

Role = str | tuple[int, ...]  # of families.py; sizes of sections, each of them cut by outputs
_KV_ROLES = {"key_value": (1, False), "kv_fused": (2, False), "qkv_fused": (2, True)}  # sections, behind queries?


def _plan_layers(
    name: str, module: Any, role: Role, assignment: HeadAssignment, world_size: int, rank: int, block: int
) -> dict[str, LayerPlan]:
    """The plan of a layer, or of PEFT's layer around one and of the factors beside it, by their names.

    Where the base cuts its outputs LoRA's B does; A sees all inputs on every rank.  Where it cuts its inputs A does;
    its few outputs are summed, and B is whole.
    """
    if not hasattr(module, "base_layer"):
        return {name: _plan_layer(name, module, role, assignment, world_size, rank, block)[0]}
    base, key = f"{name}.base_layer", next(iter(getattr(module, "adapter_layer_names", ())), "")
    if key != "lora_A" or getattr(module, "lora_variant", None):
        raise ValueError(
            f"{name}: a {type(module).__name__} that is not plain LoRA cannot be cut over tensor ranks; use LoRA, or "
            "set tensor_parallel.autotp_size to 1"
        )
    plan, spec = _plan_layer(base, module.base_layer, role, assignment, world_size, rank, block)
    plans, is_row = {base: plan}, plan.kind == "row"
    for adapter in module.lora_A:
        if isinstance(module.lora_dropout[adapter], nn.Dropout):
            plans[f"{name}.lora_dropout.{adapter}"] = LayerPlan("part_dropout" if is_row else "whole_dropout")
        if is_row:
            plans[f"{name}.lora_A.{adapter}"] = LayerPlan("row", {"weight": replace(spec, dim=1)})
        else:
            specs = with_bias_spec(module.lora_B[adapter], replace(spec, dim=0))
            plans[f"{name}.lora_B.{adapter}"] = LayerPlan("column", specs, plan.shared_rows)
    return plans


def _plan_layer(
    name: str, module: nn.Module, role: Role, assignment: HeadAssignment, world_size: int, rank: int, block: int
) -> tuple[LayerPlan, Any]:
    """The plan of one layer, and the cut of its weight."""
    if role in ("grad_all_reduce", "replicated"):
        return LayerPlan(role), None
    weight = _get_weight(module)
    if weight is None or weight.ndim != 2:
        raise UnshardableModelError(f"{name} ({type(module).__name__}) has no matrix to cut as {role!r}")
    out_dim = 1 if type(module).__name__ == "Conv1D" else 0
    head_dim = assignment.heads.head_dim
    shared_rows: SharedRows | None = None
    if role == "bias_table":
        spec = query_spec(assignment, 1, 1)
        return LayerPlan("head_columns", {"weight": spec}), spec
    if role in ("out", "row"):
        in_dim = 1 - out_dim
        size = weight.shape[in_dim]
        is_out = role == "out"
        spec = query_spec(assignment, in_dim, head_dim) if is_out else aligned_spec(in_dim, size, world_size, block)
        return LayerPlan("row", _weight_specs(name, module, _check_size(name, spec, size))), spec
    if role in ("embedding", "head"):
        spec = contiguous_spec(0, weight.shape[0], world_size)
        return LayerPlan(role, with_bias_spec(module, spec)), spec
    size = weight.shape[out_dim]
    if role in ("query", "qkv_interleaved"):
        spec = query_spec(assignment, out_dim, head_dim * (1 if role == "query" else 3))
    elif role == "gqa_interleaved":
        spec, shared_rows = gqa_interleaved_spec(assignment, out_dim, rank)
    elif role in _KV_ROLES:
        spec, shared_rows = kv_spec(assignment, out_dim, rank, *_KV_ROLES[role])
    elif role == "gate_up_fused":
        spec = sections_spec(out_dim, (size // 2,) * 2, world_size, block)
    elif not isinstance(role, str):
        spec = sections_spec(out_dim, role, world_size, block)
    else:
        assert role == "column", role
        spec = aligned_spec(out_dim, size, world_size, block)
    specs = _weight_specs(name, module, _check_size(name, spec, size))
    if shared_rows is not None and "weight" not in specs:
        raise ValueError(
            f"{name} is quantised and has fewer key-value heads than ranks: set tensor_parallel.autotp_size to "
            f"{assignment.heads.num_kv_heads}, or leave it in 16 bits"
        )
    return LayerPlan("column", specs | _bias_spec(module, spec), shared_rows), spec


def _get_weight(module: nn.Module) -> Any:
    """A layer's weight, or None; one in few bits, which is computed, shows its shape."""
    return module.weight if _is_quantized(module) else module._parameters.get("weight")


def _is_quantized(module: nn.Module) -> bool:
    return "weight" in getattr(module, "parametrizations", {})


def _scale_block(model: nn.Module) -> int:
    """The most inputs of a quantised layer that share a scale, within which nothing can be cut."""
    weights = (_get_weight(module) for module in model.modules() if _is_quantized(module))
    return max((getattr(weight, "block", 1) for weight in weights), default=1)


def _weight_specs(name: str, module: nn.Module, spec: ShardSpec) -> dict[str, ShardSpec]:
    """The cut of a weight, or of the bytes that a weight in few bits is made of."""
    if not _is_quantized(module):
        return {"weight": spec}
    weight = _get_weight(module)
    if not hasattr(weight, "byte_spans"):
        raise ValueError(
            f"{name}.weight is a {type(weight).__name__}, which cannot be cut over tensor ranks: quantise by "
            "thalweg.adapt.quantized_weight.quantize_linears, or set tensor_parallel.autotp_size to 1"
        )
    try:
        cuts = weight.byte_spans(spec.dim, spec.spans)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {
        f"parametrizations.weight.original{i}": ShardSpec(
            spec.dim, max(stop for rank in spans for _, stop in rank), tuple(tuple(rank) for rank in spans)
        )
        for i, spans in enumerate(cuts)
        if spans is not None
    }


def _check_size(name: str, spec: ShardSpec, size: int) -> ShardSpec:
    if spec.size != size:
        raise UnshardableModelError(
            f"{name} has {size} features where its heads make {spec.size}: it is not the known layer"
        )
    return spec


def with_bias_spec(module: nn.Module, spec: ShardSpec) -> dict[str, ShardSpec]:
    """The cuts of a layer's weight and of its bias, if it has one, along its outputs."""
    return {"weight": spec} | _bias_spec(module, spec)


def _bias_spec(module: nn.Module, spec: ShardSpec) -> dict[str, ShardSpec]:
    return {} if module._parameters.get("bias") is None else {"bias": replace(spec, dim=0)}


def _add_local_attributes(
    plan: TpPlan, model: nn.Module, names: Iterable[str], local_attributes: Mapping[str, str], rank: int
) -> None:
    """This rank's numbers in place of the whole model's, where the modules of these names keep any."""
    assignment = plan.head_assignment
    assert assignment is not None
    heads, num_local_heads = assignment.heads, assignment.num_local_heads(rank)
    values = {
        "query": (heads.num_heads, num_local_heads),
        "key_value": (heads.num_kv_heads, len(assignment.kv_heads[rank])),
        "repeat": (heads.num_queries_per_kv, assignment.kv_repeats[rank]),
        "width": (heads.num_heads * heads.head_dim, num_local_heads * heads.head_dim),
    }
    for name in names:
        get_attribute = partial(_get_attribute, model.get_submodule(name))
        found = ((key, values[which]) for key, which in local_attributes.items())
        local_values = {key: local for key, (full, local) in found if get_attribute(key) == full}
        if local_values:
            plan.local_attributes[name] = local_values


def _get_attribute(module: nn.Module, key: str) -> Any:
    prefix, _, name = key.rpartition(".")
    return getattr(getattr(module, prefix, None) if prefix else module, name, None)


# The model's own plan

_HF_ROLES = {"colwise": "column", "colwise_rep": "column", "rowwise": "row", "rowwise_rep": "row"}
_HF_ROLES |= {"packed_colwise": "gate_up_fused", "replicated_with_grad_allreduce": "grad_all_reduce"}


def _per_head_role(module: nn.Module, role: str, heads: AttentionHeads) -> str:
    """The role in whole heads that a linear layer of attention has by its width."""
    weight = _get_weight(getattr(module, "base_layer", module))
    out_features, in_features = weight.shape[::-1] if type(module).__name__ == "Conv1D" else weight.shape
    if role == "row":
        return "out" if in_features == heads.num_heads * heads.head_dim else role
    query_width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    role_by_width = {kv_width: "key_value", query_width: "query", 3 * query_width: "qkv_interleaved"}
    return role_by_width.get(out_features, role)


def _expert_specs(name: str, module: nn.Module, get_role: Any, world_size: int) -> Iterator[tuple[str, ShardSpec]]:
    for key, parameter in module._parameters.items():
        role = get_role(f"{name}.{key}")
        if parameter is None or role is None:
            continue
        if role == "packed_colwise":
            dim = parameter.ndim - 2 if parameter.ndim == 3 else parameter.ndim - 1
            yield key, sections_spec(dim, (parameter.shape[dim] // 2,) * 2, world_size)
        elif role in ("rowwise", "colwise"):
            dim = parameter.ndim - (1 if role == "rowwise" else 2)
            yield key, aligned_spec(dim, parameter.shape[dim], world_size)
        else:
            raise UnshardableModelError(f"{name}.{key}: the model's own plan calls it {role!r}, which is not built yet")


# The user's own


def apply_layer_specs(
    plan: TpPlan, model: nn.Module, specs: Sequence[TPLayerSpec], world_size: int, rank: int
) -> TpPlan:
    """Cut the layers that ``specs`` name as they say, whatever ``plan`` (changed in place) says of them.

    Raises:
        ValueError: no spec names a layer, or one cannot be followed.
    """
    config = getattr(model, "config", None)
    heads, model_type = heads_from_config(config), str(getattr(config, "model_type", "")).lower()
    assignment = plan.head_assignment or (None if heads is None else assign_heads(heads, world_size))
    by_heads = assignment or assign_heads(AttentionHeads(world_size, world_size, 1), world_size)
    fitting = [spec for spec in specs if model_type in map(str.lower, spec.model_types or (model_type,))]
    vocabulary = [_call_getter(model, f"get_{end}_embeddings") for end in ("input", "output")]
    block, attention, found, cuts_vocabulary = _scale_block(model), dict[str, None](), False, False
    for name, module in model.named_modules():
        weight = _get_weight(getattr(module, "base_layer", module))
        spec = next((s for s in fitting if any(re.match(one, f"{name}.weight") for one in s.patterns)), None)
        if spec is None or weight is None:
            continue
        found, skips = True, spec.partition_type == "skip"
        if skips and spec.grad_allreduce:
            plan.layers[name] = LayerPlan("grad_all_reduce")
            continue
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or hasattr(module, "base_layer")
        if not skips and (module in vocabulary or not is_linear):
            cuts_vocabulary |= module in vocabulary
            continue
        for other in list(plan.layers):  # of a shared weight, too
            if f"{other}.".startswith(f"{name}.") or _get_weight(model.get_submodule(other)) is weight:
                del plan.layers[other]
        parent = name.rpartition(".")[0]
        in_attention = re.search("attn|attention", parent, re.IGNORECASE) and assignment is not None
        if in_attention:
            attention[parent] = None
        if skips or spec.gather_output:
            continue
        role = _role_of_spec(name, module, spec)
        if in_attention and isinstance(role, str):
            role = _per_head_role(module, role, by_heads.heads)
        elif in_attention and len(role) == 3:
            role = "qkv_fused"
        plan.layers |= _plan_layers(name, module, role, by_heads, world_size, rank, block)
    if not found:
        raise UnshardableModelError(f"no weight of {type(model).__name__} has a name that one of layer_specs matches")
    if cuts_vocabulary:
        add_vocab_parallel(plan, model, world_size)
    plan.source += ", and layer_specs"
    family, plan.head_assignment = get_family(model) or Family({}), assignment
    for parent in attention:
        is_cut = any(n.startswith(f"{parent}.") and one.kind in ("column", "row") for n, one in plan.layers.items())
        if not is_cut:
            plan.local_attributes.pop(parent, None)
            plan.per_head_args.pop(parent, None)
        elif parent not in plan.local_attributes:
            _add_local_attributes(plan, model, [parent], family.local_attributes, rank)
            plan.per_head_args |= {parent: family.per_head_args} if family.per_head_args else {}
    return plan


def _role_of_spec(name: str, module: nn.Module, spec: TPLayerSpec) -> Role:
    """``"column"``, ``"row"``, or the sizes of a column's sections."""
    dim = int(spec.partition_type == "row")
    if spec.shape is None and spec.partition_dim in (None, dim):
        return spec.partition_type
    shape = spec.shape or ()
    if len(shape) != 2 or dim or spec.partition_dim:
        raise UnshardableModelError(
            f"{name}: a layer is cut in dim {dim} of its weight, a column's sections as [number, -1] or [[sizes], -1]; "
            f"its layer_spec says shape {spec.shape}, partition_dim {spec.partition_dim}"
        )
    if isinstance(shape[0], tuple):
        return shape[0]
    size = _get_weight(getattr(module, "base_layer", module)).shape[type(module).__name__ == "Conv1D"]
    return "column" if shape[0] == -1 else (size // shape[0],) * shape[0]


# The vocabulary


def add_vocab_parallel(plan: TpPlan, model: nn.Module, world_size: int) -> None:
    """Cut the input embedding and the head by vocabulary where every holder of their weights can be."""
    embedding = _call_getter(model, "get_input_embeddings")
    output = _call_getter(model, "get_output_embeddings")
    names = {id(module): name for name, module in model.named_modules()}
    for module in (embedding, output):
        if module is None or id(module) not in names or names[id(module)] in plan.layers:
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        holders = dict(model.named_modules()).items()
        users = {name: holder for name, holder in holders if any(p is weight for p in holder._parameters.values())}
        kinds: dict[str, LayerKind | None] = {name: _vocab_layer_kind(holder, output) for name, holder in users.items()}
        if None in kinds.values() or weight.shape[0] < world_size:
            continue
        for name, kind in kinds.items():
            assert kind is not None
            specs = with_bias_spec(users[name], contiguous_spec(0, weight.shape[0], world_size))
            plan.layers[name] = LayerPlan(kind, specs)


def _call_getter(model: nn.Module, method: str) -> nn.Module | None:
    try:
        result = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return result if isinstance(result, nn.Module) else None


def _vocab_layer_kind(module: nn.Module, output: nn.Module | None) -> Literal["embedding", "head"] | None:
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        return "embedding"
    return "head" if type(module) is nn.Linear and module is output else None
