"""Sources, tokenizer and packing: nothing lost, nothing doubled, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.data.corpus import read_folder, split_held_out, stdlib_documents
from thalweg.data.packing import PackedDataset, open_tokens, pack, save_tokens
from thalweg.data.tokenizer import BytePairTokenizer, train_tokenizer

sequences = st.lists(st.lists(st.integers(0, 70_000), max_size=30), min_size=1, max_size=12)


@given(sequences, st.integers(1, 17), st.sampled_from([None, 7]), st.sampled_from(["pad", "drop"]))
@settings(deadline=None, max_examples=300)
def test_packing_loses_and_doubles_no_token(parts, block_size, end_id, tail):
    stream = [t for part in parts for t in [*part, *([] if end_id is None else [end_id])]]
    num_blocks = -(-len(stream) // block_size) if tail == "pad" else len(stream) // block_size
    if not num_blocks:
        with pytest.raises(ValueError, match=f"do not fill one block of {block_size}"):
            pack(parts, block_size, end_id=end_id, tail=tail)
        return
    blocks = pack(parts, block_size, end_id=end_id, tail=tail, pad_id=3)
    assert len(blocks) == num_blocks
    inputs = torch.cat([blocks[i]["input_ids"] for i in range(num_blocks)]).tolist()
    labels = torch.cat([blocks[i]["labels"] for i in range(num_blocks)]).tolist()
    kept = min(len(stream), len(inputs))
    assert inputs[:kept] == stream[:kept]
    assert inputs[kept:] == [3] * (len(inputs) - kept)
    wanted = [*stream[1:], -100]
    assert labels[:kept] == wanted[:kept]
    assert set(labels[kept:]) <= {-100}
    assert all(blocks[i]["input_ids"].shape == (block_size,) for i in range(num_blocks))


@given(sequences, st.integers(1, 17), st.sampled_from([None, 7]))
@settings(deadline=None, max_examples=300)
def test_separate_documents_do_not_see_each_other(parts, block_size, end_id):
    if not any(parts) and end_id is None:
        return
    blocks = pack(parts, block_size, end_id=end_id, separate=True)
    per_document: dict[int, list[int]] = {}
    for block in (blocks[i] for i in range(len(blocks))):
        rows = [block[name].tolist() for name in ("input_ids", "labels", "document_ids", "position_ids")]
        previous = None
        for place, (token, label, document, position) in enumerate(zip(*rows, strict=True)):
            if document == -1:
                assert (label, position) == (-100, 0)
                continue
            per_document.setdefault(document, []).append(token)
            begun = sum(map(len, [p for d, p in per_document.items() if d == document])) - 1
            document_tokens = [*parts[document], *([] if end_id is None else [end_id])]
            following = document_tokens[begun + 1] if begun + 1 < len(document_tokens) else -100
            assert label == following
            assert position == (previous[1] + 1 if previous and previous[0] == document else 0)
            assert position <= place
            previous = (document, position)
    whole = {i: [*p, *([] if end_id is None else [end_id])] for i, p in enumerate(parts)}
    assert per_document == {i: p for i, p in whole.items() if p}


def test_tokens_are_kept_narrow_and_mapped(tmp_path):
    assert pack([[65_535, 1]], 2).tokens.dtype == np.uint16
    assert pack([[65_536, 1]], 2).tokens.dtype == np.uint32
    assert pack([[1 << 40, 1]], 2).tokens.dtype == np.int64
    save_tokens(tmp_path / "deep" / "tokens.npy", pack([range(10)], 4).tokens)
    tokens = open_tokens(tmp_path / "deep" / "tokens.npy")
    assert isinstance(tokens, np.memmap)
    blocks = PackedDataset(tokens, 4)
    assert blocks[-1]["input_ids"].tolist() == [8, 9, 0, 0]
    assert blocks[0]["labels"].tolist() == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        blocks[3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([[1, -2]], 4), "sequence 0 holds the negative token -2"),
        (lambda: pack([[1], ["a"]], 4), "sequence 1 holds .* encode text"),
        (lambda: pack([[0.5]], 4), "not whole numbers"),
        (lambda: pack([[1]], 0), "block_size must be at least 1"),
        (lambda: pack([[1]], 1, tail="keep"), "'pad' or 'drop'"),  # type: ignore[arg-type]
        (lambda: pack([], 4), "0 tokens"),
        (lambda: PackedDataset(np.arange(4), 2, separate=True), "document_starts"),
    ],
)
def test_bad_input_to_packing_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_folder_is_read_in_one_order_and_only_text(tmp_path):
    for name in ("b/z.py", "b/a.py", "a.py", "a/x.txt", "__pycache__/c.py", "site-packages/p.py", "data.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\r\nx = 1\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    documents = list(read_folder(tmp_path))
    assert [d.name for d in documents] == ["a.py", "a/x.txt", "b/a.py", "b/z.py", "latin.py"]
    assert documents[0].text == "# a.py\nx = 1\n"
    assert "é" in documents[-1].text
    with pytest.raises(ValueError, match="not a folder"):
        list(read_folder(tmp_path / "nowhere"))


def test_the_standard_library_is_there_and_installed_packages_are_not():
    documents = list(stdlib_documents(tests=False))
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any("site-packages" in name for name in names)
    assert not any(name.startswith("test/") for name in names)
    assert sum(len(document.text) for document in documents) > 5e6
    training, held_out = split_held_out(documents, one_in=20)
    assert len(training) + len(held_out) == len(documents)
    assert 0.02 < len(held_out) / len(documents) < 0.09
    fewer, kept_out = split_held_out(documents[::2], one_in=20)
    assert {d.name for d in kept_out} <= {d.name for d in held_out}
    assert not {d.name for d in fewer} & {d.name for d in held_out}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document.text for document in list(stdlib_documents(tests=False))[:60]], 600)


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=200)
def test_decoding_is_the_inverse_of_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|end|>", "")


def test_a_tokenizer_is_trained_once_and_kept(tmp_path, tokenizer):
    texts = ["def f(x):\n    return x\n" * 20, "class A:\n    pass\n"]
    first = train_tokenizer(texts, 300, cache_dir=tmp_path)
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    stamp = files[0].stat().st_mtime_ns
    again = train_tokenizer(iter(texts), 300, cache_dir=tmp_path)
    assert files[0].stat().st_mtime_ns == stamp
    assert again.encode("return x").tolist() == first.encode("return x").tolist()
    train_tokenizer([*texts, "more"], 300, cache_dir=tmp_path)
    train_tokenizer(["".join(texts)], 300, cache_dir=tmp_path)
    train_tokenizer(texts, 301, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert tokenizer.vocab_size == 600
    assert max(map(max, tokenizer.encode_batch(["import os", "def main() -> int:"]))) < 600
    assert len(tokenizer.encode("    return self")) < 8


def test_a_damaged_or_foreign_tokenizer_file_is_refused(tmp_path, tokenizer):
    path = tmp_path / "t.json"
    tokenizer.save(path)
    assert BytePairTokenizer.load(path).vocab_size == 600
    path.write_text(path.read_text()[:1000])
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer.*delete it"):
        BytePairTokenizer.load(path)
    with pytest.raises(ValueError, match="no tokenizer at"):
        BytePairTokenizer.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(["x"], 100)
