"""A runner out of plain torch operators: the reference, mixtures of experts, and devices other than CPUs.

The picture of a step, for N tokens in spans of sequences:

    host     one array of integers: tokens, positions, slots, block tables -> one copy to the device, not waited for
    linear   all N tokens together
    cache    all N keys and values are written by one index_copy_ to their slots, and read by one index_select
    attend   spans of like sizes are a padded batch: (B, T) queries gather (B, S) keys, one SDPA for all of them

Keys and values of a layer lie in a tensor (position in the cache, 2 * kv heads, dim); position p of a sequence is at
``16 * table[p // 16] + p % 16``.  Sizes are alike where their next powers of two are, so that padding at most doubles
the work, and most steps have one group.  A padding repeats its span's last query or key: nothing is read that the
span's own sequence has not written, whatever lies in the other blocks.  Nothing in a step waits for the device; the
sampler's one copy of the tokens to the host does, and of more than 64 tokens each mixture once, for who goes where.
Experts in bf16 on a GPU for which torch has a grouped product wait for nothing, and only those chosen are read.

Where the device has graphs (CUDA), a step in which each sequence has one token is one launch and not hundreds: for each
number of sequences and of keys, both rounded up to powers of two, the kernels are captured when it first comes.  A
graph reads memory of its own for tokens, positions and block tables; rows without a sequence write to a block of the
cache that no sequence has.  All graphs share one pool of memory, as no two run at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.device import attention_of_many_shapes, copy_to_device, graph_module
from thalweg.infer.config import EngineConfig
from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import AttentionSpec, DecoderSpec, EncoderSpec, LinearSpec, MoESpec, NormSpec
from thalweg.infer.precision import get_compute_dtype
from thalweg.infer.quantization.modules import linear_packer, quantize_experts
from thalweg.infer.runners import base
from thalweg.ops.grouped_mm import grouped_linear, has_grouped_kernel, sort_by_expert
from thalweg.utils.log import get_logger

log = get_logger(__name__)

_STORAGE_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_FP8_MAX = 448.0  # of torch.float8_e4m3fn
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# Tokens of a step up to which a device without a kernel for groups computes all experts for all of them.
_MAX_DENSE_ROWS = 64
# Contexts up to this length are attended together: what padding costs there is less than another launch.
_MIN_KEY_BUCKET = 256
# Graphs that are kept, of those used last: each takes some MB of the device's memory.
_MAX_GRAPHS = 32
# What a graph computes is at most so many times what there is to compute.
_MAX_GRAPH_PADDING = 4


@dataclass
class _AttentionGroup:
    """Spans of like sizes, padded to B spans of T queries and S keys."""

    shape: tuple[int, int, int]
    # (B * T,) the step's rows that ask; None: all of them, in order.
    rows: Tensor | None
    # (B * S,) where the keys and values are; None: in all rows of the keys, in order.
    keys: Tensor | None
    # (B, T)
    query_positions: Tensor
    # (B,) keys of each span.
    lengths: Tensor
    # Whether all spans have S keys.
    is_full: bool
    # Whether all spans are whole sequences: query t sees keys 0 to t, paddings see what they like.
    is_prefill: bool
    # What is added to scores, by kind: layers share it.
    masks: dict[Any, Tensor] = field(default_factory=dict)


@dataclass
class _AttentionMetadata:
    """All spans of a step, in groups; ``places`` (N,) is where each token's result lies in all groups' results, one
    group after the other, or None where these are the step's rows."""

    groups: list[_AttentionGroup]
    places: Tensor | None


@dataclass
class _GroupLayout:
    """The host's side of :class:`_AttentionGroup`."""

    num_keys: int
    lengths: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    tables: np.ndarray


