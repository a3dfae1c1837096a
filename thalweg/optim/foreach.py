"""torch's operators over lists of tensors (``torch._foreach_*``), named once.

They are documented but carry an underscore. On a GPU one call is a few kernels for the whole list; on a CPU
it saves the Python call for each tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ops: Any = torch
add_: Callable[..., None] = _ops._foreach_add_
addcmul_: Callable[..., None] = _ops._foreach_addcmul_
copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _ops._foreach_copy_
div: Callable[..., list[Tensor]] = _ops._foreach_div
lerp: Callable[..., list[Tensor]] = _ops._foreach_lerp
lerp_: Callable[..., None] = _ops._foreach_lerp_
mul_: Callable[..., None] = _ops._foreach_mul_
norm: Callable[..., list[Tensor]] = _ops._foreach_norm
sign_: Callable[..., None] = _ops._foreach_sign_
sqrt: Callable[..., list[Tensor]] = _ops._foreach_sqrt
