"""A tensor-parallel plan for a model that nobody has described, found by running it.

Phases, each on a small sample and alike on all ranks, without communication:

1. *See* the model run (:mod:`.traced`): which of its layers are matrix products, what each took and
   gave, which other code reads their weights.
2. *Pair*: in a second run every product's output is cut off into a leaf of its own.  Autograd then
   says which products feed which.  Products whose outputs go into one other, and nowhere else, can
   be cut by columns and that one by rows, if what lies between acts on parts of the features apart;
   :mod:`.dependence` finds these parts.
3. *Try* (:class:`_Trial`): with each rank's part of the columns, does the second product get its part of
   what it got?  Numbers of heads or widths that a module keeps are made local where that helps.
4. *Check* the whole model so, with all pairs; a pair that does harm is left out, and its layers
   stay whole on every rank.

Invariant: nothing is believed because of a name.  What is cut has been seen to give the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.parallel.cuts import Cut, Span, even
from thalweg.parallel.dependence import Dependence, Unit
from thalweg.parallel.plans import Layer, Plan, add_vocabulary
from thalweg.parallel.sample import evaluating, sample_of
from thalweg.parallel.traced import Product, Seen, close, first_tensor, leaves_of, see
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_MOST_TRIALS = 200

Indices = tuple[tuple[int, ...], ...]  # by rank


@dataclass
class Region:
    """Columns of ``first`` products and rows of ``second``, with the indices of each rank."""

    first: list[Product]
    second: Product
    outs: list[Indices]
    ins: Indices
    fraction: list[Fraction]  # of the units, by rank
    partial: list[str] = field(default_factory=list)  # modules between whose parameters see a part
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rank: a list of values

    @property
    def names(self) -> list[str]:
        """Its products."""
        return [*(p.name for p in self.first), self.second.name]


def derive(model: nn.Module, world: int, rank: int) -> Plan | None:
    """The plan for this rank, or None where the model cannot be run or nothing in it can be cut."""
    sample = sample_of(model)
    if sample is None:
        _log.warning("no inputs were found that %s takes: its layers stay whole", type(model).__name__)
        return None
    try:
        with evaluating(model):
            seen = see(model, sample)
            regions = _harmless(model, seen, _regions(model, seen, world), world)
    except RuntimeError as error:
        _log.warning("%s could not be looked at: %s", type(model).__name__, error)
        return None
    plan = Plan(f"the graph of {type(model).__name__}'s linear layers")
    for region in regions:
        for product, outs in zip(region.first, region.outs, strict=True):
            plan.layers[product.name] = Layer("column", _cuts(product, product.out_dim, outs, bias=True))
        second = region.second
        plan.layers[second.name] = Layer("row", _cuts(second, 1 - second.out_dim, region.ins, bias=False))
        plan.layers.update({name: Layer("partial") for name in region.partial})
        for name, values in region.attributes.items():
            plan.attributes.setdefault(name, {}).update({key: own[rank] for key, own in values.items()})
    if regions:
        add_vocabulary(plan, model, world)
        whole = [p.name for p in seen.products if p.name not in plan.layers]
        _log.info("%s: %d pairs of layers are cut, %s stay whole", plan.source, len(regions), whole or "none")
    return plan if regions else None


def _cuts(product: Product, dim: int, by_rank: Indices, *, bias: bool) -> dict[str, Cut]:
    spans = tuple(tuple(_runs(own)) for own in by_rank)
    size = product.weight.shape[dim]
    cuts = {"weight": Cut(dim, size, spans)}
    if bias and product.module._parameters.get("bias") is not None:
        cuts["bias"] = Cut(0, size, spans)
    return cuts


def _runs(indices: Sequence[int]) -> Iterator[Span]:
    start = previous = None
    for index in indices:
        if previous is None or index != previous + 1:
            if start is not None and previous is not None:
                yield start, previous + 1
            start = index
        previous = index
    if start is not None and previous is not None:
        yield start, previous + 1


# Pairs


def _regions(model: nn.Module, seen: Seen, world: int) -> list[Region]:
    """Every pair that can be cut by itself."""
    graph = leaves_of(model, seen)
    taken: set[str] = set()
    known: dict[Any, tuple[list[Unit], dict[str, list[str]]]] = {}
    hopeless = set()
    found = []
    for second in seen.products:
        feeding = graph.exclusive(second)
        if not feeding or second.name in taken or any(p.name in taken for p in feeding):
            continue
        partial = graph.parameters_between(second)
        root = seen.common_root([*(p.name for p in feeding), second.name])
        if partial is None or root is None or not all(_below(name, root) for name in partial):
            continue
        dependence = Dependence(graph.inputs[second.name], [graph.leaves[p.name] for p in feeding])
        key = (
            type(model.get_submodule(root)),
            *((p.name.removeprefix(root), tuple(p.weight.shape)) for p in (*feeding, second)),
        )
        if key in hopeless:
            continue
        region = None
        if key in known:
            units, attributes = known[key]
            region = _dealt(feeding, second, units, world)
            if region is not None and not _agrees(dependence, region):
                region = None
        if region is None:
            units = dependence.units()
            attributes = {}
            region = None if units is None else _dealt(feeding, second, units, world)
        if region is None or units is None:
            hopeless.add(key)
            continue
        region.partial = partial
        trial = _Trial(model, seen, root, world)
        hint = {root + name: keys for name, keys in attributes.items()}
        if trial.settle(region, hint):
            relative = {name.removeprefix(root): list(own) for name, own in region.attributes.items()}
            known[key] = units, relative
            taken.update(region.names)
            found.append(region)
        else:
            hopeless.add(key)
    return found


def _below(name: str, root: str) -> bool:
    return root == "" or name == root or name.startswith(f"{root}.")


def _agrees(dependence: Dependence, region: Region) -> bool:
    return all(
        dependence.agrees(columns, [outs[rank] for outs in region.outs])
        for rank, columns in enumerate(region.ins)
    )


def _dealt(first: list[Product], second: Product, units: list[Unit], world: int) -> Region | None:
    """The units of each kind, dealt out evenly; None where there are fewer than ranks."""
    kinds: dict[Any, list[Unit]] = {}
    for unit in units:
        kinds.setdefault(unit.kind, []).append(unit)
    own: list[list[Unit]] = [[] for _ in range(world)]
    fractions: list[Fraction] = []
    for kind, members in sorted(kinds.items(), reverse=True):
        if len(members) < world:
            return None
        grain = 8 if kind[0] == 1 and len(members) % 8 == 0 and len(members) // 8 >= world else 1
        spans = even(len(members), world, grain)
        for units_of_rank, (start, stop) in zip(own, spans, strict=True):
            units_of_rank.extend(members[start:stop])
        if not fractions:
            fractions = [Fraction(stop - start, len(members)) for start, stop in spans]
    outs = [
        tuple(tuple(sorted(c for unit in units_of for c in unit.channels[i])) for units_of in own)
        for i in range(len(first))
    ]
    ins = tuple(tuple(sorted(c for unit in units_of for c in unit.columns)) for units_of in own)
    return Region(first, second, outs, ins, fractions)


# Trials


class _Differs(Exception):
    """A trial's second product got something else."""


