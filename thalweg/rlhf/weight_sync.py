"""The hybrid engine: an actor that trains under ZeRO and generates by the one inference engine.

The picture, for each generation phase::

    actor                      skeleton                           inference engine
    shards --all-gather-->     a linear layer's weights, merged --pack-->  its own weights
           --all-gather-->     norms, biases, embeddings        --------   read where they lie
                                                                           KV cache

The skeleton is the plain model without values, a tensor of no memory in the place of each parameter.  It is described
as any model is (``infer/models``), and a runner reads one linear layer of that description after the other.  A layer
that is read is the bucket: its weights are there until the next one is read.  So beyond the shards and the inference
engine's own weights there is at most one bucket.

Phases: the first :meth:`HybridEngine.generation` builds the inference engine.  At its end the engine sleeps: the memory
of its weights, KV cache and activations goes back to the system, its program and its addresses stay.  The next phase
describes the skeleton anew and wakes it with that.  Nothing of the actor changes: LoRA is merged into the bucket, so
there is nothing to unmerge.

Invariants: every rank reads the same layers in the same order, so the gathers meet; from then on a rank generates by
itself, without collectives, so unequal lengths (or no prompts at all) cannot make another one wait for ever.  Where
``tensor_parallel_size`` neighbours are one inference engine, each cuts its part out of the bucket, and one that has no
requests (any more) computes for the others until none of them has.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.engine import Engine
from thalweg.infer.config import EngineConfig
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.loader.load import load_engine
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models import spec as specs
from thalweg.infer.parallel.executor import GroupEngine, WorkerLoop, start_worker
from thalweg.infer.parallel.process_group import InferenceGroup, join_launched_group
from thalweg.infer.parallel.shard import shard_for_rank
from thalweg.infer.precision import NUM_PROBE_TOKENS, check_logits_close, eval_mode, get_weight_format
from thalweg.infer.runners.base import ModelInput, QuerySpan
from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits
from thalweg.parallel_dims import control_group
from thalweg.utils.log import get_logger

log = get_logger(__name__)
_WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HybridEngine:
    """An actor in training, and between the ends of :meth:`generation` an inference engine of its weights.

    ``actor``: the engine of a causal Hugging Face model, or of a PEFT model of one.  ``config``: how to generate; by
    default in the dtype that the actor computes in, on its device.  With its ``tensor_parallel_size`` so many
    neighbouring ranks are one inference engine, whose group ``join_group`` makes.  ``runner`` insists on one, as in
    ``load_engine``.

    Raises:
        ValueError: the actor has stages of a pipeline, or adapters that cannot be merged into its weights; or there are
            no groups of so many ranks.
    """

    def __init__(
        self,
        actor: Engine,
        config: EngineConfig | None = None,
        *,
        runner: str | None = None,
        join_group: Callable[[EngineConfig], InferenceGroup] = join_launched_group,
    ) -> None:
        if actor.meshes.pp is not None:
            raise ValueError("a rollout's actor may not have pipeline parallelism: leave it to ZeRO")
        dtype = "bf16" if actor.bfloat16_enabled() else "fp16" if actor.fp16_enabled() else "fp32"
        self.actor, config = actor, config or EngineConfig()
        own = {"dtype": dtype, "device": str(actor.device)}
        self.config = replace(config, **{key: value for key, value in own.items() if getattr(config, key) == "auto"})
        if actor.meshes.tp is not None and runner == "transformers":
            raise ValueError("the model's own code divides its layers, by tensor_parallel: leave the runner out")
        if self.config.weight_offload:
            raise ValueError("weight_offload: a rollout's weights are new each time and stay in memory; leave it out")
        ranks, world_size = self.config.num_ranks, dist.get_world_size(actor.meshes.world_group)
        if ranks > 1 and (ranks != self.config.tensor_parallel_size or world_size % ranks or runner == "transformers"):
            raise ValueError(
                f"{ranks} ranks are to generate together: tensor_parallel_size alone may ask for that, must divide "
                f"the number of ranks, {world_size}, and is not for the runner transformers"
            )
        self.weights = ActorWeights(actor, _WEIGHT_DTYPES[dtype], torch.device(self.config.device))
        self._is_verified = False
        self.runner, self._join_group = runner, join_group
        self._core: LLMEngine | WorkerLoop | None = None
        self._group: InferenceGroup | None = None  # with which this rank generates, unless alone

    @contextmanager
    def generation(self) -> Iterator[LLMEngine | GroupEngine]:
        """Yield an inference engine of the actor's weights as they are now; collective at its beginning, and at its end
        over the ranks that generate together."""
        core, self._core = self._core, None
        core = self._load() if core is None else self._wake_up(core)
        try:
            yield (engine := self._engine(core))
            if isinstance(engine, GroupEngine):
                engine.finish()
            core.sleep()
            self._core = core
        except BaseException:
            core.close()  # who waits for this rank hears of it
            raise
        finally:
            self.weights.release()

    def close(self) -> None:
        """Drop the inference engine, in a process that will not generate any more."""
        if self._core is not None:
            self._core.close()
        self._core = None

    def _engine(self, core: Any) -> LLMEngine | GroupEngine:
        return core if self._group is None else GroupEngine(core, self._group)

    def _wake_up(self, core: Any) -> Any:
        with self.weights.reading():
            if self.runner == "transformers":
                self.weights.gather_all()
                core.wake_up()
            else:
                spec = self.weights.describe()
                core.wake_up(spec if self._group is None else shard_for_rank(spec, self._group.rank, self.config))
        return core

    def _load(self) -> LLMEngine | WorkerLoop:
        with self.weights.reading():
            spec = None
            if self.runner != "transformers":
                try:
                    spec = self.weights.describe()
                except specs.UnsupportedModelError as reason:
                    self._use_model_code(reason)
            if spec is None:
                self.weights.gather_all()
            core = self._build(spec)
            engine, logits = self._engine(core), None
            if isinstance(engine, GroupEngine):
                logits = engine.drive(self._probe)
            elif spec is not None:
                logits = self._probe(engine)
        if spec is None or self._is_verified or self.config.quantization:
            return core
        gap = self._verify(logits)
        # All ranks go the same way: their kernels, chosen by measurement, may differ in the last bits of a logit.
        failed = torch.tensor(float(gap is not None))
        dist.all_reduce(failed, group=control_group(self.actor.meshes.world_group))
        if not failed:
            self._is_verified = True
            return core
        core.close()
        self._use_model_code(gap or specs.UnsupportedModelError("another rank's logits are not the actor's"))
        return self._load()

    def _build(self, spec: specs.DecoderSpec | None) -> LLMEngine | WorkerLoop:
        """Return this rank's part of the inference engine; collective."""
        if self.config.num_ranks > 1:
            assert spec is not None, "the model's own code runs on one rank"
            shard_for_rank(spec, 0, self.config)  # what cannot be divided is an error on all ranks, before one waits
            self._group = self._join_group(self.config)
        if spec is not None and self._group is not None and self._group.rank > 0:
            return start_worker(spec, self._group, self.config.device)
        core = load_engine(self.weights.skeleton, self.config, runner=self.runner, spec=spec, workers=self._group)
        assert isinstance(core, LLMEngine)
        return core

    def _use_model_code(self, reason: specs.UnsupportedModelError) -> None:
        if self.config.num_ranks > 1:
            raise ValueError(f"tensor_parallel_size {self.config.num_ranks} of generation: {reason}; use 1")
        if self.actor.meshes.tp is not None:
            raise ValueError(f"the model's own code divides its layers, by tensor_parallel, and {reason}: leave it out")
        log.warning("rollouts run through the model's own code, with a whole copy of its weights: %s", reason)
        self.runner = "transformers"

    @property
    def _probe_tokens(self) -> list[int]:
        vocab_size = self.weights.skeleton.config.get_text_config().vocab_size
        return [(7 * i + 3) % vocab_size for i in range(NUM_PROBE_TOKENS)]

    def _probe(self, core: LLMEngine) -> Tensor:
        """Run some tokens: a runner that packs a layer at its first use has then packed all.  Returns their logits."""
        span, rows = QuerySpan(0, 0, NUM_PROBE_TOKENS), range(NUM_PROBE_TOKENS)
        logits = core.runner.run(ModelInput(self._probe_tokens, [span], rows, block_tables=[[0]]))
        core.runner.free_slot(0)
        return logits.clone()

    def _verify(self, logits: Tensor | None) -> specs.UnsupportedModelError | None:
        """Return by how much these are not the actor's logits, or None, as where there are none; collective."""
        ids = torch.tensor([self._probe_tokens], device=self.actor.device)
        with torch.no_grad(), eval_mode(self.actor.module):
            expected = self.actor(input_ids=ids).logits[0].float()
        if isinstance(expected, VocabParallelLogits):  # whole on all ranks, or on none
            expected = expected.full_tensor()
        if logits is None:
            return None
        dtypes = {self.weights.dtype, _WEIGHT_DTYPES[get_weight_format(self.config)]}
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        try:
            check_logits_close(logits.to(expected.device), expected, coarsest)
        except specs.UnsupportedModelError as gap:
            return gap
        return None


