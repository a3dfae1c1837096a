"""The native kernels against torch, in fp64 where it matters, over shapes and formats."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.marks import nightly
from thalweg.adapt.quantized_weight import QuantizedWeight, nf4_values
from thalweg.comm.collectives.onebit import OneBitCode, payload_bytes, split_payload
from thalweg.ops import cpu_kernels
from thalweg.ops.linear import packed
from thalweg.ops.linear.packed import pack_linear

if cpu_kernels.unsupported_reason():
    MISSING = ["kernels"]
else:
    from tests.unit.emulated_kernels import MISSING, emulate
    from thalweg.ops.cpu_kernels.kernel_builder import optimize

pytestmark = pytest.mark.skipif(bool(cpu_kernels.unsupported_reason()), reason=cpu_kernels.unsupported_reason())
ERRORS = {"fp32": 1e-6, "bf16": 6e-3, "int8": 2e-2, "int4": 0.12}
# A processor with AVX-512 runs the code for smaller ones too.
ISAS = {isa.name: isa for isa in cpu_kernels.supported_isas()}
if "avx512" in ISAS:  # which has the instruction of AVX-VNNI in registers of 256 bits, under another code
    evex = cpu_kernels.ISAS["avx2"].features | {"avx512vl", "avx512vnni"}
    ISAS.setdefault("avxvnni", replace(cpu_kernels.ISAS["avxvnni"], features=evex))
IN_GATE = {*list(ISAS)[:1], "avx2"}  # the others share their code
NEEDS_EMULATOR = pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)}")


@pytest.fixture(scope="module", params=[name if name in IN_GATE else nightly(name) for name in ISAS])
def kernels(request: pytest.FixtureRequest) -> cpu_kernels.KernelSet:
    torch.set_num_threads(2)
    return cpu_kernels.KernelSet(ISAS[request.param])


def pack_weight(weight: Tensor, weight_format: str) -> dict[str, Tensor]:
    """Pack a weight (N, K), of any floating dtype, for the format: ``weight`` and, for int8, ``scale``."""
    packed = {
        part: _empty_aligned(nbytes)
        for part, nbytes in cpu_kernels.packed_nbytes(weight.shape[0], weight.shape[1], weight_format).items()
    }
    at = dict.fromkeys(packed, 0)
    for block in cpu_kernels.iter_packed_blocks(
        weight.shape, lambda start, stop, out: out.copy_(weight[start:stop]), weight_format
    ):
        for part, piece in block.items():
            packed[part][at[part] : at[part] + piece.numel()] = piece
            at[part] += piece.numel()
    assert all(at[part] == whole.numel() for part, whole in packed.items())
    return packed


def _empty_aligned(nbytes: int) -> Tensor:
    """Return bytes that start on a cache line (of 64 bytes)."""
    raw = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes]


def run(kernels: cpu_kernels.KernelSet, calls: list[cpu_kernels.Instruction]) -> None:
    """Run calls on this processor, or on an emulated one of the kernels' kind."""
    if kernels.isa in ISAS.values():
        cpu_kernels.build_program(calls, kernels.compile(), []).run()
        return
    with tempfile.TemporaryDirectory() as folder:
        emulate(kernels, calls, Path(folder))


def product(kernels: cpu_kernels.KernelSet, x: Tensor, weight: Tensor, form: str) -> Tensor:
    """Make rows ready and multiply them with a packed weight, on two threads."""
    rows, width = x.shape
    kind = kernels.isa.operand_kind(form)
    ready = cpu_kernels.ActivationBuffer(rows, width, kind, cpu_kernels.allocate_rows(rows, width))
    count, eps = torch.tensor([rows]), torch.zeros(1)
    unused, bias = torch.zeros(width), torch.zeros(cpu_kernels.round_up(len(weight), 32))
    out = torch.zeros(rows, len(bias))
    parts = pack_weight(weight, form)
    calls = [
        cpu_kernels.Instruction(kernels.norm("none", kind), [
            x, x.stride(0) * 4, unused, unused, eps, count, width, *ready.output_args(),
        ]),
        cpu_kernels.Instruction(kernels.gemm(form), [
            ready.operand, parts["weight"], out, count, cpu_kernels.round_up(width),
            len(bias) // cpu_kernels.WEIGHT_FORMATS[form].panel_columns, ready.operand_stride, out.stride(0) * 4, bias,
            0, ready.scale, parts.get("scale", 0), *ready.sum_args(form),
        ]),
    ]  # fmt: skip
    run(kernels, calls)
    return out[:, : len(weight)]


