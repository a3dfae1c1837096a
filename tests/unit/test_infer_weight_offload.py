"""ZeRO-Inference: weights in a file give what weights in memory give, within the memory asked for."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thalweg
from tests.marks import nightly
from tests.repo.source import ROOT
from tests.unit.infer_models import tiny_decoder
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.loader.hf import load_mmapped
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import AttentionSpec, DecoderLayerSpec, DecoderSpec, LinearSpec, MLPSpec
from thalweg.infer.offload import packed_file
from thalweg.infer.offload.packed_file import CorruptFileError, PackedWeightsFile, content_digest
from thalweg.infer.offload.weight_ring import WeightRing, optimal_batch_size, plan_ring, split_into_segments
from thalweg.infer.runners.packed_weights import layer_linears
from thalweg.ops import cpu_kernels
from thalweg.storage_io.disk import Disk

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], list(range(20, 60))]
kernels = pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens(engine: Any, new: int = 8) -> dict[str, list[int]]:
    """Decode all prompts greedily, in steps that cut the longest in pieces."""
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=new)))
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def options(folder: Path | None = None, **fields: Any) -> EngineConfig:
    fields = {"max_batch": 4, "max_length": 96, "max_step_tokens": 16} | fields
    return EngineConfig(stream_folder=None if folder is None else str(folder), **fields)


def load_with_less(model: Any, folder: Path, share: float, **fields: Any) -> Any:
    """Load with direct reads and room for a share of the weights."""
    width = {"fp32": 4, "bf16": 2}.get(fields.get("dtype", ""), 1)
    weights = width * sum(p.numel() for p in model.parameters())
    for least in range(int(share * weights), 2 * weights, weights // 16):
        with contextlib.suppress(ValueError):
            return load_engine(model, options(folder, stream="nvme", stream_memory=least, **fields))
    raise AssertionError("no memory was enough")


@kernels
@pytest.mark.parametrize(
    ("kind", "form"), [("llama", "fp32"), nightly("gpt2", "int8"), nightly("falcon40", "bf16"), ("gpt_neox", "int4")]
)
def test_weights_in_a_file_give_the_same_tokens(kind: str, form: str, tmp_path: Path) -> None:
    model = tiny_decoder(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 6})
    fields = {"quantize": form} if form.startswith("int") else {"dtype": form}
    plain = load_engine(model, options(**fields))
    want = tokens(plain)
    plain.close()
    mapped = load_engine(model, options(tmp_path, stream="cpu", **fields))
    read = load_with_less(model, tmp_path, 0.5, **fields)
    ring = read.runner._weights.ring
    assert ring.num_streamed > 0 and ring.total_bytes < sum(ring.sizes)
    for engine in (mapped, read):
        assert tokens(engine) == want and tokens(engine) == want
        engine.close()
    assert not list(tmp_path.iterdir()), "a live model's file has no name"


@kernels
def test_a_segment_in_anothers_place_would_be_noticed(tmp_path: Path) -> None:
    """Negative control: every segment that passes gets the bytes of another one of its size."""
    model = tiny_decoder("llama", num_hidden_layers=6)
    engine = load_with_less(model, tmp_path, 0.5, dtype="fp32")
    want = tokens(engine)
    file, ring = engine.runner._weights.file, engine.runner._weights.ring
    streamed, read = range(ring.num_resident, len(ring.sizes)), file.read
    other = {s: t for s in streamed for t in streamed if s != t and ring.sizes[s] == ring.sizes[t]}
    assert other
    file.read = lambda segment, into: read(other.get(segment, segment), into)
    tokens(engine)  # what was read ahead is used up
    assert tokens(engine) != want


@kernels
def test_a_directory_is_mapped_and_its_packed_weights_are_found_again(tmp_path: Path) -> None:
    model, source = tiny_decoder("llama"), tmp_path / "model"
    model.save_pretrained(source)
    want = tokens(load_engine(model, options(quantize="int8")))
    folder = tmp_path / "weights"
    stamps = set()
    for stream in ("cpu", "nvme"):
        engine = load_engine(source, options(folder, stream=stream, quantize="int8"))
        assert tokens(engine) == want
        engine.close()
        (file,) = folder.iterdir()
        stamps.add(file.stat().st_mtime_ns)
    assert len(stamps) == 1, "written once"
    # Another model at the same place is another file, never the old one's weights.
    other = tiny_decoder("llama", seed=5)
    other.save_pretrained(source)
    again = load_engine(source, options(folder, stream="cpu", quantize="int8"))
    assert tokens(again) == tokens(load_engine(other, options(quantize="int8"))) != want
    again.close()
    assert len(list(folder.iterdir())) == 2


@kernels
@pytest.mark.parametrize("stream", ["cpu", "nvme"])
def test_a_damaged_file_is_an_error_never_a_wrong_token(tmp_path: Path, stream: str) -> None:
    source, folder = tmp_path / "model", tmp_path / "weights"
    tiny_decoder("llama").save_pretrained(source)
    ask = options(folder, stream=stream, dtype="fp32", stream_memory=400_000)
    engine = load_engine(source, ask)
    want = tokens(engine)
    engine.close()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for position in (len(whole) - 5000, len(whole) // 2):
        flipped = bytearray(whole)
        flipped[position] ^= 64
        file.write_bytes(flipped)
        with pytest.raises(CorruptFileError, match="delete it"):
            tokens(load_engine(source, ask))
    for bad in (whole[:-4096], whole[:100], b""):  # cut short: seen at once, and written anew
        file.write_bytes(bad)
        engine = load_engine(source, ask)
        assert tokens(engine) == want
        engine.close()


def test_other_weights_of_the_same_size_and_time_have_another_digest(tmp_path: Path) -> None:
    """As after cp --preserve, or an unpacked archive: the name, size and time of a file do not say what it holds."""
    digests = []
    for seed in (0, 1):
        tiny_decoder("llama", seed=seed).save_pretrained(tmp_path)
        for file in tmp_path.iterdir():
            os.utime(file, ns=(10**18, 10**18))
        digests.append(load_mmapped(tmp_path, EngineConfig())[1])
    assert digests[0] != digests[1]
    assert digests[1] == load_mmapped(tmp_path, EngineConfig())[1]


def test_samples_of_a_large_file_tell_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_WHOLE_DIGEST_BYTES", 1 << 20)
    monkeypatch.setattr(packed_file, "_SAMPLE_BYTES", 1 << 10)
    file = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 255, (8 << 20,), dtype=torch.uint8, generator=generator)
    digests = set()
    for change in (slice(0, 0), slice(0, 1), slice(-1, None), slice(4 << 20, (4 << 20) + 20_000)):
        changed = data.clone()
        changed[change] += 1
        file.write_bytes(changed.numpy().tobytes())
        digests.add(content_digest([file]))
    assert len(digests) == 4
    file.write_bytes(data.numpy().tobytes())
    assert content_digest([file]) in digests


def pack_all(model: Any, folder: Path, source: str, weights_id: Any) -> WeightRing:
    """Pack a model's weights as a runner does."""
    decoder = build_decoder_spec(model)
    asked = EngineConfig(weight_offload=source, weight_offload_dir=str(folder), weight_offload_bytes=1 << 30)
    ring = WeightRing(decoder, "int8", asked, weights_id)
    try:
        for layer in decoder.layers:
            for linear in layer_linears(layer):
                list(ring.pack(linear, "int8"))
        list(ring.pack(decoder.lm_head, "int8"))
    except BaseException:
        ring.close()
        raise
    ring.finalize()
    return ring


