"""A loader that knows where it is: batches for this rank, and a place to come back to.

    dataset --EpochPlan--> ids of this rank --torch DataLoader (workers, collate)--> batches
                  ^                                                        |
              position  <----------- moved when a batch reaches the user --+

The arithmetic of who gets what is in ``sampler.py``; torch's own ``DataLoader`` does the
loading.  This file keeps the position: ``(epoch, samples of the whole job)``, counted
when a batch is *handed over*, never when a worker has fetched it ahead.

Invariants: ``state_dict()`` is a few JSON scalars, the same on every rank; loading it at
another world size or micro-batch goes on with exactly the ids that were not yet handed
over; the order of samples never depends on the number of workers; torch's global random
state is not touched (torch's own loader draws from it at each start, which makes a resumed
run's dropout differ).  What is not restored: random transforms *inside* worker processes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from thalweg.data.sampler import BatchSlice, EpochSampler, rank_slice_bounds
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
_STATE_VERSION = 1
_END_OF_EPOCH = object()


class ShardedIterableDataset(IterableDataset):
    """Yields ``(share, collated batch)`` for one rank, from sample ``start`` on of a stream that can only be read from
    start to end.

    Every rank reads the same stream, numbers the samples as they come, and keeps its own share of each step by the same
    rule as for a dataset with a length (``sampler.py``).  That rule needs to know how many samples are left only up to
    one step and one sample per rank, so the reader looks that far ahead and no further.

    A dataset with ``set_epoch`` is told nothing here: a stream that differs between epochs
    has to arrange that itself, and alike on each rank.
    """

    def __init__(
        self, dataset: Any, epoch_sampler: EpochSampler, start: int, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset, self._epoch_sampler, self._start, self._collate = dataset, epoch_sampler, start, collate_fn

    def __iter__(self) -> Iterator[tuple[BatchSlice, Any]]:
        epoch_sampler = self._epoch_sampler
        lookahead = epoch_sampler.world_size * epoch_sampler.batch_size + epoch_sampler.world_size
        stream = islice(iter(self._dataset), self._start, None)
        lookahead_buffer: list[Any] = list(islice(stream, lookahead))
        position = self._start
        while step_size := epoch_sampler.next_step_size(len(lookahead_buffer)):
            low, high = rank_slice_bounds(step_size, epoch_sampler.rank, epoch_sampler.world_size)
            ids = list(range(position + low, position + high))
            samples = lookahead_buffer[low:high]
            num_duplicates = int(not samples)
            if num_duplicates:  # fewer samples left than ranks: see the rule in sampler.py
                duplicate_index = (epoch_sampler.rank - step_size) % step_size
                ids, samples = [position + duplicate_index], [lookahead_buffer[duplicate_index]]
            del lookahead_buffer[:step_size]
            lookahead_buffer += islice(stream, lookahead - len(lookahead_buffer))
            start, position = position, position + step_size
            is_last = epoch_sampler.next_step_size(len(lookahead_buffer)) == 0
            yield BatchSlice(start, position, ids, num_duplicates, is_last), self._collate(samples)


class PositionedLoader:
    """A loader that counts what it hands over: ``epoch`` is that of the next batch, ``position`` how far it is in it.

    ``num_handed_over``: batches so far, whatever epoch they belong to.  ``is_in_use``: False between a resume and the
    first training of a program that may pass over by itself what it has seen; see :meth:`_iter_unsure`.
    """

    def __init__(self) -> None:
        self.epoch = self.position = self.num_handed_over = 0
        self._started, self.is_in_use = False, True

    def __iter__(self) -> Iterator[Any]:
        self._begin_pass()
        return self._iter_pass() if self.is_in_use else self._iter_unsure()

    def _iter_pass(self) -> Iterator[Any]:
        """The batches from ``position`` to the end of ``epoch``."""
        raise NotImplementedError

    def _iter_unsure(self) -> Iterator[Any]:
        """A resumed pass of a program that goes on with the data, or first takes as many batches as it has seen.

        Only batches that the model is trained on matter.  So the first is the one that comes next.  If another is asked
        for before any training, the program passes batches over and counts them from the epoch's start, and so does
        this: what it trains on first is again the one that comes next.
        """
        epoch, position, batches = self.epoch, self.position, self._iter_pass()
        yield from islice(batches, 1)
        if self._started and not self.is_in_use:
            if position:
                _log.warning(
                    "batches before the first training count from the start of epoch %d, as with DeepSpeed; to read "
                    "ahead without passing any over, set engine.training_dataloader.is_in_use = True first", epoch
                )  # fmt: skip
            self.position, self._started = 0, False
            yield from islice(self._iter_pass(), 1, None)
            if not self.is_in_use:  # all was passed over: the program counts through the epochs before this one
                self.epoch, self.position, self._started = epoch, 0, False
        else:
            yield from batches

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``, from its start.

        Naming the epoch that ``load_state_dict`` has just restored keeps its position, so
        the usual ``for epoch in range(start, n): loader.set_epoch(epoch)`` resumes in place.
        """
        if epoch != self.epoch or self._started:
            self.epoch, self.position = epoch, 0
        self._started = False

    def _begin_pass(self) -> None:
        """The next epoch after one that has begun, the rest of this one else."""
        if self._started:
            self.epoch, self.position = self.epoch + 1, 0
        self._started = False

    def _hand_over(self, position: int) -> None:
        """A batch goes to the user, which brings this loader to ``position``."""
        self.position, self._started = position, True
        self.num_handed_over += 1


