"""Data of fine-tuning and RLHF: files or hub names in, token ids out.

An example is a row of a dataset, in one of these forms:

- ``prompt`` with ``chosen`` and, for preferences, ``rejected``: texts as DeepSpeed-Chat's, or lists of chat messages,
  in which without a list of them as ``prompt`` all but the last are the prompt;
- ``messages``: a conversation; the assistant's last message is the answer, and SFT's loss is on those before it, too;
- ``text``: all of it counts.

Texts go to the tokenizer as they are, behind its token of the beginning where it puts one in front; messages through
its chat template.  Further columns reach a reward function.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from thalweg.rlhf.rollout import pad_sequences
from thalweg.utils.log import get_logger

log = get_logger(__name__)
Example = dict[str, Any]
_Item = TypeVar("_Item")
_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_OPEN_ROWS = 256  # packed rows that are looked through for room
# The data_split by which a step has all data; where its 1 is, its part is in others.
WHOLE_SPLITS = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1", "dpo": "0,0,1", "grpo": "0,0,1"}


def load_examples(
    data_path: Sequence[str],
    data_split: str,
    step: str,
    seed: int,
    *,
    whole: Sequence[str] = (),
    config_name: str | None = None,
) -> list[Example]:
    """Return a step's part of each dataset, blended: all together, in an order that ``seed`` gives.

    ``data_split``: "2,4,4" gives 20% to SFT, 40% to the reward model and 40% to what follows; no example is in two.
    ``whole``: further datasets, which are all this step's.  ``config_name``: of the hub's datasets.
    Raises ValueError where nothing is left.
    """
    if not (data_path or whole):
        raise ValueError("data_path names no data: give files or names of datasets")
    weights = [float(part) for part in data_split.split(",")]
    total, phase = sum(weights), WHOLE_SPLITS[step].split(",").index("1")
    examples, num_rows = list[Example](), 0
    for number, path in enumerate((*data_path, *whole)):
        rows = _load_rows(path, config_name)
        num_rows += len(rows)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + number)).tolist()
        first, last = (round(len(rows) * sum(weights[:stop]) / total) for stop in (phase, phase + 1))
        if number >= len(data_path):
            first, last = 0, len(rows)
        examples += [rows[i] for i in order[first:last]]
    if not examples:
        raise ValueError(f"data_split {data_split} leaves no example of {', '.join(data_path)} for {step}")
    if len(examples) < num_rows:
        paths, split = ", ".join((*data_path, *whole)), f"{data_split}; --data_split {WHOLE_SPLITS[step]} takes all"
        log.info("%s: %d of %d examples of %s (data_split %s)", step, len(examples), num_rows, paths, split)
    shuffled = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [examples[i] for i in shuffled]


def _load_rows(path: str, config_name: str | None) -> list[Example]:
    from datasets import exceptions, load_dataset

    if Path(path).suffix in _FORMATS or Path(path).exists():
        kind = _FORMATS.get(Path(path).suffix)
        if kind is None or not Path(path).is_file():
            raise ValueError(f"{path}: give a file that exists, in {', '.join(_FORMATS)}")
        # Of a line with more fields than a CSV's header pandas drops the last with a warning; else all columns shift.
        options: dict[str, Any] = {"index_col": False} if kind == "csv" else {}
        try:
            found: Any = load_dataset(kind, data_files=str(path), split="train", **options)
        except (exceptions.DatasetGenerationError, StopIteration, ValueError) as error:  # StopIteration: no bytes
            raise ValueError(f"{path}: no rows to read: {str(error.__cause__ or error) or 'it is empty'}") from error
    else:
        found = load_dataset(path, config_name, split="train")
    # A column that only other rows have is None there.
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def _split(example: Example, column: str = "chosen") -> tuple[Any, Any]:
    """Return what is before an answer, and the answer: a text or messages, None where there is none.

    A conversation without messages as its prompt begins with them, as TRL's, and a prompt's text beside it is in it;
    an answer alone is to that text.
    """
    messages = example.get("messages") if column == "chosen" else None
    if messages and messages[-1]["role"] != "assistant":
        return messages, None
    prompt: Any = example.get("prompt")
    answer: Any = messages or example.get(column, example.get("text") if column == "chosen" else None)
    if messages or (isinstance(answer, list) and isinstance(prompt or "", str)):
        asked = [{"role": "user", "content": prompt}] if prompt else None
        return answer[:-1] or asked, answer[-1:]
    return prompt, answer


def encode_prompt(tokenizer: Any, example: Example) -> list[int]:
    """Return the tokens before the answer."""
    prompt, _ = _split(example)
    if isinstance(prompt, list):
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    begin = tokenizer("a")["input_ids"][:1]  # of any text, where the tokenizer puts its token in front
    return begin + tokens if begin == [tokenizer.bos_token_id] != tokens[:1] else tokens


def encode_example(tokenizer: Any, example: Example, column: str = "chosen") -> tuple[list[int], list[int]]:
    """Return the tokens before an answer, and its own: of a text with the end token, of a chat as its template writes
    it.  What comes behind the assistant's last message is left out.

    Raises:
        ValueError: the example has no such answer, or its chat template writes what is before it in another way.
    """
    while example.get("messages") and example["messages"][-1]["role"] != "assistant":
        example = example | {"messages": example["messages"][:-1]}
    before, answer = _split(example, column)
    if answer is None:
        raise ValueError(f"an example has no {column} (or messages, text for chosen): it has {', '.join(example)}")
    if isinstance(answer, str):
        tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return encode_prompt(tokenizer, example), [*tokens, tokenizer.eos_token_id]
    chat, before = tokenizer.apply_chat_template, before or []
    whole = list(chat([*before, *answer], return_dict=False))
    # What is to generate may be begun otherwise than what was said: with "<think>", which history is written without.
    for begins in (True, False):
        prompt = list(chat(before, add_generation_prompt=begins, return_dict=False)) if before else []
        if whole[: len(prompt)] == prompt:
            return prompt, whole[len(prompt) :]
    raise ValueError("the chat template writes messages otherwise once an answer follows: give another, or texts")


def end_ids(tokenizer: Any) -> list[int]:
    """The tokens that an answer may end with: the tokenizer's end, and what its chat template writes behind an answer,
    as a turn's end that is not a text's."""
    if tokenizer.chat_template is None:
        return [tokenizer.eos_token_id]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = list(tokenizer.apply_chat_template(chat, return_dict=False))
    marks = [token for token, added in tokenizer.added_tokens_decoder.items() if added.content.strip()]
    return list(dict.fromkeys([tokenizer.eos_token_id, *(whole[i] for i in _find_marks(tokenizer, whole, marks))]))


def _find_marks(tokenizer: Any, tokens: list[int], marks: Sequence[int]) -> list[int]:
    """Where behind the last word there are marks, with nothing but blanks beside them."""
    blank_or_mark = (token in marks or not tokenizer.decode([token]).strip() for token in reversed(tokens))
    places = range(len(tokens) - sum(takewhile(bool, blank_or_mark)), len(tokens))
    return [place for place in places if tokens[place] in marks]


def _find_turns(tokenizer: Any, messages: Any, before: list[int], ends: Sequence[int]) -> Iterator[slice]:
    """Yield where in the tokens ``before`` the last answer there are earlier ones, each with its end: those that stand
    there as the template begins an answer."""
    asked = [messages[:i] for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    prompts = [encode_prompt(tokenizer, {"prompt": prompt}) for prompt in asked]
    starts = [len(prompt) for prompt in prompts if prompt == before[: len(prompt)]]
    for start, limit in pairwise([*starts, len(before)]):
        if stops := [place + 1 for place in range(start, limit) if before[place] in ends]:
            yield slice(start, stops[0])


class AnswerDataset(Dataset[Any]):
    """Examples as tokens: ``prompt`` and an answer for each of ``columns``; rows of ``max_length`` tokens at most.

    An answer that does not fit is cut at its end, a prompt that leaves none room is left out.  With one column what the
    assistant has said earlier in ``messages`` (``turns`` of the prompt) are answers, too.
    """

    def __init__(
        self, examples: Sequence[Example], tokenizer: Any, max_length: int, columns: Sequence[str] = ("chosen",)
    ) -> None:
        self.pad_id, self.columns, self.rows = pad_token_id(tokenizer), tuple(columns), list[Any]()
        ends = end_ids(tokenizer)
        for example in examples:
            pairs = [encode_example(tokenizer, example, column) for column in columns]
            for _, answer in pairs:  # a template may begin a new line behind an answer's end, and no response does
                del answer[min(_find_marks(tokenizer, answer, ends), default=len(answer)) + 1 :]
            # What all answers follow: the conversations of a pair may part before their last messages.
            side_by_side = zip(*(before for before, _ in pairs), strict=False)
            prompt = [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, side_by_side)]
            turns = list(_find_turns(tokenizer, example.get("messages", ()), prompt, ends)) if len(columns) == 1 else []
            if min([len(prompt), *(turn.start for turn in turns)]) < max_length - 1:
                texts = ([*before, *answer][len(prompt) : max_length] for before, answer in pairs)
                row: Any = {"prompt": prompt[:max_length], **dict(zip(columns, texts, strict=True))}
                self.rows.append(row | ({"turns": turns} if turns else {}))
        if not self.rows:
            raise ValueError(f"no example has room for an answer in max_seq_len {max_length}: give more")
        if left_out := len(examples) - len(self.rows):
            log.info("%d of %d examples leave no room in max_seq_len %d: left out", left_out, len(examples), max_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Pad rows on the right: ``input_ids``, ``attention_mask``, ``response_mask`` (what counts), all of the first
        column's rows before those of the second's."""
        prompts = [row["prompt"] for _ in self.columns for row in rows]
        answers = [row[column] for column in self.columns for row in rows]
        input_ids, attention_mask, response_mask = pad_sequences(prompts, answers, self.pad_id)
        for number, row in enumerate(rows):
            for turn in row.get("turns", ()):
                response_mask[number, turn] = True
        return {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": response_mask}


class PackedAnswers(AnswerDataset):
    """Examples gathered, so that a row of this dataset is a list of them, of ``max_length`` tokens at most: the longest
    first, each where there is room."""

    def __init__(self, data: AnswerDataset, max_length: int) -> None:
        self.pad_id, self.columns = data.pad_id, data.columns
        self.rows = first_fit(data.rows, lambda row: len(row["prompt"]) + len(row["chosen"]), max_length)

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """As of the examples one by one: the model's rows are laid out anew (:mod:`.packing`)."""
        return super().collate([example for row in rows for example in row])


def first_fit(items: Sequence[_Item], get_width: Callable[[_Item], int], width: int) -> list[list[_Item]]:
    """Lay items into rows of ``width`` at most, the widest first, each into the first row with room of the newest
    256."""
    rows: list[list[_Item]] = []
    room: list[int] = []
    for item in sorted(items, key=get_width, reverse=True):
        newest = range(max(len(room) - _OPEN_ROWS, 0), len(room))
        place = next((i for i in newest if room[i] >= get_width(item)), None)
        if place is None:
            place = len(room)
            room.append(width)
            rows.append([])
        room[place] -= get_width(item)
        rows[place].append(item)
    return rows


class PromptSource:
    """Prompts of PPO and GRPO, an iteration at a time: what iteration k has depends on k and the seed alone, so a run
    that goes on has the prompts that it would have had."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_length: int, seed: int) -> None:
        prompted = [example for example in examples if _split(example)[0] is not None]
        columns = dict.fromkeys(name for example in examples for name in example)  # a reward function gets all of them
        if not prompted:
            raise ValueError(f"no example has prompt, messages or chosen messages: they have {', '.join(columns)}")
        encoded = [(encode_prompt(tokenizer, example), columns | example) for example in prompted]
        self.items = [(prompt, example) for prompt, example in encoded if 0 < len(prompt) <= max_length]
        self.seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch, and the prompts in its order
        if not self.items:
            raise ValueError(f"no prompt has 1 to {max_length} tokens: set max_prompt_seq_len")
        self.longest = max(len(prompt) for prompt, _ in self.items)
        if left_out := len(encoded) - len(self.items):
            log.info("%d of %d prompts do not fit max_prompt_seq_len %d: left out", left_out, len(encoded), max_length)

    def take(self, iteration: int, count: int, rank: int, world_size: int) -> list[tuple[list[int], Example]]:
        """Return this rank's ``count`` prompts of an iteration; one pass after another, each in an order of its own."""
        start = (iteration * world_size + rank) * count
        chosen = []
        for position in range(start, start + count):
            epoch, index = divmod(position, len(self.items))
            if epoch != self._order[0]:
                draw = torch.Generator().manual_seed(self.seed + epoch)
                self._order = epoch, torch.randperm(len(self.items), generator=draw).tolist()
            chosen.append(self.items[self._order[1][index]])
        return chosen


def pad_token_id(tokenizer: Any) -> int:
    """The token that stands for nothing: the tokenizer's, or its end token."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
