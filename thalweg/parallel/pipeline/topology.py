"""Ranks on named axes, as programs lay them out by hand: coordinates to ranks and back, and who shares an axis.

The axes of a job of Thalweg's follow from its config (:mod:`thalweg.parallel_dims`); this is the arithmetic alone.
"""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any


class ProcessTopology:
    """Ranks in row-major order of ``axes``, of which the last varies fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)
        coords = product(*map(range, self.dims))
        self.mapping = {self.ProcessCoord(*coord): rank for rank, coord in enumerate(coords)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at these coordinates.

        Raises:
            ValueError: an axis is missing, or there is no such rank.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(f"get_rank() needs a coordinate on each of {self.axes}; filter_match() takes some of them")
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(f"there is no rank at {coord_kwargs}: the axes have the sizes {self.dims}")
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        """The axes, the slowest first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        for coord, number in self.mapping.items():
            if number == rank:
                return coord
        raise ValueError(f"rank {rank} is not in a topology of {self.world_size()} ranks")

    def get_rank_repr(self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_",
                      outer_sep: str = "-") -> str:  # fmt: skip
        """``model_00-expert_01``: the coordinates of a rank on the other axes."""
        coord = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of ranks that differ on ``axis`` alone."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        coords = product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, coord, strict=True))) for coord in coords]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks with these coordinates."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks at ``idx`` of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """All ranks."""
        return prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines of stages, each stage of data ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same with tensor ranks inside."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(number: int) -> list[int]:  # what imports DeepSpeed's module of this name imports it along
    from sympy import factorint

    if number <= 0:
        raise ValueError(f"a positive number has prime factors, not {number}")
    return factorint(number, multiple=True)
