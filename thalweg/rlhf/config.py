"""Every option of ``thalweg rlhf``, declared once; the names are DeepSpeed-Chat's where it has the option.

A config file is JSON: options at the top level are for every step, those in a block named after a step (``"sft"``,
``"reward"``, ``"ppo"``, ``"dpo"``, ``"grpo"``) for that step, and flags of the command line go over both.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from thalweg.utils.formatting import did_you_mean

Step = Literal["sft", "reward", "ppo", "dpo", "grpo"]
STEPS: tuple[Step, ...] = get_args(Step)

# DeepSpeed-Chat's options that are not these: ignored, refused with a cure, or here by another name.
_CHAT = tomllib.loads(Path(__file__).with_name("deepspeed_chat.toml").read_text(encoding="utf-8"))
IGNORED, SWITCHES = frozenset(_CHAT["ignored"]), frozenset(_CHAT["switches"])
REFUSED: dict[str, str] = _CHAT["refused"]
ALIASES: dict[str, str] = _CHAT["aliases"]
# Options that PPO's actor and critic have of their own, over those of all models: ``critic_weight_decay``.
ROLE_OPTIONS = (
    "learning_rate", "weight_decay", "zero_stage", "dropout", "gradient_checkpointing", "lora_dim", "lora_module_name",
    "lora_learning_rate",
)  # fmt: skip
_VARIANTS = ("", "rslora", "dora")
_STAGES = (None, 0, 1, 2, 3)


def _option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class RLHFConfig:
    """One step's options.  Raises ValueError for a name or a value that cannot be."""

    output_dir: str = _option("rlhf-out", "where checkpoints, models, metrics and the report go")
    model_name_or_path: str = _option("", "the model to begin with: a Hugging Face directory or name")
    data_path: tuple[str, ...] = _option((), "files (json, jsonl, csv, parquet) or datasets of the hub, blended")
    sft_only_data_path: tuple[str, ...] = _option((), "more data, all of it for SFT")
    data_split: str = _option("2,4,4", "parts of the data for SFT, reward model, and PPO, DPO or GRPO")
    seed: int = _option(1234, "of data order, new weights and samples")
    # Training
    per_device_train_batch_size: int = _option(8, "rows of a micro-batch on each rank")
    gradient_accumulation_steps: int = _option(1, "micro-batches of an update")
    max_seq_len: int = _option(512, "tokens of a row, at most (SFT, reward model, DPO)")
    packing: bool = _option(False, "SFT: lay examples end to end in rows of max_seq_len; none sees another")
    num_train_epochs: int = _option(1, "passes over the data, or over the prompts")
    num_train_steps: int = _option(0, "updates, or iterations of PPO and GRPO; 0: what the epochs come to")
    learning_rate: float = _option(1e-5, "at its highest")
    weight_decay: float = _option(0.0, "of AdamW")
    lr_scheduler_type: str = _option("cosine", "transformers' schedules: cosine, linear, constant_with_warmup, ...")
    num_warmup_steps: int = _option(0, "updates")
    dtype: str = _option("fp32", "what models compute in", ("fp32", "bf16", "fp16"))
    zero_stage: int = _option(0, "ZeRO stage", (0, 1, 2, 3))
    offload: bool = _option(False, "optimizer state (and parameters at stage 3) in the host's memory")
    dropout: float | None = _option(None, "of models in training; by default their own, and 0 in PPO, DPO and GRPO")
    gradient_checkpointing: bool = _option(False, "compute activations again in the backward pass")
    lora_dim: int = _option(0, "rank of LoRA adapters; 0: none")
    lora_module_name: str = _option("", "adapt linear layers whose names hold this text; empty: all")
    lora_alpha: int = _option(0, "LoRA's scale is lora_alpha / lora_dim; 0: lora_dim")
    lora_variant: str = _option("", "LoRA with its scale by the root of its rank, or weight-decomposed", _VARIANTS)
    lora_learning_rate: float | None = _option(None, "of LoRA's weights; by default learning_rate")
    only_optimize_lora: bool = _option(False, "with LoRA: keep all else frozen, and not the adapted weights alone")
    enable_mixed_precision_lora: bool = _option(
        False, "not the critic's: frozen weights in 8 bits between ranks (ZeRO++)"
    )
    quantize_base: str = _option("", "with only_optimize_lora: keep the base's linear layers so", ("", "nf4", "int8"))
    bottleneck_dim: int = _option(0, "width of Houlsby's adapters, all else frozen; PPO's critic has none; 0: none")
    deepspeed_config: str | Mapping[str, Any] | None = _option(None, "a ds_config.json (or its keys) over all of these")
    save_interval: int = _option(0, "commit a checkpoint each so many updates or iterations; 0: none")
    enable_tensorboard: bool = _option(False, "write events for TensorBoard")
    tensorboard_path: str = _option("", "where to; by default OUT/tensorboard")
    print_answers: bool = _option(False, "PPO, GRPO: log prompts and responses")
    print_answers_interval: int = _option(1, "of each so many iterations")
    enable_test_mode: bool = _option(False, "end after test_stop_step, and save the model")
    test_stop_step: int = _option(0, "updates, or iterations of PPO and GRPO")
    # DPO
    beta: float = _option(0.1, "strength of DPO's and GRPO's pull to the reference")
    label_smoothing: float = _option(0.0, "DPO: how often a preference is the wrong way round")
    # PPO and GRPO
    actor_model_name_or_path: str = _option("", "PPO, GRPO: by default SFT's result or model_name_or_path")
    reward_model_name_or_path: str = _option(
        "", "PPO, GRPO: what scores; by default the reward step's result.  That step: what it begins with"
    )
    critic_model_name_or_path: str = _option("", "PPO: where the critic begins; by default the reward model")
    reward_function: str = _option("", "FILE.py:NAME or MODULE:NAME of a function that scores, in place of a model")
    actor_learning_rate: float | None = _option(None, "PPO, GRPO: by default learning_rate, and so are those below")
    critic_learning_rate: float | None = _option(None, "PPO")
    actor_weight_decay: float | None = _option(None, "PPO, GRPO")
    critic_weight_decay: float | None = _option(None, "PPO")
    actor_zero_stage: int | None = _option(None, "PPO, GRPO", _STAGES)
    critic_zero_stage: int | None = _option(None, "PPO; of the reward model, too", _STAGES)
    reference_zero_stage: int | None = _option(None, "PPO, GRPO, DPO: by default the actor's", _STAGES)
    actor_dropout: float | None = _option(None, "PPO, GRPO")
    critic_dropout: float | None = _option(None, "PPO")
    actor_gradient_checkpointing: bool | None = _option(None, "PPO, GRPO")
    critic_gradient_checkpointing: bool | None = _option(None, "PPO")
    actor_lora_dim: int | None = _option(None, "PPO, GRPO")
    critic_lora_dim: int | None = _option(None, "PPO: by default none, whatever lora_dim is")
    actor_lora_module_name: str | None = _option(None, "PPO, GRPO")
    critic_lora_module_name: str | None = _option(None, "PPO")
    actor_lora_learning_rate: float | None = _option(None, "PPO, GRPO")
    critic_lora_learning_rate: float | None = _option(None, "PPO")
    offload_reference_model: bool = _option(False, "reference in the host's memory, divided as at stage 3")
    offload_reward_model: bool = _option(False, "PPO, GRPO: the reward model so")
    per_device_generation_batch_size: int = _option(8, "prompts on each rank")
    generation_batches: int = _option(1, "so many times these are an iteration's, all generated before it trains")
    num_generations: int = _option(1, "responses to a prompt; GRPO's group")
    max_prompt_seq_len: int = _option(256, "longer prompts are left out")
    max_answer_seq_len: int = _option(256, "tokens of a response, at most")
    temperature: float = _option(1.0, "of sampling")
    rollout_ahead: int = _option(
        0,
        "PPO, GRPO: 1: generate the next iteration's responses while this one trains, by the weights before it",
        (0, 1),
    )
    rollout_ranks: int = _option(0, "PPO, GRPO: of the ranks the last so many generate, and do not train")
    inference_tp_size: int = _option(
        1, "PPO, GRPO: neighbouring ranks that generate together, each with a part of every layer; training as it is"
    )
    importance_cap: float = _option(2.0, "rollout_ahead: the most that a token of the older policy counts")
    ppo_epochs: int = _option(1, "passes over an iteration's responses")
    num_mini_batches: int = _option(1, "updates of a pass")
    gamma: float = _option(1.0, "PPO: discount")
    lam: float = _option(0.95, "PPO: of generalised advantage estimation")
    clip_range: float = _option(0.2, "of the ratio to the old policy")
    value_clip_range: float = _option(0.2, "PPO: of the value's step")
    reward_clip: float = _option(5.0, "PPO: of a response's score")
    enable_ema: bool = _option(False, "PPO, GRPO: average the actor's weights as well, in OUT/<step>/model_ema")
    ema_decay: float = _option(0.992, "of that average, for each iteration")
    unsupervised_dataset_name: str = _option("", "PPO, GRPO: texts whose loss is added to the policy's")
    unsupervised_dataset_config_name: str | None = _option(None, "which of that dataset's configurations")
    unsup_coef: float = _option(0.0, "times so much (InstructGPT's pretraining mix); with texts 27.8")
    kl_coef: float = _option(0.1, "PPO: of the KL penalty")
    kl_target: float | None = _option(None, "PPO: a response's KL in nats that the penalty holds by adapting")
    kl_horizon: int = _option(10_000, "PPO: responses in which it adapts")

    def __post_init__(self) -> None:
        for each in fields(self):
            choices, value = each.metadata["choices"], getattr(self, each.name)
            if choices is not None and value not in choices:
                raise ValueError(f"{each.name} is {value!r}; it may be {', '.join(map(str, choices))}")
        if bool(self.unsup_coef) != bool(self.unsupervised_dataset_name):
            raise ValueError("unsup_coef and unsupervised_dataset_name go together: give both, or neither")
        if self.quantize_base and not (self.lora_dim and self.only_optimize_lora):
            raise ValueError("quantize_base keeps the base frozen: set lora_dim and only_optimize_lora as well")
        if self.bottleneck_dim and self.lora_dim:
            raise ValueError("bottleneck_dim and lora_dim are two kinds of adapters: give one")
        if self.rollout_ranks % self.inference_tp_size:
            raise ValueError(
                f"{self.rollout_ranks} rollout_ranks are no whole number of groups of inference_tp_size, "
                f"{self.inference_tp_size}"
            )
        if self.rollout_ahead and self.temperature != 1:
            raise ValueError("rollout_ahead weighs tokens by probabilities of temperature 1: leave temperature out")
        if self.enable_test_mode and self.test_stop_step < 1:
            raise ValueError("enable_test_mode ends after test_stop_step: set it to 1 or more")
        parts = self.data_split.split(",")
        if len(parts) != 3 or not all(x.strip().replace(".", "", 1).isdigit() for x in parts):
            raise ValueError(f"data_split is {self.data_split!r}: give three numbers, as 2,4,4")

    def of(self, role: Literal["actor", "critic"]) -> RLHFConfig:
        """The options of PPO's actor or critic, its own over those of all models."""
        own = {name: value for name in ROLE_OPTIONS if (value := getattr(self, f"{role}_{name}")) is not None}
        if role == "critic":
            own = {"lora_dim": 0, "bottleneck_dim": 0, "enable_mixed_precision_lora": False} | own
            own |= {} if own["lora_dim"] else {"quantize_base": ""}  # the base trains
        return replace(self, **own)

    @property
    def num_prompts(self) -> int:
        """Prompts of an iteration on each rank."""
        return self.per_device_generation_batch_size * self.generation_batches

    def stop(self, total: int) -> int:
        """After how many of so many updates or iterations a run ends."""
        return min(total, self.test_stop_step) if self.enable_test_mode else total


