"""Ring attention against one process: balance, masks, documents, odd lengths, other axes (row 39)."""

from __future__ import annotations

import pytest
import torch

from tests.dist.sequence_parity import SequenceCase, find_mismatches, make_hf_batch, run_engine, run_plain
from tests.dist.tensor_models import build_model
from tests.dist.tensor_parity import make_config
from tests.harness import run_ranks
from tests.marks import nightly


def test_row39_a_ring_of_two():
    pytest.importorskip("transformers")
    cases = [
        SequenceCase("llama", "plain", 10, 0, context_parallel=2),
        SequenceCase("llama", "plain", 11, 3, context_parallel=2),
        SequenceCase("llama, 6 heads on 3, tied", "masked", 9, 1, context_parallel=2),
        SequenceCase("llama, 4 heads on 1", "padded", 13, 2, context_parallel=2),
        SequenceCase("qwen3", "packed", 13, 3, context_parallel=2),
        SequenceCase("gpt2", "plain", 3, 2, context_parallel=2),
        SequenceCase("reference, 5 heads", "masked", 9, 3, context_parallel=2),
        SequenceCase("bert", "padded", 9, 1, context_parallel=2),
        SequenceCase("bert", "plain", 7, 1, context_parallel=2),
        SequenceCase("mistral, window", "plain", 14, 2, context_parallel=2),
        SequenceCase("mistral, window", "packed", 13, 0, context_parallel=2),
    ]
    for found in run_ranks(find_mismatches, 2, cases, 3, timeout=200):
        assert found == []


@pytest.mark.parametrize("steps", [nightly(3), nightly(20)])
def test_a_ring_of_four_and_with_every_other_axis(steps):
    pytest.importorskip("transformers")
    recomputed = (("activation_checkpointing", {"policy": "full"}),)
    cases = [
        SequenceCase("llama", "plain", 15, 0, context_parallel=4),
        SequenceCase("llama, 4 heads on 1", "padded", 14, 3, context_parallel=4),
        SequenceCase("reference", "plain", 9, 1, context_parallel=2),
        SequenceCase("qwen3", "packed", 13, 2, context_parallel=2, sequence_parallel=2, extra=recomputed),
        SequenceCase("reference, 5 heads", "masked", 11, 3, context_parallel=2, tensor_parallel=2),
    ]
    for found in run_ranks(find_mismatches, 4, cases, steps, timeout=250):
        assert found == []


def _controls(rank: int, world: int) -> dict[str, float]:
    """What is lost without the late keys of a rank, without documents, or without gradients' way home."""
    import thalweg.parallel.sequence.batch_split as parts
    import thalweg.parallel.sequence.ring_attention as ring

    torch.set_num_threads(1)
    found = {}
    merge, documents_of, backward = ring._merge_by_lse, parts.document_ids_from_positions, ring.block_backward

    def unweighted(out, lse, new_out, new_lse):
        out.add_(new_out * 0.5)

    def scaled_backward(*args, **kwargs):
        dq, dk, dv = backward(*args, **kwargs)
        return dq, 0.99 * dk, 0.99 * dv

    for name, kind in (("merge", "plain"), ("documents", "packed"), ("gradients", "plain")):
        case = SequenceCase("llama", kind, 9, 0, context_parallel=2)
        wanted = run_plain(case, 2, world)
        ring._merge_by_lse = unweighted if name == "merge" else merge
        parts.document_ids_from_positions = (lambda positions: None) if name == "documents" else documents_of
        ring.block_backward = scaled_backward if name == "gradients" else backward
        found[name] = run_engine(case, 2, rank, world).max_differences(wanted)["gradient"]
    return found


def test_negative_controls_fail():
    pytest.importorskip("transformers")
    for found in run_ranks(_controls, 2):
        assert all(value > 1e-3 for value in found.values()), found


def _refusals(rank: int, world: int) -> list[str]:
    import thalweg

    texts = []
    for changes in ({}, {"dropout": 0.5}):
        model = build_model("reference")
        for block in model.blocks:
            block.attention.dropout = changes.get("dropout", 0.0)
        own, *_ = thalweg.initialize(model=model, config=make_config(0, 1, 1, 1, context_parallel_size=2))
        length = 8 if changes else 1
        tokens = torch.ones(1, length, dtype=torch.long)
        with pytest.raises(ValueError) as caught:
            own(tokens, tokens)
        own.close()
        texts.append(str(caught.value))
    return texts


