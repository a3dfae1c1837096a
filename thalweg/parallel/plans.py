"""From a model to its plan: which layers are cut, how, and what else must change with them.

Sources, in this order: our own families; the model's own plan (``base_model_tp_plan`` of a
Hugging Face config), whose roles say less about heads, so they are read off the widths; the
graph of its linear layers (:mod:`.derive`).  The vocabulary is added wherever the
model's embedding and head allow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thalweg.parallel.cuts import Cut, by_units, by_width, sections
from thalweg.parallel.families import Family, family_of
from thalweg.parallel.heads import Deal, Heads, deal, group_rows, key_value_rows, query_rows, section_rows
from thalweg.parallel.layers import Shared


@dataclass(frozen=True)
class Layer:
    """One module of a plan: what it does, its parameters' cuts by key, and rows it shares."""

    kind: str  # column, row, embedding, head, partial, experts, columns_of_heads
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    shared: Shared | None = None


@dataclass
class Plan:
    """Layers and attributes by module name; ``by_head``: modules with arguments that carry heads."""

    source: str
    layers: dict[str, Layer] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    by_head: dict[str, tuple[str, ...]] = field(default_factory=dict)
    deal: Deal | None = None


class Refused(ValueError):
    """A model cannot be cut; the message names the module and the cure."""


def plan_of(model: nn.Module, world: int, rank: int) -> Plan | None:
    """The plan for this rank of ``world``, or None where neither a family nor the model itself has one.

    Raises:
        ValueError: the model has fewer heads than ranks.
    """
    family, own = family_of(model), _own_rules(model)
    if family is None and not own:
        return None
    dealt = _deal_of(model, world, family is not None and "groups" in family.rules.values())
    if family is not None and dealt is not None:
        plan = Plan(f"the {_kind(model)} family", deal=dealt)
        for name, module in model.named_modules():
            role = next((role for end, role in family.rules.items() if _ends(name, end)), None)
            if role is not None:
                plan.layers[name] = _layer(name, module, role, dealt, world, rank)
        _local_attributes(plan, model, family, rank)
    elif own:
        plan = Plan(f"the plan of {type(model).__name__}", deal=dealt)
        _from_own(plan, model, own, dealt, world, rank)
    else:
        return None
    add_vocabulary(plan, model, world)
    return plan


