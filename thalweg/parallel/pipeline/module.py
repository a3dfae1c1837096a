"""A model as a list of layers, of which each rank builds only its own.

A *layer* is anything that takes the previous one's output, a tuple as one argument (as in
``nn.Sequential``), and returns its own: a
``LayerSpec`` (built on its rank alone), a module, or a plain function.  Layers that are
``TiedLayerSpec`` s of one key share a weight wherever they lie; its gradient is the sum over
all of them.  Names are those of the whole model: ``layers.<index>.<parameter>``, the same on
whatever rank and in however many stages, so that a checkpoint knows nothing of the cut.
"""

import operator
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thalweg.parallel.pipeline.partition import partition_balanced
from thalweg.parallel.sequence.pipeline_layers import LayerSequenceParallel
from thalweg.parallel_dims import control_group

LayerLike = Any  # LayerSpec | nn.Module | Callable
_preserve_rng = partial(torch.random.fork_rng, devices=[])
DUMMY_PARAM_NAME = "_nothing"


class LayerSpec:
    """A layer to be built later: ``LayerSpec(nn.Linear, 4, 4)``."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ValueError(f"LayerSpec needs a class or function that makes the layer, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> Any:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"LayerSpec({getattr(self.typename, '__name__', self.typename)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares ``tied_weight_attr`` with all others of the same ``key``.

    ``forward_fn(module, input)`` runs it instead of its own forward, as for an embedding used
    as the output layer.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attrs = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _RecomputedLayers(nn.Module):
    activation_checkpoint_interval: int
    checkpointable_layers: tuple[str, ...] = ()
    activation_checkpoint_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute every so many layers (0: none) from now on; in training this is a method of ``engine.module``."""
        if interval < 0:
            raise ValueError(f"the interval is {interval}: recompute every so many layers, or 0 for none")
        self.activation_checkpoint_interval = interval


