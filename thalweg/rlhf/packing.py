"""Rows without their padding, laid end to end; a prompt that several rows begin with is there once.

::

    rows    p p p a a - - -     a unit    p p p a a b b b        laid out    p p p a a b b b s s s t t t t u
            p p p b b b - -               s s s t t t t u                    q q c d d d d d v v v v v v - -
            q q c d d d d d               ...
            s s s t t t t u

An answer sees its prompt and itself; positions go on from the prompt's.  Preferences share their prompt, GRPO's groups
as well, so a batch of pairs has about half of its padded tokens.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.engine import Engine
from thalweg.infer.precision import eval_mode
from thalweg.parallel_dims import control_group
from thalweg.rlhf import losses
from thalweg.rlhf.data import first_fit
from thalweg.utils.log import get_logger

log = get_logger(__name__)
Batch = Mapping[str, Tensor]
_SLACK = (1.0, 1.04, 1.1)  # room in a row beyond its even part of the tokens
_MOST_LAYOUTS = 12  # numbers of rows that are looked at
_MOST_SHARED = (2, 4, 8)  # widths of a prompt with its answers, in longest rows: the larger, the more is shared
_MLP_TO_ATTENTION = 4  # a token's products with weights cost as much as attention to so many hidden sizes of tokens
# Outputs of the two layouts of one batch differ by no more, in parts of the largest.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_HALF_TOLERANCE = 5e-2
# What :func:`pack_rows` is told of an engine's model; None where its rows are padded.
_row_limits: WeakKeyDictionary[Engine, tuple[int, float] | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class PackedRows:
    """What a model takes, and where in its output, flattened to (tokens, ...), each token of the padded rows is."""

    inputs: dict[str, Tensor]
    places: Tensor  # int64 (B, T); 0 for padding


@torch.no_grad()
def pack_rows(batch: Batch, hidden_size: int, max_width: float = inf, *, always: bool = False) -> PackedRows | None:
    """Lay out ``input_ids``, ``attention_mask`` and ``response_mask``, (B, T), padded on the right.

    Returns ``input_ids`` and ``position_ids`` (R, W) and ``attention_mask`` bool (R, 1, W, W), or None where no layout
    of at most ``max_width`` tokens a row is cheaper than the padding, unless it is ``always`` asked for;
    ``hidden_size`` tells what attention costs beside the products.
    """
    lengths = batch["attention_mask"].sum(1).tolist()
    # Up to the first answer; behind it somebody may ask again.
    begins = (batch["attention_mask"].bool() & (batch["response_mask"].cumsum(1) == 0)).sum(1).tolist()
    rows = [ids[:length] for ids, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
    least, layout, width = inf, list[list[_Unit]](), 0
    for choice in _choose_layouts(rows, begins):
        row_width = max(sum(unit.width for unit in units) for units in choice)
        price = _cost(len(choice), row_width, hidden_size)
        if price < least and row_width <= max_width:
            least, layout, width = price, choice, row_width
    if not layout or (least >= _cost(len(rows), max(lengths), hidden_size) and not always):
        return None
    input_ids, position_ids, documents, parents = (torch.zeros(len(layout), width, dtype=torch.int64) for _ in range(4))
    places = torch.zeros(batch["input_ids"].shape, dtype=torch.int64)
    num_documents = 0
    for number, units_of_row in enumerate(layout):
        start = 0
        for unit in units_of_row:
            at, begin = start, begins[unit.rows[0]]
            prompt = num_documents + 1
            for index, row in enumerate(unit.rows):
                first = 0 if index == 0 else begin  # the prompt is laid out before the first answer
                stop = at + lengths[row] - first
                input_ids[number, at:stop] = torch.tensor(rows[row][first:])
                position_ids[number, at:stop] = torch.arange(first, lengths[row])
                num_documents += 1
                documents[number, at:stop], parents[number, at:stop] = num_documents + 1, prompt
                flat = number * width
                places[row, :begin] = flat + start + torch.arange(begin)
                places[row, begin : lengths[row]] = flat + stop + torch.arange(begin - lengths[row], 0)
                at = stop
            documents[number, start : start + begin] = prompt
            num_documents += 1
            start = at
    keys = documents[:, None, None, :]
    attention = (documents[:, None, :, None] == keys) | (parents[:, None, :, None] == keys)
    attention &= torch.ones(width, width, dtype=torch.bool).tril()
    inputs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention}
    return PackedRows(inputs, places)


@dataclass
class _Unit:
    """Rows that begin with one prompt, and the tokens that they take together."""

    rows: list[int]
    width: int


def _cost(num_rows: int, width: int, hidden_size: int) -> float:
    return num_rows * width * (1 + width / (_MLP_TO_ATTENTION * hidden_size))


def _choose_layouts(rows: Sequence[list[int]], begins: Sequence[int]) -> Iterator[list[list[_Unit]]]:
    """Yield layouts among which one is cheap: in so many rows, with prompts shared by so much."""
    seen = -1
    for most in _MOST_SHARED:
        units = _share_prompts(rows, begins, most * max(map(len, rows)))
        if len(units) == seen:
            return
        seen, total, widest = len(units), sum(unit.width for unit in units), max(unit.width for unit in units)
        counts = range(1, len(units) + 1, -(-len(units) // _MOST_LAYOUTS))
        for width in sorted({max(widest, ceil(total / n * slack)) for n in counts for slack in _SLACK}):
            yield first_fit(units, lambda unit: unit.width, width)


def _share_prompts(rows: Sequence[list[int]], begins: Sequence[int], limit: int) -> list[_Unit]:
    open_units: dict[tuple[int, ...], _Unit] = {}
    units: list[_Unit] = []
    for number, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        prompt, more = tuple(row[:begin]), len(row) - begin
        unit = open_units.get(prompt)
        if unit is None or unit.width + more > limit:
            unit = open_units[prompt] = _Unit([], begin)
            units.append(unit)
        unit.rows.append(number)
        unit.width += more
    return units


def forward_rows(engine: Engine, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a causal or a value model on padded rows, without their padding where it can be left out; collective.

    Returns its logits or values, flattened to (tokens, ...), and the place there of each of the rows' tokens, (B, T).
    A model that takes no such layout computes the padding; the first batch of an engine is computed in both ways, and
    where any rank finds them different, none lays rows out.
    """
    packed = _lay_out(engine, batch)
    return _forward(engine, packed), packed.places.to(engine.device, non_blocking=True)