@pytest.mark.parametrize("form", list(ERRORS))
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 150), st.integers(0, 1000))
def test_products(kernels: cpu_kernels.KernelSet, form: str, rows: int, sixteens: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16 * sixteens, generator=generator)
    weight = torch.randn(outputs, 16 * sixteens, generator=generator)
    got = product(kernels, x, weight, form)
    want = x.double() @ weight.double().t()
    scale = (x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None]).clamp(min=1e-9)
    assert ((got - want).abs() / scale).max() < ERRORS[form]


@pytest.mark.parametrize("form", list(ERRORS))
def test_a_rows_result_does_not_depend_on_the_others(kernels: cpu_kernels.KernelSet, form: str) -> None:
    x, weight = torch.randn(31, 96), torch.randn(70, 96)
    together = product(kernels, x, weight, form)
    for row in (0, 7, 30):
        assert torch.equal(product(kernels, x[row : row + 1], weight, form)[0], together[row])


def layer_calls(
    kernels: cpu_kernels.KernelSet, kv_dtype: str
) -> tuple[list[cpu_kernels.Instruction], dict[str, Tensor]]:
    """Return calls of every kernel but the products, on the same numbers each time, and what they write."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, kv_heads, dim, width = 21, 4, 2, 32, 128
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    shape = cpu_kernels.AttentionShape(
        heads, kv_heads, dim, 0.2, kv_dtype, kernels.isa.bf16_dot, rotary_dim=32, qk_norm=True, sliding_window=18,
        softcap=5.0,
    )  # fmt: skip
    count, eps, zero = torch.tensor([rows]), torch.tensor([1e-5]), torch.zeros(width)
    qkv, stripe = randn(rows, (heads + 2 * kv_heads) * dim), 2 * kv_heads * 16 * shape.head_bytes
    cache, angles = torch.zeros(2 * stripe, dtype=torch.uint8), randn(rows, dim // 2)
    keys, values = cache, cache[kv_heads * 16 * shape.head_bytes :]
    tables, positions = torch.tensor([5, 17], dtype=torch.int32), torch.arange(rows)
    attended, scratch = torch.zeros(rows, width), torch.zeros(256, 64)
    x, gain, up, indices = randn(rows, width), randn(width), randn(rows, 2 * width), torch.tensor([3, 0, 20])
    made: dict[str, Tensor] = {"queries": qkv, "attended": attended, "x": x}
    if kv_dtype != "bf16":
        made["keys and values"] = cache
    calls = [
        cpu_kernels.Instruction(kernels.rope_and_store_kv(shape), [
            qkv, qkv.stride(0) * 4, count, positions, tables, keys, values, angles.cos(), angles.sin(), gain, gain, eps,
            torch.zeros(rows, dtype=torch.int64), stripe,
        ]),
        cpu_kernels.Instruction(kernels.paged_attention(shape), [
            qkv, qkv.stride(0) * 4, count, positions, tables, keys, values, attended, scratch, 256, zero,
            torch.zeros(rows, dtype=torch.int64), stripe, positions,
        ]),
        cpu_kernels.Instruction(kernels.add(), [x, up, count, width, up.stride(0) * 4]),
    ]  # fmt: skip
    for kind in ("fp32", "bf16", "int8"):
        for name in ("rms", "layer", "silu", "gelu", "gelu_tanh", "relu"):
            ready = cpu_kernels.ActivationBuffer(rows, width, kind, cpu_kernels.allocate_rows(rows, width))
            made |= {f"{name} {kind}": ready.y, f"{name} {kind} operand": ready.operand}
            made |= {f"{name} {kind} sums": ready.group_sums, f"{name} {kind} row sums": ready.row_sums}
            if name in ("rms", "layer"):
                call = [x, width * 4, gain, gain, eps, count, width]
                calls.append(cpu_kernels.Instruction(kernels.norm(name, kind), [*call, *ready.output_args()]))
            else:
                call = [up, width * 8, count, width, *ready.output_args()]
                calls.append(cpu_kernels.Instruction(kernels.activate(name, True, kind), call))
    picked, best, ranks = torch.zeros(3, width), torch.zeros(rows, dtype=torch.int32), randn(2, rows, width)
    total = torch.zeros(rows, width)
    made |= {"picked": picked, "best": best, "total": total}
    calls += [
        cpu_kernels.Instruction(kernels.gather_rows(), [
            x, width * 4, picked, width * 4, torch.tensor([3]), indices, width * 4,
        ]),
        cpu_kernels.Instruction(kernels.argmax(), [x, width * 4, count, width - 3, torch.zeros(rows), best]),
        cpu_kernels.Instruction(kernels.reduce_sum(), [
            total, width * 4, ranks, width * 4, rows * width * 4, 2, count, width,
        ]),
    ]  # fmt: skip
    return calls, made


@pytest.mark.parametrize(("name", "kv_dtype"), [
    *((name, kv_dtype) if name == "avx2" else nightly(name, kv_dtype)
      for name in list(ISAS)[1:] for kv_dtype in ("fp32", "bf16", "int8")),
    pytest.param("neon", "int8", marks=NEEDS_EMULATOR),
    *(pytest.param("neon", kv_dtype, marks=[NEEDS_EMULATOR, pytest.mark.nightly]) for kv_dtype in ("fp32", "bf16")),
])  # fmt: skip
def test_every_instruction_set_computes_the_same(name: str, kv_dtype: str) -> None:
    made = []
    for isa in (next(iter(ISAS.values())), ISAS.get(name, cpu_kernels.ISAS[name])):
        kernels = cpu_kernels.KernelSet(isa)
        calls, outputs = layer_calls(kernels, kv_dtype)
        run(kernels, calls)
        made.append(outputs)
    assert all(want.any() for name, want in made[0].items() if "sums" not in name), "nothing but zeros shows nothing"
    errors = {name: (made[1][name].double() - want.double()).abs().max().item() for name, want in made[0].items()}
    # Some sets add up products of bf16 in pairs, rounded, and others widen them: all else has the same bits.
    assert errors.pop("attended") < (2e-2 if kv_dtype == "bf16" else 1e-6)
    assert not {name: error for name, error in errors.items() if error}


@pytest.mark.skipif("x86_64" not in {isa.machine for isa in cpu_kernels.supported_isas()}, reason="no x86 processor")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_avx_vnni_multiplies_bytes_in_one_instruction(form: str) -> None:
    assemblies = []
    for name in ("avxvnni", "avx2"):
        kernels = cpu_kernels.KernelSet(cpu_kernels.ISAS[name])
        parsed, machine = optimize(kernels.llvm_ir(kernels.gemm(form)), kernels.isa)
        assemblies.append(machine.emit_assembly(parsed))
    assert ["vpdpbusd" in text for text in assemblies] == [True, False]
    assert ["vpmadd" in text for text in assemblies] == [False, True]
    assert not any("zmm" in text for text in assemblies)


@NEEDS_EMULATOR
@pytest.mark.nightly
def test_an_arm_processor_decodes_signs_and_nf4() -> None:
    kernels = cpu_kernels.KernelSet(cpu_kernels.ISAS["neon"])
    for dtype in (torch.float32, torch.bfloat16):
        weight = QuantizedWeight.quantize(torch.randn(5, 192).to(dtype), "nf4")
        values, out = torch.tensor(nf4_values()).to(dtype).float(), torch.zeros(5, 192, dtype=dtype)
        name = kernels.dequantize_nf4("bf16" if dtype == torch.bfloat16 else "fp32")
        run(kernels, [cpu_kernels.Instruction(name, [weight.codes, weight.scales, values, out, 15, 64])])
        assert torch.equal(out, weight.dequantize())
    payloads = torch.randint(0, 256, (3, payload_bytes(4)), dtype=torch.uint8)
    for payload in payloads:
        split_payload(payload)[0].copy_(torch.rand(4))
    scales, signs = split_payload(payloads[0])
    out, want = torch.zeros(2, 4096)
    arguments = [scales, signs, payloads.stride(0), 3, out, 4]
    run(kernels, [cpu_kernels.Instruction(kernels.decompress_signs(), arguments)])
    OneBitCode().decompress(payloads, want)
    assert torch.equal(out, want)


@pytest.mark.parametrize("form", list(ERRORS))
@NEEDS_EMULATOR
def test_an_arm_processors_products(form: str) -> None:
    x, weight = torch.randn(7, 96), torch.randn(70, 96)
    got = product(cpu_kernels.KernelSet(cpu_kernels.ISAS["neon"]), x, weight, form)
    scale = x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]
    error = (got - x @ weight.t()).abs() / scale
    assert error.max() < ERRORS[form]
    assert ((got.roll(1, 1) - x @ weight.t()).abs() / scale).max() > ERRORS[form], "negative control"


@pytest.mark.parametrize("form", [*ERRORS, "fp16"])
def test_torchs_own_packed_kernels(form: str) -> None:
    weight, bias, x = torch.randn(64, 96), torch.randn(64), torch.randn(5, 96)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form, torch.float32)
    got = pack_linear(weight, bias, form)(x.to(dtype)).float()
    want = x @ weight.t() + bias
    assert (got - want).norm() / want.norm() < {"fp16": 1e-3}.get(form, ERRORS.get(form, 0))
    with pytest.raises(ValueError, match="known"):
        pack_linear(weight, bias, "int3")


def test_torchs_int8_kernel_computes_each_row_on_its_own() -> None:
    """It has one scale for all rows: a large one in the batch must not blur the others."""
    weight, bias, x = torch.randn(64, 96), torch.randn(64), torch.randn(3, 96)
    layer = pack_linear(weight, bias, "int8")
    assert torch.equal(layer(torch.cat([x[:1], 1e3 * x[1:], 0 * x]))[0], layer(x[:1])[0])
    kept = torch.quantize_per_tensor(weight, 0.03, 0, torch.qint8)
    made = torch.ops.quantized.linear_prepack(kept, None)
    bare = [torch.ops.quantized.linear_dynamic(torch.cat([x[:1], y]), made)[0] for y in (x[1:], 1e3 * x[1:])]
    assert not torch.equal(*bare), "negative control: the bare kernel"


def test_a_kernel_that_is_not_there_is_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = torch.randn(64, 96), torch.randn(2, 96)
    if torch.backends.mkldnn.is_available():
        for form in ("fp32", "bf16"):
            assert pack_linear(weight, None, form).kernel_name == "onednn"
        assert pack_linear(weight, None, "int4").kernel_name == "int4"
    assert not caplog.records

    def broken(*_: object) -> None:
        raise RuntimeError("no such operator\nand a stack")

    monkeypatch.setitem(packed._PACKERS, "fp32", broken)
    layer = pack_linear(weight, None, "fp32")
    assert layer.kernel_name == "torch" and torch.equal(layer(x), torch.nn.functional.linear(x, weight))
    assert "torch's own product: no such operator" in caplog.text and "stack" not in caplog.text


def test_int4_that_becomes_int8_is_said_once_for_a_shape(caplog: pytest.LogCaptureFixture) -> None:
    """On the processor, where outputs count too, and in the form of an accelerator."""
    weight, device = torch.randn(64, 96), partial(packed._DEVICE_PACKERS["int4"], bias=None, dtype=torch.float32)
    assert device(weight[:33]).kernel_name == "torch" and not caplog.records
    narrow = torch.randn(40, 90)
    packed._log_once.cache_clear()
    for _ in range(2):
        layer = device(narrow)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["int4 weights of 40 outputs and 90 inputs are kept in int8: the inputs do not go into groups of 32"]
    x = torch.randn(3, 90)
    assert torch.equal(layer(x), packed._DEVICE_PACKERS["int8"](narrow, None, torch.float32)(x))
    kernels = {form: pack_linear(weight[:33], None, form).kernel_name for form in ("int4", "int8")}
    assert kernels["int4"] == kernels["int8"]
    assert "of 33 outputs and 96 inputs are kept in int8" in caplog.text


def test_a_kernel_that_the_processor_lacks_is_said_once_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise NotImplementedError(
            "Could not run 'mkldnn::reorder'. It is only available for: [CPU, Meta, Python].\nmore"
        )

    monkeypatch.setitem(packed._PACKERS, "bf16", missing)
    packed._log_once.cache_clear()
    for shape in ((8, 4), (4, 8), (8, 8)):
        weight, x = torch.randn(shape), torch.randn(2, shape[1], dtype=torch.bfloat16)
        assert torch.equal(packed.pack_linear(weight, None, "bf16")(x), x @ weight.bfloat16().T)
    want = "weights in bf16 stay with torch's own product: Could not run 'mkldnn::reorder'"
    assert [record.getMessage() for record in caplog.records] == [want]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 10**6))
def test_the_best_of_each_row(rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that several are the largest: the first one counts.
    x = torch.randint(-3, 3, (rows, width), generator=generator).float()
    x[torch.rand(x.shape, generator=generator) < 0.1] = -torch.inf
    if seed % 3 == 0:
        x[seed % rows, seed % width] = torch.nan
    places, values = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    kernels, count = cpu_kernels.KernelSet(), torch.tensor([rows])
    call = cpu_kernels.Instruction(kernels.argmax(), [x, x.stride(0) * 4, count, width, values, places])
    cpu_kernels.build_program([call], kernels.compile(), [x, count, places, values]).run()
    want = x.max(dim=1).values
    assert torch.equal(values.isnan(), want.isnan())
    good = ~want.isnan()
    assert torch.equal(values[good], want[good])
    assert torch.equal(places[good].long(), torch.stack([(r == r.max()).int().argmax() for r in x])[good])
