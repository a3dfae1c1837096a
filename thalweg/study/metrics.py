"""How good outputs are (by torchmetrics), and what repeats say about a ratio."""

import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

MISSING = "torchmetrics is not installed: pip install 'thalweg[study]'"


def _clean(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .")


def _accuracy(outputs: list[str], references: list[list[str]]) -> float:
    return statistics.fmean(_clean(a) == _clean(b[0]) for a, b in zip(outputs, references, strict=True))


def _macro_f1(outputs: list[str], references: list[list[str]]) -> float:
    """Over the labels that occur in the references; an output that is no label counts as wrong."""
    import torch
    from torchmetrics.functional.classification import multiclass_f1_score

    labels = {name: index for index, name in enumerate(sorted({_clean(one[0]) for one in references}))}
    predicted = torch.tensor([labels.get(_clean(text), len(labels)) for text in outputs])
    target = torch.tensor([labels[_clean(one[0])] for one in references])
    scores = multiclass_f1_score(predicted, target, num_classes=len(labels) + 1, average="none")
    return float(scores[: len(labels)].mean())


def _rouge(key: str, outputs: list[str], references: list[list[str]]) -> float:
    from torchmetrics.functional.text import rouge_score

    return float(rouge_score(outputs, references, rouge_keys=(key,))[f"{key}_fmeasure"])


def _bleu(outputs: list[str], references: list[list[str]]) -> float:
    from torchmetrics.functional.text import sacre_bleu_score

    return float(sacre_bleu_score(outputs, references))


def _squad(key: str, outputs: list[str], references: list[list[str]]) -> float:
    from torchmetrics.functional.text import squad

    predictions = [{"prediction_text": text, "id": str(i)} for i, text in enumerate(outputs)]
    target = [
        {"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": str(i)}
        for i, texts in enumerate(references)
    ]
    return float(squad(predictions, target)[key]) / 100


def _pearson(outputs: list[str], references: list[list[str]]) -> float:
    """Of the numbers that outputs begin with; one that is no number counts as 0."""

    def number(text: str) -> float:
        try:
            return float(text.split()[0].rstrip(".,"))
        except (ValueError, IndexError):
            return 0.0

    found = np.array([[number(text) for text in outputs], [number(one[0]) for one in references]])
    return 0.0 if (found.std(axis=1) == 0).any() else float(np.corrcoef(found)[0, 1])


# Each takes outputs and, for each of them, the accepted answers; between 0 and 1, pearson between -1 and 1.
METRICS: dict[str, Callable[[list[str], list[list[str]]], float]] = {
    "accuracy": _accuracy, "macro_f1": _macro_f1, "bleu": _bleu, "pearson": _pearson,
    **{key: partial(_rouge, key) for key in ("rouge1", "rouge2", "rougeL")},
    **{key: partial(_squad, key) for key in ("exact_match", "f1")},
}  # fmt: skip
_T_TABLE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Estimate = tuple[float, float | None, float | None]  # the middle, low and high of 95%
_OWN = ("accuracy", "pearson")  # of a line: these need no library


def score(names: Sequence[str], outputs: list[str], references: list[list[str]]) -> dict[str, float | None]:
    """Return the metrics; None for those whose library (:data:`MISSING`) is not there."""
    has_library = importlib.util.find_spec("torchmetrics") is not None
    return {name: METRICS[name](outputs, references) if has_library or name in _OWN else None for name in names}


def agreement(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of the outputs whose tokens are all equal."""
    return statistics.fmean(list(a) == list(b) for a, b in zip(outputs, others, strict=True))


def interval(rounds: Sequence[Sequence[float]]) -> Estimate:
    """Return the median over rounds of a round's median, and its 95% interval (see :func:`estimate`)."""
    return estimate([math.log(statistics.median(one)) for one in rounds])


def log_ratios(ours: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each round, the logarithm of how many times as long ``baseline`` takes as ``ours``.

    Medians of a round are compared with each other: the two were measured one soon after the other.
    """
    return [math.log(statistics.median(b) / statistics.median(a)) for a, b in zip(ours, baseline, strict=False)]


def estimate(logs: Sequence[float], noise: Sequence[float] = ()) -> Estimate:
    """Return exp of the median of one logarithm a round, and its 95% interval; no interval where nothing says one.

    A round is one independent repeat: what turns of a process have in common (the layout of its memory, a slow minute)
    would make more repeats look surer than they are.  The half width is Student's t of the rounds, and at least that of
    ``noise``: logarithms of ratios whose true value is 1.  Three rounds may agree by chance; the null comparisons of a
    whole study rarely do.
    """
    spreads = [_t_quantile(len(noise)) * math.sqrt(statistics.fmean(x * x for x in noise))] if noise else []
    if len(logs) > 1:
        spreads.append(_t_quantile(len(logs) - 1) * statistics.stdev(logs))
    middle = statistics.median(logs)
    if not spreads:
        return math.exp(middle), None, None
    half = max(spreads) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _t_quantile(freedom: int) -> float:
    """97.5% of Student's t; beyond the table 1.96 + 2.5 / freedom is off by less than 0.02."""
    return _T_TABLE[freedom - 1] if freedom <= len(_T_TABLE) else 1.96 + 2.5 / freedom
