"""GRPO and PPO: an iteration is rollout, scores, updates.

::

    prompts --actor's inference engine--> responses --reward--> scores
            actor, reference --> log-probabilities, KL          critic (PPO) --> values
            GRPO: advantage = the score above its group's       PPO: generalised advantage estimation
    updates: ppo_epochs passes over the responses, each in num_mini_batches

What an iteration draws depends on the seed, its number and the rank, so a run that goes on has the same samples.

With ``rollout_ahead`` a thread generates iteration i + 1's responses by the weights that iteration i began with, while
i trains.  They are one iteration old when they are used, never more, and each token is weighed by how much likelier it
has become (:func:`.losses.importance_weights`)::

    weights of iteration   0                1                2
    generation             r0  r1 ........  r2 ........  r3
    training                   r0           r1           r2
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.engine import Engine
from thalweg.infer.config import EngineConfig
from thalweg.infer.types import SamplingParams
from thalweg.parallel_dims import control_group
from thalweg.rlhf import checkpoint, losses, models
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.data import AnswerDataset, Example, PromptSource, end_ids, pad_token_id
from thalweg.rlhf.packing import forward_rows, response_logprobs
from thalweg.rlhf.rollout import Rollout, RolloutAhead, generate_rollout
from thalweg.rlhf.rollout_ranks import RolloutRanks
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
        names = {name for example in examples for name in example if takes_all or name in taken}
        columns = {name: [example.get(name) for example in examples] for name in names}
        rewards = list(function(**columns | {"prompts": prompts, "completions": completions}))
        if len(rewards) != len(completions):
            raise ValueError(f"the reward function gave {len(rewards)} numbers for {len(completions)} responses")
        scores = torch.tensor([math.nan if reward is None else float(reward) for reward in rewards])
        if bad := (~scores.isfinite()).nonzero().flatten().tolist():  # each update would be left out, in silence
            raise ValueError(
                f"the reward function gave {rewards[bad[0]]} for the response {completions[bad[0]][:80]!r}"
            )
        return scores

    return score


def reward_from_model(engine: Engine, batch_size: int) -> RewardFn:
    """A reward model's score of prompt and response, at the last token."""

    def score(rollout: Rollout, *_: Any) -> Tensor:
        return losses.end_scores(models.rollout_values(engine, rollout, batch_size), rollout.attention_mask)

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
    weights: Tensor | None = None  # of tokens that an older policy drew

    def __getitem__(self, rows: slice) -> Self:
        rollout = self.rollout[rows]
        tables = {
            name: None if (table := getattr(self, name)) is None else table[rows, : rollout.mask.shape[1]]
            for name in ("logprobs", "reference_logprobs", "advantages", "values", "returns", "weights")
        }
        return Experience(rollout, self.scores[rows], **tables)  # type: ignore[arg-type]