class _Trial:
    """Runs the module at ``root`` as one rank would: with a part of the columns, and local numbers."""

    def __init__(self, model: nn.Module, seen: Seen, root: str, world: int) -> None:
        self.model, self.seen, self.root, self.world = model, seen, root, world

    def settle(self, region: Region, hint: dict[str, list[str]]) -> bool:
        """Find the numbers that must be local for every rank's part to come out right."""
        ranks = sorted(range(self.world), key=lambda rank: region.fraction[rank])
        ends = dict.fromkeys((ranks[-1], ranks[0]))
        for subset in itertools.islice(self._subsets(region, hint), _MOST_TRIALS):
            attributes: dict[str, dict[str, Any]] = {}
            for name, key, value in subset:
                local = [_times(value, fraction) for fraction in region.fraction]
                attributes.setdefault(name, {})[key] = local
            region.attributes = attributes
            if all(self.passes([region], rank) for rank in ends) and all(
                self.passes([region], rank) for rank in range(self.world)
            ):
                return True
        return False

    def _subsets(self, region: Region, hint: dict[str, list[str]]) -> Iterator[tuple[Any, ...]]:
        """Sets of numbers to make local, likely ones first."""
        numbers = list(self._numbers(region))
        hinted = tuple(n for n in numbers if n[1] in hint.get(n[0], ()))
        if hinted:
            yield hinted
        yield ()
        likely = tuple(n for n in numbers if "head" in n[1] and "dim" not in n[1] and "size" not in n[1])
        yield likely
        numbers.sort(key=lambda number: number not in likely)
        for size in range(1, len(numbers) + 1):
            yield from itertools.combinations(numbers, size)

    def _numbers(self, region: Region) -> Iterator[tuple[str, str, Any]]:
        """Whole numbers kept by modules here that can be divided as the features are."""
        products = {id(product.module) for product in self.seen.products}
        for name, module in self.model.get_submodule(self.root).named_modules(prefix=self.root):
            if id(module) in products or type(module).__module__.startswith("torch.nn"):
                continue
            for key, value in vars(module).items():
                numbers: Any = value if isinstance(value, tuple | list) and value else [value]
                if any(type(n) is not int for n in numbers) or max(numbers) < 2:
                    continue
                if any(_times(value, fraction) is None for fraction in region.fraction):
                    continue
                yield name, key, value

    def passes(self, regions: list[Region], rank: int) -> bool:
        """Whether everything comes out as it was, run as ``rank`` would."""
        call = self.seen.calls.get(self.root)
        if call is None:
            return False
        module = self.model.get_submodule(self.root)
        with torch.no_grad(), self._as_rank(regions, rank):
            try:
                result = call.repeat(module)
            except Exception:  # a model with parts of its features may fail in any way
                return False
        return close(first_tensor(result), call.output)

    @contextmanager
    def _as_rank(self, regions: list[Region], rank: int) -> Iterator[None]:
        handles, before = [], []
        for region in regions:
            for product, outs in zip(region.first, region.outs, strict=True):
                handles.append(product.module.register_forward_hook(_narrowing(outs[rank])))
            second = region.second
            handles.append(second.module.register_forward_pre_hook(_comparing(second.x, region.ins[rank])))
            for name, values in region.attributes.items():
                module = self.model.get_submodule(name)
                for key, by_rank in values.items():
                    before.append((module, key, getattr(module, key)))
                    setattr(module, key, by_rank[rank])
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, key, value in reversed(before):
                setattr(module, key, value)


def _times(value: Any, fraction: Fraction) -> Any:
    """A number, or several, times a fraction, in whole numbers; None where that leaves a rest."""
    if isinstance(value, tuple | list):
        parts = [_times(n, fraction) for n in value]
        return None if None in parts else type(value)(parts)
    result = value * fraction
    return int(result) if result.denominator == 1 and result > 0 else None


def _narrowing(indices: tuple[int, ...]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output[..., list(indices)]

    return hook


def _comparing(whole: Tensor, indices: tuple[int, ...]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        if not close(args[0], whole[..., list(indices)]):
            raise _Differs
        return (whole,)

    return hook


def _harmless(model: nn.Module, seen: Seen, regions: list[Region], world: int) -> list[Region]:
    """The pairs with which the whole model still gives what it gave, on every rank."""
    trial = _Trial(model, seen, "", world)

    def fine(some: list[Region]) -> bool:
        return all(trial.passes(some, rank) for rank in range(world))

    if not regions or fine(regions):
        return regions
    alone = [region for region in regions if fine([region])]
    return alone if fine(alone) else []
