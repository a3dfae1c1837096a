"""The demo's text: the standard library's sources, tokenized on the spot and kept in the demo's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from thalweg.data.corpus import split_held_out, stdlib_documents
from thalweg.data.packing import concatenate_sequences, save_tokens
from thalweg.data.tokenizer import BytePairTokenizer, train_tokenizer

# One document in so many is never trained on.
_HELD_OUT = 40
_FORMAT = 1


@dataclass(frozen=True)
class CorpusInfo:
    """Facts about the prepared text; ``vocabulary`` is what training the tokenizer arrived at."""

    key: str
    documents: int
    bytes: int
    tokens: int
    vocabulary: int


def prepare_corpus(out: Path, vocabulary: int, log: Callable[[str], None]) -> CorpusInfo:
    """Write ``tokenizer.json``, ``tokens.npy``, ``held_out.npy`` and ``corpus.json`` below ``out``.

    Nothing is done twice: files of the same text and vocabulary are used as they are.
    """
    documents = list(stdlib_documents())
    if not documents:
        raise ValueError("this Python has no standard library sources (.py files): use one that does")
    size = sum(len(document.text.encode()) for document in documents)
    log(f"text: {len(documents):,} files of the standard library, {size / 1e6:.1f} MB")
    digest = hashlib.blake2b(f"{_FORMAT} {vocabulary}".encode(), digest_size=12)
    for document in documents:
        digest.update(f"\0{document.name}\0{document.text}".encode())
    key = digest.hexdigest()
    cached = _load_cached(out, key)
    if cached is not None:
        log(f"tokenizer: {cached.vocabulary:,} tokens, kept from before; {cached.tokens / 1e6:.1f} M of text")
        return cached
    training, held_out = split_held_out(documents, _HELD_OUT)
    tokenizer = train_tokenizer([document.text for document in training], vocabulary)
    tokenizer.save(out / "tokenizer.json")
    total = 0
    for name, split in (("tokens.npy", training), ("held_out.npy", held_out)):
        stream, _ = concatenate_sequences(
            tokenizer.encode_batch([document.text for document in split]), end_id=tokenizer.end_id
        )
        save_tokens(out / name, stream)
        total += len(stream)
    corpus = CorpusInfo(key, len(documents), size, total, tokenizer.vocab_size)
    (out / "corpus.json").write_text(json.dumps(asdict(corpus)), encoding="utf-8")
    log(f"tokenizer: {corpus.vocabulary:,} byte-pair tokens, trained here; {total / 1e6:.1f} M tokens of text")
    return corpus


def _load_cached(out: Path, key: str) -> CorpusInfo | None:
    try:
        corpus = CorpusInfo(**json.loads((out / "corpus.json").read_text(encoding="utf-8")))
        BytePairTokenizer.load(out / "tokenizer.json")
    except (OSError, ValueError, TypeError):
        return None
    complete = all((out / name).exists() for name in ("tokens.npy", "held_out.npy"))
    return corpus if corpus.key == key and complete else None
