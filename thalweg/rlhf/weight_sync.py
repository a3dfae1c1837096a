"""The hybrid engine: an actor that trains under ZeRO and generates by the one inference engine.

The picture, for each generation phase::

    actor                      skeleton                           inference engine
    shards --all-gather-->     a linear layer's weights, merged --pack-->  its own weights
           --all-gather-->     norms, biases, embeddings        --------   read where they lie
                                                                           KV cache

The skeleton is the plain model without values, a tensor of no memory in the place of each parameter.  It is described
as any model is (``infer/models``), and a runner is built from that description, which reads one linear layer after the
other.  A layer that is read is the bucket: its weights are there until the next one is read, gathered with their ZeRO
unit as in a forward pass.  So beyond the shards and the inference engine's own weights there is at most one unit and
one bucket.

Phases: :meth:`HybridEngine.generation` gathers, builds, yields the inference engine, and drops its weights and KV cache
before training goes on.  Nothing of the actor changes: LoRA is merged into the bucket, so there is nothing to unmerge.

Invariants: every rank reads the same layers in the same order, so the gathers meet; from then on a rank generates by
itself, without collectives, so unequal lengths (or no prompts at all) cannot make another one wait for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.engine import Engine
from thalweg.infer.config import EngineConfig
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.loader.load import load_engine
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import DecoderSpec, LinearSpec, UnsupportedModelError
from thalweg.infer.precision import NUM_PROBE_TOKENS, check_logits_close, eval_mode, get_weight_format
from thalweg.infer.runners.base import ModelInput, QuerySpan
from thalweg.utils.log import get_logger

log = get_logger(__name__)
_WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HybridEngine:
    """An actor in training, and between the ends of :meth:`generation` an inference engine of its weights.

    ``actor``: the engine of a causal Hugging Face model, or of a PEFT model of one.  ``config``: how to generate; by
    default in the dtype that the actor computes in, on its device.  ``runner`` insists on one, as in ``load_engine``.

    Raises:
        ValueError: the actor's layers, or stages of them, are divided among ranks.
    """

    def __init__(
        self, actor: Engine, config: EngineConfig | None = None, tokenizer: Any = None, *, runner: str | None = None
    ) -> None:
        axes = {"tensor": actor.meshes.tp, "pipeline": actor.meshes.pp}
        divided = [name for name, mesh in axes.items() if mesh is not None]
        if divided:
            raise ValueError(
                f"a rollout's actor may not have {' and '.join(divided)} parallelism, where no rank has all of a "
                "layer: leave it to ZeRO"
            )
        dtype = "bf16" if actor.bfloat16_enabled() else "fp16" if actor.fp16_enabled() else "fp32"
        self.actor, self.tokenizer = actor, tokenizer
        config = config or EngineConfig(dtype=dtype)
        self.config = replace(config, device=str(actor.device)) if config.device == "auto" else config
        self.weights = ActorWeights(actor, _WEIGHT_DTYPES[dtype], torch.device(self.config.device))
        self._is_verified = False
        self.runner = runner

    @contextmanager
    def generation(self) -> Iterator[LLMEngine]:
        """Yield an inference engine of the actor's weights as they are now; collective, at its beginning alone."""
        core = self._load()
        try:
            yield core
        finally:
            core.close()
            self.weights.release()

    def _load(self) -> LLMEngine:
        with self.weights.reading():
            spec = None
            if self.runner != "transformers":
                try:
                    spec = self.weights.describe()
                except UnsupportedModelError as reason:
                    self._use_model_code(reason)
            if spec is None:
                self.weights.gather_all()
            core = load_engine(self.weights.skeleton, self.config, self.tokenizer, runner=self.runner, spec=spec)
            assert isinstance(core, LLMEngine)
            probe = None if spec is None else self._probe(core)
        if probe is None or self._is_verified or self.config.quantization:
            return core
        try:
            self._verify(*probe)
        except UnsupportedModelError as reason:
            core.close()
            self._use_model_code(reason)
            return self._load()
        return core

    def _use_model_code(self, reason: UnsupportedModelError) -> None:
        log.warning("rollouts run through the model's own code, with a whole copy of its weights: %s", reason)
        self.runner = "transformers"

    def _probe(self, core: LLMEngine) -> tuple[list[int], Tensor]:
        """Run some tokens: a runner that packs a layer at its first use has then packed all.  Returns their logits."""
        tokens = [(7 * i + 3) % core.metadata.vocab_size for i in range(NUM_PROBE_TOKENS)]
        rows = range(NUM_PROBE_TOKENS)
        logits = core.runner.run(ModelInput(tokens, [QuerySpan(0, 0, NUM_PROBE_TOKENS)], rows, block_tables=[[0]]))
        core.runner.free_slot(0)
        return tokens, logits.clone()

    def _verify(self, tokens: list[int], logits: Tensor) -> None:
        """Raise UnsupportedModelError unless the actor gives these logits; collective."""
        ids = torch.tensor([tokens], device=self.actor.device)
        with torch.no_grad(), eval_mode(self.actor.module):
            expected = self.actor(input_ids=ids).logits[0].float()
        dtypes = {self.weights.dtype, _WEIGHT_DTYPES[get_weight_format(self.config)]}
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        check_logits_close(logits.to(expected.device), expected, coarsest)
        self._is_verified = True