def read_mapping(source: Any) -> dict[str, Any]:
    """A JSON file's or a mapping's; nothing's is empty."""
    if not isinstance(source, str | Path):
        return dict(source or {})
    data = json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{source} holds no JSON object")
    return data


def load_rlhf_config(source: str | Path | Mapping[str, Any] | None, step: Step, **flags: Any) -> RLHFConfig:
    """Return a step's options of a JSON file or a mapping, under ``flags``; ValueError names what is unknown."""
    data = read_mapping(source)
    merged: dict[str, Any] = {key: value for key, value in data.items() if key not in STEPS}
    merged |= data.get(step, {})
    merged |= flags
    known = {each.name for each in fields(RLHFConfig)}
    options: dict[str, Any] = {}
    value: Any
    for key, value in sorted(merged.items(), key=lambda item: item[0] in ALIASES):  # after the name they are of
        name = ALIASES.get(key, key)
        if name in SWITCHES:
            name, value = name.removeprefix("disable_"), 0.0 if value else None
        if name in REFUSED:
            if value:
                raise ValueError(f"{name} has no counterpart: {REFUSED[name]}")
        elif name in known:
            if name in ("data_path", "sft_only_data_path"):
                value = (value,) if isinstance(value, str) else tuple(value)
            if key in ALIASES and options.get(name, value) != value:
                raise ValueError(
                    f"{key} is {value!r} and {name} {options[name]!r}, which are one option: give one value"
                )
            options[name] = value
        elif name not in IGNORED:
            raise ValueError(f"there is no option {key!r}{did_you_mean(name, [*known, *ALIASES])}")
    if merged.get("align_overflow") and options.get("dtype") == "fp16":
        raise ValueError(
            "align_overflow: actor and critic leave out an update each by itself; in bf16 nothing overflows"
        )
    if step == "grpo":
        options.setdefault("num_generations", 8)
    if step in ("ppo", "dpo", "grpo"):  # the old and the new policy, and the reference, are then one function
        options.setdefault("dropout", 0.0)
    if options.get("unsupervised_dataset_name"):
        options.setdefault("unsup_coef", 27.8)
    config = RLHFConfig(**options)
    given = options.keys() & {"gradient_accumulation_steps", "num_mini_batches"}
    if step not in ("ppo", "grpo") or given != {"gradient_accumulation_steps"}:
        return config
    rows = config.num_prompts * config.num_generations
    window = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if rows % window:
        raise ValueError(
            f"gradient_accumulation_steps {config.gradient_accumulation_steps}: an update of {window} responses on "
            f"each rank, and an iteration has {rows}; set generation_batches, or num_mini_batches in its place"
        )
    return replace(config, num_mini_batches=rows // window)