def _lay_out_groups(
    starts: np.ndarray, counts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, table_rows: np.ndarray
) -> tuple[list[_GroupLayout], np.ndarray]:
    """Put spans together whose numbers of queries and of keys lie between the same powers of two.

    Span i has ``counts[i]`` queries, the first at position ``starts[i]``, and ``lengths[i]`` keys in the blocks of
    ``tables[table_rows[i]]``.  Returns the groups and each token's place in their results.
    """
    # The exponents that frexp gives of whole numbers are their numbers of bits.
    key_bits = np.frexp(np.maximum(lengths, _MIN_KEY_BUCKET))[1]
    kinds = ((starts == 0) & (counts == lengths)) + 2 * np.frexp(counts - 1)[1] + 128 * key_bits
    ends, layouts = np.cumsum(counts), []
    places, base_place = np.empty(int(ends[-1]), np.int64), 0
    for kind in dict.fromkeys(kinds.tolist()):
        spans = np.flatnonzero(kinds == kind)
        own_counts, own_lengths = counts[spans], lengths[spans]
        most, num_keys = int(own_counts.max()), int(own_lengths.max())
        # A span's queries, then its last one again and again.
        steps = np.minimum(np.arange(most), own_counts[:, None] - 1)
        rows = (ends - counts)[spans][:, None] + steps
        is_own = np.arange(most) < own_counts[:, None]
        places[rows[is_own]] = base_place + np.flatnonzero(is_own)
        own_tables = tables[:, : -(-num_keys // base.BLOCK_SIZE)][table_rows[spans]]
        layouts.append(_GroupLayout(num_keys, own_lengths, rows, starts[spans][:, None] + steps, own_tables))
        base_place += rows.size
    return layouts, places


def _is_range(values: np.ndarray, count: int) -> bool:
    """Whether these are 0 to ``count`` - 1, in order."""
    return values.size == count and bool((values.ravel() == np.arange(count)).all())


def _arrays_of(layouts: Sequence[_GroupLayout], places: np.ndarray) -> list[np.ndarray]:
    """Return what a step's groups need on the device, four arrays each."""
    return [*(array for x in layouts for array in (x.lengths, x.rows, x.positions, x.tables)), places]


def _rows_by_adapter(lora_ids: np.ndarray) -> dict[int, np.ndarray]:
    """Return which rows have each adapter that is among them; -1 stands for none."""
    return {number: np.flatnonzero(lora_ids == number) for number in np.unique(lora_ids).tolist() if number >= 0}


class TorchLayers:
    """Computes parts of layers as a request asks; on a processor the linear layers are packed.

    With a ``dtype`` it is the reference: weights and cache stay as they are, and all is computed in that.  Without
    ``cache_weights``, and with ``weight_offload``, nothing of a linear layer outlives its product: the weights stay
    where the model has them (a mapped file, the host's memory) and are read again each time.  ``lora_rows``: the
    current step's rows of each adapter that has some.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self, request: base.RunnerRequest, dtype: torch.dtype | None = None, cache_weights: bool = True
    ) -> None:
        self._lora, self.lora_rows = request.lora, dict[int, Tensor]()
        self.dtype, self.device = dtype or get_compute_dtype(request.config), request.device
        self.max_length = request.max_model_len
        on_cpu = self.device.type == "cpu"
        self._attention_choice = nullcontext if on_cpu else attention_of_many_shapes
        self._cache_weights = cache_weights and request.config.weight_offload is None
        self._weight_ring: Any = None
        # Layers of experts for the ring, by mixture and number.
        self._expert_layers: dict[tuple[int, int], tuple[LinearSpec, LinearSpec]] = {}
        if dtype is None and request.config.weight_offload is not None and not on_cpu:
            from thalweg.infer.offload.weight_ring import DeviceWeightRing

            self._weight_ring = DeviceWeightRing(self.device, self.dtype, request.config.weight_offload == "cpu")
        has_packed = on_cpu or request.config.quantization is not None
        self._packs = dtype is None and has_packed and request.config.weight_offload is None
        packer = linear_packer(request.weight_format, self.device, self.dtype) if self._packs else None
        self._make_linear: Callable[[LinearSpec], Callable[[Tensor], Tensor]] = packer or self._plain_linear
        self._linears: dict[int, Callable[[Tensor], Tensor]] = {}
        self._device_tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._shared_tensors: dict[Any, Tensor] = {}
        self._relative_biases: dict[int, Tensor] = {}
        # Cosines and sines of the current step's positions, by table.
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}

    def _plain_linear(self, layer: LinearSpec) -> Callable[[Tensor], Tensor]:
        bias = None if layer.bias is None else layer.bias.to(self.device, self.dtype)
        if self.device.type != "cpu" and not layer.is_stored and (parts := self._parts_here(layer)):
            # The model's own tensors are on the device: they are multiplied one by one, and not stacked a second time.
            order = None if layer.output_permutation is None else layer.output_permutation.to(self.device)

            def linear(x: Tensor) -> Tensor:
                y = torch.cat([F.linear(x, part) for part in parts], -1)
                y = y if order is None else y.index_select(-1, order)
                y = y if layer.output_scale == 1 else y * layer.output_scale
                return y if bias is None else y + bias

            return linear
        if layer.is_stored and self._cache_weights:  # two layers may have it
            weight = self._on_device(layer.weight)
        else:
            weight = layer.weight.to(self.device, self.dtype)
        return lambda x: F.linear(x, weight, bias)

    def _parts_here(self, layer: LinearSpec) -> list[Tensor]:
        """Return the weights (outputs, inputs) of a layer's modules if all are on our device in our dtype."""
        weights: list[Tensor] = [module.weight.detach() for module in layer.modules]  # type: ignore[misc]
        if any(type(w) is not Tensor or w.device != self.device or w.dtype != self.dtype for w in weights):
            return []
        pairs = zip(layer.modules, weights, strict=True)
        return [weight.t() if type(module).__name__ == "Conv1D" else weight for module, weight in pairs]

    def _linear(self, layer: LinearSpec, x: Tensor) -> Tensor:
        y = self._base_linear(layer, x)
        lora_weights = self._lora.weights_for(layer) if self._lora is not None and self.lora_rows else None
        for number, pair in enumerate(lora_weights or ()):
            rows = self.lora_rows.get(number)
            if pair is not None and rows is not None:
                down, up = (self._on_device(half) for half in pair)
                y.index_add_(0, rows, (x.index_select(0, rows) @ down.t() @ up).to(y.dtype))
        return y

    def _base_linear(self, layer: LinearSpec, x: Tensor) -> Tensor:
        if self._weight_ring is not None:
            return F.linear(x, *self._weight_ring.get(layer))
        if not self._cache_weights:
            return self._make_linear(layer)(x)
        if id(layer) not in self._linears:
            self._linears[id(layer)] = self._make_linear(layer)
        return self._linears[id(layer)](x)

    def _on_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the model's tensors on our device, made once."""
        found = self._device_tensors.get(id(tensor))
        if found is None:
            # The head's weight and the embedding's may be two tensors with the same memory.
            memory = tensor.data_ptr(), tensor.shape, tensor.stride(), dtype or self.dtype
            moved = self._shared_tensors.get(memory)
            if moved is None:
                moved = self._shared_tensors[memory] = tensor.to(self.device, dtype or self.dtype)
            # The tensor is kept: another one at its place in memory would be taken for it.
            found = self._device_tensors[id(tensor)] = tensor, moved
        return found[1]

    def _rotate(self, r: specs.RopeTable, x: Tensor, positions: Tensor) -> None:
        """Rotate x (N, heads, dim) in place."""
        if id(r) not in self._rotations:
            tables = (self._on_device(t, torch.float32) for t in (r.cos, r.sin))
            cos, sin = (t.index_select(0, positions)[:, None].to(x.dtype) for t in tables)
            pairs = ((cos, cos), (-sin, sin))
            whole = [torch.stack(p, -1).flatten(-2) if r.interleaved else torch.cat(p, -1) for p in pairs]
            self._rotations[id(r)] = whole[0], whole[1]
        cos, sin = self._rotations[id(r)]
        x = x[..., : cos.shape[-1]]
        # (a, b) becomes (a cos - b sin, b cos + a sin).
        turned = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if r.interleaved else torch.cat(x.chunk(2, -1)[::-1], -1)
        x.mul_(cos).addcmul_(turned, sin)

    def _attention_metadata(
        self, layouts: Sequence[_GroupLayout], places: np.ndarray, on_device: Iterator[Tensor], block_size: int
    ) -> _AttentionMetadata:
        """Return groups on our device.  ``on_device`` has what :func:`_arrays_of` lists next.  ``block_size``: of the
        tables, 0 where the keys lie in the rows of the queries."""
        groups, num_rows = [], len(places)
        for layout in layouts:
            lengths, rows, positions, tables = islice(on_device, 4)
            num_spans, num_queries = rows.shape
            keys = None
            in_order = _is_range(layout.rows, num_rows)
            if block_size:
                key_positions = torch.arange(layout.num_keys, device=self.device)
                key_positions = torch.minimum(key_positions, lengths[:, None] - 1)
                keys = tables.gather(1, key_positions // block_size) * block_size + key_positions % block_size
            elif not in_order:
                keys = rows
            is_full = bool((layout.lengths == layout.num_keys).all())
            is_prefill = num_queries == layout.num_keys and not bool(layout.positions[:, 0].any())
            own_rows, own_keys = (None if in_order else rows.flatten()), (None if keys is None else keys.flatten())
            shape = num_spans, num_queries, layout.num_keys
            groups.append(_AttentionGroup(shape, own_rows, own_keys, positions, lengths, is_full, is_prefill))
        own_places = next(on_device)
        is_in_order = _is_range(places, num_rows) and sum(x.rows.size for x in layouts) == num_rows
        return _AttentionMetadata(groups, None if is_in_order else own_places)

    def _attend(
        self,
        a: AttentionSpec,
        q: Tensor,
        fetch: Callable[[Tensor | None], Tensor],
        metadata: _AttentionMetadata,
        *,
        causal: bool = True,
    ) -> Tensor:
        """Attend q (N, heads, dim) to keys and values (places, 2 * kv heads, dim), which ``fetch`` gives.

        ``causal``: each query sees the positions up to its own.
        """
        results = []
        for group in metadata.groups:
            num_spans, num_queries, num_keys = group.shape
            own = q if group.rows is None else q.index_select(0, group.rows)
            k, v = fetch(group.keys).view(num_spans, num_keys, -1, a.head_dim).chunk(2, 2)
            own = own.view(num_spans, num_queries, *q.shape[1:])
            results.append(self._attend_group(a, own, k, v, group, causal).flatten(0, 1))
        y = results[0] if len(results) == 1 else torch.cat(results)
        return y if metadata.places is None else y.index_select(0, metadata.places)

    def _attend_group(
        self, a: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, group: _AttentionGroup, causal: bool
    ) -> Tensor:
        """Attend q (B, T, heads, dim) to k, v (B, S, kv heads, dim)."""
        (num_spans, num_queries, num_keys), heads_per_group = group.shape, a.num_heads // a.num_kv_heads
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        sees_all = not a.sliding_window or num_keys <= a.sliding_window
        has_bias = a.alibi_slopes is not None or a.relative_bias is not None
        if causal and group.is_prefill and num_queries > 1 and sees_all and not has_bias and not a.softcap:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.scale, enable_gqa=heads_per_group > 1)
            return y.transpose(1, 2)
        # Kernels that take a mask know no groups of heads: queries that share keys become queries of one head.
        q = q.reshape(num_spans, a.num_kv_heads, heads_per_group * num_queries, a.head_dim)
        needs_mask = not group.is_full or (causal and num_queries > 1) or not sees_all or has_bias
        mask = self._mask(a, group, causal) if needs_mask else None
        if a.softcap:
            scores = a.softcap * torch.tanh((q @ k.transpose(2, 3)) * a.scale / a.softcap)
            if mask is not None:
                scores = scores + mask
            y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a.scale)
        return y.unflatten(2, (heads_per_group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _mask(self, a: AttentionSpec, group: _AttentionGroup, causal: bool) -> Tensor:
        """Return what is added to scores (B, 1, heads of a group * T, S), with a bias the same for each kv head; made
        once a step for all layers of a kind."""
        kind = causal, a.sliding_window, id(a.alibi_slopes), id(a.relative_bias), a.num_heads, a.num_kv_heads
        if kind in group.masks:
            return group.masks[kind]
        _, num_queries, num_keys = group.shape
        key_positions = torch.arange(num_keys, device=self.device)
        query_positions = group.query_positions[:, :, None]
        if causal:
            seen = key_positions <= query_positions
        else:
            seen = (key_positions < group.lengths[:, None, None]).expand(-1, num_queries, -1)
        if a.sliding_window:
            seen = seen & (key_positions > query_positions - a.sliding_window)
        bias, heads_per_group = self._position_bias(a, key_positions - query_positions), a.num_heads // a.num_kv_heads
        if bias is None:  # of the scores' dtype: SDPA would make one out of each layer's booleans
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            mask = mask[:, None, None].expand(-1, 1, heads_per_group, -1, -1)
        else:
            mask = bias.masked_fill(~seen[:, None], -torch.inf).unflatten(1, (a.num_kv_heads, heads_per_group))
        group.masks[kind] = mask = mask.flatten(2, 3)
        return mask

    def _position_bias(self, a: AttentionSpec, distances: Tensor) -> Tensor | None:
        """Return what is added to the scores (B, heads, T, S) of keys at these distances from queries (B, T, S)."""
        if a.alibi_slopes is not None:
            return self._on_device(a.alibi_slopes)[:, None, None] * distances[:, None]
        if a.relative_bias is None:
            return None
        table = self._relative_biases.get(id(a.relative_bias))
        if table is None:
            table = a.relative_bias.build_table(self.max_length).to(self.device, self.dtype)
            self._relative_biases[id(a.relative_bias)] = table
        return table[:, self.max_length + distances].transpose(0, 1)

    def _mlp(self, m: specs.MLPSpec | MoESpec, x: Tensor) -> Tensor:
        if isinstance(m, MoESpec):
            return self._moe(m, x)
        y = self._linear(m.up, x)
        if m.gated:
            gate, value = y.chunk(2, dim=-1)
            return self._linear(m.down, _ACTIVATIONS[m.activation](gate) * value)
        return self._linear(m.down, _ACTIVATIONS[m.activation](y))

    def _moe(self, m: MoESpec, x: Tensor) -> Tensor:
        probs = F.linear(x, self._on_device(m.router)).softmax(-1, dtype=torch.float32)
        weight, chosen = probs.topk(m.top_k, dim=-1)
        if m.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        weight, stacks = weight.to(x.dtype), ()
        own_experts, is_whole = chosen - m.first_expert, m.num_experts == probs.shape[1]
        out = torch.zeros_like(x)
        if is_whole and m.packed_experts is None and self._weight_ring is None and self._cache_weights:
            stacks = self._on_device(m.up), self._on_device(m.down)
        if stacks and all(map(has_grouped_kernel, stacks)):
            experts = sort_by_expert(chosen, m.num_experts)
            gate, value = grouped_linear(experts.permute(x), stacks[0], experts.groups).chunk(2, dim=-1)
            y = grouped_linear(_ACTIVATIONS[m.activation](gate) * value, stacks[1], experts.groups)
            out = experts.combine(y, weight)
        elif self.device.type != "cpu" and len(x) <= _MAX_DENSE_ROWS:
            # A batch's tokens go to most experts anyway, and which would have to be asked the device: all compute all.
            for number in range(m.num_experts):
                own = torch.where(own_experts == number, weight, 0).sum(1, keepdim=True)
                y = self._expert(m, number, x)
                out += torch.where(own != 0, y * own, 0)
        else:
            # Others' are left out; the numbers of rows are asked of the device once.
            is_own = None if is_whole else (own_experts >= 0) & (own_experts < m.num_experts)
            experts = sort_by_expert(own_experts, m.num_experts, is_own)
            for number, choices in enumerate(experts.order.split(experts.groups.counts_list)):
                if len(choices):
                    token = choices // m.top_k
                    y = self._expert(m, number, x[token]) * weight.flatten()[choices, None]
                    out.index_add_(0, token, y)
        if m.shared_expert is not None:
            y = self._mlp(m.shared_expert, x)
            if m.shared_expert_gate is not None:
                y = y * F.linear(x, self._on_device(m.shared_expert_gate)).sigmoid()
            out = out + y
        return out

    def _expert(self, m: MoESpec, number: int, x: Tensor) -> Tensor:
        """Return an expert's result."""
        if m.packed_experts is not None:
            up, down = m.packed_experts[number]
        elif self._weight_ring is not None:
            layers = self._expert_layers.get((id(m), number))
            if layers is None:
                layers = self._expert_layers[id(m), number] = LinearSpec(m.up[number]), LinearSpec(m.down[number])
            up, down = (partial(self._base_linear, layer) for layer in layers)
        elif self._cache_weights:
            up, down = (partial(F.linear, weight=self._on_device(t)[number]) for t in (m.up, m.down))
        else:
            up, down = (partial(F.linear, weight=t[number].to(self.device, self.dtype)) for t in (m.up, m.down))
        gate, value = up(x).chunk(2, dim=-1)
        return down(_ACTIVATIONS[m.activation](gate) * value)

    def _norm(self, n: NormSpec | None, x: Tensor) -> Tensor:
        if n is None:
            return x
        # A device's own kernels sum in fp32 and round once, as is done here, where weights are of the same dtype.
        is_fused = self.device.type != "cpu" and n.weight.dtype == x.dtype
        weight, *bias = (
            self._on_device(t, t.dtype if is_fused else torch.float32) for t in (n.weight, n.bias) if t is not None
        )
        y = x if is_fused else x.float()
        if n.norm_type == "layer":
            y = F.layer_norm(y, weight.shape, weight, bias[0], n.eps)
        elif is_fused:
            y = F.rms_norm(y, weight.shape, weight, n.eps)
        else:
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + n.eps) * weight
        return y.to(x.dtype)

    def _add_branch(self, x: Tensor, branch: Tensor, post_norm: NormSpec | None, norm: NormSpec | None) -> Tensor:
        """Add what attention or MLP gave, behind its own norm, to x; then normalise x where the layer does."""
        return self._norm(norm, x + self._norm(post_norm, branch))

    def _project_qkv(self, a: AttentionSpec, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (N, heads, dim), and keys and then values (N, 2 * kv heads, dim), normalised and rotated."""
        qkv = self._linear(a.qkv, x).view(len(x), a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        q, k, _ = qkv.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        for norm, part in ((a.q_norm, q), (a.k_norm, k)):
            if norm is not None:
                part.copy_(self._norm(norm, part))
        if a.rope is not None:
            self._rotate(a.rope, qkv[:, : a.num_heads + a.num_kv_heads], positions)
        return q, qkv[:, a.num_heads :]

    def _embed(self, d: DecoderSpec | EncoderSpec, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the stack's input."""
        x = F.embedding(tokens, self._on_device(d.embed))
        if d.embed_scale != 1.0:
            x = x * torch.tensor(d.embed_scale, dtype=x.dtype).item()  # rounded as the model rounds it
        if d.position_embeddings is not None:
            x = x + self._on_device(d.position_embeddings)[positions]
        return self._norm(d.embed_norm, x)

    def encode(self, e: EncoderSpec, prompts: Sequence[Sequence[int]], lora_ids: Sequence[int] = ()) -> Tensor:
        """Return an encoder's last states (tokens, width), prompt after prompt."""
        counts = np.array([len(prompt) for prompt in prompts])
        tokens = np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])
        position_ids = [e.position_ids(torch.from_numpy(t)).numpy() for t in np.split(tokens, np.cumsum(counts)[:-1])]
        no_tables, firsts = np.empty((len(counts), 0), np.int64), np.zeros_like(counts)
        layouts, places = _lay_out_groups(firsts, counts, counts, no_tables, firsts)
        arrays = [tokens, np.concatenate(position_ids), *_arrays_of(layouts, places)]
        lora_rows = _rows_by_adapter(np.repeat(lora_ids, counts)) if lora_ids else {}
        on_device = iter(base.arrays_to_device([*arrays, *lora_rows.values()], self.device))
        ids, positions = islice(on_device, 2)
        metadata = self._attention_metadata(layouts, places, on_device, 0)
        self.lora_rows = dict(zip(lora_rows, on_device, strict=True))
        self._rotations = {}
        x = self._embed(e, ids, positions)
        for layer in e.layers:
            q, kv = self._project_qkv(layer.attention, self._norm(layer.attn_norm, x), positions)

            def fetch(at: Tensor | None, kv: Tensor = kv) -> Tensor:
                return kv if at is None else kv.index_select(0, at)

            attended = self._attend(layer.attention, q, fetch, metadata, causal=False).flatten(1)
            attended = self._linear(layer.attention.out, attended)
            x = self._add_branch(x, attended, layer.post_attn_norm, layer.attn_residual_norm)
            inner = self._mlp(layer.mlp, self._norm(layer.mlp_norm, x))
            x = self._add_branch(x, inner, layer.post_mlp_norm, layer.mlp_residual_norm)
        return self._norm(e.final_norm, x)

    def close(self) -> None:
        """Drop the weights."""
        if self._weight_ring is not None:
            self._weight_ring.close()
        for table in (self._linears, self._device_tensors, self._shared_tensors, self._relative_biases):
            table.clear()


class KVCacheTensor:
    """Rows (heads, dim) by position, written and gathered in ``dtype``, stored as ``kv_cache_dtype``.

    ``int8`` has a scale for each row and head, ``fp8`` (e4m3) none; ``auto`` keeps rows as they are.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, kv_cache_dtype: str, device: torch.device) -> None:
        """``shape``: positions, heads, dim."""
        self._dtype, self._kv_cache_dtype = dtype, kv_cache_dtype
        # On a device memory is taken at once, on the host as rows are written: nobody reads what nobody wrote.
        allocate = torch.zeros if device.type == "cpu" else torch.empty
        self._rows = allocate(*shape, dtype=_STORAGE_DTYPES.get(kv_cache_dtype, dtype), device=device)
        self._scales = allocate(shape[0] if kv_cache_dtype == "int8" else 0, shape[1], 1, device=device)

    def write(self, indices: Tensor, rows: Tensor) -> None:
        """Store rows (T, heads, dim) at positions (T,)."""
        if self._kv_cache_dtype == "int8":
            scale = rows.float().abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
            self._scales.index_copy_(0, indices, scale)
            rows = (rows.float() / scale).round_().to(torch.int8)
        elif self._kv_cache_dtype == "fp8":
            rows = rows.float().clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
            # Not every device indexes 8-bit floats: the bytes are moved.
            self._rows.view(torch.uint8).index_copy_(0, indices, rows.view(torch.uint8))
            return
        self._rows.index_copy_(0, indices, rows.to(self._rows.dtype))

    def gather(self, indices: Tensor | None) -> Tensor:
        """Return the rows (T, heads, dim) at positions (T,)."""
        assert indices is not None, "a cache is never in the order of the queries"
        if self._kv_cache_dtype == "int8":
            rows, scales = self._rows.index_select(0, indices), self._scales.index_select(0, indices)
            return (rows.float() * scales).to(self._dtype)
        if self._kv_cache_dtype == "fp8":
            rows = self._rows.view(torch.uint8).index_select(0, indices)
            return rows.view(torch.float8_e4m3fn).to(self._dtype)
        return self._rows.index_select(0, indices).to(self._dtype)


@dataclass
class _Step:
    """A step's integers on the device."""

    tokens: Tensor
    positions: Tensor
    # Where each token's keys and values go.
    slot_mapping: Tensor
    metadata: _AttentionMetadata
    # Of cross attention, where there is an encoder.
    cross_metadata: _AttentionMetadata | None
    # Rows whose logits are wanted; None: all, in order.
    logit_indices: Tensor | None
    # Of those rows, the ones of each adapter.
    logit_lora_rows: dict[int, Tensor]


@dataclass
class _DecodeGraph:
    """A captured step of B sequences with up to S keys, and what it reads: see :meth:`TorchRunner._decode`."""

    graph: Any
    inputs: Tensor


class TorchRunner(TorchLayers, base.ModelRunner):
    """Runs a :class:`DecoderSpec`, or with a ``comm`` a shard of one."""

    block_size = base.BLOCK_SIZE
    # None: no graphs.
    _graph_module: Any = None
    # Whether each token is computed alone, as its sums depend on how many there are.
    _is_batch_invariant = False

    @staticmethod
    def supports(spec: DecoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run a model, or None."""
        if spec is None:
            return base.UNDESCRIBED
        if config.weight_offload and config.quantization:
            return f"{config.quantization} weights cannot be streamed through torch's operators"
        return specs.length_unsupported_reason(spec, config)

    def __init__(
        self, request: base.DecoderRequest, dtype: torch.dtype | None = None, cache_weights: bool = True
    ) -> None:
        super().__init__(request, dtype, cache_weights)
        self._weight_format = request.weight_format
        self._take_decoder(request.spec)
        self.comm, self.num_slots = request.comm, request.num_slots
        self._kv_cache_dtype = request.kv_cache_dtype if dtype is None else "auto"
        config = request.config
        has_fixed_work = self.comm is None and self._cache_weights and self.decoder.encoder is None
        # A token that is batch invariant takes the same kernels with and without logits.
        if has_fixed_work and dtype is None and not (config.enforce_eager or config.batch_invariant):
            self._graph_module = graph_module(self.device)
        self._capture_stream = self._graph_module and self._graph_module.Stream(self.device)
        # As of the last step that changed them: a token in the middle of a block goes on in the last one.
        self._block_tables = np.zeros((self.num_slots, -(-self.max_length // self.block_size)), np.int64)
        if isinstance(request.num_blocks, int):
            self._allocate_cache(request.num_blocks)
        else:
            self._warm_up(min(request.config.max_num_batched_tokens, self.max_length))
            self._allocate_cache(request.num_blocks())
        self._is_batch_invariant = config.batch_invariant

    def _take_decoder(self, spec: DecoderSpec) -> None:
        packs = self._packs
        self.decoder = quantize_experts(spec, self._weight_format, self.device, self.dtype) if packs else spec

    def _allocate_cache(self, num_blocks: int) -> None:
        self._kv_cache: list[KVCacheTensor] = []
        # By numbers of sequences and keys, the one used last at the end.
        self._graphs: dict[tuple[int, int], _DecodeGraph] = {}
        self._graph_logits: Tensor | None = None
        self.num_blocks = num_blocks
        make_tensor = partial(KVCacheTensor, dtype=self.dtype, kv_cache_dtype=self._kv_cache_dtype, device=self.device)
        num_positions = (num_blocks + (self._graph_module is not None)) * self.block_size
        shapes = [(2 * x.attention.num_kv_heads, x.attention.head_dim) for x in self.decoder.layers]
        self._kv_cache += [make_tensor(num_positions, *shape) for shape in shapes]

    def _warm_up(self, num_tokens: int) -> None:
        """Run a step of so many tokens: weights come to the device, and what activations take is known after it."""
        blocks = list(range(-(-num_tokens // self.block_size)))
        self._allocate_cache(2 * len(blocks))
        rows = range(min(num_tokens, self.num_slots))
        batch = base.ModelInput([0] * num_tokens, [base.QuerySpan(0, 0, num_tokens)], rows, [blocks])
        if self.decoder.encoder is not None:
            encoder_blocks = [len(blocks) + block for block in blocks]
            self.run_encoder([base.EncoderInput(0, batch.tokens, encoder_blocks)])
            batch.encoder_block_tables, batch.encoder_seq_lens = [encoder_blocks], [num_tokens]
        self.run(batch)

    @torch.inference_mode()
    def run(self, batch: base.ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab), or the last hidden states (tokens, width)."""
        if self._is_batch_invariant and len(batch.tokens) > 1:
            return self._run_one_by_one(batch)
        if (logits := self._run_graph(batch)) is not None:
            return logits
        d, comm, step = self.decoder, self.comm, self._prepare(batch)
        with self._attention_choice():
            x = self._forward(step)
        is_last_stage = comm is None or comm.is_last_stage
        if comm is not None and not is_last_stage:
            comm.send_activations(x)
        if batch.wants_hidden_states:
            result = self._norm(d.final_norm, x).float() / d.final_norm_scale
        elif is_last_stage:
            result = self._logits(x, step)
        else:
            result = torch.empty(len(batch.logit_indices), d.vocab_size, device=self.device)
        return result if comm is None else comm.return_result(result)

    def _run_one_by_one(self, batch: base.ModelInput) -> Tensor:
        """Run each token alone: its result then depends on nobody's company, not on how prompts are chunked, not on
        what the prefix cache holds.  All ranks do so alike."""
        place_of_row = {row: place for place, row in enumerate(batch.logit_indices)}
        results: dict[int, Tensor] = {}
        row = 0
        for number, span in enumerate(batch.spans):
            own = slice(number, number + 1)
            for position in range(span.start, span.start + span.num_tokens):
                by_sequence = ("block_tables", "encoder_block_tables", "encoder_seq_lens", "lora_ids")
                alone = replace(
                    batch,
                    tokens=[batch.tokens[row]],
                    spans=[base.QuerySpan(span.slot, position, 1)],
                    logit_indices=[0] if row in place_of_row else [],
                    **{name: getattr(batch, name)[own] for name in by_sequence},
                )
                result = self.run(alone)
                if row in place_of_row:
                    results[place_of_row[row]] = result[0]
                row += 1
        return torch.stack([results[place] for place in range(len(results))]) if results else torch.empty(0, 0)

    def _run_graph(self, batch: base.ModelInput) -> Tensor | None:
        """Compute a step by one launch, or None: not each sequence has one token, or padding would cost too much."""
        count = len(batch.spans)
        if self._graph_module is None or len(batch.tokens) > count or list(batch.logit_indices) != [*range(count)]:
            return None
        if batch.wants_hidden_states or max(batch.lora_ids, default=-1) >= 0:
            return None
        slots, starts, _ = self._take_spans(batch)
        size, tables, longest = self.block_size, self._block_tables, int(starts.max()) + 1
        num_rows = min(1 << (count - 1).bit_length(), self.num_slots)
        num_keys = min(max(1 << (longest - 1).bit_length(), _MIN_KEY_BUCKET), tables.shape[1] * size)
        least = int(np.maximum(starts, _MIN_KEY_BUCKET).sum())
        if num_rows * num_keys > min(_MAX_GRAPH_PADDING * least, self.num_blocks * size):
            return None
        if num_rows > _MAX_DENSE_ROWS and any(isinstance(x.mlp, MoESpec) for x in self.decoder.layers):
            return None  # which experts compute what would be asked of the device
        inputs = np.zeros(num_rows * (2 + num_keys // size), np.int64)
        inputs[:count], inputs[num_rows : num_rows + count] = batch.tokens, starts
        own_tables = inputs[2 * num_rows :].reshape(num_rows, -1)
        own_tables[:count] = tables[:, : num_keys // size][slots]
        own_tables[count:, 0] = self.num_blocks
        on_device, key = copy_to_device(torch.from_numpy(inputs), self.device), (num_rows, num_keys)
        found = self._graphs.pop(key, None) or self._capture(key, on_device)
        if found is None:
            return None
        self._graphs[key] = found
        found.inputs.copy_(on_device)
        found.graph.replay()
        assert self._graph_logits is not None, "the first capture makes them"
        return self._graph_logits[:count]

    def _capture(self, key: tuple[int, int], inputs: Tensor) -> _DecodeGraph | None:
        """Capture a step; where that fails there are no graphs from then on."""
        stream = torch.accelerator.current_stream(self.device) if self.device.type != "cpu" else None
        others = list(self._graphs.values())
        try:
            # Once without a graph: what is made once and kept must not lie in the graphs' memory.
            logits = self._decode(inputs, *key)
            if (kept := self._graph_logits) is None:
                kept = self._graph_logits = logits.new_empty(self.num_slots, logits.shape[1])
            graph, pool = self._graph_module.CUDAGraph(), others[0].graph.pool() if others else None
            options = {"pool": pool, "stream": self._capture_stream, "capture_error_mode": "thread_local"}
            # Torch would capture on a stream of the current device, and wait for that one.
            with torch.accelerator.device_index(self.device.index), self._graph_module.graph(graph, **options):
                kept[: key[0]].copy_(self._decode(inputs, *key))
        except Exception as error:
            log.warning("no CUDA graphs, decoding steps launch their kernels one by one: %s", error)
            self._graph_module = None
            self._graphs.clear()
            if stream is not None:  # a capture that fails leaves its own
                torch.accelerator.set_stream(stream)
            return None
        if len(others) == _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return _DecodeGraph(graph, inputs)

    def _decode(self, inputs: Tensor, num_rows: int, num_keys: int) -> Tensor:
        """Return logits (B, vocab) of B sequences with a token each, which see up to S keys.

        ``inputs``: tokens (B,), positions (B,) and block tables (B, S / 16), one after the other.
        """
        tokens, positions, tables = inputs.split([num_rows, num_rows, len(inputs) - 2 * num_rows])
        key_positions = torch.minimum(torch.arange(num_keys, device=self.device), positions[:, None])
        size, query_positions = self.block_size, positions[:, None]
        keys = tables.view(num_rows, -1).gather(1, key_positions // size) * size + key_positions % size
        slot_mapping = keys.gather(1, query_positions)[:, 0]
        shape = num_rows, 1, num_keys
        group = _AttentionGroup(shape, None, keys.flatten(), query_positions, positions + 1, False, False)
        step = _Step(tokens, positions, slot_mapping, _AttentionMetadata([group], None), None, None, {})
        self._rotations, self.lora_rows = {}, {}
        return self._logits(self._forward(step), step)

    def _logits(self, x: Tensor, step: _Step) -> Tensor:
        d = self.decoder
        if step.logit_indices is not None:
            if len(step.logit_indices) == 0:
                return torch.empty(0, d.vocab_size, device=self.device)
            x, self.lora_rows = x.index_select(0, step.logit_indices), step.logit_lora_rows
        logits = self._linear(d.lm_head, self._norm(d.final_norm, x)).float()
        logits = logits if self.comm is None else self.comm.gather_logits(logits)
        return d.logit_softcap * torch.tanh(logits / d.logit_softcap) if d.logit_softcap else logits

    def _take_spans(self, batch: base.ModelInput) -> np.ndarray:
        """Return the spans' slots, starts and counts (3, spans); their block tables are up to date then."""
        slots, starts, counts = spans = np.array(batch.spans, np.int64).T.copy()
        for number in np.flatnonzero((counts > 1) | (starts % self.block_size == 0)).tolist():
            num_blocks = -(-int(starts[number] + counts[number]) // self.block_size)
            self._block_tables[slots[number], :num_blocks] = batch.block_tables[number][:num_blocks]
        return spans

    def _prepare(self, batch: base.ModelInput) -> _Step:
        """Lay out a step on the host and copy it to the device."""
        slots, starts, counts = self._take_spans(batch)
        lengths, size, tables = starts + counts, self.block_size, self._block_tables
        positions, slot_of_token = starts, slots
        if len(batch.tokens) > len(starts):
            firsts, slot_of_token = np.repeat([starts - (np.cumsum(counts) - counts), slots], counts, axis=1)
            positions = firsts + np.arange(len(firsts))
        blocks = tables[slot_of_token, positions // size]
        layouts, places = _lay_out_groups(starts, counts, lengths, tables, slots)
        arrays = [np.array(batch.tokens, np.int64), positions, blocks * size + positions % size]
        arrays += _arrays_of(layouts, places)
        indices = np.array(batch.logit_indices, np.int64)
        lora_rows, logit_lora_rows = {}, {}
        if batch.lora_ids:
            lora_ids = np.repeat(batch.lora_ids, counts)
            lora_rows, logit_lora_rows = _rows_by_adapter(lora_ids), _rows_by_adapter(lora_ids[indices])
        arrays += [indices, *lora_rows.values(), *logit_lora_rows.values()]
        cross_layouts, cross_places = [], places
        if batch.encoder_seq_lens:
            tables = np.zeros((len(slots), max(map(len, batch.encoder_block_tables))), np.int64)
            for row, blocks in zip(tables, batch.encoder_block_tables, strict=True):
                row[: len(blocks)] = blocks
            lengths = np.array(batch.encoder_seq_lens)
            cross_layouts, cross_places = _lay_out_groups(starts, counts, lengths, tables, np.arange(len(slots)))
            arrays += _arrays_of(cross_layouts, cross_places)
        on_device = iter(base.arrays_to_device(arrays, self.device))
        tokens, on_device_positions, slot_mapping = islice(on_device, 3)
        metadata = self._attention_metadata(layouts, places, on_device, size)
        on_device_indices = next(on_device)
        # Each takes as many as it has keys.
        self.lora_rows = dict(zip(lora_rows, on_device, strict=False))
        logit_rows = dict(zip(logit_lora_rows, on_device, strict=False))
        cross = self._attention_metadata(cross_layouts, cross_places, on_device, size) if cross_layouts else None
        self._rotations = {}
        wanted = None if _is_range(indices, len(positions)) else on_device_indices
        return _Step(tokens, on_device_positions, slot_mapping, metadata, cross, wanted, logit_rows)

    def _forward(self, step: _Step) -> Tensor:
        d = self.decoder
        if self.comm is None or self.comm.is_first_stage:
            x = self._embed(d, step.tokens, step.positions)
        else:
            x = self.comm.receive_activations(len(step.tokens), self.device).to(self.dtype)
        for index, layer in enumerate(d.layers):
            normed, residual = self._norm(layer.attn_norm, x), x
            attended = self._attention(layer.attention, index, normed, step)
            x = self._add_branch(x, self._all_reduce(attended), layer.post_attn_norm, layer.attn_residual_norm)
            if layer.cross_attention is not None:
                x = self._cross_attention(layer.cross_attention, layer.attention, index, x, step)
            inner = self._mlp(layer.mlp, self._norm(layer.mlp_norm, residual if layer.parallel_residual else x))
            x = self._add_branch(x, self._all_reduce(inner), layer.post_mlp_norm, layer.mlp_residual_norm)
        return x

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' partial results, where there are several."""
        return partial if self.comm is None else self.comm.all_reduce(partial)

    @torch.inference_mode()
    def run_encoder(self, inputs: Sequence[base.EncoderInput]) -> None:
        """Compute encoder prompts and store the keys and values of cross attention."""
        d, size = self.decoder, self.block_size
        assert d.encoder is not None, "only a model with an encoder has encoder prompts"
        if self._is_batch_invariant and len(inputs) > 1:
            for encoder_input in inputs:
                self.run_encoder([encoder_input])
            return
        with self._attention_choice():
            states = self.encode(d.encoder, [x.tokens for x in inputs], [x.lora_id for x in inputs])
        slots = [
            (np.array(x.blocks, np.int64)[:, None] * size + np.arange(size)).ravel()[: len(x.tokens)] for x in inputs
        ]
        (slot_mapping,) = base.arrays_to_device([np.concatenate(slots)], self.device)
        for index, layer in enumerate(d.layers):
            if layer.cross_attention is not None:
                a = layer.attention
                kv = self._linear(layer.cross_attention.kv, states).view(len(states), 2 * a.num_kv_heads, a.head_dim)
                self._kv_cache[index].write(slot_mapping, kv)

    def _cross_attention(
        self, cross: specs.CrossAttentionSpec, a: AttentionSpec, index: int, x: Tensor, step: _Step
    ) -> Tensor:
        assert step.cross_metadata is not None, "a step of a model with cross attention has encoder prompts"
        q = self._linear(cross.q, self._norm(cross.norm, x)).view(len(x), a.num_heads, a.head_dim)
        cross_spec = replace(a, scale=cross.scale, sliding_window=0, softcap=0.0, alibi_slopes=None, relative_bias=None)
        out = self._attend(cross_spec, q, self._kv_cache[index].gather, step.cross_metadata, causal=False)
        return self._norm(cross.residual_norm, x + self._linear(cross.out, out.flatten(1)))

    def _attention(self, a: AttentionSpec, index: int, x: Tensor, step: _Step) -> Tensor:
        if a.num_heads == 0:  # a rank that has experts alone
            return torch.zeros_like(x)
        q, kv = self._project_qkv(a, x, step.positions)
        self._kv_cache[index].write(step.slot_mapping, kv)
        out = self._attend(a, q, self._kv_cache[index].gather, step.metadata)
        return self._linear(a.out, out.flatten(1))

    def close(self) -> None:
        """Drop the weights and the cache."""
        super().close()
        self._kv_cache, self._graphs, self._graph_logits = [], {}, None

    @torch.inference_mode()
    def wake_up(self, spec: DecoderSpec | None) -> None:
        """Bring new weights to where they are used, all of them now: a caller's may be gone at their first use."""
        assert spec is not None, "a described model"
        self._take_decoder(spec)
        for layer in specs.list_linears(self.decoder):
            self._linears[id(layer)] = self._make_linear(layer)
        self._allocate_cache(self.num_blocks)


class TorchEncoder(TorchLayers, base.EncoderRunner):
    """Runs an :class:`EncoderSpec` in plain operators."""

    @staticmethod
    def supports(spec: EncoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run an encoder, or None."""
        return base.UNDESCRIBED if spec is None else None

    def __init__(self, request: base.EncoderRequest, dtype: torch.dtype | None = None) -> None:
        super().__init__(request, dtype)
        self._encoder, self.max_num_batched_tokens = request.spec, request.max_encoder_tokens

    @torch.inference_mode()
    def run(self, inputs: Sequence[base.EncoderInput]) -> Tensor:
        """Return the last states."""
        with self._attention_choice():
            return self.encode(self._encoder, [x.tokens for x in inputs]).float()
