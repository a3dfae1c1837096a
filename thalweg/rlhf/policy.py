"""GRPO and PPO: an iteration is rollout, scores, updates.

::

    prompts --actor's inference engine--> responses --reward--> scores
            actor, reference --> log-probabilities, KL          critic (PPO) --> values
            GRPO: advantage = the score above its group's       PPO: generalised advantage estimation
    updates: ppo_epochs passes over the responses, each in num_mini_batches

What an iteration draws depends on the seed, its number and the rank, so a run that goes on has the same samples.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.engine import Engine
from thalweg.infer.types import SamplingParams
from thalweg.rlhf import checkpoint, losses
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.data import AnswerDataset, Example, PromptSource, pad_token_id
from thalweg.rlhf.models import (
    adapters_disabled,
    all_reduce_on_host,
    mean_over_ranks,
    rollout_logprobs,
    rollout_values,
    update_ema,
)
from thalweg.rlhf.rollout import Rollout, generate_rollout
from thalweg.rlhf.weight_sync import HybridEngine

# Scores of responses: the rollout, each row's prompt and response as texts, each row's example.
RewardFn = Callable[[Rollout, list[str], list[str], list[Example]], Tensor]
_LARGE_PRIME = 1_000_003  # seeds of two iterations are as far apart


def reward_from_function(function: Callable[..., Sequence[float]]) -> RewardFn:
    """A verifiable reward: ``function(prompts=..., completions=..., **columns)`` returns a number for each row, as
    TRL's reward functions do; ``columns``: those of the examples' that it has parameters for, or all."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = {parameter.name for parameter in parameters}

    def score(_: Rollout, prompts: list[str], completions: list[str], examples: list[Example]) -> Tensor:
        columns = {name: [example[name] for example in examples] for name in examples[0] if takes_all or name in taken}
        rewards = list(function(**columns | {"prompts": prompts, "completions": completions}))
        if len(rewards) != len(completions):
            raise ValueError(f"the reward function gave {len(rewards)} numbers for {len(completions)} responses")
        return torch.tensor([float(reward) for reward in rewards])

    return score


def reward_from_model(engine: Engine, batch_size: int) -> RewardFn:
    """A reward model's score of prompt and response, at the last token."""

    def score(rollout: Rollout, *_: Any) -> Tensor:
        return losses.end_scores(rollout_values(engine, rollout, batch_size), rollout.attention_mask)

    return score


@dataclasses.dataclass
class Experience:
    """A rollout and what is known of it; tables (rows, T - 1)."""

    rollout: Rollout
    scores: Tensor  # (rows,)
    logprobs: Tensor  # the actor's before the updates
    reference_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None = None  # PPO's
    returns: Tensor | None = None

    def __getitem__(self, rows: slice) -> Experience:
        rollout = self.rollout[rows]
        tables = {
            name: None if (table := getattr(self, name)) is None else table[rows, : rollout.mask.shape[1]]
            for name in ("logprobs", "reference_logprobs", "advantages", "values", "returns")
        }
        return Experience(rollout, self.scores[rows], **tables)  # type: ignore[arg-type]