class PipelineModule(_RecomputedLayers):
    """The layers of one model, to be cut into stages.

    Args:
        layers: the layers in order.
        num_stages: ranks of the pipeline; by default the config's ``pipeline.stages``.
        loss_fn: ``loss_fn(output, labels)``, on the last stage.
        partition_method: "parameters" (equal parameters), "uniform" (equal counts), "type:REGEX"
            (equal counts of the layers whose class name matches), "best" or "auto": parameters.
        activation_checkpoint_interval: recompute every so many layers (0: none).
        checkpointable_layers: names of classes; only where all of so many layers are of these.  By default where any
            has parameters.
        activation_checkpoint_func: ``activation_checkpoint_func(function, *args)``, which recomputes.
        seed_layers, base_seed: give every layer a seed of its own before it is built, so that
            its values depend on neither the cut nor the rank.  By default they follow from the program's
            ``torch.manual_seed``, of rank 0.

    Constructing it builds nothing of a ``LayerSpec``: :meth:`build_layers` does, on each rank.
    """

    def __init__(
        self,
        layers: Sequence[LayerLike],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        seed_layers: bool = True,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not len(layers):
            raise ValueError("PipelineModule needs at least one layer")
        if topology is not None:
            raise ValueError("topology= is not needed: the mesh follows from pipeline.stages and the world size")
        self.specs, self.num_stages, self.loss_fn = list(layers), num_stages, loss_fn
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = tuple(checkpointable_layers or ())
        if activation_checkpoint_func is not None:
            self.activation_checkpoint_func = activation_checkpoint_func
        self._seed_layers, self._base_seed, self._seed_fn = seed_layers, base_seed, seed_fn or torch.manual_seed
        # So that an optimizer can be made of layers that exist.
        self.layers = nn.ModuleDict({str(i): s for i, s in enumerate(layers) if isinstance(s, nn.Module)})
        self._layer_costs()  # complain about the method now

    def partition_layers(self, num_stages: int, method: str | None = None) -> list[range]:
        """The layers of each stage; ``method`` in place of the module's own."""
        return partition_balanced(self._layer_costs(method), num_stages)

    @property
    def num_parameters(self) -> int:
        """Trained elements of the whole model."""
        return int(sum(self._layer_costs("parameters")))

    def _layer_costs(self, method: str | None = None) -> list[float]:
        method = (method or self.partition_method).lower()
        if method == "uniform":
            return [1.0] * len(self.specs)
        if method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            matches = [1.0 if pattern.search(_class_name(spec)) else 0.0 for spec in self.specs]
            if not any(matches):
                names = sorted(set(map(_class_name, self.specs)))
                raise ValueError(f"partition_method {method!r} matches no layer: {names}")
            return matches
        if method in ("parameters", "best", "auto"):
            return [float(self._num_parameters(spec)) for spec in self.specs]
        raise ValueError(f"unknown partition_method {method!r}: use 'parameters', 'uniform' or 'type:REGEX'")

    def _num_parameters(self, spec: LayerLike) -> int:
        layer = _build_on_meta(spec) if isinstance(spec, LayerSpec) else spec
        if not isinstance(layer, nn.Module):
            return 0
        return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)

    def build_layers(self, indices: Sequence[int]) -> dict[int, Any]:
        """Build the layers of these indices; tied ones among them share their weight.  The first call is collective."""
        if self._base_seed is None:
            seed = torch.tensor(torch.initial_seed() % 2**31)
            if dist.is_initialized():  # ranks may be seeded apart, and replicas and tied layers must be alike
                dist.broadcast(seed, 0, group=control_group(None))
            self._base_seed = seed.item() * 1_000_003 % 2**31  # or one seed's second layer were the next one's first
        tied_layers = self.tied_layers()
        built: dict[int, Any] = {}
        for index in indices:
            spec = self.specs[index]
            if not isinstance(spec, LayerSpec):
                built[index] = spec
                continue
            tied = [i for i, _ in tied_layers[spec.key]] if isinstance(spec, TiedLayerSpec) else [index]
            with _preserve_rng():
                if self._seed_layers:
                    # A tied layer is everywhere seeded as the first of its key.
                    self._seed_fn(int(self._base_seed) + tied[0])
                layer = spec.build()
            first_index = next((i for i in tied if i in built), None)
            if isinstance(spec, TiedLayerSpec) and first_index is not None:
                for attr in spec.tied_weight_attrs:
                    owner, _, name = _find_param_name(layer, attr).rpartition(".")
                    setattr(layer.get_submodule(owner), name, operator.attrgetter(attr)(built[first_index]))
            built[index] = layer
        return built

    def tied_layers(self) -> dict[str, list[tuple[int, list[str]]]]:
        """Of each key: the layers that share it, in order, with the names of the shared weights."""
        by_key: dict[str, list[tuple[int, list[str]]]] = {}
        for index, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                layer = _build_on_meta(spec)
                names = [_find_param_name(layer, attr) for attr in spec.tied_weight_attrs]
                by_key.setdefault(spec.key, []).append((index, names))
        return by_key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not to be called: a pipeline is driven by ``engine.train_batch()`` and ``eval_batch()``."""
        raise RuntimeError("a PipelineModule runs through engine.train_batch() and engine.eval_batch()")


def _build_on_meta(spec: LayerSpec) -> Any:
    with torch.device("meta"), _preserve_rng():
        return spec.build()


def _find_param_name(layer: nn.Module, attr: str) -> str:
    """The parameter that an attribute is: its own name, a child's, or a property's."""
    weight = operator.attrgetter(attr)(layer)
    return next(name for name, param in layer.named_parameters() if param is weight)


class LocalLayers(_RecomputedLayers):
    """Some of the layers; parameters are named ``layers.<index>...`` as in the whole model."""

    def __init__(self, specs: Sequence[LayerLike], built: dict[int, Any], checkpoint_interval: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in built.items() if isinstance(layer, nn.Module)})
        # Each layer is a unit of ZeRO's.
        self._no_split_modules = sorted({type(layer).__name__ for layer in self.layers.values()})
        self._indices = list(built)
        self._functions = {i: layer for i, layer in built.items() if not isinstance(layer, nn.Module)}
        tied_specs = {i: spec for i in built if isinstance(spec := specs[i], TiedLayerSpec)}
        self._forward_fns = {i: spec.forward_fn for i, spec in tied_specs.items() if spec.forward_fn is not None}
        # A function reads such a layer's weights outside of its forward pass: they are the root's.
        self._no_unit_modules = [f"layers.{i}" for i in self._forward_fns]
        self.activation_checkpoint_interval = checkpoint_interval

    def forward(self, value: Any, layer_indices: Sequence[int] | None = None) -> Any:
        """Run the layers (or ``layer_indices`` of them) one after the other on ``value`` (a tensor or a tree)."""
        indices = self._indices if layer_indices is None else list(layer_indices)
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return self._run(indices, value)
        for start in range(0, len(indices), interval):
            chunk = indices[start : start + interval]
            run = partial(self.activation_checkpoint_func, self._run) if self.is_checkpointable(chunk) else self._run
            value = run(chunk, value)
        return value

    def is_checkpointable(self, layer_indices: Sequence[int]) -> bool:
        """Whether these layers are recomputed together, where the interval makes a block of them."""
        if not self.checkpointable_layers:
            return bool(self.layer_parameters(layer_indices))
        layers = [self._functions.get(i) or self.layers[str(i)] for i in layer_indices]
        return all(_class_name(layer) in self.checkpointable_layers for layer in layers)

    def layer_parameters(self, layer_indices: Sequence[int]) -> list[nn.Parameter]:
        """The parameters of these layers, as the modules hold them now."""
        modules = [self.layers[str(i)] for i in layer_indices if i not in self._functions]
        return list(dict.fromkeys(p for module in modules for p in module.parameters()))

    def _run(self, indices: Sequence[int], value: Any) -> Any:
        for index in indices:
            layer = self._functions[index] if index in self._functions else self.layers[str(index)]
            call = self._forward_fns.get(index)
            value = layer(value) if call is None else call(layer, value)
        return value


class PipelineModuleStages:
    """This rank's stages of a :class:`PipelineModule`, and how to run them."""

    def __init__(
        self,
        pipeline_module: PipelineModule,
        stage_ranges: Sequence[range],
        local_stages: Sequence[int],
        checkpoint_interval: int,
    ) -> None:
        self._stage_ranges, self._loss_fn = stage_ranges, pipeline_module.loss_fn
        self._last_stage = len(stage_ranges) - 1
        indices = [index for stage in local_stages for index in stage_ranges[stage]]
        self.module = LocalLayers(pipeline_module.specs, pipeline_module.build_layers(indices), checkpoint_interval)
        self.module.checkpointable_layers = pipeline_module.checkpointable_layers
        self.module.activation_checkpoint_func = pipeline_module.activation_checkpoint_func
        add_dummy_param(self.module)
        self._local_stages = tuple(local_stages)
        # Set where ranks share sequences.
        self.sequence_parallel: LayerSequenceParallel | None = None

    @property
    def needs_batch(self) -> bool:
        """Labels are for the last stage, inputs for the first; sequences in parts are for all."""
        return self.sequence_parallel is not None or 0 in self._local_stages or self._last_stage in self._local_stages

    def run(self, stage: int, value: Any, batch: Any) -> Any:
        """The stage's forward on ``value``, or on the batch's inputs; the last one gives the loss (0-dim)."""
        sequence_parallel = self.sequence_parallel
        if sequence_parallel is not None:
            batch = sequence_parallel.split_batch(batch)
        inputs = batch[0] if stage == 0 else value
        if stage != self._last_stage:
            return self.module(inputs, self._stage_ranges[stage])
        with nullcontext() if sequence_parallel is None else sequence_parallel.loss_mode():
            loss = self.module(inputs, self._stage_ranges[stage])
            loss = loss if self._loss_fn is None else self._loss_fn(loss, batch[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the last layer of a PipelineModule, or its loss_fn, must return a scalar loss")
        loss = loss.reshape(())
        return loss if sequence_parallel is None else sequence_parallel.mean_loss(loss)

    def find_batch_error(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is."""
        if not self.needs_batch:
            return None
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return None if self.sequence_parallel is None else self.sequence_parallel.find_batch_error(batch)
        type_name = type(batch).__name__
        return f"a PipelineModule's batch is (inputs, labels), got {type_name}: let the data iterator yield them"

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the stage uses, as the modules hold them now."""
        return self.module.layer_parameters(self._stage_ranges[stage])


def add_dummy_param(module: nn.Module) -> None:
    """Give a stage that trains nothing a parameter for ZeRO and the optimizer to hold; it gets no gradient,
    and is in no checkpoint."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        module.register_parameter(DUMMY_PARAM_NAME, nn.Parameter(torch.zeros(1)))


def _class_name(spec: LayerLike) -> str:
    layer_type = spec.typename if isinstance(spec, LayerSpec) else type(spec) if isinstance(spec, nn.Module) else spec
    return getattr(layer_type, "__name__", str(layer_type))