class ActorWeights:
    """A model in training as a plain one whose weights are gathered when they are read, within :meth:`reading`.

    ``skeleton``: the base model, without adapters.  ``dtype``: of the gathered weights.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype, device: torch.device) -> None:
        actor = engine.module
        self.dtype, self._sharded = dtype, engine.sharded_model
        self._read: Callable[[str], Tensor] | None = None
        self._tensors: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for name, param in actor.named_parameters():
            kind = dtype if param.is_floating_point() else param.dtype
            empty = nn.Parameter(torch.empty(param.shape, dtype=kind, device=device), requires_grad=False)
            self._tensors[name] = memo[id(param)] = empty
        skeleton: Any = copy.deepcopy(actor, memo).eval()
        self._adapters = _remove_adapters(skeleton)
        self.skeleton: Any = skeleton.get_base_model() if hasattr(skeleton, "peft_config") else skeleton
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._bucket: tuple[nn.Module, ...] = ()
        self._bucketed = self._find_bucketed()
        self.release()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Gather what is read within; the bucket is given back at its end; collective."""
        with self._sharded.read_whole() as self._read:
            try:
                yield
            finally:
                self._read = None
                self._release_bucket()

    def describe(self) -> DecoderSpec:
        """Gather what an engine reads where it lies, and describe the model; its linear layers gather themselves as
        they are read.  Collective."""
        for name in self._tensors:
            if name not in self._bucketed:
                self._gather(name)
        # A transposed view can only be made of a tensor that has memory, though nobody looks at it.
        transposed: list[Any] = [m for m in self.skeleton.modules() if type(m).__name__ == "Conv1D"]
        for module in transposed:
            _allocate(module.weight)
        spec = _map_linears(build_decoder_spec(self.skeleton), self._on_demand)
        for module in transposed:
            _free(module.weight)
        return spec

    def gather_all(self) -> None:
        """Gather every weight, for a runner that is the model's own code; collective."""
        for name in self._tensors:
            self._gather(name)
        for base_layer in self._adapters:
            self._merge(base_layer)

    def _release_bucket(self) -> None:
        """Give the memory of the bucket back."""
        for module in self._bucket:
            _free(module.weight)
        self._bucket = ()

    def release(self) -> None:
        """Give all memory back."""
        for tensor in self._tensors.values():
            _free(tensor)
        self._bucket = ()

    def _find_bucketed(self) -> set[str]:
        """Names of the weights that only linear layers read: they need not be there but for that.  What the
        description shows elsewhere as well (an embedding that is the head) stays."""
        try:
            spec = build_decoder_spec(self.skeleton)
        except UnsupportedModelError:
            return set()
        read_in_place = {_storage(tensor) for tensor in _list_tensors(spec)}
        layers: list[LinearSpec] = []

        def collect(layer: LinearSpec) -> LinearSpec:
            layers.append(layer)
            return layer

        _map_linears(spec, collect)
        weights: list[Any] = [module.weight for layer in layers for module in layer.modules]
        return {self._names[id(weight)] for weight in weights if _storage(weight) not in read_in_place}

    def _on_demand(self, layer: LinearSpec) -> LinearSpec:
        if any(self._names[id(module.weight)] in self._bucketed for module in layer.modules):
            return _BucketedLinear(layer, self._fetch)
        for module in layer.modules:
            if module in self._adapters:
                raise UnsupportedModelError("an adapter on a layer that shares its weight with the embedding")
        return layer

    def _fetch(self, modules: tuple[nn.Module, ...]) -> None:
        """Make these modules the bucket; collective unless they are."""
        if modules == self._bucket:
            return
        self._release_bucket()
        self._bucket = modules
        for module in modules:
            self._gather(self._names[id(module.weight)])
            self._merge(module)

    @torch.no_grad()
    def _gather(self, name: str) -> None:
        assert self._read is not None, "weights are read within reading()"
        tensor = self._tensors[name]
        _allocate(tensor)
        tensor.copy_(self._read(name))

    @torch.no_grad()
    def _merge(self, base_layer: nn.Module) -> None:
        """Let PEFT merge the layer's adapter into its gathered weight."""
        layer = self._adapters.get(base_layer)
        if layer is None:
            return
        weight: Any = base_layer.weight
        storage = weight.data
        layer.merge()
        if weight.data.data_ptr() != storage.data_ptr():  # merged into another tensor, which nobody else sees
            storage.copy_(weight.data)
            weight.data = storage
        layer.merged_adapters.clear()


