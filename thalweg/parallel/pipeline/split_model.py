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

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.ops.grouped_mm import fake_grouped_mm
from thalweg.parallel.pipeline.partition import FitsFn, partition_balanced
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.utils.trees import call_model, copy_to_meta, get_loss


@dataclass(frozen=True)
class BlockLayout:
    """The parts of a model, by name.

    ``list_name``: the ModuleList; ``entry_modules`` and ``exit_modules``: leaf modules with parameters before and
    after it; ``num_extra_outputs``: None if a block returns its hidden tensor, else how many values follow
    it in the tuple that it returns; ``block_costs``: of the blocks.
    """

    list_name: str
    num_blocks: int
    entry_modules: tuple[str, ...]
    exit_modules: tuple[str, ...]
    num_extra_outputs: int | None = None
    block_costs: tuple[float, ...] = field(default=(), repr=False)


def without_cache(forward: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of training: a cache of keys and values is of no use there, and no stage could fill it."""
    return {"use_cache": False} if "use_cache" in inspect.signature(forward).parameters else {}


def find_blocks(model: nn.Module, batch: Mapping[str, Any]) -> BlockLayout:
    """Find the parts of ``model`` by running a copy of it on the meta device on ``batch``.

    Raises:
        ValueError: the model has no list of blocks, runs them out of order or more than once,
            or uses a module both before and after them that is not a shared embedding.
    """
    by_config = getattr(getattr(model, "config", None), "output_router_logits", False)
    if batch.get("output_router_logits", by_config):
        raise ValueError(
            f"{type(model).__name__} adds a loss over the routers of all blocks (output_router_logits), of "
            "which a stage has its own only: set output_router_logits to false in the model's config"
        )
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks to cut between, or two: write it as a PipelineModule"
        )
    name, blocks = max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    prefix = f"{name}." if name else ""
    order: list[str] = []
    meta_model = copy_to_meta(model)
    for key, module in meta_model.named_modules():
        is_block = key.startswith(prefix) and key.removeprefix(prefix).isdigit()
        inside = key.startswith(prefix) and not is_block and key != name
        if is_block or (not inside and any(True for _ in module.parameters(recurse=False))):
            module.register_forward_pre_hook(lambda *_, key=key: order.append(key))
    returned: list[Any] = []

    def check_chained(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block must take the very tensor that the block before it returned."""
        previous = (returned[-1][0] if isinstance(returned[-1], tuple) else returned[-1]) if returned else None
        if returned and not any(value is previous for value in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(model).__name__} computes something between its blocks {len(returned) - 1} and "
                f"{len(returned)}, which no stage of a pipeline would do: write the model as a PipelineModule"
            )

    for block in meta_model.get_submodule(name).children():
        block.register_forward_pre_hook(check_chained, with_kwargs=True)
        block.register_forward_hook(lambda _module, _args, output: returned.append(output))
    with torch.no_grad(), _MetaScalarMode():
        meta_model(**{key: v.to("meta") if isinstance(v, Tensor) else v for key, v in batch.items()})
    indices = [int(key.removeprefix(prefix)) for key in order if key.startswith(prefix)]
    if indices != list(range(len(blocks))):
        raise ValueError(
            f"{type(model).__name__} runs the blocks of {name!r} in the order {indices}: a pipeline needs "
            "each once, in order. Write the model as a PipelineModule instead."
        )
    first, last = order.index(f"{prefix}0"), order.index(f"{prefix}{len(blocks) - 1}")
    entry_modules, exit_modules = dict.fromkeys(order[:first]), dict.fromkeys(order[last + 1 :])
    both = entry_modules.keys() & exit_modules.keys()
    between = [key for key in order[first:last] if not key.startswith(prefix)]
    if both or between:
        raise ValueError(
            f"{type(model).__name__} uses {sorted({*both, *between})} on both sides of its blocks: write the "
            "model as a PipelineModule instead"
        )
    costs = tuple(float(sum(p.numel() for p in block.parameters())) for block in blocks)
    num_extra_outputs = len(returned[0]) - 1 if isinstance(returned[0], tuple) else None
    return BlockLayout(name, len(blocks), tuple(entry_modules), tuple(exit_modules), num_extra_outputs, costs)


def partition_blocks(
    model: nn.Module,
    layout: BlockLayout,
    num_stages: int,
    costs: Sequence[float] | None = None,
    fits: FitsFn | None = None,
) -> list[range]:
    """The blocks of each stage, at least one.

    ``costs``: of the blocks, the exit's in the last; by default numbers of parameters, where the exit
    weighs on the last stage and look-ups on none.  ``fits`` as in :func:`.partition.partition`.

    Raises:
        ValueError: fewer blocks than stages, or none of the cuts fits.
    """
    if layout.num_blocks < num_stages:
        raise ValueError(f"{type(model).__name__} has {layout.num_blocks} blocks, too few for {num_stages} stages")
    if costs is None:
        exits = (model.get_submodule(key) for key in layout.exit_modules)
        exit_sizes = [p.numel() for module in exits for p in module.parameters(recurse=False)]
        costs = [*layout.block_costs[:-1], layout.block_costs[-1] + float(sum(exit_sizes))]
    return partition_balanced(costs, num_stages, min_layers=1, fits=fits)


