"""``deepspeed.ops.op_builder``: nothing is compiled, so a builder says whether its operator is there."""

from typing import Any, NoReturn

_OFFERED = ("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLamb", "FusedLion")
_OTHERS = ("AsyncIO", "Utils", "Inference", "Transformer", "SparseAttn", "Quantizer", "RandomLTD")


def _make_builder(name: str, offered: bool) -> type:
    def load(self: Any, verbose: bool = True) -> NoReturn:
        raise NotImplementedError(
            f"{name}Builder().load() is not offered by Thalweg: no operator is compiled; kernels come with torch or "
            "are generated at load, and deepspeed.ops has the optimizers"
        )

    methods = {"load": load, "is_compatible": lambda self, verbose=False: offered, "builder_available": lambda: offered}
    return type(f"{name}Builder", (), {"NAME": name.lower(), "__doc__": f"Whether {name} is there.", **methods})


_builders = {f"{name}Builder": _make_builder(name, name in _OFFERED) for name in (*_OFFERED, *_OTHERS)}
ALL_OPS: dict[str, Any] = {vars(builder)["NAME"]: builder() for builder in _builders.values()}
COMPATIBLE_OPS = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> type:
    """A builder by its class."""
    if name not in _builders:
        raise AttributeError(name)
    return _builders[name]