class GRPOTrainer:
    """Group relative policy optimisation (Shao et al. 2024).

    ``actor``: an engine of a causal model whose window is an update's micro-batches; ``reference``: a frozen one, or
    None where the actor's adapters can be disabled.  ``reward``: what scores responses.  ``ema``: a frozen engine in
    fp32, sharded as the actor is, that becomes the average of its weights.  ``pretraining``: texts whose loss is added.
    """

    def __init__(
        self,
        config: RLHFConfig,
        actor: Engine,
        reference: Engine | None,
        tokenizer: Any,
        prompts: PromptSource,
        reward: RewardFn,
        *,
        ema: Engine | None = None,
        pretraining: AnswerDataset | None = None,
    ) -> None:
        num_rows = config.per_device_generation_batch_size * config.num_generations
        if num_rows % (config.per_device_train_batch_size * config.num_mini_batches):
            raise ValueError(
                f"per_device_generation_batch_size x num_generations is {num_rows} responses, no whole number of "
                f"num_mini_batches x per_device_train_batch_size ({config.num_mini_batches} x "
                f"{config.per_device_train_batch_size})"
            )
        self.config, self.actor, self.reference, self.tokenizer = config, actor, reference, tokenizer
        self.prompts, self.reward, self.iteration = prompts, reward, 0
        self.ema, self.pretraining, self._num_micro_batches = ema, pretraining, 0
        self.hybrid = HybridEngine(actor)
        self.params = SamplingParams(
            max_tokens=config.max_answer_seq_len, temperature=config.temperature,
            stop_token_ids=(tokenizer.eos_token_id,), ignore_eos=True,
        )  # fmt: skip
        self.samples: list[dict[str, Any]] = []

    @property
    def engines(self) -> dict[str, Engine]:
        """What a run commits, by name."""
        return {"actor": self.actor} | ({} if self.ema is None else {"ema": self.ema})

    def step(self) -> dict[str, float]:
        """Run an iteration; returns its metrics, means over all ranks; collective."""
        experience, metrics = self.collect()
        self._num_micro_batches = 0
        updates: list[dict[str, float]] = []
        rows = len(experience.rollout) // self.config.num_mini_batches
        for _ in range(self.config.ppo_epochs):
            for first in range(0, len(experience.rollout), rows):
                updates.append(self.update(experience[first : first + rows]))
        metrics |= {key: sum(each[key] for each in updates) / len(updates) for key in updates[0]}
        if self.ema is not None:
            update_ema(self.ema, self.actor, self.config.ema_decay)
        self.iteration += 1
        return mean_over_ranks(metrics)

    def collect(self) -> tuple[Experience, dict[str, float]]:
        """Generate responses and score them; collective."""
        config, size = self.config, self.config.per_device_train_batch_size
        rank, world_size, count = dist.get_rank(), dist.get_world_size(), config.per_device_generation_batch_size
        items = self.prompts.take(self.iteration, count, rank, world_size)
        with self.hybrid.generation() as core:
            rollout = generate_rollout(
                core, [prompt for prompt, _ in items], self.params, pad_id=pad_token_id(self.tokenizer),
                seed=config.seed + _LARGE_PRIME * (self.iteration * world_size + rank),
                num_samples=config.num_generations,
            )  # fmt: skip
        examples = [example for _, example in items for _ in range(config.num_generations)]
        prompts = self.tokenizer.batch_decode([p for p, _ in items for _ in range(config.num_generations)])
        responses = self.tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
        self._set_training(False)
        scores = self.reward(rollout, prompts, responses, examples).float()
        logprobs = rollout_logprobs(self.actor, rollout, size, config.temperature)
        if self.reference is None:
            with adapters_disabled(self.actor) as base:
                reference_logprobs = rollout_logprobs(base, rollout, size, config.temperature)
        else:
            reference_logprobs = rollout_logprobs(self.reference, rollout, size, config.temperature)
        experience = self.advantages(Experience(rollout, scores, logprobs, reference_logprobs, torch.empty(0)))
        mask = rollout.mask
        metrics = {
            "reward": scores.mean(),
            "kl": (logprobs - reference_logprobs).sum(1).mean(),
            "length": mask.sum(1).float().mean(),
            "ended": rollout.ended.float().mean(),
        }
        if config.temperature == 1:  # what the inference engine says of its own draws, against the trainer
            metrics["logprob_gap"] = losses.masked_mean((logprobs - rollout.logprobs).abs(), mask)
        self.samples = [
            {"prompt": prompts[row], "response": responses[row], "reward": float(scores[row])}
            for row in range(0, len(rollout), config.num_generations)
        ][:4]
        return experience, {key: float(value) for key, value in metrics.items()}

    def advantages(self, experience: Experience) -> Experience:
        """Every token of a response has its response's advantage."""
        per_row = losses.group_advantages(experience.scores, self.config.num_generations)
        advantages = per_row[:, None] * experience.rollout.mask
        return dataclasses.replace(experience, advantages=advantages)

    def update(self, experience: Experience) -> dict[str, float]:
        """Make one update of a mini-batch of this rank; returns its metrics; collective."""
        self._set_training(True)
        sums: dict[str, float] = {}
        size = self.config.per_device_train_batch_size
        for first in range(0, len(experience.rollout), size):
            for key, value in self.micro_batch(experience[first : first + size]).items():
                sums[key] = sums.get(key, 0.0) + float(value) * size / len(experience.rollout)
        return sums

    def micro_batch(self, part: Experience) -> dict[str, Tensor | float]:
        """Forward, backward, and the end of a micro-batch."""
        config, mask = self.config, part.rollout.mask.to(self.actor.device)
        logprobs, entropy = self._actor_forward(part)
        policy, clipped = losses.policy_loss(
            logprobs, part.logprobs.to(logprobs), part.advantages.to(logprobs), mask, clip_range=config.clip_range
        )
        kl = losses.masked_mean(losses.kl_estimate(logprobs, part.reference_logprobs.to(logprobs)), mask)
        self.actor.backward(policy + config.beta * kl + self._pretraining_loss(), num_items=int(mask.sum()))
        self.actor.step()
        return {"policy_loss": policy.detach(), "clipped": clipped.detach(), "entropy": entropy}

    def _pretraining_loss(self) -> Tensor | float:
        """The loss of the next texts, times its coefficient; which they are depends on the iteration alone."""
        if self.pretraining is None:
            return 0.0
        size, data, config = self.config.per_device_train_batch_size, self.pretraining, self.config
        num_each = config.ppo_epochs * config.per_device_generation_batch_size * config.num_generations // size
        number = (self.iteration * num_each + self._num_micro_batches) * dist.get_world_size() + dist.get_rank()
        self._num_micro_batches += 1
        rows = [data[(number * size + i) % len(data)] for i in range(size)]
        batch = {name: table.to(self.actor.device) for name, table in data.collate(rows).items()}
        logits = self.actor(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return config.unsup_coef * losses.sft_loss(logits, batch["input_ids"], batch["response_mask"][:, 1:])

    def _actor_forward(self, part: Experience) -> tuple[Tensor, Tensor]:
        rollout, device = part.rollout, self.actor.device
        ids = rollout.input_ids.to(device)
        logits = self.actor(input_ids=ids, attention_mask=rollout.attention_mask.to(device)).logits
        with torch.no_grad():
            entropy = losses.masked_mean(losses.token_entropy(logits), rollout.mask.to(device))
        return losses.token_logprobs(logits, ids, self.config.temperature), entropy

    def _set_training(self, training: bool) -> None:
        """Gradient checkpointing asks for the mode of training; dropout is 0."""
        for engine in self.engines.values():
            engine.train(training)

    # The run's state

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from, beside its engines; JSON."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.iteration = state["iteration"]

    def save(self, directory: str | Path) -> None:
        """Commit all engines and the run's state as one; collective."""
        checkpoint.commit(directory, self.iteration, self.engines, self.state_dict())

    def resume(self, directory: str | Path) -> int:
        """Go on from what :meth:`save` committed last, if anything; returns the iterations done; collective."""
        step, state = checkpoint.resume(directory, self.engines)
        if state:
            self.load_state_dict(state)
        return step


class PPOTrainer(GRPOTrainer):
    """Proximal policy optimisation with a KL penalty (Ziegler et al. 2019; Ouyang et al. 2022); ``critic``: an engine
    of a :class:`.models.ValueModel`."""

    def __init__(self, config: RLHFConfig, *args: Any, critic: Engine, **kwargs: Any) -> None:
        self.critic = critic
        self.kl = losses.KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        super().__init__(config, *args, **kwargs)

    @property
    def engines(self) -> dict[str, Engine]:
        """The critic, too."""
        return super().engines | {"critic": self.critic}

    def advantages(self, experience: Experience) -> Experience:
        """Generalised advantages of the penalised rewards, whitened over all ranks' tokens."""
        config, rollout, mask = self.config, experience.rollout, experience.rollout.mask
        values = rollout_values(self.critic, rollout, config.per_device_train_batch_size)[:, :-1]
        logprobs, reference = experience.logprobs, experience.reference_logprobs
        rewards = losses.kl_penalized_rewards(
            experience.scores, logprobs, reference, mask, kl_coef=self.kl.coef, clip=config.reward_clip
        )
        advantages, returns = losses.gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
        advantages = losses.whiten(advantages, mask, all_reduce_on_host)
        sizes = mean_over_ranks({"kl": float((logprobs - reference).sum(1).mean())})
        self.kl.update(sizes["kl"], len(rollout) * dist.get_world_size())
        return dataclasses.replace(experience, advantages=advantages, values=values, returns=returns)

    def micro_batch(self, part: Experience) -> dict[str, Tensor | float]:
        """The same of actor and critic."""
        config, mask = self.config, part.rollout.mask.to(self.actor.device)
        num_tokens = int(mask.sum())
        logprobs, entropy = self._actor_forward(part)
        policy, clipped = losses.policy_loss(
            logprobs, part.logprobs.to(logprobs), part.advantages.to(logprobs), mask, clip_range=config.clip_range
        )
        self.actor.backward(policy + self._pretraining_loss(), num_items=num_tokens)
        self.actor.step()
        assert part.values is not None and part.returns is not None, "advantages() has made them"
        rollout, device = part.rollout, self.critic.device
        values = self.critic(
            input_ids=rollout.input_ids.to(device), attention_mask=rollout.attention_mask.to(device)
        )[:, :-1]  # fmt: skip
        value = losses.value_loss(
            values, part.values.to(values), part.returns.to(values), mask, clip_range=config.value_clip_range
        )
        self.critic.backward(value, num_items=num_tokens)
        self.critic.step()
        return {
            "policy_loss": policy.detach(), "value_loss": value.detach(), "clipped": clipped.detach(),
            "entropy": entropy, "kl_coef": self.kl.coef,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, too."""
        return super().state_dict() | {"kl_coef": self.kl.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.kl.coef = state["kl_coef"]