class GRPOTrainer:
    """Group relative policy optimisation (Shao et al. 2024).

    ``actor``: an engine of a causal model whose window is an update's micro-batches; ``reference``: a frozen one, or
    None where the actor's adapters can be disabled.  ``reward``: what scores responses.  ``ema``: a frozen engine in
    fp32, sharded as the actor is, that becomes the average of its weights.  ``pretraining``: texts whose loss is added.
    """

    min_generations = 2  # one response alone is its group's mean, so all advantages were 0

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
        rollout_ranks: RolloutRanks | None = None,
    ) -> None:
        if config.num_generations < self.min_generations:
            raise ValueError("num_generations is 1, and GRPO compares the responses to a prompt: give 2 or more")
        num_rows = config.num_prompts * config.num_generations
        if num_rows % (config.per_device_train_batch_size * config.num_mini_batches):
            raise ValueError(
                f"per_device_generation_batch_size x generation_batches x num_generations is {num_rows} responses, no "
                f"whole number of num_mini_batches x per_device_train_batch_size ({config.num_mini_batches} x "
                f"{config.per_device_train_batch_size})"
            )
        self.config, self.actor, self.reference, self.tokenizer = config, actor, reference, tokenizer
        self.prompts, self.reward, self.iteration = prompts, reward, 0
        self.ema, self.pretraining, self._num_micro_batches = ema, pretraining, 0
        models.refuse_divided_sequences(actor)
        shares_device = actor.device.type != "cpu" and rollout_ranks is None
        if config.rollout_ahead and config.inference_tp_size > 1 and shares_device:
            raise ValueError(
                "rollout_ahead and inference_tp_size: on an accelerator generation's collectives and training's may "
                "wait for each other; give one of the two"
            )
        # The ranks that have other responses; those that divide each layer with this one have the same.
        self.group, self.num_ranks = actor.meshes.dp.get_group(), actor.meshes.dp.size()
        self.rank = actor.meshes.dp.get_local_rank()
        self._tensor_group = None if actor.meshes.tp is None else actor.meshes.tp.get_group()
        # A cache for sequences of the model's length would take most of a device, and what training then keeps there
        # (Adam's moments) comes after the first rollout.
        max_model_len = prompts.longest + config.max_answer_seq_len
        self.hybrid: HybridEngine | RolloutRanks = rollout_ranks or HybridEngine(
            actor, EngineConfig(tensor_parallel_size=config.inference_tp_size, max_model_len=max_model_len)
        )
        self.params = SamplingParams(
            max_tokens=config.max_answer_seq_len, temperature=config.temperature,
            stop_token_ids=tuple(end_ids(tokenizer)),  # and at what the generation config ends with
        )  # fmt: skip
        self.samples: list[dict[str, Any]] = []
        self._ahead: RolloutAhead | None = None

    @property
    def engines(self) -> dict[str, Engine]:
        """What a run commits, by name."""
        return {"actor": self.actor} | ({} if self.ema is None else {"ema": self.ema})

    def step(self, *, last: bool = False) -> dict[str, float]:
        """Run an iteration; returns its metrics, means over all ranks; collective.  ``last``: none comes after it, for
        which responses would have to be generated ahead."""
        experience, metrics = self.collect(last=last)
        self._num_micro_batches = 0
        rows = len(experience.rollout) // self.config.num_mini_batches
        firsts = range(0, len(experience.rollout), rows)
        updates = [self.update(experience[i : i + rows]) for _ in range(self.config.ppo_epochs) for i in firsts]
        metrics |= {key: sum(each[key] for each in updates) / len(updates) for key in updates[0]}
        if self.ema is not None:
            models.update_ema(self.ema, self.actor, self.config.ema_decay)
        self.iteration += 1
        return models.mean_over_ranks(metrics, self.group)

    def _items(self, iteration: int) -> list[tuple[list[int], Example]]:
        return self.prompts.take(iteration, self.config.num_prompts, self.rank, self.num_ranks)

    def _begin_rollout(self, iteration: int) -> RolloutAhead:
        """Let an iteration's responses to this rank's prompts be generated by the weights of now, by each of its tensor
        group's ranks to some of them; collective."""
        prompts = [prompt for prompt, _ in self._items(iteration)]
        size, own = (1, 0) if self._tensor_group is None else (self._tensor_group.size(), self._tensor_group.rank())
        num_each = -(-len(prompts) // size)
        arguments: dict[str, Any] = {
            "prompts": prompts[own * num_each : (own + 1) * num_each], "params": self.params,
            "pad_id": pad_token_id(self.tokenizer), "num_samples": self.config.num_generations,
            "seed": self.config.seed + _LARGE_PRIME * (iteration * self.num_ranks + self.rank) + own * num_each,
        }  # fmt: skip
        if isinstance(self.hybrid, RolloutRanks):
            return self.hybrid.begin(self.iteration, self.actor, arguments, self._join_parts)
        generate = partial(generate_rollout, **arguments)
        if iteration > self.iteration:
            generation, device = self.hybrid.generation(), self.actor.device
            return RolloutAhead.begin(self.iteration, generation, generate, self._join_parts, device)
        with self.hybrid.generation() as core:
            part = generate(core)
        return RolloutAhead(self.iteration, lambda: part, self._join_parts)

    def _join_parts(self, part: Rollout) -> Rollout:
        """The tensor group's responses, each rank's a part; collective over it."""
        if self._tensor_group is None:
            return part
        parts: list[Any] = [None] * self._tensor_group.size()
        dist.all_gather_object(parts, part, group=control_group(self._tensor_group))
        return Rollout.concat(parts, pad_token_id(self.tokenizer))

    def _next_rollout(self, last: bool) -> tuple[Rollout, int]:
        """This iteration's responses, and how many iterations old the weights are that drew them; collective."""
        ahead = self._ahead or self._begin_rollout(self.iteration)
        rollout, version, self._ahead = ahead.result(), ahead.version, None
        if self.config.rollout_ahead and not last:
            self._ahead = self._begin_rollout(self.iteration + 1)
        staleness = self.iteration - version
        assert 0 <= staleness <= self.config.rollout_ahead, f"responses of iteration {version} at {self.iteration}"
        return rollout, staleness

    def collect(self, *, last: bool = False) -> tuple[Experience, dict[str, float]]:
        """Generate responses and score them; collective."""
        config, size = self.config, self.config.per_device_train_batch_size
        items = self._items(self.iteration)
        rollout, staleness = self._next_rollout(last)
        examples = [example for _, example in items for _ in range(config.num_generations)]
        # The tokenizer's token of the beginning is no part of a text.
        texts = [prompt[1:] if prompt[0] == self.tokenizer.bos_token_id else prompt for prompt, _ in items]
        prompts = self.tokenizer.batch_decode([text for text in texts for _ in range(config.num_generations)])
        responses = self.tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
        self._set_training(False)
        scores = self.reward(rollout, prompts, responses, examples).float()
        if self._tensor_group is not None:  # a function need not say the same everywhere
            dist.broadcast(scores, group_src=0, group=control_group(self._tensor_group, scores.device))
        logprobs = models.rollout_logprobs(self.actor, rollout, size, config.temperature)
        with models.as_reference(self.reference, self.actor) as engine:
            reference_logprobs = models.rollout_logprobs(engine, rollout, size, config.temperature)
        experience = self.advantages(Experience(rollout, scores, logprobs, reference_logprobs, torch.empty(0)))
        mask, ahead = rollout.mask, {}
        if config.rollout_ahead:
            weights = losses.importance_weights(logprobs, rollout.logprobs, mask, cap=config.importance_cap)
            experience = dataclasses.replace(experience, weights=weights)
            ahead = {"staleness": float(staleness), "importance_weight": losses.masked_mean(weights, mask)}
        metrics = {
            "reward": scores.mean(),
            "kl": (logprobs - reference_logprobs).sum(1).mean(),
            "length": mask.sum(1).float().mean(),
            "ended": rollout.ended.float().mean(),
            **ahead,
        }
        if config.temperature == 1 and staleness == 0:  # what the engine says of its own draws, and the trainer
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
        clip_range, mask = self.config.clip_range, part.rollout.mask.to(self.actor.device)
        logprobs, logits = response_logprobs(self.actor, vars(part.rollout), self.config.temperature)
        with torch.no_grad():
            entropy = losses.token_entropy(logits).sum() / max(len(logits), 1)
        del logits  # the backward pass need not hold them
        weights = None if part.weights is None else part.weights.to(logprobs)
        old, advantages = part.logprobs.to(logprobs), part.advantages.to(logprobs)
        policy, clipped = losses.policy_loss(logprobs, old, advantages, mask, clip_range=clip_range, weights=weights)
        loss = policy + self._kl_loss(part, logprobs, mask) + self._pretraining_loss()
        self.actor.backward(loss, num_items=int(part.rollout.mask.sum()))
        self.actor.step()
        return {"policy_loss": policy.detach(), "clipped": clipped.detach(), "entropy": entropy}

    def _kl_loss(self, part: Experience, logprobs: Tensor, mask: Tensor) -> Tensor | float:
        kl = losses.kl_estimate(logprobs, part.reference_logprobs.to(logprobs))
        return self.config.beta * losses.masked_mean(kl, mask)

    def _pretraining_loss(self) -> Tensor | float:
        """The loss of the next texts, times its coefficient; which they are depends on the iteration alone."""
        if self.pretraining is None:
            return 0.0
        size, data, config = self.config.per_device_train_batch_size, self.pretraining, self.config
        num_each = config.ppo_epochs * config.num_prompts * config.num_generations // size
        number = (self.iteration * num_each + self._num_micro_batches) * self.num_ranks + self.rank
        self._num_micro_batches += 1
        rows = [data[(number * size + i) % len(data)] for i in range(size)]
        batch = data.collate(rows)
        logprobs, _ = response_logprobs(self.actor, batch)
        return -config.unsup_coef * losses.masked_mean(logprobs, batch["response_mask"][:, 1:].to(logprobs.device))

    def _set_training(self, training: bool) -> None:
        """Gradient checkpointing asks for the mode of training; dropout is 0."""
        for engine in self.engines.values():
            engine.train(training)

    # The run's state

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from, beside its engines; JSON.  Waits for responses that are on their way; collective."""
        state: dict[str, Any] = {"iteration": self.iteration}
        if self._ahead is not None:  # the weights that draw them are not there any more when the run goes on
            by_rank: list[Any] = [None] * self.num_ranks
            dist.all_gather_object(by_rank, self._ahead.result().to_json(), group=control_group(self.group))
            state["ahead"] = {"version": self._ahead.version, "by_rank": by_rank}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; responses of another number of data ranks are drawn anew."""
        self.iteration, ahead = state["iteration"], state.get("ahead")
        if ahead and self.config.rollout_ahead and len(ahead["by_rank"]) == self.num_ranks:
            rollout = Rollout.from_json(ahead["by_rank"][self.rank])
            self._ahead = RolloutAhead(ahead["version"], lambda: rollout)

    def close(self) -> None:
        """End the inference engine, when what it generates is there."""
        if self._ahead is not None:
            self._ahead.wait()
        self._ahead = None
        self.hybrid.close()

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

    min_generations = 1

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
        values = models.rollout_values(self.critic, rollout, config.per_device_train_batch_size)[:, :-1]
        logprobs, reference = experience.logprobs, experience.reference_logprobs
        rewards = losses.kl_penalized_rewards(
            experience.scores, logprobs, reference, mask, kl_coef=self.kl.coef, clip=config.reward_clip
        )
        advantages, returns = losses.gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
        advantages = losses.whiten(advantages, mask, partial(models.all_reduce_on_host, group=self.group))
        sizes = models.mean_over_ranks({"kl": float((logprobs - reference).sum(1).mean())}, self.group)
        self.kl.update(sizes["kl"], len(rollout) * self.num_ranks)
        return dataclasses.replace(experience, advantages=advantages, values=values, returns=returns)

    def micro_batch(self, part: Experience) -> dict[str, Tensor | float]:
        """The same of actor and critic."""
        metrics, mask = super().micro_batch(part), part.rollout.mask.to(self.actor.device)
        assert part.values is not None and part.returns is not None, "advantages() has made them"
        values, places = forward_rows(self.critic, vars(part.rollout))
        values = values[places[:, :-1]]
        value = losses.value_loss(
            values, part.values.to(values), part.returns.to(values), mask, clip_range=self.config.value_clip_range
        )
        self.critic.backward(value, num_items=int(part.rollout.mask.sum()))
        self.critic.step()
        return metrics | {"value_loss": value.detach(), "kl_coef": self.kl.coef}

    def _kl_loss(self, *_: Any) -> float:
        return 0.0  # the rewards have it

    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, too."""
        return super().state_dict() | {"kl_coef": self.kl.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.kl.coef = state["kl_coef"]
