"""One rank's shard of a decoder.

Three ways to shard, which combine.  *Stages* (``pipeline``): each has some of the layers, the first the
embedding, the last the head.  Within a stage *tensor* parallelism (Shoeybi et al. 2019, section 3): each rank
has some of the heads with their rows of queries, keys and values, some of the inner units of each MLP or of
every expert, and some of the vocabulary.  *Expert* parallelism gives each rank whole experts instead.

What the output and down projections give are partial sums, to be all-reduced over a stage's ranks, their bias on
the first rank alone; norms, router, embedding and positions are on every rank.  Shards may differ in size: 25
heads go to two ranks as 12 and 13.  With more ranks for experts than for heads, some have no heads at all.
"""

from dataclasses import replace

import torch

from thalweg.infer.config import EngineConfig
from thalweg.infer.models.spec import AttentionSpec, DecoderSpec, MLPSpec, MoESpec

_VOCAB_UNIT = 32  # columns of a packed panel


def shard_for_rank(decoder: DecoderSpec, rank: int, options: EngineConfig) -> DecoderSpec:
    """Return a rank's shard: rank ``rank % ranks_per_stage`` of stage ``rank // ranks_per_stage``.

    Raises ValueError, naming the degrees that work, where layers, heads or experts cannot be divided so.
    """
    stage_index, rank_in_stage = divmod(rank, options.ranks_per_stage)
    moe_specs = [x.mlp for x in decoder.layers if isinstance(x.mlp, MoESpec)]
    num_experts = min((len(m.up) for m in moe_specs), default=1)
    expert_parallel = options.expert_parallel_size
    if expert_parallel > num_experts:
        has = num_experts if moe_specs else "no"
        raise ValueError(f"expert_parallel is {expert_parallel}; this model has {has} experts")
    stage_spec = pipeline_stage(decoder, stage_index, options.pipeline_parallel_size)
    degrees = options.ranks_per_stage, options.tensor_parallel_size, expert_parallel
    return shard_stage(stage_spec, rank_in_stage, *degrees)


def pipeline_stage(decoder: DecoderSpec, stage_index: int, num_stages: int) -> DecoderSpec:
    """Return the layers of a stage; what only the first or the last needs is empty elsewhere."""
    num_layers = len(decoder.layers)
    if num_stages > num_layers:
        raise ValueError(f"pipeline_parallel is {num_stages}; this model has {num_layers} layers")
    spec = replace(decoder, layers=decoder.layers[slice(*_part(num_layers, stage_index, num_stages))])
    if stage_index > 0:
        spec = replace(spec, embed=decoder.embed[:0], embed_norm=None, position_embeddings=None)
    if stage_index < num_stages - 1:
        spec = replace(spec, lm_head=decoder.lm_head.slice_outputs((0, 0)), final_norm=None)
    return spec


def shard_stage(
    decoder: DecoderSpec, rank: int, num_ranks: int, tensor_parallel: int | None = None, expert_parallel: int = 1
) -> DecoderSpec:
    """Return the shard of ``rank`` of ``num_ranks``; ``vocab_size`` stays the whole model's.

    ``tensor_parallel``: how many of the ranks have heads, by default all.  ``expert_parallel``: into how many
    groups the experts are divided, 1 for a part of every expert on each rank.
    """
    tensor_parallel = tensor_parallel or num_ranks
    num_heads = min(x.attention.num_heads for x in decoder.layers)
    if tensor_parallel > num_heads or any(not _divides_heads(x.attention, tensor_parallel) for x in decoder.layers):
        degrees = range(1, num_heads + 1)
        valid = [str(n) for n in degrees if all(_divides_heads(x.attention, n) for x in decoder.layers)]
        raise ValueError(
            f"tensor_parallel is {tensor_parallel}; this model's heads can be divided by {', '.join(valid)}"
        )
    if num_ranks == 1:
        return decoder
    head = decoder.lm_head
    if head.out_features:
        head = head.slice_outputs(vocab_range(decoder.vocab_size, rank, num_ranks))
    layers = []
    for x in decoder.layers:
        m, own = x.mlp, (rank, num_ranks)
        mlp = _shard_moe(m, *own, expert_parallel) if isinstance(m, MoESpec) else _shard_mlp(m, *own)
        layers.append(replace(x, attention=_shard_heads(x.attention, rank, num_ranks, tensor_parallel), mlp=mlp))
    return replace(decoder, layers=layers, lm_head=head)