class _BucketedLinear(LinearSpec):
    """A linear layer whose weight is there when it is read, and until another one is."""

    def __init__(self, layer: LinearSpec, fetch: Callable[[tuple[nn.Module, ...]], None]) -> None:
        shape = (layer.out_features, layer.in_features)
        more: dict[str, Any] = {"output_permutation": layer.output_permutation, "output_scale": layer.output_scale}
        super().__init__(self._read, layer.bias, shape, modules=layer.modules, copy_rows_fn=self._copy, **more)
        self._layer, self._fetch = layer, fetch

    @property
    def is_stored(self) -> bool:
        """What is read is to be kept: the modules' own tensors will be gone."""
        return True

    def _read(self) -> Tensor:
        self._fetch(self.modules)
        weight = self._layer.weight
        is_bucket = any(_storage(weight) == _storage(module.weight) for module in self.modules)
        return weight.clone() if is_bucket else weight  # a runner may keep what it reads

    def _copy(self, start: int, stop: int, out: Tensor) -> None:
        self._fetch(self.modules)
        self._layer.copy_rows(start, stop, out)


def _remove_adapters(skeleton: nn.Module) -> dict[nn.Module, Any]:
    """Put the base layers of PEFT's adapters in their places; returns the adapter of each."""
    if not hasattr(skeleton, "peft_config"):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters: dict[nn.Module, Any] = {}
    for owner in list(skeleton.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, BaseTunerLayer) and not isinstance(owner, BaseTunerLayer):
                base_layer = child.get_base_layer()
                adapters[base_layer] = child
                setattr(owner, name, base_layer)
    return adapters


def _map_linears(part: Any, change: Callable[[LinearSpec], LinearSpec]) -> Any:
    """A description with its linear layers changed; a part in which none is stays the same object."""
    if isinstance(part, LinearSpec):
        return change(part)
    if isinstance(part, list | tuple):
        items = [_map_linears(item, change) for item in part]
        return items if any(new is not old for new, old in zip(items, part, strict=True)) else part
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {key: new for key, value in values.items() if (new := _map_linears(value, change)) is not value}
    return replace(part, **changed) if changed else part


def _list_tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a description but for the weights of its linear layers."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, LinearSpec):
        yield from _list_tensors(part.bias)
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for item in part:
            yield from _list_tensors(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _list_tensors(getattr(part, field.name))


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _allocate(tensor: Any) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


def _free(tensor: Any) -> None:
    tensor.untyped_storage().resize_(0)
