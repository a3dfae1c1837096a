"""zero.Init: build a model without memory, and give it its values when it is sharded.

    with thalweg.zero.Init():
        model = AutoModelForCausalLM.from_config(config)     # on meta, true shapes
    engine, *_ = thalweg.initialize(model=model, config=...) # values appear shard by shard

The phases.  Inside the context the constructors run as always, under a dispatch mode of this
thread (:mod:`.record_mode`); what they do to big tensors is recorded (:mod:`.op_graph`).  After it
the parameters are on meta and still remember: a later ``model.apply(init)``, ``deepcopy``,
``.half()`` or ``load_state_dict`` counts (:mod:`.deferred_tensor`).  :func:`materialize` replays the
records (:mod:`.replay`), one full tensor at a time where the model allows it.

The promise.  Values are those of an ordinary CPU build from the same random state, bit for
bit, and the random state after the block is that of an ordinary build.  The price is that
random numbers are drawn twice, once to move the generator on and once at replay.  (DeepSpeed
instead patches the constructors of torch.nn for the whole process and empties parameters.)

A model built under plain ``torch.device("meta")`` has no record; :mod:`.reset_parameters` runs the
initialisation that its modules bring along.  :class:`OnDevice` builds one so, or on another device, in a dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.deferred_init.deferred_tensor import drop_record, is_deferred
from thalweg.deferred_init.op_graph import is_meta, make_view_ref
from thalweg.deferred_init.record_mode import RecordMode
from thalweg.deferred_init.replay import replay_targets, thread_state
from thalweg.deferred_init.reset_parameters import record_module_init
from thalweg.device import request_huge_pages

ValueSink = Callable[[str, Tensor, Tensor], None]

# Tensors of so many elements are computed at once while a model is built.
SMALL_NUMEL = 4096


class Init:
    """Context in which models are built on meta, with true shapes and recorded values.

    Args:
        enabled: ``False`` makes the context do nothing.
        dtype: floating dtype in which the model is built, as under
            ``torch.set_default_dtype`` (which this sets inside the context, for the whole
            process); default: the dtype that the program has.
        module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory,
        config_dict_or_path, config, mpu, options: taken for DeepSpeed's sake, no effect.
            A model that exists already is sharded by ``thalweg.initialize``, over the mesh
            and the tiers that its config says.

    A context affects only the thread that entered it, patches nothing, and leaves models
    that exist already alone.  Contexts may be nested.

    Raises ``ValueError`` for a dtype that is not a floating one.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **options: Any,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"zero.Init(dtype={dtype!r}): give a floating dtype, as torch.bfloat16, or None")
        self.enabled = enabled
        self.dtype = dtype
        self._entered: list[tuple[RecordMode | None, torch.dtype]] = []

    def __enter__(self) -> Init:
        if self.enabled:
            request_huge_pages()  # who builds a model here has made few tensors yet
            recorder = None if thread_state.is_recording else RecordMode(SMALL_NUMEL)
            self._entered.append((recorder, torch.get_default_dtype()))
            if recorder is not None:
                recorder.__enter__()
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            recorder, dtype = self._entered.pop()
            torch.set_default_dtype(dtype)
            if recorder is not None:
                recorder.__exit__(*error)


class OnDevice:
    """Tensors of the constructors within are made on ``device``, floating ones as ``dtype``.

    On "meta" they have shapes and no memory, and no values that could be had back: ``thalweg.zero.Init`` keeps those.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._entered: list[tuple[Any, torch.dtype]] = []

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._entered.append((self.device.__enter__(), torch.get_default_dtype()))
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            _, dtype = self._entered.pop()
            torch.set_default_dtype(dtype)
            self.device.__exit__(*error)


def has_meta_tensors(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``module`` is on meta."""
    return bool(_get_meta_tensors(module))


def materialize_module(module: nn.Module, sink: ValueSink, *, device: str | torch.device = "cpu") -> None:
    """Give ``sink(name, tensor, value)`` the value of every parameter and buffer on meta.

    Called once for each distinct tensor, under its first name; ``value`` is a full plain
    tensor on ``device``, valid during the call only.  The order of the calls is the same on
    every rank that built the same model.  Afterwards the tensors are ordinary meta tensors,
    the same objects, without a record.

    Raises:
        ValueError: a tensor has neither a record nor a module that can initialise it; raised
            before the sink is called.
    """
    meta_tensors = _get_meta_tensors(module)
    record_module_init(module, {name: tensor for name, tensor in meta_tensors.items() if not is_deferred(tensor)})
    names, tensors = list(meta_tensors), list(meta_tensors.values())

    def emit(index: int, value: Tensor) -> None:
        sink(names[index], tensors[index], value.to(device))

    replay_targets([make_view_ref(tensor) for tensor in tensors], emit)
    for tensor in tensors:
        drop_record(tensor)


def _get_meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the distinct parameters and buffers on meta by their first names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if is_meta(tensor)}
