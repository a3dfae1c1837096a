"""Rollouts: prompts in, responses out, as a batch that losses read.

::

    row of input_ids    prompt | response, its end token included | padding
    response_mask       0 0 0    1 1 1 1 1                          0 0 0

Log-probabilities, values and rewards of a batch are (rows, T - 1), in the place of the token before: column t is about
token t + 1, and :attr:`Rollout.mask` says which of them the actor chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.device import enter_device
from thalweg.infer.engine.engine import LLMEngine
from thalweg.infer.parallel.executor import GroupEngine
from thalweg.infer.types import Request, SamplingParams, collect_results

# What a rank generates with: an inference engine of its own, or its part of one.
RolloutEngine = LLMEngine | GroupEngine


@dataclass(frozen=True)
class Rollout:
    """Sequences padded on the right; every row's first token is one of its prompt's."""

    input_ids: Tensor  # int64 (rows, T)
    attention_mask: Tensor  # bool (rows, T)
    response_mask: Tensor  # bool (rows, T)
    logprobs: Tensor  # fp32 (rows, T - 1): the inference engine's, 0 outside of responses
    ended: Tensor  # bool (rows,): by an end token, not by length

    @property
    def mask(self) -> Tensor:
        """(rows, T - 1): whether the actor chose the next token."""
        return self.response_mask[:, 1:]

    def responses(self) -> list[list[int]]:
        """Each row's response as tokens."""
        return [ids[mask].tolist() for ids, mask in zip(self.input_ids, self.response_mask, strict=True)]

    def __getitem__(self, rows: slice) -> Rollout:
        """Some of the rows, without padding that none of them needs."""
        length = int(self.attention_mask[rows].sum(1).max())
        tables = self.input_ids, self.attention_mask, self.response_mask
        input_ids, attention, chosen = (table[rows, :length] for table in tables)
        return Rollout(input_ids, attention, chosen, self.logprobs[rows, : length - 1], self.ended[rows])

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def concat(cls, parts: Sequence[Rollout], pad_id: int) -> Rollout:
        """The rows of all parts, in their order; one of them at least has some."""
        parts = [part for part in parts if len(part)]
        length = max(part.input_ids.shape[1] for part in parts)

        def join(name: str, fill: int = 0) -> Tensor:
            tables = [(getattr(part, name), length - part.input_ids.shape[1]) for part in parts]
            return torch.cat([F.pad(table, (0, missing), value=fill) for table, missing in tables])

        return cls(
            join("input_ids", pad_id), join("attention_mask"), join("response_mask"), join("logprobs"),
            torch.cat([part.ended for part in parts]),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Lists of its tables' numbers, exactly."""
        return {name: table.tolist() for name, table in vars(self).items()}

    @classmethod
    def from_json(cls, lists: Mapping[str, Any]) -> Rollout:
        """What :meth:`to_json` has made."""
        return cls(**{name: torch.tensor(table) for name, table in lists.items()})


class RolloutAhead:
    """A rollout that a thread generates while its process trains: the inference engine has weights of its own, and the
    thread enters no collective but those of its group.

    ``version``: the iteration whose weights these are.  ``wait()`` returns what this rank generates, when it is there;
    the inference engine sleeps from then on.  ``join`` makes the rollout of this rank's part and others'.
    """

    def __init__(
        self, version: int, wait: Callable[[], Rollout], join: Callable[[Rollout], Rollout] = lambda part: part
    ) -> None:
        self.version, self.wait, self._join = version, wait, join
        self._whole: Rollout | None = None

    @classmethod
    def begin(
        cls,
        version: int,
        generation: AbstractContextManager[Any],
        generate: Callable[[Any], Rollout],
        join: Callable[[Rollout], Rollout],
        device: torch.device,
    ) -> RolloutAhead:
        """Enter ``generation``, which is collective, and ``generate`` on ``device`` in a thread."""
        context = ExitStack()
        core = context.enter_context(generation)
        thread = ThreadPoolExecutor(1, "rollout", enter_device, (device,))
        future = thread.submit(generate, core)
        thread.shutdown(wait=False)

        def wait() -> Rollout:
            with context:
                return future.result()

        return cls(version, wait, join)

    def result(self) -> Rollout:
        """Wait for all of it; collective over the ranks that generate a part each."""
        if self._whole is None:
            self._whole = self._join(self.wait())
        return self._whole


def pad_sequences(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``response_mask`` of prompts and their responses, (rows, T)."""
    length = max((len(p) + len(r) for p, r in zip(prompts, responses, strict=True)), default=1)
    input_ids = torch.full((len(prompts), length), pad_id)
    attention, chosen = (torch.zeros(len(prompts), length, dtype=torch.bool) for _ in range(2))
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, stop = len(prompt), len(prompt) + len(response)
        input_ids[row, :stop] = torch.tensor([*prompt, *response])
        attention[row, :stop] = True
        chosen[row, start:stop] = True
    return input_ids, attention, chosen


def generate_rollout(
    core: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    seed: int,
    pad_id: int,
    num_samples: int = 1,
) -> Rollout:
    """Return ``num_samples`` responses to each prompt, those of a prompt in neighbouring rows.

    Prompt i draws by ``seed + i``, whatever else runs: the same seed gives the same rollout.  Raises RuntimeError where
    the engine fails at a request.
    """
    requests = [
        Request(f"rollout-{i}", prompt, replace(params, n=num_samples, seed=seed + i, logprobs=0))
        for i, prompt in enumerate(prompts)
    ]
    results = collect_results(core.run_requests(requests), "a rollout failed")
    responses = [results[request.request_id, index] for request in requests for index in range(num_samples)]
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    input_ids, attention_mask, response_mask = pad_sequences(repeated, [x.token_ids for x in responses], pad_id)
    chosen = torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    for row, response in enumerate(responses):
        start = len(repeated[row]) - 1
        chosen[row, start : start + len(response.logprobs)] = torch.tensor([x.logprob for x in response.logprobs])
    ended = torch.tensor([response.finish_reason == "stop" for response in responses])
    return Rollout(input_ids, attention_mask, response_mask, chosen, ended)
