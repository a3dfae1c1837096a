"""Cutting a model that nobody wrote for a pipeline: one whose body is a list of blocks.

    entry     modules that run before the first block (embeddings): on the first stage
    blocks    the model's longest ``ModuleList``, run in order on one hidden tensor
    exit      modules that run after the last block (norm, head): on the last stage

Every stage runs the model's *own* forward, so masks, positions and rotary tables are made by
the model's own code from the batch, which every stage has.  What is not the stage's is
replaced: entry and exit modules by stand-ins without parameters, blocks by placeholders that
pass the hidden tensor on.  The placeholder before the stage's first block puts in what the
previous stage sent; the one after its last block ends the forward, as nothing behind it can
matter here.  Which module runs when is found by one forward pass on the meta device; names stay
the model's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.ops.grouped import answers_without_values
from thalweg.parallel.layers import give_forward
from thalweg.parallel.pipeline.cut import Fits, partition
from thalweg.utils.trees import call_with, loss_of


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model, by name.

    ``blocks``: the ModuleList; ``entry`` and ``exit``: leaf modules with parameters before and
    after it; ``extra``: None if a block returns its hidden tensor, else how many values follow
    it in the tuple that it returns; ``costs``: of the blocks.
    """

    blocks: str
    num_blocks: int
    entry: tuple[str, ...]
    exit: tuple[str, ...]
    extra: int | None = None
    costs: tuple[float, ...] = field(default=(), repr=False)


def dissect(model: nn.Module, batch: Mapping[str, Any]) -> Anatomy:
    """Find the parts of ``model`` by running a copy of it on the meta device on ``batch``.

    Raises:
        ValueError: the model has no list of blocks, runs them out of order or more than once,
            or uses a module both before and after them that is not a shared embedding.
    """
    if wants_routers(model, batch):
        raise ValueError(
            f"{type(model).__name__} adds a loss over the routers of all blocks (output_router_logits), of "
            "which a stage has its own only: set output_router_logits to false in the model's config"
        )
    name, blocks = _longest_list(model)
    prefix = f"{name}." if name else ""
    order: list[str] = []
    ghost = _ghost(model)
    for key, module in ghost.named_modules():
        is_block = key.startswith(prefix) and key.removeprefix(prefix).isdigit()
        inside = key.startswith(prefix) and not is_block and key != name
        if is_block or (not inside and any(True for _ in module.parameters(recurse=False))):
            module.register_forward_pre_hook(lambda *_, key=key: order.append(key))
    returned: list[Any] = []
    for block in ghost.get_submodule(name).children():
        block.register_forward_pre_hook(partial(_refuse_what_lies_between, model, returned), with_kwargs=True)
        block.register_forward_hook(lambda _module, _args, output: returned.append(output))
    with torch.no_grad(), _Ones():
        ghost(**{key: v.to("meta") if isinstance(v, Tensor) else v for key, v in batch.items()})
    indices = [int(key.removeprefix(prefix)) for key in order if key.startswith(prefix)]
    if indices != list(range(len(blocks))):
        raise ValueError(
            f"{type(model).__name__} runs the blocks of {name!r} in the order {indices}: a pipeline needs "
            "each once, in order. Write the model as a PipelineModule instead."
        )
    first, final = order.index(f"{prefix}0"), order.index(f"{prefix}{len(blocks) - 1}")
    entry, leaving = dict.fromkeys(order[:first]), dict.fromkeys(order[final + 1 :])
    both = entry.keys() & leaving.keys()
    between = [key for key in order[first:final] if not key.startswith(prefix)]
    if both or between:
        raise ValueError(
            f"{type(model).__name__} uses {sorted({*both, *between})} on both sides of its blocks: write the "
            "model as a PipelineModule instead"
        )
    costs = tuple(float(sum(p.numel() for p in block.parameters())) for block in blocks)
    extra = len(returned[0]) - 1 if isinstance(returned[0], tuple) else None
    return Anatomy(name, len(blocks), tuple(entry), tuple(leaving), extra, costs)


