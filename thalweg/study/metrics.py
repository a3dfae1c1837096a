"""How good outputs are (by torchmetrics), and what repeats say about a ratio (by the bootstrap)."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any

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


def _rouge(key: str) -> Callable[[list[str], list[list[str]]], float]:
    def score(outputs: list[str], references: list[list[str]]) -> float:
        from torchmetrics.functional.text import rouge_score

        return float(rouge_score(outputs, references, rouge_keys=(key,))[f"{key}_fmeasure"])

    return score


def _bleu(outputs: list[str], references: list[list[str]]) -> float:
    from torchmetrics.functional.text import sacre_bleu_score

    return float(sacre_bleu_score(outputs, references))


def _squad(key: str) -> Callable[[list[str], list[list[str]]], float]:
    def score(outputs: list[str], references: list[list[str]]) -> float:
        from torchmetrics.functional.text import squad

        predictions = [{"prediction_text": text, "id": str(i)} for i, text in enumerate(outputs)]
        target = [
            {"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": str(i)}
            for i, texts in enumerate(references)
        ]
        return float(squad(predictions, target)[key]) / 100

    return score


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
    "accuracy": _accuracy, "macro_f1": _macro_f1, "rouge1": _rouge("rouge1"), "rouge2": _rouge("rouge2"),
    "rougeL": _rouge("rougeL"), "bleu": _bleu, "exact_match": _squad("exact_match"), "f1": _squad("f1"),
    "pearson": _pearson,
}  # fmt: skip
_RESAMPLES = 500
_OWN = ("accuracy", "pearson")  # of a line: these need no library


def score(names: Sequence[str], outputs: list[str], references: list[list[str]]) -> dict[str, float | None]:
    """Return the metrics; None for those whose library (:data:`MISSING`) is not there."""
    has_library = importlib.util.find_spec("torchmetrics") is not None
    return {name: METRICS[name](outputs, references) if has_library or name in _OWN else None for name in names}


def agreement(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of the outputs whose tokens are all equal."""
    return statistics.fmean(list(a) == list(b) for a, b in zip(outputs, others, strict=True))


def interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the median of all values and its 95% interval, by the bootstrap over rounds and over values within them.

    Rounds are drawn first: what is common to a process (the layout of its memory, a slow minute) is no independent
    repeat.  With one round the interval is that of its values alone.
    """
    return _bootstrap([(one,) for one in rounds], lambda drawn: float(np.median(np.concatenate([a for (a,) in drawn]))))


def ratio_interval(ours: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return how many times as long ``baseline`` takes as ``ours``, and the 95% interval, by the same bootstrap.

    The median over rounds of the ratio of a round's medians: the two were measured one soon after the other.
    """
    pairs = list(zip(ours, baseline, strict=False))
    return _bootstrap(pairs, lambda drawn: float(np.median([np.median(b) / np.median(a) for a, b in drawn])))


def _bootstrap(
    rounds: Sequence[tuple[Sequence[float], ...]], statistic: Callable[[Any], float]
) -> tuple[float, float, float]:
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(_RESAMPLES):
        chosen = (rounds[i] for i in generator.integers(len(rounds), size=len(rounds)))
        drawn.append(statistic([tuple(generator.choice(values, len(values)) for values in one) for one in chosen]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return statistic(rounds), float(low), float(high)
