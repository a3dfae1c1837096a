"""Taking over a ``DataLoader`` that the user already has."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from thalweg.data.loader import StatefulLoader, build_loader, is_stream
from thalweg.data.sampler import EpochPlan

_CARRIED = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class CountingLoader:
    """A user's loader left exactly as it is, with its position counted in batches.

    Resuming starts the pass and discards as many batches as had been handed over, so it
    costs their loading, and gives the same samples only if the user's own order is
    reproducible.  The position belongs to this rank and this batch size.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._epoch = 0
        self._batches = 0
        self._begun = False

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's sampler or dataset which epoch comes next, where it wants to know."""
        if epoch != self._epoch or self._begun:
            self._epoch, self._batches = epoch, 0
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._epoch, self._batches = self._epoch + 1, 0
        self._begun = False
        for part in (getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)  # pyright: ignore[reportOptionalMemberAccess]
        skip = self._batches
        for number, batch in enumerate(self.loader):
            if number >= skip:
                self._batches, self._begun = number + 1, True
                yield batch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the batch just handed over was the epoch's last; False where the length is unknown."""
        return self._begun and self._batches >= _length(self.loader)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the batches of it handed over, as JSON scalars."""
        finished = self.at_epoch_end
        return {
            "version": 1,
            "epoch": self._epoch + finished,
            "batches": 0 if finished else self._batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that had been handed over."""
        if "batches" not in state:
            raise ValueError(
                "the checkpoint's loader position counts samples, and this loader only batches: "
                "use the loader that the checkpoint was saved with, or do not restore its state"
            )
        self._epoch, self._batches, self._begun = int(state["epoch"]), int(state["batches"]), False


def adopt_loader(
    loader: DataLoader, *, rank: int = 0, world_size: int = 1, seed: int = 0, distribute: bool | None = None
) -> StatefulLoader | CountingLoader:
    """Return a loader with ``state_dict`` in place of the user's ``DataLoader``.

    With ``distribute`` its sampler is replaced by one that deals the samples out to the
    ranks (default: when there are several ranks and the user has not done so with a
    ``DistributedSampler``); batch size, collate function and workers are kept.  A random
    or sequential sampler becomes the seeded order of :class:`EpochPlan`; any other sampler
    is drawn once an epoch on every rank, from torch's generator seeded alike, so a weighted
    sampler keeps its weights.  Without ``distribute`` the loader is used as it is and its
    batches are counted.

    Raises ``ValueError`` for a custom ``batch_sampler``, which cannot be divided without
    knowing its rule, and for the sizes that :func:`build_loader` refuses.
    """
    already = isinstance(loader.sampler, DistributedSampler)
    if distribute is None:
        distribute = world_size > 1 and not already
    if not distribute:
        return CountingLoader(loader)
    iterable = is_stream(loader.dataset)
    if loader.batch_size is None or not (iterable or type(loader.batch_sampler) is BatchSampler):
        raise ValueError(
            "a DataLoader with its own batch_sampler (or batch_size=None) cannot be divided over "
            f"{world_size} ranks from outside: give the batch sampler its rank, or pass the dataset instead"
        )
    sampler = loader.sampler
    options = {name: getattr(loader, name) for name in _CARRIED}
    if loader.num_workers == 0:
        options = {
            key: v for key, v in options.items() if key not in ("prefetch_factor", "persistent_workers")
        }
    plain = iterable or already or type(sampler) in (SequentialSampler, RandomSampler)
    random = type(sampler) is RandomSampler or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    if type(sampler) is RandomSampler and (
        sampler.replacement or len(sampler) != len(_sized(loader.dataset))
    ):
        plain = False
    built = build_loader(
        loader.dataset,
        batch_size=loader.batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=False if iterable else random,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        **options,
    )
    if plain:
        return built
    plan = EpochPlan(
        num_samples=len(_sized(sampler)),
        batch_size=loader.batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=True,
        drop_last=loader.drop_last,
        order=_DrawnOrder(sampler, seed),
    )
    return StatefulLoader(loader.dataset, plan, collate_fn=loader.collate_fn, **options)


class _DrawnOrder:
    """The order that a user's sampler gives, drawn under a seed that every rank shares."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def __call__(self, epoch: int) -> list[int]:
        seed = (self._seed << 20) + epoch
        if isinstance(getattr(self._sampler, "generator", None), torch.Generator):
            self._sampler.generator.manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return [int(index) for index in self._sampler]


def _sized(thing: Any) -> Sized:
    return thing


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")
