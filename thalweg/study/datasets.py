"""Datasets to ``input`` and ``output``, and what they look like.

Rows come by ``datasets`` from the hub or from local files, or from the samples in the package, which were written by
hand in the columns of each schema.  A row that cannot be used (empty, or without an answer) is counted and left out; a
dataset that cannot be used at all is a ValueError that says why.
"""

import codecs
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from thalweg.data.corpus import stdlib_documents
from thalweg.study.config import StudyDataset
from thalweg.study.schemas import SCHEMAS, Row

SAMPLES = Path(__file__).parent / "samples"
MAX_LINE_BYTES = 64 << 20  # of a local file: a longer line is not one row of text
_TEXT_LENGTH = 4096  # characters of a source file
_BUILDERS = {"jsonl": "json", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}


def load_rows(dataset: StudyDataset) -> list[dict[str, Any]]:
    """Return the rows of a dataset as their source has them; of ``stdlib``, the sources of Python's standard library,
    a file's name as ``input`` and its beginning as ``output``.

    Raises ValueError: no such file or sample, not UTF-8, a line beyond :data:`MAX_LINE_BYTES`, damaged JSON; and what
    ``datasets`` raises for names on the hub.
    """
    if dataset.path.startswith("sample:"):
        name = dataset.path.removeprefix("sample:")
        file = SAMPLES / f"{name}.jsonl"
        if not file.is_file():
            names = ", ".join(sorted(one.stem for one in SAMPLES.glob("*.jsonl")))
            raise ValueError(f"there is no sample {name!r} in the package: there are {names}")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if dataset.path == "stdlib":
        return [
            {"input": f"# {one.name}\n", "output": one.text[:_TEXT_LENGTH]} for one in stdlib_documents(tests=False)
        ]
    import datasets

    suffix = Path(dataset.path).suffix.lstrip(".").lower()
    if suffix not in _BUILDERS:
        found: Any = datasets.load_dataset(dataset.path, dataset.subset, split=dataset.split, revision=dataset.revision)
        return list(found)
    if not Path(dataset.path).is_file():
        raise ValueError(f"there is no file {dataset.path}")
    if suffix != "parquet":
        _check_text_file(Path(dataset.path))
    options: dict[str, Any] = {}
    if _BUILDERS[suffix] == "csv":
        # Without index_col a line with more fields than the header shifts all columns, and nobody is told.
        options = {"sep": "\t" if suffix == "tsv" else ",", "index_col": False}
    try:
        found = datasets.load_dataset(_BUILDERS[suffix], data_files=dataset.path, split="train", **options)
    except Exception as error:  # of many kinds; of a file without a row, a StopIteration that says nothing
        reason = str(error.__cause__ or error) or "it has no row"
        raise ValueError(f"{dataset.path} cannot be read: {reason}") from error
    return list(found)


def _check_text_file(path: Path) -> None:
    """Raise ValueError for what would otherwise end in the parser's memory, or in its middle."""
    decoder, line, length = codecs.getincrementaldecoder("utf-8")(), 1, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                number = line + chunk[: error.start].count(b"\n")
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file") from None
            newlines = chunk.count(b"\n")
            length = len(chunk) - chunk.rfind(b"\n") - 1 if newlines else length + len(chunk)
            line += newlines
            if length > MAX_LINE_BYTES:
                raise ValueError(f"{path}, line {line}: over {MAX_LINE_BYTES >> 20} MiB; a row is to be one line")


def normalize(rows: Sequence[Row], dataset: StudyDataset) -> tuple[list[dict[str, Any]], int]:
    """Return rows of ``input``, ``output`` and ``references`` (all accepted answers), and how many were left out.

    Raises ValueError where a column is missing, or no row is left.
    """
    schema = SCHEMAS[dataset.schema_name]
    template = dataset.template or schema.template
    fields = [name for _, name, _, _ in Formatter().parse(template) if name]
    usable, num_skipped = [], 0
    for number, row in enumerate(rows):
        try:
            columns = schema.add_columns(row)
            output = columns[schema.output]
            prompt = template.format_map({key: _text(value) for key, value in columns.items()})
        except (KeyError, AttributeError) as error:
            raise ValueError(
                f"row {number + 1} has no {error} for schema {dataset.schema_name}; its columns are {', '.join(row)}"
            ) from None
        except (IndexError, TypeError, ValueError):  # no answer, or None where text should be
            num_skipped += 1
            continue
        answer = _answer(output, schema.labels)
        empty = any(not _text(row.get(key)).strip() for key in fields if key in row)
        if answer is None or empty:
            num_skipped += 1
            continue
        found = row.get("answers")
        references = [answer] if not isinstance(found, Mapping) else list(dict.fromkeys(found["text"]))
        usable.append({"input": prompt, "output": answer, "references": references})
    if not usable:
        raise ValueError(f"none of {len(rows)} rows has both an input and an output for schema {dataset.schema_name}")
    return usable, num_skipped


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _answer(output: Any, labels: tuple[str, ...]) -> str | None:
    """An answer as text; None where there is none (-1 is GLUE's mark of a hidden label)."""
    if labels and str(output).lstrip("-").isdigit():
        return labels[int(output)] if 0 <= int(output) < len(labels) else None
    return _text(output).strip() or None


def explore(rows: Sequence[Row], num_skipped: int, tokenizers: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts of a dataset: rows, the most frequent outputs (its labels, where it has some), and for each
    tokenizer the distribution of the tokens of ``input`` and ``output``."""
    counts = Counter(row["output"] for row in rows)
    # Answers that are nearly all different are texts, not labels.
    labels = dict(counts.most_common()) if len(counts) <= max(1, min(20, len(rows) // 2)) else {}
    lengths: dict[str, Any] = {}
    for name, tokenizer in tokenizers.items():
        lengths[name] = {}
        for column in ("input", "output"):
            encoded = tokenizer([row[column] for row in rows], truncation=False, verbose=False)["input_ids"]
            lengths[name][column] = _distribution([len(ids) for ids in encoded])
    return {"rows": len(rows), "skipped": num_skipped, "labels": labels, "tokens": lengths}


def _distribution(lengths: list[int]) -> dict[str, Any]:
    """Quantiles and a histogram of 20 bins."""
    import numpy as np

    counts, edges = np.histogram(lengths, bins=20)
    quantiles = np.percentile(lengths, [0, 25, 50, 75, 95, 100]).tolist()
    return {
        "mean": float(np.mean(lengths)),
        **dict(zip(("min", "p25", "median", "p75", "p95", "max"), quantiles, strict=True)),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }
