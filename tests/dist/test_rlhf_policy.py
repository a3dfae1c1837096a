"""An update of PPO and GRPO on two ranks equals one of a single process on all responses, written here anew.

The reference computes each token's loss in a loop, its mean over the tokens of both ranks, and one step of AdamW; the
control weighs ranks alike, as a mean of the ranks' means would, although one of them has more tokens.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_ranks
from tests.marks import nightly
from tests.rlhf_support import make_tokenizer
from tests.unit.infer_models import tiny_decoder
from tests.unit.test_rlhf_data import make_chatml_tokenizer, make_tokenizer_with_a_beginning
from thalweg.infer import load_engine
from thalweg.rlhf import weight_sync
from thalweg.rlhf.config import RLHFConfig
from thalweg.rlhf.data import AnswerDataset, PromptSource
from thalweg.rlhf.models import ValueModel, adapt, build_engine, build_frozen_engine, save_model, update_ema
from thalweg.rlhf.policy import Experience, GRPOTrainer, PPOTrainer
from thalweg.rlhf.rollout import Rollout, RolloutAhead, pad_sequences
from thalweg.rlhf.rollout_ranks import RolloutRanks

REUSE_RANKS = True

LR = 1e-2
# Rows of the two ranks: (prompt, response); rank 1 has fewer tokens, and a response that is its end token alone.
ROWS = [
    [([5, 9, 2], [8, 8, 3, 100, 7]), ([4], [90, 3, 1, 17])],
    [([60, 61, 7, 1, 2], [5]), ([33, 2], [12, 5])],
]


def _experience(rows: list[Any], seed: int, weighted: bool = False) -> Experience:
    ids, attention, chosen = pad_sequences([p for p, _ in rows], [r for _, r in rows], 0)
    draw = torch.Generator().manual_seed(seed)
    mask = chosen[:, 1:]

    def table(scale: float, shift: float = 0.0) -> Tensor:
        return (scale * torch.randn(mask.shape, generator=draw) + shift) * mask

    rollout = Rollout(ids, attention, chosen, table(0), torch.ones(len(rows), dtype=torch.bool))
    return Experience(
        rollout, torch.zeros(len(rows)), table(0.3, -4.9), table(0.3, -4.9), table(1.0), table(0.5), table(0.5),
        table(0.3, 1.0) if weighted else None,
    )  # fmt: skip


def _config(kind: str) -> RLHFConfig:
    return RLHFConfig(
        learning_rate=LR, per_device_train_batch_size=1, per_device_generation_batch_size=1, num_generations=2,
        beta=0.07, clip_range=0.1, value_clip_range=0.15, lr_scheduler_type="constant", weight_decay=0.0,
        zero_stage=3 if kind == "grpo" else 2, critic_zero_stage=3, deepspeed_config={"gradient_clipping": 0.0},
    )  # fmt: skip


def _critic() -> ValueModel:
    torch.manual_seed(3)
    model = ValueModel(tiny_decoder("qwen2").model)
    torch.nn.init.normal_(model.value_head.weight)
    return model


def _update(rank: int, world: int, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    config = _config(kind)
    options = {"num_updates": 1, "accumulation": 2}
    actor = build_engine(tiny_decoder("llama"), config, **options)
    reference = build_frozen_engine(tiny_decoder("llama"), config)
    prompts = PromptSource([{"prompt": "a"}], make_tokenizer(), 8, 0)
    arguments = config, actor, reference, make_tokenizer(), prompts, lambda *_: torch.zeros(2)
    if kind == "ppo":
        trainer: GRPOTrainer = PPOTrainer(*arguments, critic=build_engine(_critic(), config.of("critic"), **options))
    else:
        trainer = GRPOTrainer(*arguments)
    metrics = trainer.update(_experience(ROWS[rank], rank, kind == "grpo"))
    states = [engine.state_dict() for engine in trainer.engines.values()]
    for engine in trainer.engines.values():
        engine.close()
    return states[0], states[-1] if kind == "ppo" else {}, metrics


def _reference(kind: str, weigh_ranks_alike: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    actor, critic, config = tiny_decoder("llama"), _critic(), _config(kind)
    totals, value_totals, counts = [], [], []
    for rank, rows in enumerate(ROWS):
        known = _experience(rows, rank, kind == "grpo")
        total, value_total, count = torch.zeros(()), torch.zeros(()), 0
        for row, (prompt, response) in enumerate(rows):
            ids = torch.tensor([prompt + response])
            logprobs = actor(input_ids=ids).logits[0].log_softmax(-1)
            values = critic(ids)[0]
            for t in range(len(prompt) - 1, len(prompt) + len(response) - 1):
                new, old = logprobs[t, ids[0, t + 1]], known.logprobs[row, t]
                ratio, advantage = torch.exp(new - old), known.advantages[row, t]
                bounded = ratio.clip(1 - config.clip_range, 1 + config.clip_range)
                weight = 1.0 if known.weights is None else known.weights[row, t]
                total = total - weight * torch.minimum(ratio * advantage, bounded * advantage)
                if kind == "grpo":
                    log_ratio = known.reference_logprobs[row, t] - new
                    total = total + config.beta * (torch.exp(log_ratio) - log_ratio - 1)
                assert known.values is not None and known.returns is not None
                before, target = known.values[row, t], known.returns[row, t]
                near = before + (values[t] - before).clip(-config.value_clip_range, config.value_clip_range)
                value_total = value_total + torch.maximum((values[t] - target) ** 2, (near - target) ** 2) / 2
                count += 1
        totals.append(total)
        value_totals.append(value_total)
        counts.append(count)
    if weigh_ranks_alike:
        loss = (totals[0] / counts[0] + totals[1] / counts[1]) / 2
        value_loss = (value_totals[0] / counts[0] + value_totals[1] / counts[1]) / 2
    else:
        loss, value_loss = (sum(x) / sum(counts) for x in (totals, value_totals))
    for model, its_loss in ((actor, loss), (critic, value_loss)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        its_loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    return actor.state_dict(), critic.state_dict()


@pytest.mark.parametrize("kind", ["grpo", nightly("ppo")])
def test_an_update_equals_a_single_process(kind: str) -> None:
    (got, got_critic, metrics), other = run_ranks(_update, 2, kind)
    assert all(torch.equal(got[name], other[0][name]) for name in got)
    assert 0 < metrics["entropy"] < 4.9

    def gap(states: tuple[dict[str, Tensor], dict[str, Tensor]]) -> float:
        pairs = [(got, states[0])] + ([(got_critic, states[1])] if kind == "ppo" else [])
        return max(float((a[name] - b[name]).abs().mean()) for a, b in pairs for name in a)

    assert gap(_reference(kind, False)) < 1e-5 < 1e-4 < gap(_reference(kind, True))


def test_a_group_of_one_response_is_refused_as_it_teaches_nothing() -> None:
    with pytest.raises(ValueError, match="num_generations is 1, and GRPO compares the responses to a prompt"):
        GRPOTrainer(RLHFConfig(), *[None] * 5)  # type: ignore[arg-type]


def _ends(rank: int, world: int, ends: list[int]) -> Rollout:
    """Responses by a model whose generation config has ends that its tokenizer does not know of."""
    config = replace(_config("grpo"), max_answer_seq_len=12, num_generations=8)
    tokenizer = make_tokenizer_with_a_beginning()
    model = tiny_decoder("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = ends
    actor = build_engine(model, config, num_updates=1, accumulation=8)
    prompts = PromptSource([{"prompt": "a"}], tokenizer, 8, 0)
    trainer = GRPOTrainer(config, actor, actor, tokenizer, prompts, lambda *_: torch.zeros(8))
    rollout = trainer.collect(last=True)[0].rollout
    core: Any = trainer.hybrid._core  # type: ignore[union-attr]
    assert core.metadata.max_length == prompts.longest + 12 == 14  # of the 128 that the model takes
    assert core.stats().kv_blocks == core.runner.num_slots == 64  # a block for each sequence
    assert trainer.samples[0]["prompt"] == "a"
    assert rollout.input_ids[0, 0] == tokenizer.bos_token_id  # which a reward function is not told of
    trainer.close()
    actor.close()
    return rollout


def test_a_response_ends_at_any_of_the_generation_config_s_ends() -> None:
    ends = list(range(0, 256, 5))
    rollout = run_ranks(_ends, 1, ends)[0]
    responses = rollout.responses()
    ended = [response[-1] in ends for response in responses]
    assert rollout.ended.tolist() == ended and sum(ended) > 3
    assert not any(token in ends for response in responses for token in response[:-1])


def _chat_ends(rank: int, world: int, folder: str) -> tuple[Rollout, list[int]]:
    """A base model whose tokenizer and generation config end texts, and whose chats end with another token, which it
    says at about every second place."""
    config = replace(_config("grpo"), max_answer_seq_len=24, num_generations=8)
    tokenizer = make_chatml_tokenizer()
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_decoder("llama", vocab_size=len(tokenizer))
    torch.nn.init.normal_(model.lm_head.weight.data[turn_end], std=100)
    model.generation_config.eos_token_id = 7
    actor = build_engine(model, config, num_updates=1, accumulation=8)
    prompts = PromptSource([{"messages": [{"role": "user", "content": "a"}]}], tokenizer, 64, 0)
    trainer = GRPOTrainer(config, actor, actor, tokenizer, prompts, lambda *_: torch.zeros(8))
    rollout = trainer.collect(last=True)[0].rollout
    trainer.close()
    save_model(actor, tokenizer, f"{folder}/model")
    actor.close()
    return rollout, [tokenizer.eos_token_id, turn_end]


def test_a_chat_s_response_is_one_turn_here_and_wherever_the_saved_model_goes(tmp_path: Path) -> None:
    rollout, (text_end, turn_end) = run_ranks(_chat_ends, 1, str(tmp_path))[0]
    responses = rollout.responses()
    assert sum(response[-1] == turn_end for response in responses) > 4
    assert rollout.ended.tolist() == [response[-1] in (turn_end, text_end, 7) for response in responses]
    assert not any(turn_end in response[:-1] for response in responses)
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [7, text_end, turn_end]


def _save_dropouts(rank: int, world: int, folder: str, lora_dim: int) -> None:
    config = replace(_config("grpo"), lora_dim=lora_dim, dropout=0.0)
    falcon = tiny_decoder("falcon7", hidden_dropout=0.2, attention_dropout=0.3)
    for name, model in (("actor", falcon), ("critic", ValueModel(copy.deepcopy(falcon.base_model)))):
        engine = build_engine(adapt(model, config), config, num_updates=1)
        assert engine.module.config.hidden_dropout == 0
        save_model(engine, make_tokenizer(), f"{folder}/{name}")
        assert engine.module.config.hidden_dropout == 0
        engine.close()


@pytest.mark.parametrize("lora_dim", [0, 2])
def test_what_is_saved_has_the_model_s_own_dropout(lora_dim: int, tmp_path: Path) -> None:
    run_ranks(_save_dropouts, 1, str(tmp_path), lora_dim)
    for name in ("actor", "critic"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["hidden_dropout"], config["attention_dropout"]) == (0.2, 0.3)


def _average(rank: int, world: int) -> tuple[float, float]:
    config = _config("grpo")
    actor = build_engine(tiny_decoder("llama"), config, num_updates=2, accumulation=2)
    ema = build_frozen_engine(tiny_decoder("llama"), config)
    prompts = PromptSource([{"prompt": "a"}], make_tokenizer(), 8, 0)
    trainer = GRPOTrainer(config, actor, ema, make_tokenizer(), prompts, lambda *_: torch.zeros(2))
    want = actor.state_dict()
    for _ in range(2):
        trainer.update(_experience(ROWS[rank], rank))
        update_ema(ema, actor, 0.75)
        now = actor.state_dict()
        want = {name: 0.75 * want[name] + 0.25 * now[name] for name in want}
    got = ema.state_dict()
    gaps = [max(float((got[name] - other[name]).abs().max()) for name in got) for other in (want, now)]
    actor.close()
    ema.close()
    return gaps[0], gaps[1]


def test_the_average_of_an_actor_follows_its_recursion_shard_by_shard() -> None:
    for gap, control in run_ranks(_average, 2):
        assert gap < 1e-6 < 1e-3 < control


def _mix(rank: int, world: int, coefficient: float) -> dict[str, Tensor]:
    config = replace(_config("grpo"), beta=0.0, unsup_coef=coefficient, unsupervised_dataset_name="texts")
    actor = build_engine(tiny_decoder("llama"), config, num_updates=1, accumulation=2)
    prompts = PromptSource([{"prompt": "a"}], make_tokenizer(), 8, 0)
    texts = AnswerDataset([{"text": "abcdef"}], make_tokenizer(), 16)
    texts.rows[0]["chosen"] = [4, 90, 3, 1, 17]
    trainer = GRPOTrainer(config, actor, actor, make_tokenizer(), prompts, lambda *_: torch.zeros(2), pretraining=texts)
    known = _experience(ROWS[0], 0)
    trainer.update(replace(known, advantages=torch.zeros_like(known.advantages)))
    state = actor.state_dict()
    actor.close()
    return state


def test_the_pretraining_mix_is_the_language_model_s_own_loss() -> None:
    """Without advantages an update is that of the texts alone, whatever their coefficient: AdamW knows no scale."""
    got = run_ranks(_mix, 2, 0.5)[0]
    model = tiny_decoder("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.tensor([[4, 90, 3, 1, 17]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    want, before = model.state_dict(), tiny_decoder("llama").state_dict()

    def gap(other: dict[str, Tensor]) -> float:
        return max(float((got[name] - other[name]).abs().mean()) for name in got)

    assert gap(want) < 1e-4 < 1e-3 < gap(before)


AHEAD = 4  # iterations


def _ahead(rank: int, world: int, runs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Each run's rollouts and metrics; one that dies after its second iteration is gone on with.  ``ranks``: so many do
    nothing but generate."""
    found, tokenizer = [], make_tokenizer()
    model = partial(tiny_decoder, "llama", vocab_size=len(tokenizer))
    for run in runs:
        config = RLHFConfig(
            learning_rate=run.get("lr", LR), per_device_train_batch_size=2, per_device_generation_batch_size=2,
            num_generations=2, max_answer_seq_len=6, lr_scheduler_type="constant", zero_stage=3,
            rollout_ahead=run["ahead"], importance_cap=1.5, inference_tp_size=run.get("tp", 1),
        )  # fmt: skip
        rollouts: list[Any] = []
        metrics: list[dict[str, float]] = []
        ranks = RolloutRanks(run["ranks"], run.get("tp", 1)) if "ranks" in run else None
        if ranks is not None and ranks.is_generating:
            lengths: list[int] = []

            def noted_length(model: Any, options: Any, lengths: Any = lengths, **more: Any) -> Any:
                lengths.append(options.max_model_len)
                return load_engine(model, options, **more)

            weight_sync.load_engine = noted_length
            for _ in range(2 if run.get("dies") else 1):
                ranks.generate(model(), 11)
            assert set(lengths) <= {11} and (lengths or run.get("tp"))
            continue

        def make(config: RLHFConfig = config, ranks: Any = ranks) -> GRPOTrainer:
            prompts = PromptSource([{"prompt": x} for x in ("a b", "c", "e f g")], tokenizer, 8, 0)
            mesh = None if ranks is None else ranks.mesh
            return GRPOTrainer(
                config, build_engine(model(), config, num_updates=AHEAD, accumulation=2, mesh=mesh),
                build_frozen_engine(model(), config, mesh=mesh), tokenizer, prompts,
                lambda rollout, *_: rollout.response_mask.sum(1) + rollout.input_ids.sum(1) % 5, rollout_ranks=ranks,
            )  # fmt: skip

        def close(trainer: GRPOTrainer) -> None:
            trainer.close()
            for engine in (trainer.actor, trainer.reference):
                assert engine is not None
                engine.close()

        def go(trainer: GRPOTrainer, stop: int, rollouts: Any = rollouts, metrics: Any = metrics) -> None:
            collect = trainer.collect

            def noted(**options: Any) -> Any:
                experience, of_it = collect(**options)
                tables = experience.rollout.input_ids, experience.rollout.logprobs, experience.weights
                rollouts.append([None if table is None else table.numpy() for table in tables])
                return experience, of_it

            trainer.collect = noted  # type: ignore[method-assign]
            while trainer.iteration < stop:
                metrics.append(trainer.step(last=trainer.iteration == AHEAD - 1))

        trainer = make()
        if run.get("dies"):
            go(trainer, 2)
            trainer.save(folder)
            close(trainer)
            trainer = make()
            assert trainer.resume(folder) == 2
        go(trainer, AHEAD)
        assert trainer._ahead is None
        close(trainer)
        found.append({"rollouts": rollouts, "metrics": metrics})
    return found


