"""A tensor-parallel plan for a model that nobody has described, found by running it.

Phases, each on a small sample and alike on all ranks, without communication:

1. *See* the model run (:mod:`.module_trace`): which of its layers are matrix products, what each took and
   gave, which other code reads their weights.
2. *Pair*: in a second run every product's output is cut off into a leaf of its own.  Autograd then
   says which products feed which.  Products whose outputs go into one other, and nowhere else, can
   be cut by columns and that one by rows, if what lies between acts on parts of the features apart;
   :mod:`.channel_deps` finds these parts.
3. *Try* (:class:`_Verifier`): with each rank's part of the columns, does the second product get its part of
   what it got?  Numbers of heads or widths that a module keeps are made local where that helps.
4. *Check* the whole model so, with all pairs; a pair that does harm is left out, and its layers
   stay whole on every rank.

Invariant: nothing is believed because of a name.  What is cut has been seen to give the same.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.shard_spec import ShardSpec, Span, split_evenly
from thalweg.parallel.tensor.auto_plan import module_trace
from thalweg.parallel.tensor.auto_plan.channel_deps import ChannelDependence, ChannelGroup
from thalweg.parallel.tensor.auto_plan.module_trace import LinearOp, ModuleTrace
from thalweg.parallel.tensor.dummy_inputs import eval_mode, make_dummy_inputs
from thalweg.parallel.tensor.plan import LayerPlan, TpPlan, add_vocab_parallel, with_bias_spec
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_MAX_TRIALS = 200

IndicesByRank = tuple[tuple[int, ...], ...]  # by rank


@dataclass
class ColumnRowPair:
    """Columns of ``column_ops`` products and rows of ``row_op``, with the indices of each rank."""

    column_ops: list[LinearOp]
    row_op: LinearOp
    out_indices: list[IndicesByRank]
    in_indices: IndicesByRank
    fractions: list[Fraction]  # of the units, by rank
    partial_modules: list[str] = field(default_factory=list)  # modules between whose parameters see a part
    local_attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rank: a list of values


def infer_plan(model: nn.Module, world_size: int, rank: int) -> TpPlan | None:
    """The plan for this rank, or None where the model cannot be run or nothing in it can be cut."""
    inputs = make_dummy_inputs(model)
    if inputs is None:
        _log.warning("no inputs were found that %s takes: its layers stay whole", type(model).__name__)
        return None
    try:
        with eval_mode(model):
            trace = module_trace.trace_modules(model, inputs)
            pairs = _drop_failing(model, trace, _find_pairs(model, trace, world_size), world_size)
    except RuntimeError as error:
        _log.warning("could not trace %s: %s", type(model).__name__, error)
        return None
    plan = TpPlan(f"the graph of {type(model).__name__}'s linear layers")
    for pair in pairs:
        for op, out_indices in zip(pair.column_ops, pair.out_indices, strict=True):
            specs = with_bias_spec(op.module, _weight_spec(op, op.out_dim, out_indices))
            plan.layers[op.name] = LayerPlan("column", specs)
        row_op = pair.row_op
        row_spec = _weight_spec(row_op, 1 - row_op.out_dim, pair.in_indices)
        plan.layers[row_op.name] = LayerPlan("row", {"weight": row_spec})
        plan.layers.update({name: LayerPlan("grad_all_reduce") for name in pair.partial_modules})
        for name, values in pair.local_attributes.items():
            plan.local_attributes.setdefault(name, {}).update({key: own[rank] for key, own in values.items()})
    if pairs:
        add_vocab_parallel(plan, model, world_size)
        replicated = [p.name for p in trace.linear_ops if p.name not in plan.layers]
        _log.info("%s: sharded %d layer pairs; replicated: %s", plan.source, len(pairs), replicated or "none")
    return plan if pairs else None


def _weight_spec(op: LinearOp, dim: int, indices_by_rank: IndicesByRank) -> ShardSpec:
    return ShardSpec(dim, op.weight.shape[dim], tuple(tuple(_to_spans(own)) for own in indices_by_rank))


def _to_spans(indices: Sequence[int]) -> Iterator[Span]:
    """Runs of neighbours."""
    for _, members in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in members]
        yield run[0], run[-1] + 1


# Pairs


def _find_pairs(model: nn.Module, trace: ModuleTrace, world_size: int) -> list[ColumnRowPair]:
    """Every pair that can be cut by itself."""
    graph = module_trace.build_graph(model, trace)
    used_names: set[str] = set()
    found_units: dict[Any, tuple[list[ChannelGroup], dict[str, list[str]]]] = {}
    failed_keys = set()
    pairs = []
    for row_op in trace.linear_ops:
        column_ops = graph.exclusive_sources(row_op)
        if not column_ops or row_op.name in used_names or any(p.name in used_names for p in column_ops):
            continue
        partial_modules = graph.modules_between(row_op)
        root = trace.common_root([*(p.name for p in column_ops), row_op.name])
        if partial_modules is None or root is None:
            continue
        if root and not all(f"{name}.".startswith(f"{root}.") for name in partial_modules):
            continue
        dependence = ChannelDependence(graph.inputs[row_op.name], [graph.leaves[p.name] for p in column_ops])
        key = (
            type(model.get_submodule(root)),
            *((p.name.removeprefix(root), tuple(p.weight.shape)) for p in (*column_ops, row_op)),
        )
        if key in failed_keys:
            continue
        pair = None
        if key in found_units:
            groups, attributes = found_units[key]
            pair = _assign_groups(column_ops, row_op, groups, world_size)
            if pair is not None and not all(
                dependence.depends_only_on(columns, [outs[rank] for outs in pair.out_indices])
                for rank, columns in enumerate(pair.in_indices)
            ):
                pair = None
        if pair is None:
            groups = dependence.channel_groups()
            attributes = {}
            pair = None if groups is None else _assign_groups(column_ops, row_op, groups, world_size)
        if pair is None or groups is None:
            failed_keys.add(key)
            continue
        pair.partial_modules = partial_modules
        verifier = _Verifier(model, trace, root, world_size)
        hint = {root + name: keys for name, keys in attributes.items()}
        if verifier.find_attributes(pair, hint):
            relative = {name.removeprefix(root): list(own) for name, own in pair.local_attributes.items()}
            found_units[key] = groups, relative
            used_names.update(p.name for p in (*column_ops, row_op))
            pairs.append(pair)
        else:
            failed_keys.add(key)
    return pairs


def _assign_groups(
    column_ops: list[LinearOp], row_op: LinearOp, groups: list[ChannelGroup], world_size: int
) -> ColumnRowPair | None:
    """The units of each kind, dealt out evenly; None where there are fewer than ranks."""
    by_sizes: dict[Any, list[ChannelGroup]] = {}
    for group in groups:
        by_sizes.setdefault(group.sizes, []).append(group)
    groups_by_rank: list[list[ChannelGroup]] = [[] for _ in range(world_size)]
    fractions: list[Fraction] = []
    for sizes, members in sorted(by_sizes.items(), reverse=True):
        if len(members) < world_size:
            return None
        multiple = 8 if sizes[0] == 1 and len(members) % 8 == 0 and len(members) // 8 >= world_size else 1
        spans = split_evenly(len(members), world_size, multiple)
        for rank_groups, (start, stop) in zip(groups_by_rank, spans, strict=True):
            rank_groups.extend(members[start:stop])
        if not fractions:
            fractions = [Fraction(stop - start, len(members)) for start, stop in spans]
    out_indices = [
        tuple(tuple(sorted(c for unit in units_of for c in unit.out_channels[i])) for units_of in groups_by_rank)
        for i in range(len(column_ops))
    ]
    in_indices = tuple(tuple(sorted(c for unit in units_of for c in unit.in_channels)) for units_of in groups_by_rank)
    return ColumnRowPair(column_ops, row_op, out_indices, in_indices, fractions)


# Trials


class _MismatchError(Exception):
    """A trial's second product got something else."""


