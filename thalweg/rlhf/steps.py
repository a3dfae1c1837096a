"""The steps from a base model to a chat model: SFT, reward model, then PPO, DPO or GRPO.

Each step reads models and data, trains, and leaves ``OUTPUT_DIR/<step>/model`` (in Hugging Face's layout, there only
when the step is done), ``metrics.jsonl`` and ``report.html``; ``OUTPUT_DIR/<step>/checkpoint`` is what a run that died
goes on from.  A later step begins from an earlier one's result unless its options name another model.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.data.batch_feed import cycle
from thalweg.engine import Engine
from thalweg.infer.config import EngineConfig
from thalweg.infer.loader.hf import load_tokenizer
from thalweg.parallel_dims import init_distributed
from thalweg.rlhf import checkpoint, losses, models
from thalweg.rlhf.config import RLHFConfig, Step, load_rlhf_config
from thalweg.rlhf.data import WHOLE_SPLITS, AnswerDataset, PackedAnswers, PromptSource, load_examples
from thalweg.rlhf.packing import forward_rows, response_logprobs
from thalweg.rlhf.policy import GRPOTrainer, PPOTrainer, RewardFn, reward_from_function, reward_from_model
from thalweg.rlhf.report import RunLog, write_report_of_steps
from thalweg.rlhf.rollout_ranks import RolloutRanks
from thalweg.utils.log import get_logger

log = get_logger(__name__)
Batch = dict[str, Tensor]
# The loss of a batch, over how many items it is a mean, and what else to record.
LossFn = Callable[[Engine, Batch], tuple[Tensor, int, dict[str, Tensor]]]


def run_step(step: Step, config: RLHFConfig) -> Path:
    """Run a step, or go on with it, unless it is done; returns the folder of its model; collective."""
    init_distributed()
    folder = Path(config.output_dir) / step
    model = folder / "model"
    if model.is_dir():
        log.info("%s is done: %s", step, model)
        return model
    torch.manual_seed(config.seed)
    tokenizer = models.load_tokenizer(_find_model(step, config))
    train = _train_supervised if step in ("sft", "reward", "dpo") else _train_policy
    with ExitStack() as engines:
        trained = train(step, config, tokenizer, folder, engines)
        if "ema" in trained:
            models.save_model(trained["ema"], tokenizer, folder / "model_ema")
        if "model" in trained:  # a rank that only generates has none
            models.save_model(trained["model"], tokenizer, model)
    return model


def run_all(source: Any, algorithm: Step, only: Sequence[int] = (), **flags: Any) -> Path:
    """Run SFT, the reward model where ``algorithm`` asks for one, and ``algorithm``; a run that died goes on.

    ``only``: the steps' numbers, 1 to 3, by default all.  ``actor_model``, ``reward_model`` and their ``_zero_stage``
    among the flags are DeepSpeed-Chat's: what SFT and the reward model begin with, and train at.
    """
    begins = {
        "sft": {"model_name_or_path": flags.pop("actor_model", ""), "zero_stage": flags.get("actor_zero_stage")},
        "reward": {
            "reward_model_name_or_path": flags.pop("reward_model", ""), "zero_stage": flags.get("reward_zero_stage")
        },
    }  # fmt: skip
    final = load_rlhf_config(source, algorithm, **flags)
    has_reward = final.reward_function or final.reward_model_name_or_path or final.critic_model_name_or_path
    needs_reward_model = algorithm != "dpo" and not has_reward
    steps: list[Step] = ["sft", *(("reward",) if needs_reward_model else ()), algorithm]
    numbers = {"sft": 1, "reward": 2, algorithm: 3}
    steps = [step for step in steps if not only or numbers[step] in only]
    if not steps:
        raise ValueError(f"step {only[0]} has nothing to do: {algorithm} has no reward model to train")
    for step in steps:
        begin = {option: value for option, value in begins.get(step, {}).items() if value not in ("", None)}
        model = run_step(step, load_rlhf_config(source, step, **flags | begin))
    write_report_of_steps(Path(final.output_dir), numbers)
    return model


def _find_model(step: Step, config: RLHFConfig) -> str:
    """Where a step's model begins: what its options name, or an earlier step's result."""
    sft = Path(config.output_dir) / "sft" / "model"
    named = {
        "ppo": config.actor_model_name_or_path, "grpo": config.actor_model_name_or_path,
        "reward": config.reward_model_name_or_path,
    }.get(step, "")  # fmt: skip
    path = named or (str(sft) if step != "sft" and sft.is_dir() else config.model_name_or_path)
    if not path:
        raise ValueError(f"{step} has no model to begin with: set model_name_or_path")
    return path


# SFT, reward model, DPO: batches in, a loss out


def _train_supervised(
    step: Step, config: RLHFConfig, tokenizer: Any, folder: Path, engines: ExitStack
) -> dict[str, Engine]:
    whole = config.sft_only_data_path if step == "sft" else ()
    examples = load_examples(config.data_path, config.data_split, step, config.seed, whole=whole)
    columns = ("chosen",) if step == "sft" else ("chosen", "rejected")
    data: Any = AnswerDataset(examples, tokenizer, config.max_seq_len, columns)
    if config.packing and step == "sft":
        data = PackedAnswers(data, config.max_seq_len)
    num_ranks = models.num_data_ranks(config, dist.get_world_size())
    size = config.per_device_train_batch_size * config.gradient_accumulation_steps * num_ranks
    num_batches = len(data) // (config.per_device_train_batch_size * num_ranks)  # of an epoch
    updates_per_epoch = -(-num_batches // config.gradient_accumulation_steps)  # the last of fewer batches, perhaps
    num_updates = config.num_train_steps or config.num_train_epochs * updates_per_epoch
    if len(data) < size and not config.num_train_steps:
        raise ValueError(
            f"{step}: {len(data)} examples (data_split {config.data_split}; --data_split {WHOLE_SPLITS[step]} takes"
            f" all) do not fill one update of {size}: give more, or smaller batches"
        )
    path = _find_model(step, config)
    is_reward = step == "reward"
    loaded = models.ValueModel.from_pretrained(path) if is_reward else models.load_policy(path)
    model: nn.Module = models.adapt(loaded, config, None if is_reward else "CAUSAL_LM")
    reference = None
    if step == "dpo" and not _has_frozen_base(config):
        reference = engines.enter_context(closing(_build_reference(path, config)))
    engine = engines.enter_context(closing(models.build_engine(
        model, config, num_updates=num_updates, accumulation=config.gradient_accumulation_steps, training_data=data,
        collate_fn=data.collate, name=step,
    )))  # fmt: skip
    loss_fns: dict[str, LossFn] = {"sft": _sft, "reward": _reward, "dpo": partial(_dpo, config, reference)}
    start, _ = checkpoint.resume(folder / "checkpoint", {"model": engine})
    run_log, batches = RunLog(folder, start), cycle(engine.training_dataloader)
    for update in range(start + 1, config.stop(num_updates) + 1):
        before, metrics = engine.global_steps, list[dict[str, float]]()
        while engine.global_steps == before:
            engine.train()
            loss, num_items, more = loss_fns[step](engine, next(batches))
            engine.backward(loss, num_items=num_items)
            engine.step()
            metrics.append({key: float(value) for key, value in {"loss": loss.detach(), **more}.items()})
        means = {key: sum(each[key] for each in metrics) / len(metrics) for key in metrics[0]}
        _record(engine, run_log, step, update, models.mean_over_ranks(means))
        if config.save_interval and update % config.save_interval == 0 and update < num_updates:
            checkpoint.commit(folder / "checkpoint", update, {"model": engine}, {})
    run_log.write_report(step)
    return {"model": engine}


def _build_reference(path: str, config: RLHFConfig, mesh: DeviceMesh | None = None) -> Engine:
    stage = config.zero_stage if config.reference_zero_stage is None else config.reference_zero_stage
    options = replace(config, zero_stage=stage)
    policy = models.load_policy(path)
    return models.build_frozen_engine(policy, options, offload=config.offload_reference_model, mesh=mesh)


def _record(
    engine: Engine, run_log: RunLog, step: str, update: int, metrics: Mapping[str, float], samples: Any = ()
) -> None:
    run_log.add(update, metrics, samples)
    engine.monitor.write_events([(f"{step}/{name}", value, update) for name, value in metrics.items()])
    for number, sample in enumerate(samples):
        text = f"**{sample['prompt']}** {sample['response']} ({sample['reward']:.4g})"
        engine.monitor.text(f"{step}/sample {number}", text, update)
    log.info("%s %d: %s", step, update, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _sft(engine: Engine, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    mask, (logprobs, _) = batch["response_mask"][:, 1:], response_logprobs(engine, batch)
    return -losses.masked_mean(logprobs, mask.to(logprobs.device)), int(mask.sum()), {}


def _reward(engine: Engine, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    values, places = forward_rows(engine, batch)
    chosen, rejected = losses.end_scores(values[places], batch["attention_mask"]).chunk(2)
    more = {"accuracy": (chosen > rejected).float().mean(), "margin": (chosen - rejected).detach().mean()}
    return losses.pairwise_loss(chosen, rejected), len(chosen), more


def _dpo(
    config: RLHFConfig, reference: Engine | None, engine: Engine, batch: Batch
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """DPO of a batch whose first half is chosen; ``reference`` None: the actor without its adapters."""
    with models.as_reference(reference, engine) as base:
        ref_chosen, ref_rejected = _summed_logprobs(base, batch).chunk(2)
    chosen, rejected = _summed_logprobs(engine, batch).chunk(2)
    loss = losses.dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta=config.beta, label_smoothing=config.label_smoothing
    )
    margin = config.beta * ((chosen - ref_chosen) - (rejected - ref_rejected)).detach()
    return loss, len(chosen), {"accuracy": (margin > 0).float().mean(), "margin": margin.mean()}


def _summed_logprobs(engine: Engine, batch: Batch) -> Tensor:
    return response_logprobs(engine, batch)[0].sum(1)


def _has_frozen_base(config: RLHFConfig) -> bool:
    return bool(config.lora_dim and config.only_optimize_lora)


# PPO and GRPO


def _train_policy(
    step: Step, config: RLHFConfig, tokenizer: Any, folder: Path, engines: ExitStack
) -> dict[str, Engine]:
    prompts = PromptSource(
        load_examples(config.data_path, config.data_split, step, config.seed), tokenizer, config.max_prompt_seq_len,
        config.seed,
    )  # fmt: skip
    options, critic_options, path = config.of("actor"), config.of("critic"), _find_model(step, config)
    if config.rollout_ranks and models.num_tensor_ranks(config) > 1:
        raise ValueError("rollout_ranks and tensor_parallel: ranks that train beside others divide no layers; give one")
    ranks = RolloutRanks(config.rollout_ranks, config.inference_tp_size) if config.rollout_ranks else None
    if ranks is not None and ranks.is_generating:
        ranks.generate(models.load_policy(path, options), prompts.longest + config.max_answer_seq_len)
        return {}
    mesh, world_size = (None, dist.get_world_size()) if ranks is None else (ranks.mesh, ranks.num_training)
    num_prompts = models.num_data_ranks(config, world_size) * config.num_prompts
    iterations = config.num_train_steps or -(-config.num_train_epochs * len(prompts.items) // num_prompts)
    rows = config.num_prompts * config.num_generations // config.num_mini_batches
    window = rows // config.per_device_train_batch_size
    num_updates = iterations * config.ppo_epochs * config.num_mini_batches
    shared: dict[str, Any] = {"num_updates": num_updates, "accumulation": window, "mesh": mesh}
    policy = models.load_policy(path, options)
    actor = engines.enter_context(closing(models.build_engine(policy, options, name="actor", **shared)))
    reference = None
    if not _has_frozen_base(options):
        reference = engines.enter_context(closing(_build_reference(path, options, mesh)))
    ema = pretraining = None
    if config.enable_ema:  # in fp32: a step of the average is smaller than bf16 can tell
        averaged = replace(options, dtype="fp32", gradient_checkpointing=False)
        # Its shards are the actor's.
        offload = config.offload_reference_model and options.zero_stage == 3
        frozen = models.build_frozen_engine(models.load_policy(path, averaged), averaged, offload=offload, mesh=mesh)
        ema = engines.enter_context(closing(frozen))
    if config.unsup_coef:
        texts = load_examples(
            (config.unsupervised_dataset_name,), "1,0,0", "sft", config.seed,
            config_name=config.unsupervised_dataset_config_name,
        )  # fmt: skip
        pretraining = AnswerDataset(texts, tokenizer, config.max_seq_len)
    arguments = config, actor, reference, tokenizer, prompts, _load_reward(config, engines, tokenizer, mesh)
    more: dict[str, Any] = {"ema": ema, "pretraining": pretraining, "rollout_ranks": ranks}
    if step == "ppo":
        begin = config.critic_model_name_or_path or _find_reward_model(config) or path
        values = models.adapt(models.ValueModel.from_pretrained(begin), critic_options)
        critic = engines.enter_context(closing(models.build_engine(values, critic_options, name="critic", **shared)))
        trainer: GRPOTrainer = PPOTrainer(*arguments, critic=critic, **more)
    else:
        trainer = GRPOTrainer(*arguments, **more)
    engines.callback(trainer.close)
    start = trainer.resume(folder / "checkpoint")
    run_log = RunLog(folder, start)
    iterations = config.stop(iterations)
    for iteration in range(start + 1, iterations + 1):
        metrics = trainer.step(last=iteration == iterations)
        _record(actor, run_log, step, iteration, metrics, trainer.samples)
        if config.print_answers and iteration % config.print_answers_interval == 0:
            for sample in trainer.samples:
                log.info("%(prompt)s|%(response)s (reward %(reward).4g)", sample)
        if config.save_interval and iteration % config.save_interval == 0 and iteration < iterations:
            trainer.save(folder / "checkpoint")
    run_log.write_report(step)
    return {"model": actor} | ({} if ema is None else {"ema": ema})


def _find_reward_model(config: RLHFConfig) -> str:
    trained = Path(config.output_dir) / "reward" / "model"
    named = config.reward_model_name_or_path or config.critic_model_name_or_path  # as DeepSpeed-Chat's third step
    return named or (str(trained) if trained.is_dir() else "")


def _load_reward(config: RLHFConfig, engines: ExitStack, tokenizer: Any, mesh: DeviceMesh | None) -> RewardFn:
    if config.reward_function:
        return reward_from_function(_load_function(config.reward_function))
    path = _find_reward_model(config)
    if not path:
        raise ValueError("there is nothing that scores: set reward_function or reward_model_name_or_path")
    model, options = models.ValueModel.from_pretrained(path, needs_head=True), config.of("critic")
    own = load_tokenizer(path, EngineConfig())  # None where the folder has none
    if own is not None and not tokenizer.get_vocab().items() <= own.get_vocab().items():
        raise ValueError(f"{path}: a reward model with other tokens than the actor's scores other texts; give another")
    engine = models.build_frozen_engine(model, options, offload=config.offload_reward_model, mesh=mesh)
    return reward_from_model(engines.enter_context(closing(engine)), config.per_device_train_batch_size)


def _load_function(name: str) -> Callable[..., Any]:
    """The function FILE.py:NAME or MODULE:NAME."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise ValueError(f"reward_function: there is no file {source}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif source:
        module = importlib.import_module(source)
    else:
        raise ValueError(f"reward_function is {name!r}: give FILE.py:NAME or MODULE:NAME")
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward_function: {source} has no function {attribute}")
    return function
