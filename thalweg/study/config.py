"""``study.yaml``: which models, datasets, techniques and hardware settings, and how often each is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from thalweg.study.schemas import SCHEMAS

STUDIES = Path(__file__).parent / "studies"
PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))
Task = Literal["inference", "training"]


# Each kind is a class of techniques.py or training.py.
KINDS: dict[str, Task] = {
    "hugging_face": "inference", "thalweg": "inference", "zero3": "inference",
    "torch_train": "training", "thalweg_train": "training",
}  # fmt: skip


def _one_of(known: Mapping[str, Any], what: str) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"{name!r} is no {what}: there are {', '.join(known)}")
        return name

    return AfterValidator(check)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = Field(pattern=r"^[\w][\w .,()+-]*$")


class StudyModel(_Section):
    """A model by ``path`` (a folder, or a name on the hub), or by the ``config`` of one with random weights.

    ``config`` has Hugging Face's keys, ``model_type`` among them.  Its weights are drawn from the study's seed and its
    tokenizer is trained on the study's own texts: time and memory are those of the shape, quality means nothing.
    """

    path: str | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> StudyModel:
        if (self.path is None) == (self.config is None):
            raise ValueError("give path (a folder, or a name on the hub) or config (random weights), one of them")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs model_type, such as llama")
        return self


class StudyDataset(_Section):
    """A dataset: ``path`` is a name on the hub, a local file (jsonl, json, csv, tsv, parquet), ``sample:NAME`` for
    one of the hand-written samples in the package, or ``stdlib`` for the sources of Python's standard library.

    ``schema``: how a row becomes ``input`` and ``output``, a key of ``schemas.SCHEMAS``; ``template`` replaces its
    prompt.  ``samples`` rows are measured, in batches of ``batch_size``, with at most ``max_prompt_tokens`` tokens in
    and ``new_tokens`` out; all rows are explored.
    """

    path: str
    schema_name: Annotated[str, _one_of(SCHEMAS, "schema")] = Field(alias="schema")
    template: str | None = None
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    samples: int = Field(16, ge=1)
    batch_size: int = Field(8, ge=1)
    new_tokens: int = Field(16, ge=2)
    max_prompt_tokens: int = Field(256, ge=1)

    @field_validator("template")
    @classmethod
    def _parses(cls, template: str | None) -> str | None:
        list(Formatter().parse(template or ""))  # a ValueError for a brace without its other half
        return template


class StudyTechnique(_Section):
    """One way of running a model: a ``kind`` of :data:`KINDS` and its options.

    ``python``: the interpreter of its processes, where its library lives in another environment.
    """

    kind: Annotated[str, _one_of(KINDS, "kind of technique")]
    options: dict[str, Any] = {}
    python: str | None = None
    env: dict[str, str] = {}

    @property
    def task(self) -> Task:
        """What it does with the model."""
        return KINDS[self.kind]


class StudyHardware(_Section):
    """How much of the machine a cell gets, and what an hour of it costs.

    ``ranks``: processes of a training cell, each with a batch, a device and ``threads`` of its own.  ``memory``: bytes
    (or a size such as 8GiB) that a model's weights may take; by default what is free.  ``planned``: the machine is not
    here; its training cells are what ``thalweg.plan`` says for ``ranks`` of ``device`` (a name such as a100), each with
    ``memory``, and are marked so.
    """

    device: str = "cpu"
    ranks: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    planned: bool = False
    memory: int | str | None = None
    price_per_hour: float | None = Field(default=None, ge=0)
    currency: str = "USD"


class StudyConfig(_Section):
    """A whole study.  ``rounds`` processes of each cell, in each of them ``turns`` passes over the samples that count
    after one that does not; ``steps`` of training that count, after two that do not.  ``timeout``: seconds that one
    process may take."""

    seed: int = 0
    rounds: int = Field(3, ge=1)
    turns: int = Field(3, ge=1)
    steps: int = Field(8, ge=1)
    timeout: float = Field(900, gt=0)
    models: tuple[StudyModel, ...] = Field(min_length=1)
    datasets: tuple[StudyDataset, ...] = Field(min_length=1)
    techniques: tuple[StudyTechnique, ...] = Field(min_length=1)
    hardware: tuple[StudyHardware, ...] = (StudyHardware(name="1 thread", threads=1),)

    @field_validator("techniques", mode="before")
    @classmethod
    def _fill_presets(cls, techniques: Any) -> Any:
        if not isinstance(techniques, list | tuple):
            raise ValueError("must be a list of names, or of mappings with name and kind")
        filled = []
        for given in techniques:
            # What a study says beside a preset's name goes over it.
            fields = {"name": given} if isinstance(given, str) else dict(given)
            preset = PRESETS.get(fields.get("name", ""), {})
            if not preset and "kind" not in fields:
                raise ValueError(f"{fields.get('name')!r} needs a kind, or is one of {', '.join(PRESETS)}")
            filled.append({**preset, **fields})
        return filled

    @model_validator(mode="after")
    def _names_are_unique(self) -> StudyConfig:
        for section in ("models", "datasets", "techniques", "hardware"):
            names = [slug(one.name) for one in getattr(self, section)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{section}: {', '.join(twice)} is there twice; names must differ")
        return self

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the techniques, in their order."""
        return list(dict.fromkeys(technique.task for technique in self.techniques))

    def with_null(self, task: Task) -> list[StudyTechnique]:
        """The techniques of a task, and the first, which is its baseline, once more under another name."""
        baseline, *others = (one for one in self.techniques if one.task == task)
        return [baseline, *others, baseline.model_copy(update={"name": f"{baseline.name} (null)"})]


def slug(name: str) -> str:
    """A name as part of a path."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def load_study(path: str | Path) -> StudyConfig:
    """Read a study: a YAML file, or the name of one in the package (``report``).

    Raises ValueError with all problems at once, FileNotFoundError where there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        shipped = STUDIES / f"{file.name.removesuffix('.yaml')}.yaml"
        if not shipped.is_file():
            names = ", ".join(sorted(one.stem for one in STUDIES.glob("*.yaml")))
            raise FileNotFoundError(f"there is no study {path}: give a YAML file, or one of the package's ({names})")
        file = shipped
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must be a mapping with name, models, datasets and techniques")
    try:
        config = StudyConfig.model_validate({"name": file.stem, **tree})
    except ValidationError as error:
        # pydantic counts what is left of a list once faulty entries are out: what is wrong is said already.
        faulty = {one["loc"][0] for one in error.errors() if len(one["loc"]) > 1}
        found = [one for one in error.errors() if one["type"] != "too_short" or one["loc"][0] not in faulty]
        problems = ("/".join(map(str, one["loc"])) + f": {one['msg']}" for one in found)
        raise ValueError(f"{path}: " + "; ".join(problems)) from None
    return config