def _lay_out(engine: Engine, batch: Batch) -> PackedRows:
    if engine not in _row_limits:
        limits = _find_limits(engine)
        _row_limits[engine] = limits if limits is not None and _agrees(engine, batch) else None
    limits = _row_limits[engine]
    return (None if limits is None else pack_rows(batch, *limits)) or _padded(batch)


def _padded(batch: Batch) -> PackedRows:
    places = torch.arange(batch["input_ids"].numel()).view(batch["input_ids"].shape)
    return PackedRows({name: batch[name] for name in ("input_ids", "attention_mask")}, places)


def _forward(engine: Engine, packed: PackedRows) -> Tensor:
    inputs = {name: table.to(engine.device, non_blocking=True) for name, table in packed.inputs.items()}
    output = engine(**inputs)
    return getattr(output, "logits", output).flatten(0, 1)


def _find_limits(engine: Engine) -> tuple[int, float] | None:
    """The hidden size of a Hugging Face model whose masks and positions may be given, and how many tokens its rows may
    have; None for any other."""
    model = _find_hugging_face_model(engine)
    if model is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    text = model.config.get_text_config()
    if text._attn_implementation not in ("sdpa", "eager") or getattr(text, "attention_chunk_size", None):
        return None
    return text.hidden_size, getattr(text, "sliding_window", None) or inf