class _Verifier:
    """Runs the module at ``root`` as one rank would: with a part of the columns, and local numbers."""

    def __init__(self, model: nn.Module, trace: ModuleTrace, root: str, world_size: int) -> None:
        self.model, self.trace, self.root, self.world_size = model, trace, root, world_size

    def find_attributes(self, pair: ColumnRowPair, hint: dict[str, list[str]]) -> bool:
        """Find the numbers that must be local for every rank's part to come out right."""
        ranks = sorted(range(self.world_size), key=lambda rank: pair.fractions[rank])
        extremes_first = dict.fromkeys((ranks[-1], *ranks))
        for subset in itertools.islice(self._attribute_subsets(pair, hint), _MAX_TRIALS):
            pair.local_attributes = {}
            for name, key, value in subset:
                local = [_scale_exact(value, fraction) for fraction in pair.fractions]
                pair.local_attributes.setdefault(name, {})[key] = local
            if all(self.passes([pair], rank) for rank in extremes_first):
                return True
        return False

    def _attribute_subsets(self, pair: ColumnRowPair, hint: dict[str, list[str]]) -> Iterator[tuple[Any, ...]]:
        """Sets of numbers to make local, likely ones first."""
        attributes = list(self._divisible_attributes(pair))
        hinted = tuple(n for n in attributes if n[1] in hint.get(n[0], ()))
        if hinted:
            yield hinted
        yield ()
        likely = tuple(n for n in attributes if "head" in n[1] and "dim" not in n[1] and "size" not in n[1])
        yield likely
        attributes.sort(key=lambda number: number not in likely)
        for size in range(1, len(attributes) + 1):
            yield from itertools.combinations(attributes, size)

    def _divisible_attributes(self, pair: ColumnRowPair) -> Iterator[tuple[str, str, Any]]:
        """Whole numbers kept by modules here that can be divided as the features are."""
        op_modules = {id(product.module) for product in self.trace.linear_ops}
        for name, module in self.model.get_submodule(self.root).named_modules(prefix=self.root):
            if id(module) in op_modules or type(module).__module__.startswith("torch.nn"):
                continue
            for key, value in vars(module).items():
                numbers: Any = value if isinstance(value, tuple | list) and value else [value]
                is_count = all(type(n) is int for n in numbers) and max(numbers) >= 2
                if is_count and all(_scale_exact(value, fraction) is not None for fraction in pair.fractions):
                    yield name, key, value

    def passes(self, pairs: list[ColumnRowPair], rank: int) -> bool:
        """Whether everything comes out as it was, run as ``rank`` would."""
        call = self.trace.calls.get(self.root)
        if call is None:
            return False
        with torch.no_grad(), ExitStack() as stack:
            for pair in pairs:
                row_op = pair.row_op
                for op, out_indices in zip(pair.column_ops, pair.out_indices, strict=True):
                    select_columns = partial(_select_columns, out_indices[rank])
                    stack.enter_context(op.module.register_forward_hook(select_columns))
                compare_input = partial(_compare_input, row_op.x, pair.in_indices[rank])
                stack.enter_context(row_op.module.register_forward_pre_hook(compare_input))
                for name, values in pair.local_attributes.items():
                    module = self.model.get_submodule(name)
                    for key, by_rank in values.items():
                        stack.callback(setattr, module, key, getattr(module, key))
                        setattr(module, key, by_rank[rank])
            try:
                result = call.replay(self.model.get_submodule(self.root))
            except Exception:  # a model with parts of its features may fail in any way
                return False
        return module_trace.is_close(module_trace.first_tensor(result), call.output)


def _scale_exact(value: Any, fraction: Fraction) -> Any:
    """A number, or several, times a fraction, in whole numbers; None where that leaves a rest."""
    if isinstance(value, tuple | list):
        scaled = [_scale_exact(n, fraction) for n in value]
        return None if None in scaled else type(value)(scaled)
    result = value * fraction
    return int(result) if result.denominator == 1 and result > 0 else None


def _select_columns(indices: tuple[int, ...], module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output[..., list(indices)]


def _compare_input(
    full_input: Tensor, indices: tuple[int, ...], module: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor]:
    if not module_trace.is_close(args[0], full_input[..., list(indices)]):
        raise _MismatchError
    return (full_input,)


def _drop_failing(
    model: nn.Module, trace: ModuleTrace, pairs: list[ColumnRowPair], world_size: int
) -> list[ColumnRowPair]:
    """The pairs with which the whole model still gives what it gave, on every rank."""
    verifier = _Verifier(model, trace, "", world_size)

    def all_pass(subset: list[ColumnRowPair]) -> bool:
        return all(verifier.passes(subset, rank) for rank in range(world_size))

    if not pairs or all_pass(pairs):
        return pairs
    passing = [region for region in pairs if all_pass([region])]
    return passing if all_pass(passing) else []
