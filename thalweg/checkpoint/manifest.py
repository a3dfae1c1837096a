"""The manifest: what a checkpoint holds, where each byte lies and what it must hash to.

The file is JSON with one entry a line.  Its first line is the checksum and nothing
else, ``{"checksum":"sha256:<64 hex>",``; the digest covers every byte after that line,
so a changed byte anywhere is seen before the rest is believed.  Its second line is the
``head``, which can be read alone (checksum still verified) when many checkpoints are
listed.  A manifest that passes its checksum is still parsed as a stranger's: names
stay inside the directory, pieces tile their tensor, aliases end at a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from thalweg.checkpoint.dtypes import DTYPES
from thalweg.checkpoint.errors import DamagedCheckpoint
from thalweg.checkpoint.layout import Box, tiles

FORMAT = "thalweg-checkpoint"
VERSION = 1
_FIRST_LINE = re.compile(rb'\{"checksum":"sha256:([0-9a-f]{64})",\n')
_SECOND = b'"head":'

Count = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Head(_Record):
    """What identifies a checkpoint among others of its directory; ``sequence`` grows with each commit."""

    format: StrictStr = FORMAT
    version: StrictInt = VERSION
    tag: StrictStr
    step: StrictInt
    epoch: Count
    world: Count
    sequence: Count
    created: StrictStr
    writer: StrictStr


class FileRecord(_Record):
    """One shard file: its size, and the size and sha256 of its header (length word included)."""

    size: Count
    header_bytes: Count
    header_sha256: Digest


class Piece(_Record):
    """One box of a logical tensor: the entry ``key`` of ``file``."""

    file: FileName
    key: StrictStr
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    sha256: Digest

    @property
    def box(self) -> Box:
        """The box it fills."""
        return Box(self.offset, self.size)


class TensorRecord(_Record):
    """A logical tensor; a tensor without elements has no pieces."""

    dtype: StrictStr
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(_Record):
    """Everything about one checkpoint but the tensors' bytes.  ``state`` and ``ranks`` are encoded trees."""

    head: Head
    files: dict[FileName, FileRecord]
    tensors: dict[StrictStr, TensorRecord]
    aliases: dict[StrictStr, StrictStr]
    state: Any
    ranks: list[Any]

    def canonical(self, name: str) -> str:
        """The stored tensor's name behind ``name``, which may be an alias."""
        return self.aliases.get(name, name)


def serialise(manifest: Manifest) -> bytes:
    """The bytes of the manifest file."""
    body = b"".join(_body(manifest))
    return b'{"checksum":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def _body(manifest: Manifest) -> Iterator[bytes]:
    def text(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    yield _SECOND + text(manifest.head.model_dump()) + b",\n"
    for section in ("files", "tensors"):
        yield f'"{section}":{{'.encode()
        records = getattr(manifest, section)
        yield b",".join(
            b"\n" + text(name) + b":" + text(record.model_dump()) for name, record in records.items()
        )
        yield b"},\n"
    yield b'"aliases":' + text(manifest.aliases) + b",\n"
    yield b'"state":' + text(manifest.state) + b",\n"
    yield b'"ranks":[' + b",".join(b"\n" + text(rank) for rank in manifest.ranks) + b"]}\n"


def _checked_body(data: bytes, where: str) -> bytes:
    first = _FIRST_LINE.match(data)
    if first is None:
        raise DamagedCheckpoint(f"{where}: the manifest does not begin with its checksum")
    body = data[first.end() :]
    if hashlib.sha256(body).hexdigest().encode() != first.group(1):
        raise DamagedCheckpoint(
            f"{where}: the manifest has changed since it was committed (its checksum differs)"
        )
    return body


def parse_head(data: bytes, where: str) -> Head:
    """The head of a manifest whose checksum holds."""
    line = _checked_body(data, where).partition(b"\n")[0]
    if not (line.startswith(_SECOND) and line.endswith(b",")):
        raise DamagedCheckpoint(f"{where}: the manifest has no head")
    try:
        head = Head.model_validate(json.loads(line[len(_SECOND) : -1]))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: the manifest's head cannot be read: {error}") from error
    _check_version(head, where)
    return head


def parse(data: bytes, where: str) -> Manifest:
    """Check and read a manifest; ``where`` (a path) begins the text of any ``DamagedCheckpoint``."""
    body = _checked_body(data, where)
    parse_head(data, where)
    try:
        manifest = Manifest.model_validate(json.loads(b"{" + body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise DamagedCheckpoint(f"{where}: the manifest's {place}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: the manifest is not JSON: {error}") from error
    for problem in _problems(manifest):
        raise DamagedCheckpoint(f"{where}: {problem}")
    return manifest


def _check_version(head: Head, where: str) -> None:
    if head.format != FORMAT:
        raise DamagedCheckpoint(f"{where}: the format is {head.format!r}, not {FORMAT!r}")
    if head.version > VERSION:
        raise DamagedCheckpoint(
            f"{where}: written in version {head.version} of the format; this Thalweg reads up to {VERSION}"
        )


def _problems(manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        if not 8 <= file.header_bytes <= file.size:
            yield f"the header of {name} does not fit into it"
    for name, record in manifest.tensors.items():
        if record.dtype not in DTYPES:
            yield f"tensor {name} has the unknown dtype {record.dtype!r}"
            continue
        dims = len(record.shape)
        if any(len(p.offset) != dims or len(p.size) != dims for p in record.pieces):
            yield f"tensor {name} has pieces of another number of dims"
        elif not tiles([p.box for p in record.pieces], record.shape):
            yield f"the pieces of tensor {name} do not cover its shape {list(record.shape)} exactly once"
        for piece in record.pieces:
            if piece.file not in manifest.files:
                yield f"tensor {name} lies in {piece.file}, which the manifest does not list"
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors or alias in manifest.tensors:
            yield f"the alias {alias} of {target} does not name a stored tensor"
