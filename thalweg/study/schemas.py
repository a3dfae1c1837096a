"""Schemas of datasets: each one's columns, its prompt, the metrics its answers are judged by (``schemas.yaml``)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

Row = Mapping[str, Any]


class DatasetSchema(BaseModel):
    """How a row is read.

    ``template``: the prompt, with columns in braces.  ``output``: the column of the answer.  ``labels``: what a
    numbered answer is called.  ``metrics``: names of ``metrics.METRICS``.  ``derive``: which of :data:`DERIVED` it has.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    template: str
    output: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    derive: str | None = None
    sample: str = ""

    def add_columns(self, row: Row) -> dict[str, Any]:
        """The columns of a row, and those that are made of others."""
        return {**row, **(DERIVED[self.derive](row) if self.derive else {})}


def _cited(row: Row) -> dict[str, str]:
    """The abstracts that a paper of Multi-XScience cites; the hub's form has lists, the authors' a mapping."""
    cited = row["ref_abstract"]
    if "abstract" in cited:
        return {"cited": " ".join(cited["abstract"])}
    return {"cited": " ".join(one["abstract"] for one in cited.values())}


def _language_pair(row: Row) -> dict[str, str]:
    """The two texts of a translation, in the order of the columns."""
    (source, text), (target, translated) = list(row["translation"].items())[:2]
    return {"source_language": source, "target_language": target, "text": text, "translated": translated}


DERIVED: dict[str, Callable[[Row], Mapping[str, Any]]] = {
    "cited abstracts": _cited,
    "first answer": lambda row: {"first_answer": row["answers"]["text"][0]},
    "language pair": _language_pair,
    "score": lambda row: {"score": f"{float(row['label']):.1f}"},
}
SCHEMAS: dict[str, DatasetSchema] = {
    name: DatasetSchema.model_validate(fields)
    for name, fields in yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text("utf-8")).items()
}