def vocab_range(vocab_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first token of a rank's part of the vocabulary, and the one after the last."""
    start, stop = _part(-(-vocab_size // _VOCAB_UNIT), rank, num_ranks)
    return min(start * _VOCAB_UNIT, vocab_size), min(stop * _VOCAB_UNIT, vocab_size)


def _part(count: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first of a rank's part of so many things, and the one after the last."""
    return count * rank // num_ranks, count * (rank + 1) // num_ranks


def _divides_heads(a: AttentionSpec, num_ranks: int) -> bool:
    return num_ranks <= a.num_kv_heads or (num_ranks % a.num_kv_heads == 0 and a.num_heads % num_ranks == 0)


def _shard_heads(a: AttentionSpec, rank: int, num_ranks: int, tensor_parallel: int) -> AttentionSpec:
    """Return a rank's heads, where every ``num_ranks // tensor_parallel``-th rank has some."""
    ranks_per_head_shard = num_ranks // tensor_parallel
    if rank % ranks_per_head_shard == 0:
        return _shard_attention(a, rank // ranks_per_head_shard, tensor_parallel)
    out = a.out.slice_inputs(0, 0, keep_bias=rank == 0)
    return replace(
        a, num_heads=0, num_kv_heads=0, qkv=a.qkv.slice_outputs((0, 0)), out=out, alibi_slopes=None, relative_bias=None
    )


def _shard_attention(a: AttentionSpec, rank: int, num_ranks: int) -> AttentionSpec:
    if num_ranks == 1:
        return a
    group = a.num_heads // a.num_kv_heads
    if num_ranks <= a.num_kv_heads:
        first, last = _part(a.num_kv_heads, rank, num_ranks)
        low, high = first * group, last * group
    else:  # several ranks share a head of keys and values, and keep it twice
        low, high = _part(a.num_heads, rank, num_ranks)
        first, last = low // group, low // group + 1
    keys = a.num_heads * a.head_dim
    values = keys + a.num_kv_heads * a.head_dim
    parts = (0, low, high), (keys, first, last), (values, first, last)
    ranges = [(base + start * a.head_dim, base + stop * a.head_dim) for base, start, stop in parts]
    return replace(
        a,
        num_heads=high - low,
        num_kv_heads=last - first,
        qkv=a.qkv.slice_outputs(*ranges),
        out=a.out.slice_inputs(low * a.head_dim, high * a.head_dim, keep_bias=rank == 0),
        alibi_slopes=None if a.alibi_slopes is None else a.alibi_slopes[low:high],
    )


def _shard_mlp(m: MLPSpec, rank: int, num_ranks: int) -> MLPSpec:
    inner = m.down.in_features
    low, high = _intermediate_range(inner, rank, num_ranks)
    ranges = [(low, high), (inner + low, inner + high)] if m.gated else [(low, high)]
    return replace(m, up=m.up.slice_outputs(*ranges), down=m.down.slice_inputs(low, high, keep_bias=rank == 0))


def _shard_moe(m: MoESpec, rank: int, num_ranks: int, expert_parallel: int) -> MoESpec:
    """Return a rank's experts: of its part of them all, or of all, some of the inner units."""
    ranks_per_expert_shard = num_ranks // expert_parallel
    begin, end = _part(len(m.up), rank // ranks_per_expert_shard, expert_parallel)
    inner = m.down.shape[2]
    low, high = _intermediate_range(inner, rank % ranks_per_expert_shard, ranks_per_expert_shard)
    up = torch.cat([m.up[begin:end, low:high], m.up[begin:end, inner + low : inner + high]], 1)
    shared_expert = None if m.shared_expert is None else _shard_mlp(m.shared_expert, rank, num_ranks)
    down = m.down[begin:end, :, low:high].contiguous()
    return replace(m, up=up, down=down, shared_expert=shared_expert, first_expert=m.first_expert + begin)


def _intermediate_range(intermediate_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return a part of the inner units: whole groups of the quantised formats, where there are enough."""
    fitting = [u for u in (32, 16, 1) if intermediate_size % u == 0 and intermediate_size // u >= num_ranks]
    if not fitting:
        raise ValueError(
            f"{num_ranks} ranks share each layer; an MLP of {intermediate_size} inner units has too few for that"
        )
    start, stop = _part(intermediate_size // fitting[0], rank, num_ranks)
    return start * fitting[0], stop * fitting[0]