def _find_hugging_face_model(engine: Engine) -> Any:
    """Its model without adapters, if that is Hugging Face's own code and a rank computes whole rows; else None."""
    model: Any = engine.module
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    modules = {x.__module__ for x in type(getattr(model, "backbone", model)).__mro__}
    is_known = any(name.startswith("transformers.models.") for name in modules)
    return model if is_known and engine.meshes.sequence is None and engine.meshes.pp is None else None


@torch.no_grad()
def _agrees(engine: Engine, batch: Batch) -> bool:
    """Whether all ranks' models give one batch's tokens the same outputs in both layouts; collective."""
    rows = torch.arange(min(len(batch["input_ids"]), 2)).repeat(2)  # each beside itself
    twice = {name: batch[name][rows] for name in ("input_ids", "attention_mask", "response_mask")}
    kept = twice["attention_mask"].bool()

    def run(layout: PackedRows | None) -> Tensor:
        layout = layout or _padded(twice)
        return _forward(engine, layout)[layout.places.to(engine.device)][kept.to(engine.device)]

    with eval_mode(engine.module):
        padded, same = run(None), False
        try:
            gap = (padded.double() - run(pack_rows(twice, 1, always=True)).double()).abs().max()
            same = bool(gap <= _TOLERANCE.get(padded.dtype, _HALF_TOLERANCE) * padded.abs().max())
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # its code expects masks of other shapes
            log.debug("without padding: %s", error)
    agreed = torch.tensor(same, dtype=torch.int64)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=control_group(engine.meshes.world_group))
    if not agreed:
        log.info("%s: rows are padded, as without padding its outputs differ", type(engine.module).__name__)
    return bool(agreed)


def response_logprobs(engine: Engine, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the responses' tokens, (B, T - 1), 0 elsewhere; and the logits that each was chosen by,
    (tokens of responses, V); collective."""
    packed, mask = _lay_out(engine, batch), batch["response_mask"][:, 1:].to(engine.device)
    tokens = batch["input_ids"][:, 1:].to(engine.device)[mask]
    places = packed.places[:, :-1].to(engine.device)[mask]
    with _head_for(engine, places, tokens, temperature) as refined:
        logits = _forward(engine, packed)
    logits = logits if refined else logits.index_select(0, places)
    as_it_was = refined and logits.data_ptr() == refined[0].data_ptr()  # not scaled or capped by the model
    chosen = refined[1] if as_it_was else losses.chosen_logprobs(logits, tokens, temperature)
    return torch.zeros(mask.shape, dtype=chosen.dtype, device=mask.device).masked_scatter(mask, chosen), logits


@contextmanager
def _head_for(engine: Engine, places: Tensor, tokens: Tensor, temperature: float) -> Iterator[list[Tensor]]:
    """In 16 bits, let the head compute the logits of these places alone; yields a list in which they and
    :func:`losses.refined_logprobs` are then.

    A logit of 100, as GPT-2's are, is rounded by up to 0.25 in bf16, and its log-probability with it.
    """
    model, refined = _find_hugging_face_model(engine), list[Tensor]()
    head: Any = None if model is None else model.get_output_embeddings()
    is_whole = engine.meshes.tp is None and isinstance(head, torch.nn.Linear)  # which an adapter's is not
    if not is_whole or engine.config.compile.enabled or not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        yield refined
        return

    def select(_: Any, args: tuple[Tensor]) -> Tensor:
        return args[0].flatten(0, -2).index_select(0, places)[None]

    def refine(layer: Any, args: tuple[Tensor], logits: Tensor) -> None:
        operands = args[0][0], layer.weight, layer.bias
        refined[:] = logits[0], losses.refined_logprobs(logits[0], tokens, temperature, *operands)

    # The second one before sharding's own hook, which may take the weight away.
    with head.register_forward_pre_hook(select), head.register_forward_hook(refine, prepend=True):
        yield refined