def _run_ahead(world: int, runs: list[dict[str, Any]], folder: str) -> list[list[dict[str, Any]]]:
    """What the ranks found; tensors went as arrays, for whose numbers the parent needs no rank that has ended."""
    results = run_ranks(_ahead, world, runs, folder)
    for run in (run for of_rank in results for run in of_rank):
        run["rollouts"] = [[None if t is None else torch.from_numpy(t) for t in tables] for tables in run["rollouts"]]
    return results


@pytest.mark.nightly
def test_rollouts_one_step_ahead_have_the_samples_of_older_weights_and_go_on_with_them(tmp_path: Any) -> None:
    runs = [
        {"ahead": 0}, {"ahead": 1}, {"ahead": 1, "dies": True}, {"ahead": 0, "lr": 0.0}, {"ahead": 1, "lr": 0.0},
        {"ahead": 0, "tp": 2}, {"ahead": 1, "tp": 2},
    ]  # fmt: skip
    for now, ahead, resumed, still, still_ahead, grouped, grouped_ahead in _run_ahead(2, runs, str(tmp_path)):

        def same(one: Any, other: Any, iteration: int, atol: float = 1e-5) -> bool:
            (ids, logprobs, _), (other_ids, others, _) = one["rollouts"][iteration], other["rollouts"][iteration]
            return torch.equal(ids, other_ids) and torch.allclose(logprobs, others, rtol=0, atol=atol)

        # Ranks that generate together draw the same; their logits' last bits are in the older policy's importance
        # weights, and grow with the updates.
        assert all(same(now, grouped, i) and same(ahead, grouped_ahead, i, 1e-3) for i in range(AHEAD))
        # Weights that stay make no difference; those that move are one iteration late, and never more.
        assert all(same(still, still_ahead, i) for i in range(AHEAD))
        assert same(now, ahead, 0) and not same(now, ahead, 1)
        assert [each["staleness"] for each in ahead["metrics"]] == [0, 1, 1, 1]
        assert same(ahead, still, 1) and not same(ahead, still, 2)  # drawn before the first update, and after it
        # The correction: none where the weights are the same, and at most its cap.
        first, second = (ahead["rollouts"][i][2] for i in (0, 1))
        assert (first - 1).abs().max() < 1e-3 < (second - 1).abs().max() and second.max() <= 1.5
        # A run that died goes on with the responses that were there.
        assert all(same(ahead, resumed, i) for i in range(AHEAD))
        kl, kl_resumed = ([each["kl"] for each in run["metrics"]] for run in (ahead, resumed))
        assert kl == pytest.approx(kl_resumed, rel=1e-4, abs=1e-5) and abs(kl[-1]) > 0.01