class StatefulLoader(PositionedLoader):
    """Iterable over this rank's batches; see :func:`build_loader` for the arguments.

    Each ``iter()`` is one pass over the data: the rest of the epoch after
    ``load_state_dict``, else a whole epoch.  A pass that has begun, finished or not, is
    followed by the next epoch (another order when shuffled), unless ``set_epoch`` names one.
    After each batch ``last_sample_ids`` holds the ids in it, ``last_num_duplicates`` how many of
    them the epoch has given out before (nearly always 0; see ``sampler.py``), ``last_num_samples`` the samples that all
    ranks were given with it, and
    ``at_epoch_end`` says whether it was the epoch's last.
    """

    def __init__(
        self,
        dataset: Any,
        epoch_sampler: EpochSampler,
        *,
        collate_fn: Callable | None = None,
        **dataloader_options: Any,
    ) -> None:
        super().__init__()
        self.dataset, self.epoch_sampler = dataset, epoch_sampler
        self.batch_size, self.drop_last = epoch_sampler.batch_size, epoch_sampler.drop_last
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.last_sample_ids: list[int] = []
        self.last_num_duplicates = self.last_num_samples = 0
        self.at_epoch_end = False
        self._is_iterable = is_iterable_dataset(dataset)
        self._pending_slices: deque[BatchSlice] = deque()
        self._pass_number = 0
        # A generator of its own: without it, starting a pass would draw from torch's global one.
        self._generator = torch.Generator()
        self._dataloader_options = dataloader_options
        self._dataloader: DataLoader | None = None

    def __len__(self) -> int:
        """Batches per rank in a whole epoch; raises ``TypeError`` for an iterable dataset, as torch does."""
        if self._is_iterable:
            raise TypeError("an IterableDataset has no length: count the batches as they come")
        return len(self.epoch_sampler)

    def state_dict(self) -> dict[str, int | bool | None]:
        """Return where the loader is, as a few JSON scalars that are the same on every rank."""
        finished = self._started and self.at_epoch_end
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch + finished,
            "position": 0 if finished else self.position,
            "num_samples": None if self._is_iterable else self.epoch_sampler.num_samples,
            "seed": self.epoch_sampler.seed,
            "shuffle": self.epoch_sampler.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state`` was taken; the next pass gives what had not been handed over then.

        The saved seed must be this loader's, and the dataset as long as it was: otherwise
        the ids would not be the same ones, which is a ``ValueError``.
        """
        if state.get("samples") is not None:  # of a user's loader, which one rank used as it was
            if self.epoch_sampler.shuffle and state["samples"]:
                warn_of_other_order(state["epoch"])
            state = {**self.state_dict(), "epoch": state["epoch"], "position": state["samples"]}
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"the loader's state has version {state.get('version')!r}, not {_STATE_VERSION}")
        for name, value in self.state_dict().items():
            if name in ("num_samples", "seed", "shuffle") and state.get(name) != value:
                raise ValueError(
                    f"cannot resume the data: {name} was {state.get(name)} when the checkpoint was saved "
                    f"and is {value} now. Give the same dataset, seed and shuffle; to go on with other data, "
                    "leave training_data out and make their loader with thalweg.data.build_loader()"
                )
        self._pass_number += 1
        self.epoch, self.position, self._started = int(state["epoch"]), int(state["position"]), False
        self.at_epoch_end = False

    def _iter_pass(self) -> Iterator[Any]:
        self._pass_number += 1
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        return self._iter_batches(self._pass_number)

    def _iter_batches(self, pass_number: int) -> Iterator[Any]:
        self._pending_slices.clear()
        # Worker processes seed their own libraries from this; nothing else reads it.
        self._generator.manual_seed(hash((self.epoch_sampler.seed, self.epoch, self.epoch_sampler.rank)) % (1 << 63))
        source = iter(self._build_dataloader())
        while True:
            if pass_number != self._pass_number:
                raise RuntimeError(
                    "this iterator is stale: the loader was started again or its state was loaded. "
                    "One pass at a time: take the batches from the newest iterator"
                )
            item: Any = next(source, _END_OF_EPOCH)
            if item is _END_OF_EPOCH:
                self.epoch, self.position, self._started = self.epoch + 1, 0, False
                return
            batch_slice, batch = item if self._is_iterable else (self._pending_slices.popleft(), item)
            self._hand_over(batch_slice.stop)
            self.last_sample_ids, self.last_num_duplicates = batch_slice.ids, batch_slice.num_duplicates
            self.last_num_samples = batch_slice.stop - batch_slice.start
            self.at_epoch_end = batch_slice.is_last
            yield batch

    def _build_dataloader(self) -> DataLoader:
        options = {"generator": self._generator, **self._dataloader_options}
        if self._is_iterable:
            shares = ShardedIterableDataset(self.dataset, self.epoch_sampler, self.position, self.collate_fn)
            return DataLoader(shares, batch_size=None, collate_fn=_identity, **options)
        if self._dataloader is None:
            batch_sampler: Any = _RankBatchSampler(self)
            options |= {"batch_sampler": batch_sampler, "collate_fn": self.collate_fn}
            self._dataloader = DataLoader(self.dataset, **options)
        return self._dataloader


class _RankBatchSampler:
    """The batch sampler of torch's loader: remembers each share until its batch comes out."""

    def __init__(self, loader: StatefulLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader
        for batch_slice in loader.epoch_sampler.iter_slices(loader.epoch, loader.position):
            loader._pending_slices.append(batch_slice)
            yield batch_slice.ids


def is_iterable_dataset(dataset: Any) -> bool:
    """Whether ``dataset`` can only be read from start to end."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def _identity(item: Any) -> Any:
    return item


def warn_of_other_order(epoch: int) -> None:
    """A checkpoint's position is that of another order."""
    _log.warning(
        "with this number of ranks epoch %d has another order of samples than the checkpoint's: until it ends, some of "
        "them come twice and others not at all",
        epoch,
    )


def build_loader(
    dataset: Any,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    **dataloader_options: Any,
) -> StatefulLoader:
    """Return a loader of ``dataset`` for one rank.

    ``dataset`` is anything with ``__len__`` and ``__getitem__``, or an iterable without them
    (each rank reads the whole stream and keeps its own samples; it resumes by reading past
    what was given out; at most one worker, no shuffle).  ``batch_size`` is the micro-batch
    of one rank; ``shuffle`` is true by default for a dataset with a length.  Other
    arguments (``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``timeout``,
    ``worker_init_fn``, ``multiprocessing_context``) go to ``torch.utils.data.DataLoader``.

    Raises ``ValueError`` when the dataset cannot give every rank a batch, naming the sizes.
    """
    options = {"num_workers": num_workers, **dataloader_options}
    if is_iterable_dataset(dataset):
        if shuffle:
            raise ValueError("the loader cannot shuffle an IterableDataset: shuffle inside it, or pass shuffle=False")
        if num_workers > 1:
            raise ValueError(
                f"an IterableDataset with {num_workers} workers would be read {num_workers} times: "
                "use num_workers 0 or 1, or a dataset with a length"
            )
        size, shuffle = world_size * batch_size, False
    else:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ValueError(
                f"{type(dataset).__name__} is not a dataset: it needs __len__ and __getitem__, "
                "or to be a torch.utils.data.IterableDataset"
            )
        size = len(dataset)
    common: dict[str, Any] = {"batch_size": batch_size, "rank": rank, "world_size": world_size, "seed": seed}
    epoch_sampler = EpochSampler(num_samples=size, shuffle=shuffle is not False, drop_last=drop_last, **common)
    return StatefulLoader(dataset, epoch_sampler, collate_fn=collate_fn, **options)
