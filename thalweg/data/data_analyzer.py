"""Metrics of every sample of a dataset, computed once in parallel, kept as an index of samples by difficulty.

    map      samples --metric function--> parts, in SAVE_PATH/METRIC/parts/: the values of consecutive samples
             part k is worker k % num_workers's; the processes of a worker share its parts
    reduce   the parts of all workers --sort--> three arrays of a value for each sample:

    METRIC_sample_to_metric.npy    values in the order of the dataset
    METRIC_index_to_sample.npy     sample ids by ascending value, equal ones in the order of the dataset
    METRIC_index_to_metric.npy     the values in that order

So the samples up to a difficulty are the first entries of ``index_to_sample``, as many as a binary search in
``index_to_metric`` tells.  The files are plain ``.npy`` arrays without pickles, read as memory maps.  A metric of type
``accumulate_value_over_samples`` (counts of words, say) leaves their sum instead, ``METRIC_metric_value.npy``.

Every file appears by a rename, whole or not at all, and which samples are in a part follows from the number of samples
alone.  So a map that was stopped goes on with the parts that are missing, also with other numbers of workers and
processes.  ``analysis.json`` says what was analysed; a dataset of another size in the same folder is refused, and parts
that are taken from an earlier run are told of, as nothing says that its functions and samples were these.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from thalweg.utils.atomic_file import publish_file
from thalweg.utils.log import get_logger

_log = get_logger(__name__)

_VERSION = 1
_MAX_PARTS = 1024
_PER_SAMPLE, _ACCUMULATE = "single_value_per_sample", "accumulate_value_over_samples"


@dataclass(frozen=True)
class DifficultyIndex:
    """The samples of a dataset by ascending value of a metric: ``sample_ids`` (N,), their ``values`` (N,) or None."""

    sample_ids: np.ndarray
    values: np.ndarray | None = None

    @classmethod
    def open(cls, index_to_sample_path: str | Path, index_to_metric_path: str | Path | None = None) -> Self:
        """Map the two files of an index into memory, by DeepSpeed's names of them: ``.npy`` may be left out.

        Raises:
            ValueError: a file is not there, or the two do not belong together.
        """
        name = str(index_to_sample_path).removesuffix("_percentile_merged")  # DeepSpeed's copy of the same, in blocks
        sample_ids = _open_array(name)
        values = None if index_to_metric_path is None else _open_array(index_to_metric_path)
        if values is not None and values.shape != sample_ids.shape:
            raise ValueError(
                f"{name} has {len(sample_ids)} samples and {index_to_metric_path} {len(values)}: give the two files of "
                "one index"
            )
        return cls(sample_ids, values)

    def up_to_value(self, difficulty: float) -> np.ndarray:
        """Ids of the samples whose value is at most ``difficulty``."""
        assert self.values is not None
        return self.sample_ids[: np.searchsorted(self.values, difficulty, side="right")]

    def up_to_fraction(self, part: int, whole: int) -> np.ndarray:
        """Ids of the easiest ``part`` of ``whole`` equal parts."""
        return self.sample_ids[: len(self.sample_ids) * min(part, whole) // whole]


def open_sample_metric(path: str | Path, metric: str) -> np.ndarray:
    """The values of ``metric`` in the order of the dataset, from the folder where a ``DataAnalyzer`` saved."""
    return _open_array(Path(path) / metric / f"{metric}_sample_to_metric")


def _open_array(path: str | Path) -> np.ndarray:
    file = Path(f"{str(path).removesuffix('.npy')}.npy")
    if not file.is_file():
        found = f"; {path}.idx is an index of DeepSpeed's" if Path(f"{path}.idx").exists() else ""
        raise ValueError(f"there is no {file}{found}: run thalweg.data.DataAnalyzer(...).run_map_reduce() to write it")
    return np.load(file, mmap_mode="r", allow_pickle=False)


class DataAnalyzer:
    """Analyses ``dataset``; arguments and methods bear DeepSpeed's names.

    metric_functions: each takes a collated batch and returns a tensor or array, with a number for each sample of it
    (``single_value_per_sample``), or of any one shape, to be added up (``accumulate_value_over_samples``).
    num_workers, worker_id: the workers (hosts, say) that share the work, and which this is; ``num_threads``: processes
    of this worker.  sample_indices: analyse these samples alone; the index then counts positions in them.

    Raises:
        ValueError: the lists of metrics differ in length, or a type is unknown.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        types = list(metric_types) or [_PER_SAMPLE] * len(metric_names)
        dtypes = [_to_numpy_dtype(one) for one in metric_dtypes] or [np.dtype(np.int64)] * len(metric_names)
        if not metric_names or not len(metric_names) == len(metric_functions) == len(types) == len(dtypes):
            raise ValueError("metric_names, metric_functions, metric_types and metric_dtypes must be of one length")
        if unknown := set(types) - {_PER_SAMPLE, _ACCUMULATE}:
            raise ValueError(f"metric_types must be {_PER_SAMPLE!r} or {_ACCUMULATE!r}, not {unknown}")
        self.save_path = Path(save_path)
        self.num_workers, self.worker_id, self.num_threads = num_workers, worker_id, num_threads
        self._metrics, self._functions = list(zip(metric_names, types, dtypes, strict=True)), list(metric_functions)
        self._dataset, self._sample_indices, self._batch_size = dataset, sample_indices, batch_size
        self._collate = collate_fn or default_collate
        self._num_samples = len(dataset) if sample_indices is None else len(sample_indices)
        self._part_size = max(1, -(-self._num_samples // _MAX_PARTS))
        self._parts = range(-(-self._num_samples // self._part_size))

    def run_map(self) -> None:
        """Compute the parts of this worker that are not there yet.

        Raises:
            ValueError: the folder holds another analysis, or a metric function returns something else than was agreed.
        """
        about = {
            "version": _VERSION,
            "num_samples": self._num_samples,
            "metrics": {name: {"type": kind, "dtype": dtype.name} for name, kind, dtype in self._metrics},
        }
        file = self.save_path / "analysis.json"
        if file.exists() and (found := json.loads(file.read_text())) != about:
            raise ValueError(f"{self.save_path} holds another analysis, {found}, not {about}: give another save_path")
        for name, _, _ in self._metrics:
            (self.save_path / name / "parts").mkdir(parents=True, exist_ok=True)
        publish_file(file, lambda target: target.write(json.dumps(about, indent=1).encode()))
        own = self._parts[self.worker_id :: self.num_workers]
        missing: Any = [part for part in own if not self._is_done(part)]
        if len(missing) < len(own):
            found = f"{len(own) - len(missing)} of {len(own)} parts"
            _log.warning(
                "%s: %s are of an earlier run; remove it if data or metrics have changed", self.save_path, found
            )
        processes = self.num_threads if self.num_threads > 1 else 0
        # Forked: metrics are any functions; what Python 3.14 starts by default takes those alone that it can import.
        context = "fork" if processes and sys.platform == "linux" else None
        # So torch's own loader is the pool of processes.
        compute: Any = self._compute_part
        workers: dict[str, Any] = {"num_workers": processes, "multiprocessing_context": context}
        for _ in DataLoader(missing, batch_size=None, collate_fn=compute, **workers):
            pass

    def run_reduce(self) -> None:
        """Join the parts of all workers to the index; by one worker, when all have mapped.

        Raises:
            ValueError: parts are missing.
        """
        missing = [part for part in self._parts if not self._is_done(part)]
        if missing:
            workers = sorted({part % self.num_workers for part in missing})
            raise ValueError(
                f"{len(missing)} of {len(self._parts)} parts are not in {self.save_path}: call run_map() of workers "
                f"{workers}"
            )
        for name, kind, dtype in self._metrics:
            parts = [np.load(self._part_file(name, part), allow_pickle=False) for part in self._parts]
            base = self.save_path / name / name
            if kind == _ACCUMULATE:
                _publish_array(Path(f"{base}_metric_value.npy"), np.sum(parts, axis=0, dtype=dtype))
                continue
            values = np.concatenate(parts)
            order = np.argsort(values, kind="stable")
            _publish_array(Path(f"{base}_sample_to_metric.npy"), values)
            _publish_array(Path(f"{base}_index_to_metric.npy"), values[order])
            _publish_array(Path(f"{base}_index_to_sample.npy"), order.astype(np.int64))

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both; with torch.distributed initialised the ranks of ``comm_group`` are the workers that it waits for."""
        self.run_map()
        together = dist.is_initialized() and self.num_workers > 1
        if together:
            dist.barrier(group=comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        if together:
            dist.barrier(group=comm_group)

    def _part_file(self, metric: str, part: int) -> Path:
        return self.save_path / metric / "parts" / f"{part:05d}.npy"

    def _is_done(self, part: int) -> bool:
        return all(self._part_file(name, part).exists() for name, _, _ in self._metrics)

    def _compute_part(self, part: int) -> int:
        """Compute and save a part."""
        collected: list[list[np.ndarray]] = [[] for _ in self._metrics]
        for num_samples, batch in self._iter_batches(part):
            for values, (name, kind, dtype), function in zip(collected, self._metrics, self._functions, strict=True):
                value = function(batch)
                value = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
                if kind == _PER_SAMPLE and value.size != num_samples:
                    raise ValueError(
                        f"metric {name} of {num_samples} samples has {value.size} values: return one for each"
                    )
                cast = value.astype(dtype)
                if not np.array_equal(cast, value):
                    raise ValueError(f"metric {name} has values that {dtype} cannot hold: see metric_dtypes")
                values.append(cast.reshape(-1) if kind == _PER_SAMPLE else cast)
        for values, (name, kind, dtype) in zip(collected, self._metrics, strict=True):
            joined = np.concatenate(values) if kind == _PER_SAMPLE else np.sum(values, axis=0, dtype=dtype)
            _publish_array(self._part_file(name, part), joined)
        return part

    def _iter_batches(self, part: int) -> Iterator[tuple[int, Any]]:
        stop = min(self._num_samples, (part + 1) * self._part_size)
        for start in range(part * self._part_size, stop, self._batch_size):
            numbers = range(start, min(stop, start + self._batch_size))
            ids = numbers if self._sample_indices is None else [self._sample_indices[number] for number in numbers]
            yield len(numbers), self._collate([self._dataset[index] for index in ids])


def _to_numpy_dtype(dtype: Any) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)


def _publish_array(path: Path, array: np.ndarray) -> None:
    publish_file(path, lambda file: np.save(file, array, allow_pickle=False))
