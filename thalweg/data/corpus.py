"""Where text comes from: files on this machine, read in an order that every machine agrees on."""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Installed packages are not the standard library, and caches are not text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules", ".git"})


@dataclass(frozen=True)
class Document:
    """One text and where it came from (a path relative to its root, with forward slashes)."""

    name: str
    text: str


def read_folder(root: str | Path, *, suffixes: tuple[str, ...] = (".py", ".txt", ".md")) -> Iterator[Document]:
    """Yield the text files below ``root``, ordered by relative path, whatever the file system's order.

    A file that is not text (undecodable in UTF-8 or in the encoding that a Python source
    declares) or that cannot be opened is passed over, as are empty files, links to
    folders and caches.  Raises ``ValueError`` when ``root`` is not a folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder with text in it: give the path of one that exists")
    for name in sorted(_iter_text_files(root, suffixes)):
        text = _read_text(root / name)
        if text and text.strip():
            yield Document(name, text)


def stdlib_documents(*, tests: bool = True) -> Iterator[Document]:
    """Yield the source text of the running Python's standard library.

    Some 1,800 files and 30 MB with the library's own ``tests`` (a system package of Python
    often leaves those out: about 13 MB then).
    """
    for document in read_folder(sysconfig.get_paths()["stdlib"], suffixes=(".py",)):
        if tests or not {"test", "tests"} & set(document.name.split("/")):
            yield document


def split_held_out(documents: Iterable[Document], one_in: int) -> tuple[list[Document], list[Document]]:
    """Return ``(training, held out)``: about one document in ``one_in``, chosen by a hash of its name.

    Adding or removing a file moves no other file across the line.
    """
    training: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        digest = hashlib.blake2b(document.name.encode(), digest_size=8).digest()
        (held_out if int.from_bytes(digest, "big") % one_in == 0 else training).append(document)
    return training, held_out


def _iter_text_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for folder, children, files in os.walk(root):
        children[:] = [child for child in children if child not in _SKIPPED_FOLDERS]
        for file in files:
            if file.endswith(suffixes):
                yield (Path(folder) / file).relative_to(root).as_posix()


def _read_text(path: Path) -> str | None:
    encoding = "utf-8"
    try:
        raw = path.read_bytes()
        if path.suffix == ".py":
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).replace("\r\n", "\n")
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
        return None