@pytest.mark.parametrize(
    ("training", "generating", "runs"),
    [
        (1, 1, [{"ahead": 1}]),
        nightly(2, 2, [{"ahead": 0}, {"ahead": 1}, {"ahead": 1, "dies": True}]),
        nightly(1, 2, [{"ahead": 1, "tp": 2}]),
        nightly(3, 2, [{"ahead": 0, "tp": 2}, {"ahead": 1, "tp": 2, "dies": True}]),
        nightly(1, 4, [{"ahead": 1, "tp": 2}]),
    ],
)
def test_ranks_that_generate_alone_draw_what_those_that_train_would(
    training: int, generating: int, runs: list[Any], tmp_path: Any
) -> None:
    # At a tenth of the others' rate: what AdamW makes of a gradient that is rounding alone is as large as the rate.
    runs = [run | {"lr": 1e-3} for run in runs]
    both = [_run_ahead(training, [run | {"dies": False, "tp": 1} for run in runs], str(tmp_path))]
    both.append(_run_ahead(training + generating, [run | {"ranks": generating} for run in runs], str(tmp_path)))
    for rank in range(training):
        for run, own, remote in zip(runs, *(results[rank] for results in both), strict=True):
            pairs = list(zip(own["rollouts"], remote["rollouts"], strict=True))
            assert all(torch.equal(one[0], other[0]) for one, other in pairs)
            differences = [float((one[1] - other[1]).abs().max()) for one, other in pairs]
            # Before the first update; then last bits grow, as updates divide by small second moments.
            assert max(differences[: 1 + run["ahead"]]) < 1e-5 and max(differences) < 3e-5
            assert not torch.equal(pairs[-1][0][1], pairs[0][0][1])
            assert abs(own["metrics"][-1]["kl"]) > 0.1  # the weights have moved, by far more
            assert [x.get("staleness") for x in own["metrics"]] == [x.get("staleness") for x in remote["metrics"]]


def test_rollouts_that_are_older_than_allowed_are_not_trained_on() -> None:
    run_ranks(_too_old, 1)


def _too_old(rank: int, world: int) -> None:
    config = replace(_config("grpo"), rollout_ahead=1)
    actor = build_engine(tiny_decoder("llama"), config, num_updates=1, accumulation=2)
    prompts = PromptSource([{"prompt": "a"}], make_tokenizer(), 8, 0)
    trainer = GRPOTrainer(config, actor, None, make_tokenizer(), prompts, lambda *_: torch.zeros(2))
    trainer._ahead, trainer.iteration = RolloutAhead(0, lambda: _experience(ROWS[0], 0).rollout), 2
    with pytest.raises(AssertionError, match="responses of iteration 0 at 2"):
        trainer.collect(last=True)
    trainer.close()
    actor.close()