@pytest.mark.parametrize("source", ["cpu", "nvme"])
def test_a_file_that_was_packed_from_another_model_is_refused(tmp_path: Path, source: str) -> None:
    """Whatever its name says: the sample of its weights is compared."""
    model, other = tiny_decoder("llama"), tiny_decoder("llama", seed=1)
    pack_all(model, tmp_path, source, "same").close()
    again = pack_all(model, tmp_path, source, "same")
    assert again.file.complete
    again.close()
    with pytest.raises(CorruptFileError, match="other weights than this model's: delete it"):
        pack_all(other, tmp_path, source, "same")
    (file,) = tmp_path.iterdir()
    file.unlink()
    pack_all(other, tmp_path, source, "same").close()


def test_memory_that_is_not_prefaulted_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from thalweg.storage_io import evictable_memory

    memory = evictable_memory.EvictableMemory(1 << 21)
    with caplog.at_level("INFO", logger="thalweg"):
        memory.populate(0, 1 << 20)
        assert not caplog.records  # negative control
        monkeypatch.setattr(evictable_memory, "_POPULATE_WRITE", 9999)  # advice that no system knows
        memory.populate(0, 1 << 20)
    assert "not prefaulted (Invalid argument)" in caplog.text


def test_an_error_of_the_disk_is_an_error_of_the_step(tmp_path: Path) -> None:
    from thalweg.storage_io.disk import Disk

    class Failing(Disk):
        broken = False

        def preadv(self, handle: int, buffers: Any, offset: int) -> int:
            if self.broken:
                raise OSError(5, os.strerror(5))
            return super().preadv(handle, [buffers[0][: max(4096, len(buffers[0]) // 2)]], offset)

    disk = Failing()
    file = PackedWeightsFile(tmp_path, [8192, 4096], disk=disk)
    data = torch.randint(0, 255, (8192,), dtype=torch.uint8)
    file.write(0, 0, data)
    file.write(1, 0, data[:4096])
    file.finalize()
    from thalweg.storage_io.evictable_memory import EvictableMemory

    into = EvictableMemory(8192).tensor(0, (8192,), torch.uint8)
    file.read(0, into).wait()  # short reads are gone on with
    assert torch.equal(into, data)
    disk.broken = True
    with pytest.raises(CorruptFileError, match="Input/output"):
        file.read(0, into).wait()
    file.close()


def test_a_mapped_model_takes_no_memory(tmp_path: Path) -> None:
    model = tiny_decoder("llama", hidden_size=512, intermediate_size=1024, vocab_size=8192)  # 48 MiB
    model.save_pretrained(tmp_path)
    ctypes.CDLL(None).malloc_trim(0)  # else the copies below fit into what earlier tests have freed
    largest = anonymous()
    mapped, key = load_mmapped(tmp_path, EngineConfig())
    assert anonymous() - largest < 16 << 20 and key
    for name, value in mapped.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert anonymous() - largest < 16 << 20
    copies = [value.clone() for value in mapped.state_dict().values()]  # negative control
    assert copies and anonymous() - largest > 32 << 20


PACK = """
import json, sys
from pathlib import Path
from tests.unit.test_infer_weight_offload import anonymous, options
from thalweg.infer import load_engine
from thalweg.storage_io.disk import Disk

import torch
torch.set_num_threads(1)
seen, write = [], Disk.pwritev
def pwritev(self, handle, buffers, offset):
    seen.append(anonymous())
    return write(self, handle, buffers, offset)
Disk.pwritev = pwritev
model, folder, form = sys.argv[1:]
fields = {"stream": "nvme", "stream_memory": 1 << 23, "kv_memory": 1 << 20}
load_engine(model, options(Path(folder), quantize=form, **fields))
(file,) = Path(folder).iterdir()
print(json.dumps([len(seen), max(seen[:-1]) - seen[0], file.stat().st_size]))
"""


@kernels
@pytest.mark.nightly
def test_packing_takes_the_memory_of_a_layer_not_of_the_model(tmp_path: Path) -> None:
    """Anonymous memory grows by less than two layers in fp32 while twelve are packed, in whichever form."""
    wide: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
    cases = {
        "gpt2": ("int8", {"n_embd": 512, "n_layer": 12, "n_head": 8}),
        "llama": ("int4", {**wide, "num_attention_heads": 8, "num_key_value_heads": 8}),
    }
    layer = 12 * 512 * 512 * 4
    for kind, (form, fields) in cases.items():
        tiny_decoder(kind, **fields).save_pretrained(tmp_path / kind)
        folder = tmp_path / form
        words = [sys.executable, "-c", PACK, str(tmp_path / kind), str(folder), form]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        writes, growth, size = json.loads(done.stdout)
        assert writes > 48 and size > 12 * layer // 8
        assert growth < 1.5 * layer, f"{kind} {form}: {growth >> 20} MiB"


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    pytest.skip("this kernel does not tell")


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    file = PackedWeightsFile(tmp_path, [4096, 8192], ["source"])
    file.write(1, 64, torch.arange(100, dtype=torch.uint8))
    file.finalize()
    assert file.path is not None
    with safe_open(file.path, "pt") as opened:
        assert list(opened.keys()) == ["segment.0", "segment.1"]
        assert torch.equal(opened.get_tensor("segment.1")[64:164], torch.arange(100, dtype=torch.uint8))
    file.close()


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3000), st.sampled_from(["fp32", "int8", "int4"]))
def test_any_model_runs_in_a_quarter_of_its_weights(layers: int, width: int, vocab: int, form: str) -> None:
    width *= 32
    nothing: Any = None
    square, wide, head = (
        LinearSpec(lambda: torch.empty(0), None, (outputs, width)) for outputs in (width, 3 * width, vocab)
    )
    attention = AttentionSpec(1, 1, width, wide, square, 1.0)
    layer = DecoderLayerSpec(nothing, attention, MLPSpec(square, square, "relu", False), nothing)
    decoder = DecoderSpec(vocab, width, 64, torch.empty(0), [layer] * layers, None, lm_head=head)
    ranges, sizes = split_into_segments(decoder, form)
    assert len(ranges) == 4 * layers + 1 and all(size % 4096 == 0 for size in sizes)
    flat = [r for x in ranges for r in x]
    assert [s for _, _, s in flat] == sorted(s for _, _, s in flat) and flat[-1][2] == len(sizes) - 1
    assert ranges[-1][0][2] > ranges[-2][-1][2], "the head begins a segment"
    for x in ranges:
        stops = [stop for _, stop, _ in x]
        assert [start for start, _, _ in x] == [0, *stops[:-1]] and all(stop % 32 == 0 for stop in stops[:-1])
    if sum(sizes) > 8 << 20:
        assert plan_ring(sizes, sum(sizes) // 4).num_streamed


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(2, 200))
def test_every_segment_has_one_place_and_nobody_overwrites_a_neighbour(sizes: list[int], memory: int) -> None:
    sizes = [4096 * size for size in sizes]
    try:
        c = plan_ring(sizes, 4096 * memory)
    except ValueError as error:
        least = int(str(error).rsplit(" ", 1)[1])
        assert least > 4096 * memory and plan_ring(sizes, least).total_bytes <= least
        return
    assert c.total_bytes <= 4096 * memory
    if c.num_streamed == 0:
        assert sum(sizes) <= 4096 * memory
        return
    # Play two steps: what lies where, as reads overwrite it.
    held = {c.offset(s): s for s in range(c.num_resident + c.num_slots)}
    spans = sorted((c.offset(s), c.offset(s) + sizes[s]) for s in range(c.num_resident + c.num_slots))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    for segment in [*range(len(sizes))] * 2:
        assert held[c.offset(segment)] == segment
        if segment >= c.num_resident:
            assert c.offset(c.next_in_slot(segment)) == c.offset(segment)
            held[c.offset(segment)] = c.next_in_slot(segment)


def test_the_batch_grows_until_arithmetic_or_memory_ends_it() -> None:
    fields: dict[str, Any] = {"read_rate": 1e9, "macs": 10**8, "mac_rate": 1e11, "sequence_bytes": 10**6}
    assert optimal_batch_size(read_bytes=10**8, kv_memory=10**9, **fields) == 100
    assert optimal_batch_size(read_bytes=10**8, kv_memory=10**7, **fields) == 10
    assert optimal_batch_size(read_bytes=10**5, kv_memory=10**9, **fields) == 1
    assert optimal_batch_size(read_bytes=10**8, kv_memory=10, **fields) == 1


@pytest.mark.parametrize("kind", ["mixtral", "llama", "odd_sizes"])
def test_other_models_stream_out_of_their_own_files(kind: str, tmp_path: Path) -> None:
    model = tiny_decoder(kind)
    model.save_pretrained(tmp_path / "model")
    runner = "torch" if kind == "llama" else None
    want = tokens(load_engine(model, options(dtype="fp32"), runner="torch"))
    engine = load_engine(tmp_path / "model", options(stream="cpu", dtype="fp32"), runner=runner)
    assert tokens(engine) == want
    assert not engine.runner._linears  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be streamed"):
        load_engine(model, options(stream="cpu", quantize="int8"), runner="torch")
    for ignored in ({"stream_folder": str(tmp_path)}, {"stream_memory": 1 << 20}):
        with pytest.raises(ValueError, match=r"is for the CPU kernels.*leave it out"):
            load_engine(model, EngineConfig(stream="cpu", dtype="fp32", **ignored), runner="torch")


def test_what_streams_is_computed_in_the_dtype_asked_for(tmp_path: Path) -> None:
    """Files in bf16, arithmetic in fp32: as if they had been loaded so."""
    tiny_decoder("gpt2").bfloat16().save_pretrained(tmp_path)
    found, computed = [], []
    for stream, dtype in ((None, "fp32"), ("cpu", "fp32"), ("cpu", "bf16")):
        engine = load_engine(tmp_path, options(stream=stream, dtype=dtype), runner="torch")
        found.append(tokens(engine))
        computed.append(engine.runner.dtype)
    assert found[0] == found[1] and computed == [torch.float32, torch.float32, torch.bfloat16]


@kernels
def test_init_inference_takes_deepspeeds_section(tmp_path: Path) -> None:
    model = tiny_decoder("gpt2")
    model.save_pretrained(tmp_path / "model")
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    want = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4, "buffer_size": 10**6}
    for offload in ({"device": "cpu"}, nvme):
        config = {"zero": {"stage": 3, "offload_param": offload}, "dtype": "fp32"}
        extra = {} if offload is nvme else {"stream_folder": str(tmp_path)}
        given: Any
        for given in (model, tmp_path / "model"):
            engine = thalweg.init_inference(given, config=config, **extra)
            assert engine.core is not None and 1 <= len(engine.core.runner.block_tables) < 10**4
            assert torch.equal(engine.generate(prompt, max_new_tokens=6, min_new_tokens=6), want)
            engine.close()
    with pytest.raises(ValueError, match="nvme_path"):
        thalweg.init_inference(model, {"zero": {"stage": 3, "offload_param": {"device": "nvme"}}})
    with pytest.raises(ValueError, match=r"too little.*least is"):
        load_engine(model, options(tmp_path, stream="nvme", dtype="fp32", stream_memory=10_000))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="Name a folder"):
        load_engine(model, options(file, stream="cpu", dtype="fp32"))


def test_the_file_is_begun_in_whole_huge_pages(tmp_path: Path) -> None:
    """Pieces of any size begin 2 MiB at once, which the page cache can hold as one; bytes are as written."""
    begun: dict[int, tuple[int, int]] = {}

    class Watched(Disk):
        def pwritev(self, handle: int, buffers: Any, offset: int) -> int:
            begun.setdefault(offset >> 21, (offset, sum(map(len, buffers))))
            return super().pwritev(handle, buffers, offset)

    sizes = [5 << 20, 3 << 20]
    file = PackedWeightsFile(tmp_path, sizes, disk=Watched())
    data = torch.randint(256, (sum(sizes),), dtype=torch.uint8)
    for segment, start in enumerate((0, sizes[0])):
        for at in range(0, sizes[segment], 700_001):
            stop = min(at + 700_001, sizes[segment])
            file.write(segment, at, data[start + at : start + stop])
    file.finalize()
    total = file._segment_offsets[-1]
    assert begun == {i: (i << 21, min(2 << 20, total - (i << 21))) for i in range(-(-total // (2 << 20)))}
    for mapped, size, start in zip(file.map(), sizes, (0, sizes[0]), strict=True):
        assert torch.equal(mapped, data[start : start + size])
    file.close()
