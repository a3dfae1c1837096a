"""What a DeepSpeed config or script comes to on Thalweg; `thalweg migrate` prints it.

There is no list of keys or names here.  Of a config the schema knows what is renamed, ignored and not offered, and the
shortest config is found by leaving things out while what is read stays the same.  Of a script the tables of
``compat/*/surface.ini`` know each name, and the objects behind them their arguments.
"""

import ast
import copy
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import thalweg
from thalweg.compat.finder import FALLBACK, NotOffered, Package
from thalweg.config import Config, ConfigError, load
from thalweg.config.aliases import apply_key_aliases, find_parent
from thalweg.config.format import DEEPSPEED_DEFAULTS
from thalweg.config.load import read_partial_config
from thalweg.config.reader import read_source
from thalweg.config.rules import find_rule_violations, find_unsupported
from thalweg.config.support import ignored_options, is_under, unread_blocks

_SWITCHED_OFF = "it is switched off, and nothing reads it"
_MADE_AT_RUN_TIME = "the config is made while the program runs: give `thalweg migrate` the file, or print the dict"


@dataclass
class ConfigReport:
    """A config: what is read under another name, what has no effect and why, what is wrong or not offered, what
    DeepSpeed does where nothing is said, and the shortest config of the same job."""

    label: str
    renamed: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    not_offered: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None


@dataclass
class Use:
    """One name of DeepSpeed's in a script: ``becomes`` is Thalweg's own, None where only the alias has it."""

    line: int
    name: str
    becomes: str | None
    problem: str | None = None


