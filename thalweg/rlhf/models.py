"""Models of the loops: loaded, adapted, put under ZeRO, scored, and saved whole again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.adapt.quantized_weight import quantize_linears
from thalweg.checkpoint.filesystem import FileSystem, remove_tree
from thalweg.config import load
from thalweg.engine import Engine, initialize
from thalweg.infer.bottleneck import add_bottleneck_adapters, has_bottleneck_adapters, with_bottleneck_adapters
from thalweg.infer.config import EngineConfig
from thalweg.infer.loader.hf import get_model_kind, load_model, to_local_folder
from thalweg.infer.precision import eval_mode
from thalweg.infer.quantization.checkpoints import check_all_loaded
from thalweg.infer.types import to_token_tuple
from thalweg.parallel_dims import control_group
from thalweg.parallelize import parallel_dims_from_config
from thalweg.rlhf.config import RLHFConfig, read_mapping
from thalweg.rlhf.data import end_ids
from thalweg.rlhf.packing import forward_rows, response_logprobs
from thalweg.rlhf.rollout import Rollout
from thalweg.rlhf.weight_sync import ActorWeights
from thalweg.zero.whole_parameter import named_shards
from thalweg.zero.whole_tensors import to_local

_HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A number for each token, (B, T): a Hugging Face backbone and a linear head; a reward model or a critic."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone, self.config = backbone, backbone.config
        self._no_split_modules = getattr(backbone, "_no_split_modules", None)
        text_config = backbone.config.get_text_config()
        # OPT-350m's outputs are narrower than its layers.
        self.value_head = nn.Linear(getattr(text_config, "word_embed_proj_dim", text_config.hidden_size), 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, needs_head: bool = False) -> Self:
        """Load what :func:`save_model` wrote or Hugging Face's classifier with one label, or give another model a new
        head, which says 0; ValueError where it ``needs_head`` of its own."""
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(path := to_local_folder(path))
        is_classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        auto_class: Any = AutoModelForSequenceClassification if is_classifier else AutoModel
        auto_class = with_bottleneck_adapters(auto_class, config)
        loaded, loading_info = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        check_all_loaded(path, loading_info)
        model, head, score = cls(loaded.base_model), Path(path) / _HEAD_FILE, getattr(loaded, "score", None)
        if head.is_file():
            model.value_head.load_state_dict(load_file(head))
        elif isinstance(score, nn.Linear) and score.out_features == 1:  # read at the last token, as ours is
            model.value_head.load_state_dict(score.state_dict())
        elif needs_head:
            raise ValueError(f"{path} has no value head: nothing scores; give a reward model or 1-label classifier")
        return model

    def save_pretrained(self, path: str | Path) -> None:
        """Write the backbone as a Hugging Face model, and the head beside it."""
        from safetensors.torch import save_file

        self.backbone.save_pretrained(path)
        save_file({name: t.contiguous() for name, t in self.value_head.state_dict().items()}, Path(path) / _HEAD_FILE)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the value at each token."""
        positions = {} if position_ids is None else {"position_ids": position_ids}
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **positions).last_hidden_state
        return self.value_head(states).squeeze(-1).clone()  # a view would lose FSDP2's hooks to an in-place change

    def gradient_checkpointing_enable(self) -> None:
        """As a Hugging Face model's."""
        self.backbone.gradient_checkpointing_enable()


def load_tokenizer(path: str | Path) -> Any:
    """A model's tokenizer; ValueError where it has no end token, which an answer needs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(to_local_folder(path))
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no end token: an answer could not end")
    return tokenizer


def load_policy(path: str | Path, config: RLHFConfig | None = None) -> Any:
    """A causal model; with ``lora_dim`` PEFT's model of it."""
    model = load_model(path, EngineConfig(dtype="fp32", device="cpu"))
    if (kind := get_model_kind(model)) != "causal":
        raise ValueError(f"{path} is a {kind} model, {type(model).__name__}: an actor is a causal model; give one")
    return model if config is None else adapt(model, config, "CAUSAL_LM")


