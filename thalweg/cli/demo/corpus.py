"""The demo's text: the standard library's sources, tokenized on the spot and kept in the demo's folder."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from thalweg.data.corpus import split_held_out, stdlib_documents
from thalweg.data.packing import concatenate_sequences, save_tokens
from thalweg.data.tokenizer import BytePairTokenizer, train_tokenizer

# One document in so many is never trained on.
_HELD_OUT = 40
_FORMAT = 1


def prepare_corpus(out: Path, vocabulary: int, log: Callable[[str], None]) -> int:
    """Write ``tokenizer.json``, ``tokens.npy``, ``held_out.npy`` and ``corpus.json`` below ``out``; returns how many
    tokens the tokenizer came to have.

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
        log(f"tokenizer: {cached['vocabulary']:,} tokens, kept from before; {cached['tokens'] / 1e6:.1f} M of text")
        return cached["vocabulary"]
    training, held_out = split_held_out(documents, _HELD_OUT)
    tokenizer = train_tokenizer([document.text for document in training], vocabulary)
    tokenizer.save(out / "tokenizer.json")
    total = 0
    for name, split in (("tokens.npy", training), ("held_out.npy", held_out)):
        encoded = tokenizer.encode_batch([document.text for document in split])
        stream, _ = concatenate_sequences(encoded, end_id=tokenizer.end_id)
        save_tokens(out / name, stream)
        total += len(stream)
    facts = {"key": key, "tokens": total, "vocabulary": tokenizer.vocab_size}
    (out / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
    log(f"tokenizer: {tokenizer.vocab_size:,} byte-pair tokens, trained here; {total / 1e6:.1f} M tokens of text")
    return tokenizer.vocab_size


def _load_cached(out: Path, key: str) -> dict[str, int] | None:
    try:
        facts = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
        is_same = facts["key"] == key
        BytePairTokenizer.load(out / "tokenizer.json")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return facts if is_same and all((out / name).exists() for name in ("tokens.npy", "held_out.npy")) else None
