"""The nearest (semi-)orthogonal matrix, nearly: Newton-Schulz iterations on the singular values (Jordan,
2024).

A matrix X = U S V^T is scaled to a Frobenius norm of 1 and put ``steps`` times through the odd polynomial
``a X + b (X X^T) X + c (X X^T)^2 X``, which keeps U and V and drives every singular value into about
[0.7, 1.2]. The coefficients are the quintic ones of Jordan's Muon, tuned for a steep slope at zero.

``standard`` does this to the n x m matrix (n <= m) itself: 10 n^2 m + 5 n^3 multiply-adds for five steps.
``gram`` does it to the n x n matrix R = X X^T, of which all the factors are polynomials (they commute, and
stay symmetric), and multiplies X only twice: 4 n^2 m + 14 n^3, fewer from m = 1.5 n on. It starts afresh from
the real X after two steps, since R drifts away from X X^T by rounding. Equal in exact arithmetic, in fp32 to
about 1e-6.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
METHODS = ("gram", "standard")
_EPS = 1e-7
_RESTART_STEP = 2
_MIN_GRAM_ASPECT = 1.5


def orthogonalize(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    method: str = "gram",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return U V^T of the 2-D ``matrix`` = U S V^T approximately, of the same shape, in ``dtype``.

    All arithmetic is in ``dtype`` (bf16 is what the coefficients were made for and torch's Muon uses; fp32
    does not turn a rounding difference of the input into one of 1e-3). A matrix of zeros stays zero.
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=_EPS)
    if method == "gram" and x.size(1) > _MIN_GRAM_ASPECT * x.size(0):
        x = _gram(x, steps, coefficients)
    else:
        x = _standard(x, steps, coefficients)
    return x.mT if tall else x


def _standard(x: Tensor, steps: int, coefficients: Sequence[float]) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gram(x: Tensor, steps: int, coefficients: Sequence[float]) -> Tensor:
    a, b, c = coefficients
    for count in (min(_RESTART_STEP, steps), max(0, steps - _RESTART_STEP)):
        gram = x @ x.mT if count else x
        product: Tensor | None = None
        for step in range(count):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal().add_(a)
            product = factor if product is None else factor @ product
            if step < count - 1:
                gram = factor @ gram @ factor
        x = x if product is None else product @ x
    return x


def orthogonalize_cost(rows: int, cols: int) -> int:
    """Return a matrix's cost, up to a factor that all matrices share: what the owners are balanced by."""
    n, m = sorted((rows, cols))
    return n * n * (m + n)