def adapt(model: Any, config: RLHFConfig, task_type: str | None = None) -> Any:
    """Give a model what its options ask for before training: dropout, gradient checkpointing, LoRA."""
    backbone = getattr(model, "backbone", model)
    if config.dropout is not None:
        _set_dropout(model, config.dropout)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if config.bottleneck_dim:
        add_bottleneck_adapters(backbone, config.bottleneck_dim)  # a value head trains, too
    if not config.lora_dim:
        return model
    if has_bottleneck_adapters(model):
        raise ValueError("lora_dim: the model has bottleneck adapters, over which LoRA cannot go; leave it out")
    from peft import LoraConfig, get_peft_model

    if config.quantize_base and not quantize_linears(model, config.quantize_base):  # type: ignore[arg-type]
        raise ValueError(f"quantize_base: {type(model).__name__} has no nn.Linear that it could be in few bits")

    heads = {"lm_head", "embed_out", "value_head", "score"}
    targets = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and name.rpartition(".")[2] not in heads
        and config.lora_module_name in name
    ]
    if not targets:
        raise ValueError(f"lora_module_name {config.lora_module_name!r} is in the name of no linear layer")
    transposed = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in targets)
    lora = LoraConfig(
        r=config.lora_dim, lora_alpha=config.lora_alpha or config.lora_dim,
        target_modules=targets, task_type=task_type, fan_in_fan_out=transposed,
        use_rslora=config.lora_variant == "rslora", use_dora=config.lora_variant == "dora",
    )  # fmt: skip
    adapted = get_peft_model(model, lora)
    for name, param in adapted.named_parameters():
        # A value head is new, and part of the base model that is saved; an adapted weight rests, as DeepSpeed-Chat's.
        if ".value_head." in name or not (config.only_optimize_lora or name.endswith(".base_layer.weight")):
            param.requires_grad_(True)
    if config.gradient_checkpointing and config.only_optimize_lora:
        backbone.enable_input_require_grads()
    return adapted


def _set_dropout(model: Any, p: float) -> None:
    """Set each dropout, wherever a family keeps its own: OPT and BLOOM as a module's number, Falcon in the config that
    its layers read.  The model's ``own_dropouts`` are what its configs said, for :func:`save_model`."""
    model.own_dropouts = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for owner in (module, getattr(module, "config", None)):  # one for many, of which the first finds its values
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "dropout" in name and isinstance(value, float) and value != p:
                    setattr(owner, name, p)
                    if owner is not module:
                        model.own_dropouts.append((owner, name, value))


def build_engine(
    model: nn.Module,
    config: RLHFConfig,
    *,
    num_updates: int,
    name: str = "model",
    accumulation: int = 1,
    training_data: Any = None,
    collate_fn: Any = None,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """An engine that trains a model for so many updates; ``name``: of its events for TensorBoard."""
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.enable_mixed_precision_lora:
        zero["zero_quantized_nontrainable_weights"] = True
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "seed": config.seed,
        "steps_per_print": None,
        "dataloader_drop_last": True,
        "token_weighted_loss": True,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": config.learning_rate, "betas": [0.9, 0.95], "weight_decay": config.weight_decay},
        },
        **_precision(config),
    }
    if config.enable_tensorboard:
        path = config.tensorboard_path or f"{config.output_dir}/tensorboard"
        settings["tensorboard"] = {"enabled": True, "output_path": path, "job_name": name}
    groups = None
    if config.lora_learning_rate is not None:
        trained = [(each, param) for each, param in model.named_parameters() if param.requires_grad]
        rest, lora = ([param for each, param in trained if (".lora_" in each) is own] for own in (False, True))
        groups = [{"params": rest}] * bool(rest) + [{"params": lora, "lr": config.lora_learning_rate}] * bool(lora)

    def make_schedule(optimizer: Any) -> Any:
        from transformers import get_scheduler

        return get_scheduler(config.lr_scheduler_type, optimizer, config.num_warmup_steps, num_updates)

    given = read_mapping(config.deepspeed_config)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "scheduler"):
        if given.get(key, "auto") not in ("auto", settings.get(key)):
            raise ValueError(f"deepspeed_config: {key} is counted by the options of the step: give it there alone")
    if given.get("optimizer", {}).get("type", "auto").lower() not in ("auto", "adam", "adamw"):
        del settings["optimizer"]["params"]["betas"]  # which others may not have
    _merge(settings, given)
    # A commit of all engines removes what the one before it named, and nothing else may.
    settings["checkpoint"] = {**settings.get("checkpoint", {}), "keep": "all"}
    engine = initialize(
        model=model, config=settings, training_data=training_data,
        collate_fn=collate_fn, lr_scheduler=make_schedule, mesh=mesh, model_parameters=groups,
    )[0]  # fmt: skip
    refuse_divided_sequences(engine)
    return engine


def refuse_divided_sequences(engine: Engine) -> None:
    """No step cuts its sequences: each rank has examples, or responses, of its own."""
    if engine.meshes.sequence is not None:
        out = "leave sequence_parallel_size and context_parallel_size out"
        raise ValueError(f"a rank's examples and responses are not divided over others; {out}")