def wants_routers(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face model is to look at the choices of experts of all blocks at its end."""
    by_config = getattr(getattr(model, "config", None), "output_router_logits", False)
    return bool(batch.get("output_router_logits", by_config))


def _refuse_what_lies_between(
    model: nn.Module, returned: list[Any], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A block must take the very tensor that the block before it returned."""
    if not returned:
        return
    before = returned[-1][0] if isinstance(returned[-1], tuple) else returned[-1]
    if not any(value is before for value in (*args, *kwargs.values())):
        raise ValueError(
            f"{type(model).__name__} computes something between its blocks {len(returned) - 1} and "
            f"{len(returned)}, which no stage of a pipeline would do: write the model as a PipelineModule"
        )


def cut_blocks(
    model: nn.Module,
    anatomy: Anatomy,
    num_stages: int,
    costs: Sequence[float] | None = None,
    fits: Fits | None = None,
) -> list[range]:
    """The blocks of each stage, at least one.

    ``costs``: of the blocks, the exit's in the last; by default numbers of parameters, where the exit
    weighs on the last stage and look-ups on none.  ``fits`` as in :func:`.cut.partition`.

    Raises:
        ValueError: fewer blocks than stages, or none of the cuts fits.
    """
    if anatomy.num_blocks < num_stages:
        raise ValueError(
            f"{type(model).__name__} has {anatomy.num_blocks} blocks, too few for {num_stages} stages"
        )
    if costs is None:
        leaving = [
            p.numel() for key in anatomy.exit for p in model.get_submodule(key).parameters(recurse=False)
        ]
        costs = [*anatomy.costs[:-1], anatomy.costs[-1] + float(sum(leaving))]
    return partition(costs, num_stages, least=1, fits=fits)


class StagedBlocks(nn.ModuleList):
    """The blocks of this rank under their own names; iterating yields the active ones and placeholders."""

    def __init__(self, blocks: nn.ModuleList, local: Sequence[range], extra: int | None = None) -> None:
        super().__init__()
        self.extra = extra
        self._total = len(blocks)
        for run in local:
            for index in run:
                self.add_module(str(index), blocks[index])
        self.active = range(0)
        self.incoming: Any = None

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[nn.Module]:
        """The whole list: real blocks of the active stage, placeholders for all others."""
        return (self._at(index) for index in range(self._total))

    def __getitem__(self, index: Any) -> Any:
        """One of them, or a list of a slice of them."""
        if isinstance(index, slice):
            return [self._at(i) for i in range(self._total)[index]]
        return self._at(range(self._total)[index])

    def _at(self, index: int) -> nn.Module:
        if index in self.active:
            return self._modules[str(index)]  # type: ignore[return-value]
        return Placeholder(self, index)


class Placeholder(nn.Module):
    """Stands for a block of another stage: passes the hidden tensor on, exchanges it at the borders."""

    def __init__(self, owner: StagedBlocks, index: int) -> None:
        super().__init__()
        self._where = (owner, index)  # in a tuple, so that the owner is not a submodule of ours

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        """Return what the next module is to get."""
        owner, index = self._where
        if index == owner.active.start - 1:
            hidden = owner.incoming
        if index == owner.active.stop:
            raise _Done(hidden)
        return hidden if owner.extra is None else (hidden, *(None,) * owner.extra)


class Absent(nn.Module):
    """Stands for an entry or exit module of another stage: the right shape, no parameters."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self._kind = type(real).__name__
        self._width = real.embedding_dim if isinstance(real, nn.Embedding) else None
        weight = next(real.parameters(), None)
        self._dtype = weight.dtype if weight is not None else torch.get_default_dtype()

    def forward(self, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros for a look-up, the input for anything else."""
        if self._width is None:
            return value
        return torch.zeros(*value.shape, self._width, dtype=self._dtype, device=value.device)

    def extra_repr(self) -> str:
        return f"for {self._kind} of another stage"


class _Done(Exception):
    """What leaves the stage; raised where its last block is behind us."""

    def __init__(self, value: Any) -> None:
        super().__init__("a stage's forward ends here")
        self.value = value


class StagedModel:
    """A model cut in place to the stages of one rank, and how to run them.

    Afterwards ``model(stage, value, batch)`` is a stage's forward, so that whatever hangs on the
    model's call sees the tensors that really enter and leave it.
    """

    needs_batch = True

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, cuts: Sequence[range], mine: Sequence[int]
    ) -> None:
        self.module, self._cuts = model, cuts
        self._num_stages = len(cuts)
        real = model.get_submodule(anatomy.blocks)
        assert isinstance(real, nn.ModuleList)
        self.blocks = StagedBlocks(real, [cuts[stage] for stage in mine], anatomy.extra)
        _put(model, anatomy.blocks, self.blocks)
        for names, owner in ((anatomy.entry, 0), (anatomy.exit, self._num_stages - 1)):
            for name in names if owner not in mine else ():
                if not any(name.startswith(f"{other}.") for other in names):
                    _put(model, name, Absent(model.get_submodule(name)))
        self._entry = [model.get_submodule(name) for name in anatomy.entry if 0 in mine]
        self._exit = [model.get_submodule(name) for name in anatomy.exit if self._num_stages - 1 in mine]
        whole = type(model).forward
        # A cache of keys and values is of no use in training, and no stage could fill it.
        self._fixed = {"use_cache": False} if "use_cache" in inspect.signature(whole).parameters else {}

        def forward(module: nn.Module, stage: int, value: Any, batch: Any) -> Any:
            return self._forward(partial(whole, module), stage, value, batch)

        give_forward(model, forward)

    def run(self, stage: int, value: Any, batch: Any) -> Any:
        """The stage's forward; the last one returns the loss of ``batch`` (0-dim)."""
        return self.module(stage, value, batch)

    def _forward(self, whole: Callable[..., Any], stage: int, value: Any, batch: Any) -> Any:
        self.blocks.active, self.blocks.incoming = self._cuts[stage], value
        inputs = {**self._fixed, **batch} if isinstance(batch, Mapping) else batch
        try:
            loss = loss_of(call_with(whole, inputs))
        except _Done as done:
            return done.value
        finally:
            self.blocks.incoming = None
        if loss.ndim:
            raise ValueError("a pipelined model must return its loss: give the batch labels")
        return loss

    def problem(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is: the model itself will say."""
        return None

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the stage uses, as the modules hold them now."""
        modules = [self.blocks.get_submodule(str(index)) for index in self._cuts[stage]]
        modules += self._entry if stage == 0 else []
        modules += self._exit if stage + 1 == self._num_stages else []
        return list(dict.fromkeys(p for module in modules for p in module.parameters()))


class _Ones(TorchDispatchMode):
    """A meta tensor that is looked at is one: masks hide nothing, nothing is packed.

    Grouped products, whose meta form takes bf16 alone, give what fp32 gives on a processor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        found = answers_without_values(func.name(), args)
        return func(*args, **(kwargs or {})) if found is None else found


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, module)


def _longest_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks to cut between: write it as a PipelineModule"
        )
    return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))


def _ghost(model: nn.Module) -> nn.Module:
    """A copy on the meta device; nothing of the model's values is copied on the way."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
