"""A byte-level BPE tokenizer, trained on the spot and kept.

Byte-level (Radford et al. 2019; Sennrich et al. 2016 for the merges): every text can be
encoded and decoding is its exact inverse, so there is no unknown token.  The work is done
by the ``tokenizers`` package; its files are JSON.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.utils.atomic_file import publish_file

END_TOKEN = "<|end|>"
_MIN_VOCAB_SIZE = 257  # every byte, and the end of a document


class BytePairTokenizer:
    """Text to token ids and back; ``end_id`` separates documents."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.end_id: int = tokenizer.token_to_id(END_TOKEN)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text, (length,), uint32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; the texts are spread over the processor's cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.uint32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; the end marker is shown as nothing."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as JSON, through a temporary name so that no reader sees half of it."""
        publish_file(Path(path), lambda file: file.write(self._tokenizer.to_str().encode()))

    @staticmethod
    def load(path: str | Path) -> BytePairTokenizer:
        """Read what :meth:`save` wrote; raises ``ValueError`` naming the file when it is damaged."""
        tokenizers = _import_tokenizers()
        try:
            tokenizer = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no tokenizer at {path}") from None
        except Exception as error:  # the package raises a bare Exception for bad JSON
            raise ValueError(f"{path} is not a tokenizer ({error}): delete it to train a new one") from None
        if tokenizer.token_to_id(END_TOKEN) is None:
            raise ValueError(
                f"{path} has no {END_TOKEN} token: it was not made by Thalweg; delete it to train a new one"
            )
        return BytePairTokenizer(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, cache_dir: str | Path | None = None) -> BytePairTokenizer:
    """Return a tokenizer of ``vocab_size`` tokens trained on ``texts``.

    With a ``cache_dir`` folder the result is kept there under a digest of the texts and the
    size, and taken from there the next time.  A small corpus may end with fewer tokens
    than asked for (nothing is left to merge).  Raises ``ValueError`` for a vocabulary
    that cannot hold the 256 bytes and the end marker.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(f"a byte-level vocabulary needs at least {_MIN_VOCAB_SIZE} tokens, not {vocab_size}")
    texts = list(texts)
    cached_path = None if cache_dir is None else Path(cache_dir) / f"tokenizer-{vocab_size}-{_digest(texts)}.json"
    if cached_path is not None and cached_path.exists():
        return BytePairTokenizer.load(cached_path)
    result = BytePairTokenizer(train_byte_level_bpe(texts, vocab_size, [END_TOKEN]))
    if cached_path is not None:
        result.save(cached_path)
    return result


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """Return a tokenizer of the ``tokenizers`` package; the special tokens come first."""
    tokenizers = _import_tokenizers()
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet, options = sorted(byte_level.alphabet()), {"special_tokens": list(special_tokens), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def _import_tokenizers() -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("the tokenizer needs the package 'tokenizers': run `pip install 'thalweg[hf]'`")
    import tokenizers

    return tokenizers