def build_frozen_engine(
    model: nn.Module, config: RLHFConfig, *, offload: bool = False, mesh: DeviceMesh | None = None
) -> Engine:
    """An engine of a model that only answers: a reference, or a reward model; its layers are divided as those that
    train are.  ``offload``: its parameters lie in the host's memory, which takes stage 3, whatever the config's is."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}} if offload else {"stage": config.zero_stage}
    model.requires_grad_(False)
    settings = {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size, "zero_optimization": zero,
        "steps_per_print": None, **_precision(config), **_layout(config),
    }  # fmt: skip
    return initialize(model=model, config=settings, mesh=mesh)[0].eval()


def _merge(settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``given`` over ``settings``, block by block; its "auto" are as these are."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            settings[key] = _merge(dict(settings.get(key) or {}), value)
        elif value != "auto":
            settings[key] = value
    return settings


def num_tensor_ranks(config: RLHFConfig) -> int:
    """How many ranks divide each layer, by the DeepSpeed config."""
    return parallel_dims_from_config(load(_layout(config))).tp


def num_data_ranks(config: RLHFConfig, num_ranks: int) -> int:
    """How many of the ranks have rows of their own; 1 where there are too few, which ``initialize`` refuses."""
    return max(num_ranks // num_tensor_ranks(config), 1)


def _layout(config: RLHFConfig) -> dict[str, Any]:
    """What the DeepSpeed config says of a layer's ranks: all models of a step see the same rows, so it is for all."""
    return {key: value for key, value in read_mapping(config.deepspeed_config).items() if key == "tensor_parallel"}


def _precision(config: RLHFConfig) -> dict[str, Any]:
    return {} if config.dtype == "fp32" else {config.dtype: {"enabled": True}}


@torch.no_grad()
def update_ema(ema: Engine, model: Engine, decay: float) -> None:
    """Move the average's shards towards a model's, rank by rank; collective."""
    for (_, average), (_, param) in zip(named_shards(ema.module), named_shards(model.module), strict=True):
        shard = to_local(average)
        shard.lerp_(to_local(param).to(shard), 1 - decay)
    ema.sharded_model.publish_params()


# Scoring


@torch.no_grad()
def rollout_logprobs(engine: Engine, rollout: Rollout, batch_size: int, temperature: float = 1.0) -> Tensor:
    """A model's log-probabilities of a rollout's tokens, (rows, T - 1), 0 outside of responses; collective."""
    out = torch.zeros(rollout.mask.shape)
    for rows, part in _batches(rollout, batch_size):
        out[rows, : part.mask.shape[1]] = response_logprobs(engine, vars(part), temperature)[0].cpu()
    return out


@torch.no_grad()
def rollout_values(engine: Engine, rollout: Rollout, batch_size: int) -> Tensor:
    """A value model's values, fp32 (rows, T), 0 on padding; collective."""
    out = torch.zeros(rollout.input_ids.shape)
    for rows, part in _batches(rollout, batch_size):
        values, places = forward_rows(engine, vars(part))
        out[rows, : places.shape[1]] = values[places].float().cpu()
    return out.masked_fill(~rollout.attention_mask, 0.0)


def _batches(rollout: Rollout, batch_size: int) -> Iterator[tuple[slice, Rollout]]:
    for start in range(0, len(rollout), batch_size):
        rows = slice(start, start + batch_size)
        yield rows, rollout[rows]


@contextmanager
def as_reference(reference: Engine | None, actor: Engine) -> Iterator[Engine]:
    """The engine that answers as the reference, without gradients: its own, or where there is none the actor's, a PEFT
    model's, as that of its base, without dropout."""
    model: Any = actor.module
    with torch.no_grad(), model.disable_adapter() if reference is None else nullcontext():
        engine = actor if reference is None else reference
        with eval_mode(engine):
            yield engine


# Saving


def save_model(engine: Engine, tokenizer: Any, directory: str | Path) -> None:
    """Write the model whole, adapters merged, in Hugging Face's layout, all at once, and PEFT's own files of an adapter
    below ``adapter``; its generation config has the ends that it was trained with as well; collective."""
    adapted: Any = engine.module
    adapter_state = engine.state_dict() if hasattr(adapted, "peft_config") else None
    weights = ActorWeights(engine, torch.float32, torch.device("cpu"))
    with weights.reading():
        weights.gather_all()
    directory = Path(directory)
    if dist.get_rank() == 0:
        temporary = directory.with_name(f".{directory.name}.saving")
        for stale in (temporary, directory):
            remove_tree(FileSystem(), stale)
        for config, name, value in getattr(weights.skeleton, "own_dropouts", ()):  # the copy's, not those that train
            setattr(config, name, value)
        if (saved := getattr(weights.skeleton, "generation_config", None)) is not None:
            saved.eos_token_id = list(dict.fromkeys([*to_token_tuple(saved.eos_token_id), *end_ids(tokenizer)]))
        weights.skeleton.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if adapter_state is not None:
            adapted.save_pretrained(temporary / "adapter", state_dict=adapter_state)
        temporary.rename(directory)
    weights.release()
    dist.barrier(engine.meshes.world_group)


def all_reduce_on_host(table: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a tensor in the host's memory over the group's ranks (None: all), in place; collective."""
    dist.all_reduce(table, group=control_group(group))


def mean_over_ranks(values: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Each value's mean over the group's ranks (None: all); collective."""
    table = torch.tensor(list(values.values()), dtype=torch.float64)
    all_reduce_on_host(table, group)
    return dict(zip(values, (table / dist.get_world_size(group)).tolist(), strict=True))
