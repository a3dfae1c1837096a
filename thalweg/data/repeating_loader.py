"""A loader without an end."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any


class RepeatingLoader:
    """Begins anew when its loader ends, with a new order where the loader's sampler has one for each epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._iterator: Iterator[Any] | None = None  # once a batch is asked for: a checkpoint may be loaded before

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __next__(self) -> Any:
        self._iterator = self._iterator or iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self.epoch += 1
            sampler: Any = getattr(self.loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            self._iterator = iter(self.loader)
            return next(self._iterator)
