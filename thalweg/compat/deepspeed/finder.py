"""What answers ``import deepspeed``: a finder, the modules it makes, and a distribution for who asks the version."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from thalweg import __version__
from thalweg.compat.deepspeed.surface import DEEPSPEED_VERSION, FALLBACK, SURFACE, NotOffered

NAME = "deepspeed"
# Modules that look for DeepSpeed once, when they are imported, and remember the answer.
_REMEMBER_ABSENCE = (
    "accelerate.utils",
    "transformers.integrations.deepspeed",
    "lightning.pytorch",
    "pytorch_lightning",
)


class DeepSpeedModule(ModuleType):
    """One module of the surface; a name is resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        module, surface = self.__name__, SURFACE[self.__name__]
        if name.startswith("__") and name not in surface:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = surface.get(name)
        if value is None and f"{module}.{name}" in SURFACE:
            return importlib.import_module(f"{module}.{name}")
        if isinstance(value, NotOffered):
            result: Any = _make_placeholder(f"{module}.{name}", value)
        elif value is not None:
            result = _resolve(value)
        elif FALLBACK in surface and hasattr(other := _resolve(surface[FALLBACK]), name):
            result = getattr(other, name)
        else:
            raise AttributeError(f"{module}.{name} is not among the names that Thalweg offers as {NAME}")
        vars(self)[name] = result
        return result

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *(name for name in SURFACE[self.__name__] if name != FALLBACK)})


def _resolve(target: str | NotOffered) -> Any:
    assert isinstance(target, str)
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def _make_placeholder(name: str, entry: NotOffered) -> type:
    """A class for ``isinstance`` and ``from ... import``; an object of it cannot be made."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not offered by Thalweg: {entry.instead}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": entry.instead})


class DeepSpeedFinder:
    """Finds ``deepspeed``, its submodules and its metadata; loads what it finds."""

    announced = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module of the surface; None for other packages."""
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        if name not in SURFACE:
            raise ModuleNotFoundError(
                f"{name} is not among the modules that Thalweg offers as {NAME} "
                "(thalweg/compat/deepspeed/surface.py lists them)",
                name=name,
            )
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> DeepSpeedModule:
        """An empty module that resolves its names."""
        return DeepSpeedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run; the first import of all says which DeepSpeed is in use, where there are two."""
        if not self.announced:
            self.announced = True
            _announce()

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """The distribution ``deepspeed``, where it or all are asked for."""
        if context is None or context.name is None or context.name.lower() == NAME:
            yield DeepSpeedDistribution()

    def invalidate_caches(self) -> None:
        """There are none."""


class DeepSpeedDistribution(importlib.metadata.Distribution):
    """The metadata of a DeepSpeed of the version whose surface this is."""

    def read_text(self, filename: str) -> str | None:
        """The two files that there are."""
        summary = f"DeepSpeed's names over Thalweg {__version__}"
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {DEEPSPEED_VERSION}\nSummary: {summary}\n",
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:  # type: ignore[override]
        """Where a file of the package would lie."""
        return Path(__file__).parent / path


def install() -> None:
    """Put the finder in front of all others, once.

    Raises:
        ImportError: a real DeepSpeed has been imported already.
    """
    if any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path):
        return
    real = sys.modules.get(NAME)
    if real is not None:
        raise ImportError(
            f"DeepSpeed {getattr(real, '__version__', '')} of {getattr(real, '__file__', '')} is imported already: "
            "import thalweg.compat.deepspeed before it, or start the program with `thalweg run --as-deepspeed`"
        )
    late = _found_no_deepspeed()
    sys.meta_path.insert(0, DeepSpeedFinder())  # type: ignore[arg-type]
    if late:
        from thalweg.utils.log import enable_console, get_logger

        enable_console()
        get_logger(__name__).warning(
            "%s was imported before thalweg.compat.deepspeed and found no DeepSpeed: import thalweg.compat.deepspeed "
            "first, or start the program with `thalweg run --as-deepspeed`",
            late[0],
        )


def _found_no_deepspeed() -> list[str]:
    """The modules that are loaded and will go on without a DeepSpeed."""
    loaded = [name for name in _REMEMBER_ABSENCE if name in sys.modules]
    return loaded if loaded and PathFinder.find_spec(NAME) is None else []


def _announce() -> None:
    """Say which DeepSpeed is in use where another one is installed."""
    spec = PathFinder.find_spec(NAME)
    if spec is None or spec.origin is None:
        return
    from thalweg.utils.log import enable_console, get_logger

    context = importlib.metadata.DistributionFinder.Context(name=NAME)
    installed: Iterable[Any] = importlib.metadata.MetadataPathFinder.find_distributions(context)
    version = next((distribution.version for distribution in installed), "?")
    enable_console()
    get_logger(__name__).info(
        "`import deepspeed` is Thalweg %s (as %s); the DeepSpeed %s in %s is not used: to use it, start without "
        "--as-deepspeed, THALWEG_AS_DEEPSPEED and thalweg.compat.deepspeed",
        __version__, DEEPSPEED_VERSION, version, Path(spec.origin).parent,
    )  # fmt: skip