class PipelineBlocks(nn.ModuleList):
    """The blocks of this rank under their own names; iterating yields the active ones and placeholders."""

    def __init__(self, blocks: nn.ModuleList, local_ranges: list[range], num_extra_outputs: int | None = None) -> None:
        super().__init__()
        self.num_extra_outputs = num_extra_outputs
        self._num_blocks = len(blocks)
        for block_range in local_ranges:
            for index in block_range:
                self.add_module(str(index), blocks[index])
        self.active_range = range(0)
        self.stage_input: Any = None

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[nn.Module]:
        """The whole list: real blocks of the active stage, placeholders for all others."""
        return (self._block_at(index) for index in range(self._num_blocks))

    def __getitem__(self, index: Any) -> Any:
        """One of them, or a list of a slice of them."""
        if isinstance(index, slice):
            return [self._block_at(i) for i in range(self._num_blocks)[index]]
        return self._block_at(range(self._num_blocks)[index])

    def _block_at(self, index: int) -> nn.Module:
        if index in self.active_range:
            return self._modules[str(index)]  # type: ignore[return-value]
        return PassThroughBlock(self, index)


class PassThroughBlock(nn.Module):
    """Stands for a block of another stage: passes the hidden tensor on, exchanges it at the borders."""

    def __init__(self, blocks: PipelineBlocks, index: int) -> None:
        super().__init__()
        self._position = (blocks, index)  # in a tuple, so that the owner is not a submodule of ours

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        """Return what the next module is to get."""
        blocks, index = self._position
        if index == blocks.active_range.start - 1:
            hidden = blocks.stage_input
        if index == blocks.active_range.stop:
            raise _StageBoundary(hidden)
        return hidden if blocks.num_extra_outputs is None else (hidden, *(None,) * blocks.num_extra_outputs)


class StubModule(nn.Module):
    """Stands for an entry or exit module of another stage: the right shape, no parameters."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self._real_class_name = type(real).__name__
        self._embedding_dim = real.embedding_dim if isinstance(real, nn.Embedding) else None
        weight = next(real.parameters(), None)
        self._dtype = weight.dtype if weight is not None else torch.get_default_dtype()

    def forward(self, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros for a look-up, the input for anything else."""
        if self._embedding_dim is None:
            return value
        return torch.zeros(*value.shape, self._embedding_dim, dtype=self._dtype, device=value.device)

    def extra_repr(self) -> str:
        return f"for {self._real_class_name} of another stage"


class _StageBoundary(Exception):
    """What leaves the stage; raised where its last block is behind us."""

    def __init__(self, value: Any) -> None:
        super().__init__("a stage's forward ends here")
        self.value = value


class SplitModelStages:
    """A model cut in place to the stages of one rank, and how to run them.

    Afterwards ``model(stage, value, batch)`` is a stage's forward, so that whatever hangs on the
    model's call sees the tensors that really enter and leave it.
    """

    needs_batch = True

    def __init__(
        self, model: nn.Module, layout: BlockLayout, stage_ranges: Sequence[range], local_stages: Sequence[int]
    ) -> None:
        self.module, self._stage_ranges = model, stage_ranges
        self._num_stages = len(stage_ranges)
        block_list = model.get_submodule(layout.list_name)
        assert isinstance(block_list, nn.ModuleList)
        local_ranges = [stage_ranges[stage] for stage in local_stages]
        self.blocks = PipelineBlocks(block_list, local_ranges, layout.num_extra_outputs)
        model.set_submodule(layout.list_name, self.blocks)
        for names, owning_stage in ((layout.entry_modules, 0), (layout.exit_modules, self._num_stages - 1)):
            for name in names if owning_stage not in local_stages else ():
                if not any(name.startswith(f"{other}.") for other in names):
                    model.set_submodule(name, StubModule(model.get_submodule(name)))
        self._entry_modules = [model.get_submodule(name) for name in layout.entry_modules if 0 in local_stages]
        self._exit_modules = [
            model.get_submodule(name) for name in layout.exit_modules if self._num_stages - 1 in local_stages
        ]
        full_forward = type(model).forward
        self._fixed_kwargs = without_cache(full_forward)

        def forward(module: nn.Module, stage: int, value: Any, batch: Any) -> Any:
            return self._run_stage(partial(full_forward, module), stage, value, batch)

        replace_forward(model, forward)

    def run(self, stage: int, value: Any, batch: Any) -> Any:
        """The stage's forward; the last one returns the loss of ``batch`` (0-dim)."""
        return self.module(stage, value, batch)

    def _run_stage(self, full_forward: Callable[..., Any], stage: int, value: Any, batch: Any) -> Any:
        self.blocks.active_range, self.blocks.stage_input = self._stage_ranges[stage], value
        inputs = {**self._fixed_kwargs, **batch} if isinstance(batch, Mapping) else batch
        try:
            loss = get_loss(call_model(full_forward, inputs))
        except _StageBoundary as done:
            return done.value
        finally:
            self.blocks.stage_input = None
        if loss.ndim:
            raise ValueError("a pipelined model must return its loss: give the batch labels")
        return loss

    def find_batch_error(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is: the model itself will say."""
        return None

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the stage uses, as the modules hold them now."""
        modules = [self.blocks.get_submodule(str(index)) for index in self._stage_ranges[stage]]
        modules += self._entry_modules if stage == 0 else []
        modules += self._exit_modules if stage + 1 == self._num_stages else []
        return list(dict.fromkeys(p for module in modules for p in module.parameters()))


class _MetaScalarMode(TorchDispatchMode):
    """A meta tensor that is looked at is one: masks hide nothing, nothing is packed.

    Grouped products, whose meta form takes bf16 alone, give what fp32 gives on a processor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        result = fake_grouped_mm(func.name(), args)
        return func(*args, **(kwargs or {})) if result is None else result