class ActorWeights:
    """A model in training as a plain one whose weights are gathered when they are read, within :meth:`reading`.

    ``skeleton``: the base model, without adapters.  ``dtype``: of the gathered weights.

    Raises:
        ValueError: adapters that cannot be merged into it.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype, device: torch.device) -> None:
        actor = engine.module
        self.dtype, self._sharded = dtype, engine.sharded_model
        self._read: Callable[[Mapping[str, Tensor]], None] | None = None
        self._tensors: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for name, param in actor.named_parameters():
            kind = dtype if param.is_floating_point() else param.dtype
            empty = nn.Parameter(torch.empty(param.shape, dtype=kind, device=device), requires_grad=False)
            self._tensors[name] = memo[id(param)] = empty
        skeleton: Any = copy.deepcopy(actor, memo).eval()
        self._quantized = self._replace_quantized(skeleton)
        self._adapters = _remove_adapters(skeleton)
        _check_adapters(skeleton, self._adapters)
        self.skeleton: Any = skeleton.get_base_model() if hasattr(skeleton, "peft_config") else skeleton
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._bucket: tuple[nn.Module, ...] = ()
        # The memory of all buckets, one after the other.
        self._bucket_memory, self._bucket_bytes = torch.empty(0, dtype=dtype, device=device), 0
        self._bucketed: set[str] = set()
        self._lay_out_buckets()
        self.release()

    def _replace_quantized(self, skeleton: nn.Module) -> dict[str, tuple[list[str], Any]]:
        """Put plain linear layers where the actor's hold their weights in few bits; returns, by the name of each, the
        parameters that it is made of, and what makes it."""
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        found: dict[str, tuple[list[str], Any]] = {}
        for path, module in list(skeleton.named_modules()):
            parts: Any = getattr(module, "parametrizations", {})
            if "weight" not in parts or not isinstance(module, nn.Linear):
                continue
            originals = [tensor for key, tensor in parts["weight"].named_parameters() if key.startswith("original")]
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device=originals[0].device)
            plain.weight = nn.Parameter(plain.weight.detach().to(self.dtype), requires_grad=False)
            plain.bias = module.bias
            skeleton.set_submodule(path, plain)
            found[f"{path}.weight"] = [names[id(tensor)] for tensor in originals], parts["weight"][0]
            self._tensors[f"{path}.weight"] = plain.weight
        return found

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Gather what is read within; the bucket is given back at its end; collective."""
        with self._sharded.read_whole() as self._read:
            try:
                yield
            finally:
                self._read, self._bucket = None, ()
                _free(self._bucket_memory)

    def describe(self) -> specs.DecoderSpec:
        """Gather what an engine reads where it lies, adapters merged, and describe the model; its linear layers gather
        themselves as they are read.  Collective."""
        self._gather(name for name in self._whole_names() if name not in self._bucketed)
        for base_layer in self._adapters:
            if self._names[id(base_layer.weight)] not in self._bucketed:
                self._merge(base_layer)
        # A transposed view can only be made of a tensor that has memory, though nobody looks at it.
        transposed: list[Any] = [m for m in self.skeleton.modules() if type(m).__name__ == "Conv1D"]
        for module in transposed:
            self._allocate(module.weight)
        spec = specs.map_linears(build_decoder_spec(self.skeleton), self._on_demand)
        _free(self._bucket_memory)
        return spec

    def gather_all(self) -> None:
        """Gather every weight, for a runner that is the model's own code; collective."""
        for name in self._bucketed:  # all of them at once need memory of their own
            tensor = self._tensors[name]
            tensor.data = torch.empty_like(tensor)
        self._bucketed = set()
        self._gather(self._whole_names())
        for base_layer in self._adapters:
            self._merge(base_layer)

    def release(self) -> None:
        """Give all memory back."""
        for tensor in self._tensors.values():
            _free(tensor)
        self._bucket = ()

    def _lay_out_buckets(self) -> None:
        """Find the weights that only linear layers read: they need not be there but for that, and lie where all buckets
        do.  What the description shows elsewhere as well (an embedding that is the head) stays, and so does what two
        layers read in other company."""
        try:
            spec = build_decoder_spec(self.skeleton)
        except specs.UnsupportedModelError:
            return
        read_in_place = {_storage(tensor) for tensor in specs.list_tensors(spec)}
        buckets = dict.fromkeys(layer.modules for layer in specs.list_linears(spec))
        counts = Counter(id(module.weight) for modules in buckets for module in modules)
        for modules in buckets:
            weights: list[Any] = [module.weight for module in modules]
            if any(_storage(weight) in read_in_place or counts[id(weight)] > 1 for weight in weights):
                continue
            offset = 0
            for weight in weights:
                own = torch.empty(0, dtype=weight.dtype, device=weight.device)
                weight.data = own.set_(self._bucket_memory.untyped_storage(), offset, weight.shape)  # type: ignore[call-overload]
                offset += weight.numel()
                self._bucketed.add(self._names[id(weight)])
            self._bucket_bytes = max(self._bucket_bytes, offset * self.dtype.itemsize)

    def _on_demand(self, layer: specs.LinearSpec) -> specs.LinearSpec:
        is_bucketed = any(self._names[id(module.weight)] in self._bucketed for module in layer.modules)
        return _BucketedLinear(layer, self._fetch) if is_bucketed else layer

    def _fetch(self, modules: tuple[nn.Module, ...]) -> None:
        """Make these modules the bucket; collective unless they are."""
        if modules == self._bucket:
            return
        self._bucket = modules
        self._gather(self._names[id(module.weight)] for module in modules)
        for module in modules:
            self._merge(module)

    def _whole_names(self) -> list[str]:
        """Names of all tensors but those that quantised weights are made of."""
        inner = {each for names, _ in self._quantized.values() for each in names}
        return [name for name in self._tensors if name not in inner]

    def _gather(self, names: Iterable[str]) -> None:
        assert self._read is not None, "weights are read within reading()"
        outs = {name: self._allocate(self._tensors[name]).detach() for name in names}
        self._read({name: out for name, out in outs.items() if name not in self._quantized})
        for name in self._quantized.keys() & outs.keys():
            inner_names, rebuild = self._quantized[name]
            inner = {each: torch.empty_like(self._tensors[each]) for each in inner_names}
            self._read(inner)
            outs[name].copy_(rebuild(*inner.values()).dequantize())

    def _allocate(self, tensor: Any) -> Tensor:
        """Give a tensor memory, unless it has some."""
        storage, nbytes = tensor.untyped_storage(), tensor.nbytes
        if _storage(tensor) == _storage(self._bucket_memory):
            nbytes = self._bucket_bytes
        if storage.size() < nbytes:
            storage.resize_(nbytes)
        return tensor

    # Runners read in inference mode, whose tensors (DoRA makes a new weight) no parameter takes as data where the
    # device is not one of torch's own.
    @torch.inference_mode(False)
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


