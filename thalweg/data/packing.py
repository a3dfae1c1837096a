"""Token sequences of any length, packed into blocks of one length.

The sequences are laid end to end in one stream and the stream is cut every ``T`` tokens::

    sequences   a a a | b b b b b | c            end marker e, T = 4
    stream      a a a e b b b b b e c e
    inputs      [a a a e] [b b b b] [b e c e]    each token is an input once
    labels      [a a e b] [b b b b] [e c e -]    and a label once, but for the very first

Invariants: no token is lost or doubled; a label is the token after its input, or -100
(ignored by cross-entropy) where there is none.  With ``separate=True`` documents do not
see each other: the label that would cross into the next document is -100 too, and each
block carries ``document_ids`` (to mask attention) and ``position_ids`` that start again
at 0 at each document's first token in the block, so positions stay below ``T``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from thalweg.utils.atomic_file import publish_file

IGNORE_INDEX = -100


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset of blocks over one stream of tokens.

    ``self[i]`` is a dictionary of int64 tensors of shape (T,): ``input_ids`` and
    ``labels`` (already shifted: nothing is to be shifted in the model), and with
    ``separate`` also ``document_ids`` (the document's number in the corpus, -1 on
    padding) and ``position_ids``.  ``tokens`` may be a memory map: only the blocks that
    are asked for are read.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        *,
        document_starts: np.ndarray | None = None,
        pad_id: int = 0,
        separate: bool = False,
        tail: Literal["pad", "drop"] = "pad",
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        if tail not in ("pad", "drop"):
            raise ValueError(f"tail must be 'pad' or 'drop', not {tail!r}")
        if separate and document_starts is None:
            raise ValueError("separate=True needs document_starts, the stream position of each document")
        self.tokens, self.block_size, self.document_starts = tokens, block_size, document_starts
        self.pad_id, self.separate = pad_id, separate
        self._num_blocks = -(-len(tokens) // block_size) if tail == "pad" else len(tokens) // block_size
        if not self._num_blocks:
            raise ValueError(
                f"{len(tokens)} tokens do not fill one block of {block_size}: "
                "give more text, a smaller block_size, or tail='pad'"
            )

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self._num_blocks <= index < self._num_blocks:
            raise IndexError(f"block {index} of {self._num_blocks}")
        T = self.block_size
        start = index % self._num_blocks * T
        window = np.asarray(self.tokens[start : start + T + 1], dtype=np.int64)
        inputs = np.full(T, self.pad_id, dtype=np.int64)
        labels = np.full(T, IGNORE_INDEX, dtype=np.int64)
        size = min(T, len(window))
        inputs[:size] = window[:size]
        labels[: len(window) - 1] = window[1:]
        block = {"input_ids": inputs, "labels": labels}
        if self.separate:
            block |= self._document_fields(start, size, labels)
        return {name: torch.from_numpy(values) for name, values in block.items()}

    def _document_fields(self, start: int, size: int, labels: np.ndarray) -> dict[str, np.ndarray]:
        assert self.document_starts is not None
        token_positions = np.arange(start, start + size + 1)
        document = np.searchsorted(self.document_starts, token_positions, side="right") - 1
        labels[:size][document[1:] != document[:-1]] = IGNORE_INDEX
        ids = np.full(self.block_size, -1, dtype=np.int64)
        positions = np.zeros(self.block_size, dtype=np.int64)
        ids[:size] = document[:size]
        first = np.maximum(self.document_starts[document[:size]], start)
        positions[:size] = token_positions[:size] - first
        return {"document_ids": ids, "position_ids": positions}


def pack(
    sequences: Iterable[Sequence[int] | np.ndarray],
    block_size: int,
    *,
    end_id: int | None = None,
    pad_id: int = 0,
    separate: bool = False,
    tail: Literal["pad", "drop"] = "pad",
) -> PackedDataset:
    """Pack ``sequences`` into blocks of ``block_size`` tokens; ``end_id`` is put after each sequence.

    The last block is filled up with ``pad_id`` (its labels -100), or left out with
    ``tail="drop"``.  Raises ``ValueError`` for a negative token and when there are too
    few tokens for one block.
    """
    tokens, starts = concatenate_sequences(sequences, end_id=end_id)
    return PackedDataset(tokens, block_size, document_starts=starts, pad_id=pad_id, separate=separate, tail=tail)


def concatenate_sequences(
    sequences: Iterable[Sequence[int] | np.ndarray], *, end_id: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream (the narrowest of uint16, uint32, int64) and each document's start in it (int64)."""
    arrays: list[np.ndarray] = []
    lengths: list[int] = []
    end = np.array([] if end_id is None else [end_id], dtype=np.int64)
    for index, sequence in enumerate(sequences):
        array = np.asarray(sequence)
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"sequence {index} holds {array.dtype}, not whole numbers: encode text to token ids first")
        array = array.astype(np.int64)
        if array.size and array.min() < 0:
            raise ValueError(f"sequence {index} holds the negative token {array.min()}")
        arrays += [array, end]
        lengths.append(len(array) + len(end))
    stream = np.concatenate(arrays) if arrays else end[:0]
    largest = int(stream.max()) if stream.size else 0
    for dtype in (np.uint16, np.uint32):
        if largest <= np.iinfo(dtype).max:
            stream = stream.astype(dtype)
            break
    # A document without tokens has no place in the stream, but keeps its number.
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else np.zeros(0, np.int64)
    return stream, starts


def save_tokens(path: str | Path, tokens: np.ndarray) -> None:
    """Write a stream as a plain ``.npy`` array, for :func:`open_tokens`."""
    publish_file(Path(path), lambda file: np.save(file, tokens, allow_pickle=False))


def open_tokens(path: str | Path) -> np.ndarray:
    """Map a saved stream into memory; several processes share one copy."""
    return np.load(path, mmap_mode="r", allow_pickle=False)
