"""Taking over a ``DataLoader`` that the user already has."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from thalweg.data.loader import PositionedLoader, StatefulLoader, build_loader, is_iterable_dataset, warn_of_other_order
from thalweg.data.sampler import EpochSampler

_OPTIONS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers")  # without workers these are refused


class PassthroughLoader(PositionedLoader):
    """A user's loader left exactly as it is, with its position counted in batches.

    Resuming starts the pass and discards as many batches as had been handed over, so it
    costs their loading, and gives the same samples only if the user's own order is
    reproducible.  With other numbers of ranks or sizes it discards as many samples, down to a whole batch.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self._rng: torch.Tensor | None = None  # of which the pass's order is drawn

    def __len__(self) -> int:
        return len(self.loader)

    def _iter_pass(self) -> Iterator[Any]:
        for component in (getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if hasattr(component, "set_epoch"):
                component.set_epoch(self.epoch)  # pyright: ignore[reportOptionalMemberAccess]
        skip = self.position
        generator = getattr(self.loader, "generator", None) or torch.default_generator
        current = generator.get_state()
        began = self._rng = self._rng if (skip or not self.is_in_use) and self._rng is not None else current
        if getattr(self.loader, "persistent_workers", False) and self.loader._iterator is None:
            # Before the order torch draws the workers' seed, for the pass that makes them alone.
            if skip:
                iter(self.loader)
            else:
                torch.empty((), dtype=torch.int64).random_(generator=generator)
                self._rng = generator.get_state()
        generator.set_state(began)
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        if skip and generator is torch.default_generator:
            generator.set_state(current)  # of the middle of the epoch
        for index, batch in enumerate(batches, skip):
            self._hand_over(index + 1)
            yield batch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the batch just handed over was the epoch's last; False where the length is unknown."""
        with contextlib.suppress(TypeError):
            return self._started and self.position >= len(self.loader)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, what of it was handed over, and of what one rank's order is drawn, as JSON scalars."""
        finished, size = self.at_epoch_end, self._samples_per_step
        position = 0 if finished else self.position
        samples = {} if size is None else {"samples": position * size}
        # Of several ranks each has a generator of its own, and a sampler that asks none.
        is_alone = not isinstance(getattr(self.loader, "sampler", None), DistributedSampler)
        rng = {"rng": bytes(self._rng.tolist()).hex()} if position and is_alone and self._rng is not None else {}
        return {"version": 1, "epoch": self.epoch + finished, "batches": position, **samples, **rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches, or the samples, that had been handed over."""
        samples, size = state.get("position", state.get("samples")), self._samples_per_step
        if samples is not None and size is not None:
            batches, rest = divmod(int(samples), size)
            if rest or (state.get("shuffle") and batches):
                warn_of_other_order(state["epoch"])
        elif "batches" in state:
            batches = int(state["batches"])
        else:
            raise ValueError(
                "the checkpoint's loader position counts samples, and this loader only batches: "
                "use the loader that the checkpoint was saved with, or do not restore its state"
            )
        self.epoch, self.position, self._started = int(state["epoch"]), batches, False
        self._rng = torch.tensor([*bytes.fromhex(state["rng"])], dtype=torch.uint8) if state.get("rng") else None

    @property
    def _samples_per_step(self) -> int | None:
        """Of all ranks; None where the loader does not say."""
        size = getattr(self.loader, "batch_size", None)
        return None if size is None else size * getattr(getattr(self.loader, "sampler", None), "num_replicas", 1)


def wrap_dataloader(
    loader: DataLoader, *, rank: int = 0, world_size: int = 1, seed: int = 0
) -> StatefulLoader | PassthroughLoader:
    """Return a loader with ``state_dict`` in place of the user's ``DataLoader``.

    Where there are several ranks and the user has not done so with a ``DistributedSampler``,
    its sampler is replaced by one that deals the samples out to the ranks; batch size, collate
    function and workers are kept.  A random or sequential sampler becomes the seeded order of
    :class:`EpochSampler`; any other sampler is drawn once an epoch on every rank, from torch's
    generator seeded alike, so a weighted sampler keeps its weights.  Else the loader is used as
    it is and its batches are counted.

    Raises ``ValueError`` for a custom ``batch_sampler``, which cannot be divided without
    knowing its rule, and for the sizes that :func:`build_loader` refuses.
    """
    if world_size == 1 or isinstance(loader.sampler, DistributedSampler):
        return PassthroughLoader(loader)
    is_iterable = is_iterable_dataset(loader.dataset)
    if loader.batch_size is None or not (is_iterable or type(loader.batch_sampler) is BatchSampler):
        raise ValueError(
            "a DataLoader with its own batch_sampler (or batch_size=None) cannot be divided over "
            f"{world_size} ranks from outside: give the batch sampler its rank, or pass the dataset instead"
        )
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    options = get_dataloader_options(loader)
    is_shuffled = type(sampler) is RandomSampler
    is_resampled = is_shuffled and (sampler.replacement or len(sampler) != len(dataset))  # not each sample once
    has_standard_order = is_iterable or type(sampler) is SequentialSampler or (is_shuffled and not is_resampled)
    common: dict[str, Any] = {"batch_size": loader.batch_size, "rank": rank, "world_size": world_size, "seed": seed}
    common["drop_last"] = loader.drop_last
    if has_standard_order:
        return build_loader(dataset, shuffle=is_shuffled, collate_fn=loader.collate_fn, **common, **options)
    order = partial(_draw_order, sampler, seed)
    epoch_sampler = EpochSampler(num_samples=len(sampler), shuffle=True, order=order, **common)
    return StatefulLoader(dataset, epoch_sampler, collate_fn=loader.collate_fn, **options)


def get_dataloader_options(loader: DataLoader) -> dict[str, Any]:
    """How it loads: workers and the like."""
    names = (*_OPTIONS, *_WORKER_OPTIONS) if loader.num_workers else _OPTIONS
    return {name: getattr(loader, name) for name in names}


def _draw_order(sampler: Any, seed: int, epoch: int) -> list[int]:
    """The order that a user's sampler gives, drawn under a seed that every rank shares."""
    seed = (seed << 20) + epoch
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not the accelerator's, whose state is not kept here
        return [int(index) for index in sampler]