@dataclass
class ScriptReport:
    """A script: what it uses, and the configs that stand in it or that it names."""

    label: str
    uses: list[Use] = field(default_factory=list)
    configs: list[ConfigReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def migrate_config(source: Any, label: str | None = None) -> ConfigReport:
    """The report on a config: a path, a mapping or text.

    Raises:
        ConfigError: it cannot be read as a config at all.
    """
    parsed, name = read_source(source)
    if parsed.tree is None:
        raise ConfigError(parsed.problems, name)
    partial = read_partial_config(source)
    found: tuple[Any, ...] = ()
    try:
        partial.raise_if_any([*find_rule_violations(partial.config, partial.invalid_paths),
                              *find_unsupported(partial.config, partial.invalid_paths)])  # fmt: skip
    except ConfigError as error:
        found = error.problems
    tree, aliases, _ = apply_key_aliases(copy.deepcopy(parsed.tree))
    report = ConfigReport(label or name or "config", list(aliases.describe()), not_offered=[str(p) for p in found])
    given = partial.config.provenance.user_set
    reasons = {**ignored_options(Config), **dict.fromkeys(unread_blocks(Config), _SWITCHED_OFF)}
    for path, why in reasons.items():
        if any(is_under(one, path) for one in given) and _remove(tree, path):
            report.ignored[aliases.to_user_path(path)] = why
    for problem in found:
        _remove(tree, aliases.to_schema_path(problem.path).partition("[")[0])
    for path, value in DEEPSPEED_DEFAULTS.items():
        if path not in given:
            report.defaults[path] = tree[path] = value
    try:
        report.config = _shorten(tree)
    except ConfigError as error:  # what is left needs what was cut out
        report.not_offered += [str(p) for p in error.problems if str(p) not in report.not_offered]
    return report


def _shorten(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out each option, and then each block, without which the same config is read."""
    meaning = load(copy.deepcopy(tree)).to_dict()
    for path in sorted(_paths(tree), key=len, reverse=True):
        shorter = copy.deepcopy(tree)
        _remove(shorter, ".".join(path))
        try:
            if load(copy.deepcopy(shorter)).to_dict() == meaning:
                tree = shorter
        except ConfigError:
            continue
    return tree


def _paths(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))


def _remove(tree: dict[str, Any], path: str) -> bool:
    """Take ``path`` out of ``tree``; whether it was there."""
    block, name = find_parent(tree, path)
    if block is None or name not in block:
        return False
    del block[name]
    return True


def migrate_script(path: Path) -> ScriptReport:
    """The report on a Python script.

    Raises:
        ValueError: it is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{path}{line}: this is not Python ({error}): give a script or a config") from None
    report = ScriptReport(str(path))
    reader = _ScriptReader(_packages())
    reader.visit(tree)
    report.uses = sorted(reader.uses.values(), key=lambda use: use.line)
    for source, label in reader.configs(path):
        if source is None:
            report.notes.append(f"{label}: {_MADE_AT_RUN_TIME}")
        else:
            report.configs.append(migrate_config(source, label))
    if not reader.imported:
        report.notes.append(
            "no import of deepspeed or mii: where a library (transformers, accelerate, lightning) imports it, "
            "`thalweg run --as-deepspeed` runs the script as it is"
        )
    return report


def _packages() -> dict[str, Package]:
    rooms = [importlib.import_module(f"thalweg.compat.{name}.surface") for name in ("deepspeed", "mii")]
    return {room.PACKAGE.name: room.PACKAGE for room in rooms}


class _ScriptReader(ast.NodeVisitor):
    """Follows the names of the packages through one script."""

    def __init__(self, packages: dict[str, Package]) -> None:
        self._packages = packages
        self.imported: dict[str, str] = {}  # a name in the script -> the dotted one that it stands for
        self._engines: set[str] = set()
        self._literals: dict[str, ast.expr] = {}
        self._config_arguments: list[ast.expr] = []
        self.uses: dict[str, Use] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for item in node.names:
            if self._is_ours(item.name):
                first = item.name.partition(".")[0]
                self.imported[item.asname or first] = item.name if item.asname else first
                if "." in item.name:
                    self._use(node, item.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and self._is_ours(node.module or ""):
            for item in node.names:
                self.imported[item.asname or item.name] = f"{node.module}.{item.name}"
                self._use(node, f"{node.module}.{item.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name is None:
            self.generic_visit(node)
        elif name.partition(".")[0] in self._engines:
            self._use_engine(node, name.split(".")[1])
        elif self._is_ours(name):
            self._use(node, name)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict | ast.Constant):
                self._literals[target.id] = node.value
            called = self._dotted(node.value.func) if isinstance(node.value, ast.Call) else None
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
            if called == "deepspeed.initialize" and isinstance(first, ast.Name):
                self._engines.add(first.id)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        if name is not None and self._is_ours(name):
            self._use(node, name, [keyword.arg for keyword in node.keywords if keyword.arg])
            self._config_arguments += [k.value for k in node.keywords if k.arg in ("config", "config_params")]
        self.generic_visit(node)

    def configs(self, script: Path) -> Iterator[tuple[Any, str]]:
        """Each config that a call names: as a dict or a path, or None where only the running program knows it."""
        for given in self._config_arguments:
            value = self._literals.get(given.id, given) if isinstance(given, ast.Name) else given
            label = f"{script}:{given.lineno}"
            try:
                source = ast.literal_eval(value)
            except ValueError:
                source = None
            if isinstance(source, str):
                label, source = f"{script.parent / source}", str(script.parent / source)
            yield (source if isinstance(source, str | dict) else None), label

    def _is_ours(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages

    def _dotted(self, node: ast.expr) -> str | None:
        """The whole name of a chain of attributes, the first part by what the script imported it as."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        first = self.imported.get(node.id, node.id if node.id in self._engines else None)
        return None if first is None else ".".join([first, *reversed(parts)])

    def _use(self, node: Any, name: str, arguments: list[str] | None = None) -> None:
        """Add a use of ``name``, once, or what is wrong with the arguments of a call of it."""
        use = self.uses.get(name)
        if use is None:
            use = self.uses[name] = Use(node.lineno, name, *self._look_up(name))
        if arguments and use.problem is None:
            unknown = _unknown_arguments(_resolve(name), arguments)
            if unknown:
                use.line, use.problem = node.lineno, f"takes no argument {', '.join(unknown)}"

    def _use_engine(self, node: ast.Attribute, attribute: str) -> None:
        name = f"engine.{attribute}"
        if name not in self.uses and attribute not in _engine_names():
            self.uses[name] = Use(node.lineno, name, None, "is not among the names of Thalweg's engine")

    def _look_up(self, name: str) -> tuple[str | None, str | None]:
        """(Thalweg's own name, what is wrong) for a dotted name of a package."""
        package = self._packages[name.partition(".")[0]]
        module, attributes = name, []
        while module not in package.surface and "." in module:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
        entry = package.look_up(module, attributes[0]) if attributes else None
        if isinstance(entry, NotOffered):
            return None, f"is not offered: {entry.instead}"
        if attributes and entry is None and (FALLBACK not in package.surface[module] or _resolve(name) is None):
            return None, f"is not among the names that Thalweg offers as {package.name}"
        native = name.replace(package.name, "thalweg", 1)
        if native.split(".")[1:2] and native.split(".")[1] in thalweg.__all__ and _resolve(native) is not None:
            return native, None
        target = (entry or "").replace(":", ".")
        own = target if target and not target.startswith(("thalweg.compat", package.name)) else None
        return own and ".".join([own, *attributes[1:]]), None


def _resolve(name: str) -> Any:
    """The object of a dotted name, or None."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _unknown_arguments(function: Any, given: list[str]) -> list[str]:
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return [] if takes_all else [name for name in given if name not in known]


def _engine_names() -> set[str]:
    """The engine's methods, those that say what the config says, and what its classes set on themselves."""
    from thalweg.compat.deepspeed.engine import CONFIG_GETTERS, DeepSpeedEngine

    names = {*dir(DeepSpeedEngine), *CONFIG_GETTERS}
    for cls in DeepSpeedEngine.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names
