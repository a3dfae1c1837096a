"""What answers ``import deepspeed`` and ``import mii``: a finder, its modules, a distribution for who asks a version.

A package is a table, its ``surface.ini``: for each module its names, and for each name where in Thalweg it lives, or a
``NotOffered``.  A section is for one module or several::

    [deepspeed.ops.adam deepspeed.ops.adam.cpu_adam]
    FusedAdam DeepSpeedCPUAdam = thalweg.compat.deepspeed.optimizers    names of a module of ours
    Adam = thalweg.compat.deepspeed.optimizers:FusedAdam                one that has another name there
    lamb = thalweg.optim.algorithms.lamb:                               the module itself
    CPUAdam = not offered: set "offload_optimizer" in the config        what to do instead

Two keys are not names: under ``FALLBACK`` stands the module whose names a module has beside its own, or what to do
instead of all others, under ``PROGRAM`` the module that runs for ``python -m``.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate, repeat
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from thalweg import __version__

FALLBACK, PROGRAM = "*", "-m"
_NOT_OFFERED = "not offered: "


@dataclass(frozen=True)
class NotOffered:
    """A name that can be imported and not used; ``instead`` names Thalweg's way."""

    instead: str


Names = dict[str, str | NotOffered]


def read_surface(package: str) -> dict[str, Names]:
    """The table of a package that Thalweg stands for, by module; packages that its modules lie in are there, too."""
    table = ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    table.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    table.read(Path(__file__).parent / package / "surface.ini", encoding="utf-8")
    surface: dict[str, Names] = {}
    for modules, rows in table.items():
        for module in modules.split() if rows else ():
            for parent in accumulate(module.split("."), "{}.{}".format):
                surface.setdefault(parent, {})
            for names, where in rows.items():
                surface[module] |= {name: _parse_target(name, where) for name in names.split()}
    return surface


def _parse_target(name: str, where: str) -> str | NotOffered:
    """Where a name lives: ``module:attribute``, or a module."""
    if where.startswith(_NOT_OFFERED):
        return NotOffered(" ".join(where.removeprefix(_NOT_OFFERED).split()))
    if name in (FALLBACK, PROGRAM) or where.endswith(":"):
        return where.removesuffix(":")
    return where if ":" in where else f"{where}:{name}"


@dataclass(frozen=True)
class Package:
    """A package that Thalweg stands for."""

    name: str
    title: str
    distribution: str
    version: str
    surface: dict[str, Names]
    # Modules that look for the package once, when they are imported, and remember the answer.
    remember_absence: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The module of ours whose import opts in."""
        return f"thalweg.compat.{self.name}"

    def look_up(self, module: str, name: str) -> str | NotOffered | None:
        """What stands for a name of a module; where no name of it is offered, what to do instead of all."""
        names = self.surface.get(module, {})
        rest = names.get(FALLBACK)
        return names.get(name, rest if isinstance(rest, NotOffered) else None)


_packages: dict[str, Package] = {}


class SurfaceModule(ModuleType):
    """One module of a surface; a name is resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        package = _package_of(module)
        surface = package.surface[module]
        if name.startswith("__") and name not in surface:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = package.look_up(module, name)
        if name not in surface and f"{module}.{name}" in package.surface:
            return importlib.import_module(f"{module}.{name}")
        if isinstance(value, NotOffered):
            said = f"{module}.{name} is not offered by Thalweg: {value.instead}"
            result: Any = _Placeholder(name, (), {"__doc__": said})
        elif value is not None:
            result = _resolve(value)
        elif FALLBACK in surface and hasattr(other := _resolve(surface[FALLBACK]), name):
            result = getattr(other, name)
        else:
            raise AttributeError(f"{module}.{name} is not among the names that Thalweg offers as {package.name}")
        vars(self)[name] = result
        return result

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *(_package_of(self.__name__).surface[self.__name__].keys() - {FALLBACK, PROGRAM})})


def _resolve(target: str | NotOffered) -> Any:
    assert isinstance(target, str)
    return pkgutil.resolve_name(target if ":" in target else f"{target}:")