class _BucketedLinear(specs.LinearSpec):
    """A linear layer whose weight is there when it is read, and until another one is."""

    def __init__(self, layer: specs.LinearSpec, fetch: Callable[[tuple[nn.Module, ...]], None]) -> None:
        shape = (layer.out_features, layer.in_features)
        more: dict[str, Any] = {"output_permutation": layer.output_permutation, "output_scale": layer.output_scale}
        super().__init__(self.select, layer.bias, shape, modules=layer.modules, copy_rows_fn=self._copy, **more)
        self._layer, self._fetch = layer, fetch

    @property
    def is_stored(self) -> bool:
        """What is read is to be kept: the modules' own tensors will be gone."""
        return True

    def select(self, pick: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the weight, or a part of it, in memory of its own: a runner may keep what it reads."""
        self._fetch(self.modules)
        weight = self._layer.weight
        part = weight if pick is None else pick(weight)
        others = [*(module.weight for module in self.modules), *(() if pick is None else (weight,))]
        return part.clone() if any(_storage(part) == _storage(other) for other in others) else part

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


def _check_adapters(skeleton: Any, adapters: Mapping[nn.Module, Any]) -> None:
    """Raise ValueError where an adapter is no change of one layer's weight, which is what can be merged: prompts,
    LNTuning's own layers, parameters of experts, one of two tied layers."""
    owners = Counter(id(param) for module in skeleton.modules() for param in module.parameters(recurse=False))
    found = [each for each in getattr(skeleton, "peft_config", {}).values() if each.is_prompt_learning]
    for base_layer, adapter in adapters.items():
        # Of trained tokens both layers of a pair set the same rows.
        is_alone = owners[id(getattr(base_layer, "weight", None))] == 1 or hasattr(adapter, "trainable_tokens_delta")
        if not is_alone or hasattr(adapter, "ln_tuning_layers"):
            found.append(adapter)
    if found:
        name = type(found[0]).__name__
        raise ValueError(f"{name} cannot be merged into one layer's own weight, as actors' adapters are; leave it out")


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _free(tensor: Any) -> None:
    tensor.untyped_storage().resize_(0)