def test_too_short_sequences_and_dropped_weights_are_refused():
    for short, dropped in run_ranks(_refusals, 2):
        assert "1 token cannot be divided among 2 ranks" in short
        assert "attention dropout to 0" in dropped


BASE, WIDTH, LAYERS, HEADS = 128, 32, 2, 4


def _model():
    from thalweg.nn.transformer import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, block_size=4 * BASE))


def _peak_and_traffic(rank: int, world: int, axis: str, factor: int) -> tuple[int, dict[str, int]]:
    """Bytes of live tensors at a step's peak at ``factor`` times the length; bytes sent for attention."""
    import thalweg
    from thalweg.plan.trace.alloc_recorder import AllocationRecorder

    torch.set_num_threads(1)
    config = make_config(0, 1, 1, 1, **({axis: world} if world > 1 else {}))
    own, *_ = thalweg.initialize(model=_model(), config=config)
    tokens = torch.arange(factor * BASE)[None] % 64
    tape = AllocationRecorder()
    tape.ignore(own.module.parameters())
    with tape:
        own.backward(own(tokens, tokens))
    live = peak = 0
    held: dict[int, int] = {}
    for number, num_bytes, _ in tape.events:
        if number > 0:
            held[number] = num_bytes
        live += num_bytes if number >= 0 else -held[-number]
        peak = max(peak, live)
    sent = {entry.kind: entry.sent_bytes for entry in own.ledger.entries() if entry.module == "attention"}
    own.close()
    return peak, sent


@pytest.mark.parametrize("axis", [nightly("sequence_parallel_size"), "context_parallel_size"])
def test_a_sequence_n_times_as_long_takes_the_same_memory_on_n_ranks(axis):
    alone = run_ranks(_peak_and_traffic, 1, axis, 1, reuse=False)[0][0]
    longer = run_ranks(_peak_and_traffic, 1, axis, 2, reuse=False)[0][0]
    assert longer > 1.8 * alone  # the control: one rank needs twice as much
    block = BASE * WIDTH * 4  # bytes of q, k, v or the output of a rank
    for world in (2, 4):
        for peak, sent in run_ranks(_peak_and_traffic, world, axis, world, reuse=False):
            assert peak < 1.25 * alone, (world, peak / alone)
            if axis == "sequence_parallel_size":  # four tensors there and back, (n-1)/n of each
                assert sent == {"all_to_all": LAYERS * 2 * 4 * block * (world - 1) // world}
            else:  # keys and values forward, both and their gradients backward, n-1 hops
                assert sent == {"send": LAYERS * 3 * 2 * block * (world - 1)}


def _fed(rank: int, world: int, sequence: int, context: int) -> tuple[list[float], list[int]]:
    """Losses of batches that the engine's own loader gives, and the lengths of what it hands over."""
    import thalweg

    torch.set_num_threads(1)
    samples = [{"input_ids": row, "labels": row.clone()} for row in make_hf_batch("plain", 0, 8, 13)["input_ids"]]
    config = make_config(2, 1, 2, 1, sequence_parallel_size=sequence, context_parallel_size=context, seed=5)
    own, _, loader, _ = thalweg.initialize(model=build_model("llama"), training_data=samples, config=config)
    lengths = [batch["input_ids"].shape[1] for batch in loader]
    losses = [float(own.train_batch()) for _ in range(4)]
    own.close()
    return losses, lengths


def test_the_loader_hands_each_rank_its_part():
    pytest.importorskip("transformers")
    wanted, whole = run_ranks(_fed, 1, 1, 1)[0]
    assert set(whole) == {13}
    for sequence, context in ((2, 1), (1, 2)):
        found = run_ranks(_fed, 2, sequence, context)
        assert sorted({length for _, lengths in found for length in lengths}) == [6, 7]
        for losses, _ in found:
            assert losses == pytest.approx(wanted, rel=1e-5)


def _other_rows(rank: int, world: int) -> str:
    import thalweg

    own, *_ = thalweg.initialize(
        model=build_model("reference"), config=make_config(0, 1, 1, 1, context_parallel_size=2)
    )
    tokens = torch.full((1, 8), rank)
    with pytest.raises(ValueError) as caught:
        own(tokens, tokens)
    own.close()
    return str(caught.value)


def test_different_rows_on_the_ranks_of_one_sequence_are_refused():
    assert all("given different batches" in text for text in run_ranks(_other_rows, 2))
