"""Schemas of datasets: each one's columns, its prompt, the metrics its answers are judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class DatasetSchema:
    """How a row is read.

    ``template``: the prompt, with columns in braces.  ``output``: the column of the answer, or a function of the row.
    ``labels``: what a numbered answer is called.  ``metrics``: names of ``metrics.METRICS``.
    """

    template: str
    output: str | Callable[[Row], str]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    # Columns that are not text, made into some.
    derive: Callable[[Row], Mapping[str, str]] = lambda row: {}
    sample: str = ""


def _cited(row: Row) -> dict[str, str]:
    """The abstracts that a paper of Multi-XScience cites; the hub's form has lists, the authors' a mapping."""
    cited = row["ref_abstract"]
    if "abstract" in cited:
        return {"cited": " ".join(cited["abstract"])}
    return {"cited": " ".join(one["abstract"] for one in cited.values())}


def _language_pair(row: Row) -> dict[str, str]:
    """The two texts of a translation, in the order of the columns."""
    (source, text), (target, _) = list(row["translation"].items())[:2]
    return {"source_language": source, "target_language": target, "text": text}


_LABEL = ("accuracy", "macro_f1")
_ENTAILMENT = ("entailment", "neutral", "contradiction")
_PAIR = "{sentence1}\n{sentence2}\n"
SCHEMAS: dict[str, DatasetSchema] = {
    # BigBIO's schemas (Fries et al. 2022), of which SciTail has the first and Multi-XScience the second.
    "bigbio_te": DatasetSchema(
        "Premise: {premise}\nHypothesis: {hypothesis}\nIs the hypothesis entailed by the premise? Answer entailment or"
        " neutral.\nAnswer:",
        "label", _LABEL, sample="scitail",
    ),
    "bigbio_t2t": DatasetSchema(
        "Abstract: {text_1}\nSummarize the work that this paper cites.\nSummary:",
        "text_2", ("rouge1", "rouge2", "rougeL"), sample="multi_xscience",
    ),
    # Multi-XScience as its authors publish it (Lu et al. 2020), which has the related work itself.
    "multi_xscience": DatasetSchema(
        "Abstract: {abstract}\nCited work: {cited}\nWrite the related-work section.\nRelated work:",
        "related_work", ("rouge1", "rouge2", "rougeL"), derive=_cited, sample="multi_xscience_source",
    ),
    "squad": DatasetSchema(
        "Context: {context}\nQuestion: {question}\nAnswer:",
        lambda row: row["answers"]["text"][0], ("exact_match", "f1"), sample="squad",
    ),
    "translation": DatasetSchema(
        "Translate from {source_language} to {target_language}: {text}\nTranslation:",
        lambda row: list(row["translation"].values())[1], ("bleu",), derive=_language_pair, sample="translation",
    ),
    # GLUE's tasks (Wang et al. 2019), with the columns and the numbered labels that the hub has.
    "sst2": DatasetSchema(
        "{sentence}\nIs this review negative or positive?\nAnswer:", "label", _LABEL, ("negative", "positive"),
        sample="sst2",
    ),
    "cola": DatasetSchema(
        "{sentence}\nIs this sentence acceptable or unacceptable English?\nAnswer:", "label", _LABEL,
        ("unacceptable", "acceptable"), sample="cola",
    ),
    "mnli": DatasetSchema(
        "Premise: {premise}\nHypothesis: {hypothesis}\nAnswer entailment, neutral or contradiction.\nAnswer:",
        "label", _LABEL, _ENTAILMENT, sample="mnli",
    ),
    "stsb": DatasetSchema(
        _PAIR + "How similar are the sentences, from 0 to 5?\nAnswer:",
        lambda row: f"{float(row['label']):.1f}", ("pearson",), sample="stsb",
    ),
    "mrpc": DatasetSchema(
        _PAIR + "Do the sentences say the same? Answer no or yes.\nAnswer:", "label", _LABEL, ("no", "yes"),
        sample="mrpc",
    ),
    "qqp": DatasetSchema(
        "{question1}\n{question2}\nDo the questions ask the same? Answer no or yes.\nAnswer:", "label", _LABEL,
        ("no", "yes"), sample="qqp",
    ),
    "qnli": DatasetSchema(
        "Question: {question}\nSentence: {sentence}\nDoes the sentence answer it? Answer yes or no.\nAnswer:",
        "label", _LABEL, ("yes", "no"), sample="qnli",
    ),
    "rte": DatasetSchema(
        "Premise: {sentence1}\nHypothesis: {sentence2}\nAnswer entailment or not entailment.\nAnswer:", "label", _LABEL,
        ("entailment", "not entailment"), sample="rte",
    ),
    # Rows that are normalised already.
    "input_output": DatasetSchema("{input}", "output", ("exact_match", "f1")),
}  # fmt: skip
