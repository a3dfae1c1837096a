"""Low-rank corrections of a product, another one for each row: out += B (A y), in fp32.

A layer's table has three words for each adapter: the addresses of A (rank, k) and of B transposed (rank,
columns), and the rank.  A row names its adapter, or none by -1.  Two kernels with a barrier between them, so
that all threads share the work even where there is one row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thalweg.ops.cpu_kernels.kernel_builder import F32, I64, KernelBuilder, vec

WORDS_PER_ADAPTER = 3
# ``y``: fp32 rows of ``k`` columns, a multiple of 16; ``low``: A y, with room for ``rank``, the largest.
LORA_SHRINK_ARGS = ("y", "y_stride", "rows", "k", "adapter_of", "table", "low", "low_stride", "rank")
# ``columns``: a multiple of 16.
LORA_EXPAND_ARGS = ("out", "out_stride", "rows", "columns", "adapter_of", "table", "low", "low_stride")


@contextmanager
def _if_has_adapter(code: KernelBuilder, a: dict[str, Any], row: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Give A, B and the rank of a row's adapter; the block is skipped where it has none."""
    adapter = code.load(I64, code.add(a["adapter_of"], code.mul(row, 8)), 8)
    with code.if_then(code.builder.icmp_signed(">=", adapter, code.int_const(0))):
        entry = code.add(a["table"], code.mul(adapter, 8 * WORDS_PER_ADAPTER))
        down, up, rank = (code.load(I64, code.add(entry, 8 * i), 8) for i in range(WORDS_PER_ADAPTER))
        yield down, up, rank


def emit_lora_shrink(module: Any) -> str:
    """Add the kernel that computes A y; arguments: :data:`LORA_SHRINK_ARGS`."""
    code = KernelBuilder(module, "lora_shrink")
    a = code.load_args(LORA_SHRINK_ARGS)
    with code.thread_items(code.mul(code.load(I64, a["rows"], 8), a["rank"])) as item:
        row, number = code.div(item, a["rank"]), code.rem(item, a["rank"])
        with (
            _if_has_adapter(code, a, row) as (down, _, rank),
            code.if_then(code.builder.icmp_signed("<", number, rank)),
        ):
            weight = code.add(down, code.mul(number, code.mul(a["k"], 4)))
            y = code.add(a["y"], code.mul(row, a["y_stride"]))
            total = code.stack_var(code.f32_const(0.0, 16))
            with code.range(0, a["k"], 16) as i:
                at = code.mul(i, 4)
                total.value = code.fma(
                    code.load(vec(16), code.add(weight, at)), code.load(vec(16), code.add(y, at)), total.value
                )
            to = code.add(a["low"], code.mul(row, a["low_stride"]), code.mul(number, 4))
            code.store(code.reduce_add(total.value), to)
    return code.ret()


def emit_lora_expand(module: Any) -> str:
    """Add the kernel that adds B (A y) to the product; arguments: :data:`LORA_EXPAND_ARGS`."""
    code = KernelBuilder(module, "lora_expand")
    a = code.load_args(LORA_EXPAND_ARGS)
    num_vectors = code.div(a["columns"], 16)
    with code.thread_items(code.mul(code.load(I64, a["rows"], 8), num_vectors)) as item:
        row, vector_offset = code.div(item, num_vectors), code.mul(code.rem(item, num_vectors), 64)
        with _if_has_adapter(code, a, row) as (_, up, rank):
            at = code.add(a["out"], code.mul(row, a["out_stride"]), vector_offset)
            low = code.add(a["low"], code.mul(row, a["low_stride"]))
            total = code.stack_var(code.f32_const(0.0, 16))
            with code.range(0, rank) as r:
                weight = code.load(vec(16), code.add(up, code.mul(r, code.mul(a["columns"], 4)), vector_offset))
                scale = code.splat(code.load(F32, code.add(low, code.mul(r, 4))), 16)
                total.value = code.fma(weight, scale, total.value)
            code.store(code.builder.fadd(code.load(vec(16), at), total.value), at)
    return code.ret()