class _Placeholder(type):
    """Of classes for ``isinstance`` and ``from ... import``: no object of one can be made, none has attributes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls.__doc__)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__}.{name}: {cls.__doc__}")


class SurfaceFinder:
    """Finds the packages that were opted in to, their submodules and their metadata; loads what it finds."""

    def __init__(self) -> None:
        self._announced: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module of a surface; None for other packages."""
        package = _packages.get(name.partition(".")[0])
        if package is None:
            return None
        parent, _, last = name.rpartition(".")
        if last == "__main__" and PROGRAM in package.surface.get(parent, {}):
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        if name not in package.surface:
            above = map(package.look_up, accumulate(name.split("."), "{}.{}".format), repeat(FALLBACK))
            ways = [entry.instead for entry in above if isinstance(entry, NotOffered)]
            raise ModuleNotFoundError(
                f"{name} is not among the modules that Thalweg offers as {package.name}: "
                f"{ways[0] if ways else f'{package.room}/surface.ini lists them'.replace('.', '/', 2)}",
                name=name,
            )
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> SurfaceModule:
        """An empty module that resolves its names."""
        return SurfaceModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run; the first import of all says which package is in use, where there are two."""
        package = _package_of(module.__name__)
        if package.name not in self._announced:
            self._announced.add(package.name)
            _announce(package)

    def get_code(self, name: str) -> CodeType | None:
        """What ``python -m`` runs for a module: a file of ours, which sees the module's name in ``__spec__``."""
        parent = name.removesuffix(".__main__")
        program = _package_of(parent).surface[parent].get(PROGRAM)
        spec = importlib.util.find_spec(program) if isinstance(program, str) else None
        return None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """The distributions of the packages, where they or all are asked for."""
        wanted = None if context is None or context.name is None else context.name.lower().replace("_", "-")
        yield from (SurfaceDistribution(p) for p in _packages.values() if wanted in (None, p.distribution))


class SurfaceDistribution(importlib.metadata.Distribution):
    """The metadata of a package of the version whose surface this is."""

    def __init__(self, package: Package) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        """The two files that there are."""
        package = self._package
        summary = f"{package.title}'s names over Thalweg {__version__}"
        head = f"Name: {package.distribution}\nVersion: {package.version}\nSummary: {summary}\n"
        return {"METADATA": f"Metadata-Version: 2.1\n{head}", "top_level.txt": f"{package.name}\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:  # type: ignore[override]
        """Where a file of the package would lie."""
        return Path(__file__).parent / path


def install(package: Package) -> None:
    """Let ``package`` be Thalweg's from now on; the finder stands in front of all others.

    Raises:
        ImportError: a real one has been imported already.
    """
    if package.name in _packages:
        return
    real = sys.modules.get(package.name)
    if real is not None:
        raise ImportError(
            f"{package.title} {getattr(real, '__version__', '')} of {getattr(real, '__file__', '')} is imported "
            f"already: import {package.room} before it, or start the program with `thalweg run --as-deepspeed`"
        )
    # The modules that are loaded and will go on without the package.
    late = [name for name in package.remember_absence if name in sys.modules]
    if not any(isinstance(finder, SurfaceFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, SurfaceFinder())  # type: ignore[arg-type]
    _packages[package.name] = package
    if late and PathFinder.find_spec(package.name) is None:
        from thalweg.utils.log import enable_console, get_logger

        enable_console()
        get_logger(__name__).warning(
            "%s was imported before %s and found no %s: import %s first, or start the program with "
            "`thalweg run --as-deepspeed`",
            late[0], package.room, package.title, package.room,
        )  # fmt: skip


def _package_of(module: str) -> Package:
    return _packages[module.partition(".")[0]]


def _announce(package: Package) -> None:
    """Say which package is in use where another one is installed."""
    spec = PathFinder.find_spec(package.name)
    if spec is None or spec.origin is None:
        return
    from thalweg.utils.log import enable_console, get_logger

    context = importlib.metadata.DistributionFinder.Context(name=package.distribution)
    installed: Iterable[Any] = importlib.metadata.MetadataPathFinder.find_distributions(context)
    version = next((distribution.version for distribution in installed), "?")
    enable_console()
    get_logger(__name__).info(
        "`import %s` is Thalweg %s (as %s); the %s %s in %s is not used: to use it, start without "
        "--as-deepspeed, THALWEG_AS_DEEPSPEED and %s",
        package.name, __version__, package.version, package.title, version, Path(spec.origin).parent, package.room,
    )  # fmt: skip
