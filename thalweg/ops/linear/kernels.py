"""The three matrix products of a linear layer, each with its candidates.

====== ============================ ==============================================
kind   computes                     used for
====== ============================ ==============================================
``nt`` a(M,K) @ b(N,K)^T + bias     Linear forward, Conv1D input gradient
``nn`` a(M,K) @ b(K,N) + bias       Linear input gradient, Conv1D forward
``tn`` a(M,K)^T @ b(M,N)            both weight gradients
====== ============================ ==============================================

The candidate ``torch`` is the reference and always there.  ``onednn*`` and ``convolution``
answer the same product through oneDNN and differ in which operand is transposed by a copy.
``fp32*`` widens half-precision operands, multiplies in fp32 and rounds once: on processors
without half-precision arithmetic torch's own product falls back to scalar loops (fp16 here:
7 to 50 times slower).  All take strided CPU tensors of one dtype; ``b`` is 2-D, ``a`` is
2-D or, for ``nt``, of any rank with its leading dims counted as rows.  oneDNN refuses some
strides (expanded dims), so the operand it would take as a view is made contiguous first:
no copy in any usual case.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.ops._torch_private import ONEDNN_LINEAR, onednn_linear
from thalweg.ops.autograd import run_in_clean_thread

MATMUL_KINDS = ("nt", "nn", "tn")
REFERENCE = "torch"
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Candidates that compile a kernel for each exact shape, and what does the same without.
JIT_FALLBACKS = MappingProxyType({"onednn": REFERENCE, "convolution": REFERENCE, "fp32_onednn": "fp32"})

MatmulKernel = Callable[..., Tensor]


def _tn_convolution(a: Tensor, b: Tensor) -> Tensor:
    # A 1x1 convolution over an image of M pixels in channels-last layout: its weight gradient
    # is this product, and oneDNN takes both operands as they lie, without a transposed copy.
    (rows, k), n = a.shape, b.shape[1]
    image = b.contiguous().view(1, rows, 1, n).permute(0, 3, 1, 2)
    grad = a.contiguous().view(1, rows, 1, k).permute(0, 3, 1, 2)
    weight = a.new_empty(()).expand(k, n, 1, 1)
    unit, zero = [1, 1], [0, 0]
    out = torch.ops.aten.convolution_backward(
        grad, image, weight, None, unit, zero, unit, False, zero, 1, [False, True, False]
    )[1]
    return out.reshape(k, n).contiguous()


def _via_fp32(kernel: MatmulKernel) -> MatmulKernel:
    def fp32_kernel(*args: Tensor | None) -> Tensor:
        wide = [arg if arg is None else arg.float() for arg in args]
        dtype = args[0].dtype  # pyright: ignore[reportOptionalMemberAccess]
        return kernel(*wide).to(dtype)

    return fp32_kernel


def _with_fp32(kernels: dict[str, MatmulKernel]) -> Mapping[str, MatmulKernel]:
    fp32 = {"fp32": _via_fp32(kernels[REFERENCE]), "fp32_onednn": _via_fp32(kernels["onednn"])}
    return MappingProxyType(kernels | fp32)


KERNELS: Mapping[str, Mapping[str, MatmulKernel]] = MappingProxyType({
    "nt": _with_fp32({
        REFERENCE: lambda a, b, bias=None: F.linear(a, b, bias),
        "onednn": lambda a, b, bias=None: onednn_linear(a, b.contiguous(), bias),
    }),
    "nn": _with_fp32({
        REFERENCE: lambda a, b, bias=None: a @ b if bias is None else torch.addmm(bias, a, b),
        "onednn": lambda a, b, bias=None: onednn_linear(a, b.contiguous().t(), bias),
    }),
    "tn": _with_fp32({
        REFERENCE: lambda a, b: a.t() @ b,
        "onednn": lambda a, b: onednn_linear(a.t(), b.contiguous().t()),
        "convolution": _tn_convolution,
    }),
})  # fmt: skip


def make_operands(
    kind: str, rows: int, k: int, n: int, dtype: torch.dtype, *, seed: int | None = None
) -> tuple[Tensor, ...]:
    """Make operands of one product: constant, or uniform in [-1, 1) by a generator of their own."""
    shapes = {"nt": ((rows, k), (n, k), (n,)), "nn": ((rows, k), (k, n)), "tn": ((rows, k), (rows, n))}[kind]
    if seed is None:
        return tuple(torch.full(shape, 0.5, dtype=dtype) for shape in shapes)
    generator = torch.Generator().manual_seed(seed)
    return tuple((torch.rand(shape, generator=generator) * 2 - 1).to(dtype) for shape in shapes)


@cache
def is_usable(kind: str, name: str, dtype: torch.dtype) -> bool:
    """Whether a candidate exists here and gives the right result on a small case in this dtype."""
    if name == REFERENCE:
        return True
    if name not in KERNELS.get(kind, {}) or dtype not in SUPPORTED_DTYPES:
        return False
    if name.startswith("fp32") and dtype == torch.float32:
        return False
    if name != "fp32" and (ONEDNN_LINEAR is None or not torch.backends.mkldnn.is_available()):
        return False
    return run_in_clean_thread(_matches_reference, kind, name, dtype)


def _matches_reference(kind: str, name: str, dtype: torch.dtype) -> bool:
    args = make_operands(kind, 64, 48, 80, dtype, seed=0)
    try:
        got = KERNELS[kind][name](*args)
        want = KERNELS[kind][REFERENCE](*(arg.double() for arg in args))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    if got.shape != want.shape or got.dtype != dtype:
        return False
    error = (got.double() - want).abs().max().item() / want.abs().max().item()
    return error < 8 * torch.finfo(dtype).eps
