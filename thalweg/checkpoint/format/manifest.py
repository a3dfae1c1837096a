"""The manifest: what a checkpoint holds, where each byte lies and what it must hash to.

The file is JSON with one entry a line.  Its first line is the checksum and nothing
else, ``{"checksum":"sha256:<64 hex>",``; the digest covers every byte after that line,
so a changed byte anywhere is seen before the rest is believed.  Its second line is the
``head``, which can be read alone (checksum still verified) when many checkpoints are
listed.  A manifest that passes its checksum is still parsed as a stranger's: names
stay inside the directory, pieces tile their tensor, aliases end at a tensor.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from thalweg.checkpoint.errors import CorruptCheckpointError
from thalweg.checkpoint.format.chunks import TensorChunk, covers_exactly
from thalweg.checkpoint.format.dtypes import DTYPES

FORMAT = "thalweg-checkpoint"
VERSION = 1
_CHECKSUM_LINE = re.compile(rb'\{"checksum":"sha256:([0-9a-f]{64})",\n')
_HEAD_PREFIX = b'"head":'

NonNegativeInt = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
Sha256Hex = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]


class _FrozenRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ManifestHead(_FrozenRecord):
    """What identifies a checkpoint among others of its directory; ``sequence`` grows with each commit."""

    format: StrictStr = FORMAT
    version: StrictInt = VERSION
    tag: StrictStr
    step: StrictInt
    epoch: NonNegativeInt = 0
    world: NonNegativeInt
    sequence: NonNegativeInt
    created: StrictStr
    writer: StrictStr


class FileRecord(_FrozenRecord):
    """One shard file: its size, and the size and sha256 of its header (length word included)."""

    size: NonNegativeInt
    header_bytes: NonNegativeInt
    header_sha256: Sha256Hex


class ChunkRecord(_FrozenRecord):
    """One box of a logical tensor: the entry ``key`` of ``file``."""

    file: FileName
    key: StrictStr
    offset: tuple[NonNegativeInt, ...]
    size: tuple[NonNegativeInt, ...]
    sha256: Sha256Hex

    @property
    def chunk(self) -> TensorChunk:
        """The box it fills."""
        return TensorChunk(self.offset, self.size)


class TensorRecord(_FrozenRecord):
    """A logical tensor; a tensor without elements has no pieces."""

    dtype: StrictStr
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[ChunkRecord, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(_FrozenRecord):
    """Everything about one checkpoint but the tensors' bytes.  ``state`` and ``ranks`` are encoded trees."""

    head: ManifestHead
    files: dict[FileName, FileRecord]
    tensors: dict[StrictStr, TensorRecord]
    aliases: dict[StrictStr, StrictStr]
    state: Any
    ranks: list[Any]

    def resolve_alias(self, name: str) -> str:
        """The stored tensor's name behind ``name``, which may be an alias."""
        return self.aliases.get(name, name)


def serialize_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest file."""
    body = b"".join(_iter_body(manifest))
    return b'{"checksum":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def _iter_body(manifest: Manifest) -> Iterator[bytes]:
    def dump_json(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    yield _HEAD_PREFIX + dump_json(manifest.head.model_dump()) + b",\n"
    for section in ("files", "tensors"):
        yield f'"{section}":{{'.encode()
        records = getattr(manifest, section)
        yield b",".join(b"\n" + dump_json(name) + b":" + dump_json(one.model_dump()) for name, one in records.items())
        yield b"},\n"
    yield b'"aliases":' + dump_json(manifest.aliases) + b",\n"
    yield b'"state":' + dump_json(manifest.state) + b",\n"
    yield b'"ranks":[' + b",".join(b"\n" + dump_json(rank) for rank in manifest.ranks) + b"]}\n"


def _read_verified_body(data: bytes, source: str) -> bytes:
    match = _CHECKSUM_LINE.match(data)
    if match is None:
        raise CorruptCheckpointError(f"{source}: the manifest does not begin with its checksum")
    body = data[match.end() :]
    if hashlib.sha256(body).hexdigest().encode() != match.group(1):
        raise CorruptCheckpointError(
            f"{source}: the manifest has changed since it was committed (its checksum differs)"
        )
    return body


def parse_head(data: bytes, source: str) -> ManifestHead:
    """The head of a manifest whose checksum holds."""
    line = _read_verified_body(data, source).partition(b"\n")[0]
    if not (line.startswith(_HEAD_PREFIX) and line.endswith(b",")):
        raise CorruptCheckpointError(f"{source}: the manifest has no head")
    try:
        head = ManifestHead.model_validate(json.loads(line[len(_HEAD_PREFIX) : -1]))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source}: the manifest's head cannot be read: {error}") from error
    if head.format != FORMAT:
        raise CorruptCheckpointError(f"{source}: the format is {head.format!r}, not {FORMAT!r}")
    if head.version > VERSION:
        raise CorruptCheckpointError(
            f"{source}: written in version {head.version} of the format; this Thalweg reads up to {VERSION}"
        )
    return head


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Check and read a manifest; ``source`` (a path) begins the text of any ``CorruptCheckpointError``."""
    body = _read_verified_body(data, source)
    parse_head(data, source)
    try:
        manifest = Manifest.model_validate(json.loads(b"{" + body))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(step) for step in first["loc"])
        raise CorruptCheckpointError(f"{source}: the manifest's {location}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source}: the manifest is not JSON: {error}") from error
    for problem in _find_inconsistencies(manifest):
        raise CorruptCheckpointError(f"{source}: {problem}")
    return manifest


def _find_inconsistencies(manifest: Manifest) -> Iterator[str]:
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
        elif not covers_exactly([p.chunk for p in record.pieces], record.shape):
            yield f"the pieces of tensor {name} do not cover its shape {list(record.shape)} exactly once"
        for piece in record.pieces:
            if piece.file not in manifest.files:
                yield f"tensor {name} lies in {piece.file}, which the manifest does not list"
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors or alias in manifest.tensors:
            yield f"the alias {alias} of {target} does not name a stored tensor"