def _kind(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _deal_of(model: nn.Module, world: int, in_groups: bool) -> Deal | None:
    heads = heads_of(getattr(model, "config", None))
    return None if heads is None else deal(heads, world, in_groups)


def heads_of(config: Any) -> Heads | None:
    """The heads that a config describes, or None."""
    text = getattr(config, "get_text_config", None)
    config = text() if callable(text) else config

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    query = first("num_attention_heads", "n_head", "num_heads")
    hidden = first("hidden_size", "n_embd", "d_model")
    if query is None or hidden is None:
        return None
    key_value = first("num_key_value_heads", "num_kv_heads") or query
    if getattr(config, "model_type", None) == "falcon" and not config.new_decoder_architecture:
        key_value = 1 if config.multi_query else query
    return Heads(query, key_value, first("head_dim", "d_kv") or hidden // query)


# Roles


def _layer(name: str, module: nn.Module, role: str, dealt: Deal, world: int, rank: int) -> Layer:
    if role in ("partial", "whole"):
        return Layer(role)
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise Refused(f"{name} ({type(module).__name__}) has no matrix to cut as {role!r}")
    out_dim = 1 if _is_conv1d(module) else 0
    width = dealt.heads.width
    shared: Shared | None = None
    if role == "bias_table":
        return Layer("columns_of_heads", {"weight": query_rows(dealt, 1, 1)})
    if role in ("out", "row"):
        in_dim = 1 - out_dim
        size = weight.shape[in_dim]
        cut = query_rows(dealt, in_dim, width) if role == "out" else by_width(in_dim, size, world)
        return Layer("row", {"weight": _fitting(name, cut, size)})
    if role in ("embedding", "head"):
        return Layer(role, _with_bias(module, by_units(0, weight.shape[0], world)))
    size = weight.shape[out_dim]
    if role == "query":
        cut = query_rows(dealt, out_dim, width)
    elif role == "heads3":
        cut = query_rows(dealt, out_dim, 3 * width)
    elif role == "groups":
        cut, of = group_rows(dealt, out_dim)
        shared = of(rank)
    elif role == "key_value":
        cut, of = key_value_rows(dealt, out_dim)
        shared = of(rank)
    elif role in ("sections", "sections_kv"):
        cut, of = section_rows(dealt, out_dim, first=role == "sections")
        shared = of(rank)
    elif role == "column2":
        cut = halves(out_dim, size, world)
    else:
        assert role == "column", role
        cut = by_width(out_dim, size, world)
    return Layer("column", _with_bias(module, _fitting(name, cut, size)), shared)


def halves(dim: int, size: int, world: int) -> Cut:
    """Two fused sections of equal length, each cut evenly."""
    spans = [own[0] for own in by_width(dim, size // 2, world).spans]
    return sections(dim, (size // 2, size // 2), [(span, span) for span in spans])


def _fitting(name: str, cut: Cut, size: int) -> Cut:
    if cut.size != size:
        raise Refused(
            f"{name} has {size} features where its heads make {cut.size}: it is not the known layer"
        )
    return cut


def _with_bias(module: nn.Module, cut: Cut) -> dict[str, Cut]:
    cuts = {"weight": cut}
    if module._parameters.get("bias") is not None:
        cuts["bias"] = Cut(0, cut.size, cut.spans)
    return cuts


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _local_attributes(plan: Plan, model: nn.Module, family: Family, rank: int) -> None:
    dealt = plan.deal
    assert dealt is not None
    values = {
        "query": dealt.num_query(rank),
        "key_value": len(dealt.key_value[rank]),
        "repeat": dealt.repeat[rank],
        "width": dealt.num_query(rank) * dealt.heads.width,
    }
    for name, module in model.named_modules():
        if any(_ends(name, end) for end in family.attention):
            found = {k: values[which] for k, which in family.attributes.items() if _has(module, k)}
            if found:
                plan.attributes[name] = found
            if family.by_head_arguments:
                plan.by_head[name] = family.by_head_arguments


def _has(module: nn.Module, key: str) -> bool:
    owner, _, name = key.rpartition(".")
    return hasattr(getattr(module, owner, None) if owner else module, name)


# The model's own plan

_ROLES = {
    "colwise": "column",
    "colwise_rep": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "packed_colwise": "column2",
    "replicated_with_grad_allreduce": "partial",
}


def _own_rules(model: nn.Module) -> dict[str, str]:
    config = getattr(model, "config", None)
    rules = dict(getattr(config, "base_model_tp_plan", None) or {})
    return {key: value for key, value in rules.items() if isinstance(value, str)}


def _from_own(
    plan: Plan, model: nn.Module, rules: Mapping[str, str], dealt: Deal | None, world: int, rank: int
) -> None:
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    patterns = {
        re.compile("^" + re.escape(prefix + key).replace(r"\*", r"[^.]+") + "$"): role
        for key, role in rules.items()
    }

    def role_of(name: str) -> str | None:
        return next((role for pattern, role in patterns.items() if pattern.match(name)), None)

    for name, module in model.named_modules():
        role = role_of(name)
        if role is None:
            continue
        if role == "moe_tp_experts":
            plan.layers[name] = Layer("experts", dict(_expert_cuts(name, module, role_of, world)))
            continue
        ours = _ROLES.get(role)
        if ours is None:
            raise Refused(f"{name}: the model's own plan calls it {role!r}, which is not built yet")
        if ours in ("column", "row") and dealt is not None and "attn" in name.rpartition(".")[0]:
            ours = _by_heads(module, ours, dealt.heads)
        assert dealt is not None or ours in ("column", "row", "column2", "partial")
        plan.layers[name] = _layer(
            name, module, ours, dealt or deal(Heads(world, world, 1), world), world, rank
        )
    if dealt is not None:
        attention = {name.rpartition(".")[0] for name, layer in plan.layers.items() if "attn" in name}
        whose = Family({}, tuple(sorted(attention)), _LOCAL_ATTRIBUTES)
        _local_attributes(plan, model, whose, rank)


_LOCAL_ATTRIBUTES = {
    "num_heads": "query",
    "num_attention_heads": "query",
    "num_key_value_heads": "key_value",
    "num_key_value_groups": "repeat",
}


def _by_heads(module: nn.Module, role: str, heads: Heads) -> str:
    """The role in whole heads that a linear layer of attention has by its width."""
    weight = module._parameters["weight"]
    assert weight is not None
    outs, ins = weight.shape
    if role == "row":
        return "out" if ins == heads.num_query * heads.width else role
    known = {
        heads.num_query * heads.width: "query",
        heads.num_key_value * heads.width: "key_value",
        3 * heads.num_query * heads.width: "heads3",
    }
    if heads.num_query == heads.num_key_value:
        known[heads.num_query * heads.width] = "query"
    return known.get(outs, role)


def _expert_cuts(name: str, module: nn.Module, role_of: Any, world: int) -> Iterator[tuple[str, Cut]]:
    for key, parameter in module._parameters.items():
        role = role_of(f"{name}.{key}")
        if parameter is None or role is None:
            continue
        if role == "packed_colwise":
            dim = parameter.ndim - 2 if parameter.ndim == 3 else parameter.ndim - 1
            yield key, halves(dim, parameter.shape[dim], world)
        elif role in ("rowwise", "colwise"):
            dim = parameter.ndim - (1 if role == "rowwise" else 2)
            yield key, by_width(dim, parameter.shape[dim], world)
        else:
            raise Refused(f"{name}.{key}: the model's own plan calls it {role!r}, which is not built yet")


# The vocabulary


def add_vocabulary(plan: Plan, model: nn.Module, world: int) -> None:
    """Cut the input embedding and the head by vocabulary where every holder of their weights can be."""
    embedding = _ask(model, "get_input_embeddings")
    output = _ask(model, "get_output_embeddings")
    names = {id(module): name for name, module in model.named_modules()}
    for module in (embedding, output):
        if module is None or id(module) not in names or names[id(module)] in plan.layers:
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        holders = {
            name: holder
            for name, holder in model.named_modules()
            if any(parameter is weight for parameter in holder._parameters.values())
        }
        kinds = {name: _vocabulary_kind(holder, output) for name, holder in holders.items()}
        if None in kinds.values() or weight.shape[0] < world:
            continue
        for name, kind in kinds.items():
            assert kind is not None
            plan.layers[name] = Layer(kind, _with_bias(holders[name], by_units(0, weight.shape[0], world)))


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _vocabulary_kind(module: nn.Module, output: nn.Module | None) -> str | None:
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        return "embedding"
    return "head" if type(module) is nn.Linear and module is output else None
