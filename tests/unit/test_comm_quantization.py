"""Numbers in few bits: error bounds, sizes, and what must not be hidden."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.comm.collectives.quantized import ErrorFeedback
from thalweg.comm.quantization import BlockQuantizer, PayloadFormat

CODECS = (BlockQuantizer(4), BlockQuantizer(8), BlockQuantizer(4, 64), BlockQuantizer(8, 1024))


def _through(codec: BlockQuantizer, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.full((codec.num_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.quantize(values, payload)
    out = torch.empty(values.numel())
    codec.dequantize(payload, out)
    steps = codec.get_scales(payload, values.numel())
    return out, steps.repeat_interleave(codec.block_size)[: values.numel()]


def _values(numel: int, spread: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return (x * torch.exp(spread * torch.randn(numel, generator=generator))).to(dtype)


@settings(max_examples=120, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    numel=st.integers(1, 3000),
    spread=st.floats(0, 8),
    power=st.integers(-30, 30),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_element_is_off_by_half_a_step_at_most(codec, numel, spread, power, seed, dtype):
    values = (_values(numel, spread, seed, dtype) * 10.0**power).clamp(-1e38, 1e38)
    out, steps = _through(codec, values)
    worst = values.float().abs()
    # The step is max / top of the element's own block, but for the scale's 8 bits.
    padded = torch.zeros(codec.num_blocks(numel) * codec.block_size)
    padded[:numel] = worst
    largest = padded.view(-1, codec.block_size).amax(1) / codec.quant_max
    largest = largest.repeat_interleave(codec.block_size)[:numel]
    error = (out - values.float()).abs()
    tiny = torch.finfo(torch.float32).tiny * codec.quant_max  # below it a block counts as zeros
    assert bool((error <= 0.5001 * steps + tiny).all())
    assert bool((steps <= largest * (1 + 2**-7) + tiny).all())


@settings(max_examples=40, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    numel=st.integers(1, 2000),
    where=st.integers(0, 1999),
    value=st.sampled_from([float("inf"), float("-inf"), float("nan")]),
)
def test_a_value_that_is_not_finite_is_seen_on_the_other_side(codec, numel, where, value):
    values = torch.randn(numel)
    values[where % numel] = value
    out, _ = _through(codec, values)
    assert not bool(out.isfinite().all())
    block = (where % numel) // codec.block_size
    others = torch.ones(numel, dtype=torch.bool)
    others[block * codec.block_size : (block + 1) * codec.block_size] = False
    assert bool(out[others].isfinite().all())


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=6),
    bits=st.sampled_from([4, 8]),
    raw=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_a_packing_keeps_raw_pieces_and_adds_as_it_writes(pieces, bits, raw, seed):
    packing = PayloadFormat(tuple(pieces), BlockQuantizer(bits), raw)
    numel = sum(length for length, _ in pieces)
    values = _values(numel, 1.0, seed, raw)
    payload = torch.empty(packing.num_bytes, dtype=torch.uint8)
    packing.pack(values, payload)
    out = torch.empty(numel)
    packing.unpack(payload, out)
    base = torch.randn(numel)
    added = base.clone()
    packing.unpack(payload, added, add=True)
    assert torch.equal(added, base + out)
    at = 0
    for length, encoded in pieces:
        if not encoded:
            assert torch.equal(out[at : at + length], values[at : at + length].float())
        at += length


def test_the_sizes_are_what_the_text_says():
    numel = 1 << 20
    assert BlockQuantizer(8).num_bytes(numel) / numel < 1.008
    assert BlockQuantizer(4).num_bytes(numel) / numel < 0.508


def test_two_bits_without_scales_are_not_good_enough():
    """The negative control: the bound above has teeth."""
    values = _values(2048, 2.0, 0, torch.float32)
    crude = (values / values.abs().max()).round() * values.abs().max()
    _, steps = _through(BlockQuantizer(4), values)
    assert not bool(((crude - values).abs() <= 0.5001 * steps).all())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), beta=st.sampled_from([0.0, 0.5, 0.8]), unit=st.sampled_from([1.0, 1024.0]))
def test_feedback_makes_up_for_what_rounding_takes(seed, beta, unit):
    """The sum of what is sent follows the sum of what should be; without feedback it drifts away."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(1, 512, generator=generator) * 0.05
    mean[0, ::256] = 1.0  # sets the scale, so the others are rounded hard
    feedback, codec = ErrorFeedback(beta, 1000), BlockQuantizer(4)
    wanted, sent, careless = torch.zeros(512), torch.zeros(512), torch.zeros(512)
    for _ in range(60):
        rows = feedback.compensate(mean * unit, unit)
        out = _through(codec, rows[0])[0]
        feedback.update(rows, out[None], unit)
        wanted += mean[0]
        sent += out / unit
        careless += _through(codec, mean[0])[0]
    drift, control = (sent - wanted).abs().mean(), (careless - wanted).abs().mean()
    assert drift < 0.25 * control


def test_feedback_survives_an_overflow():
    feedback = ErrorFeedback(0.8, 1024)
    feedback.compensate(torch.ones(1, 8), 1.0)
    feedback.update(torch.full((1, 8), float("inf")), torch.full((1, 8), float("nan")), 1.0)
    assert bool(feedback.compensate(torch.ones(1, 8), 1.0).isfinite().all())
