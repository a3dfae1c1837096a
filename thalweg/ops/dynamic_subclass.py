"""Give one module another forward without anybody noticing.

An attribute ``module.forward`` would have to refer back to the module: strongly, and the
model dies only when the cycle collector runs; weakly, and a deep copy calls its original.
So the one object gets a subclass of its own class instead, with the same name, as torch's
own ``fully_shard`` and ``parametrize`` do.  Parameter names, repr, hooks and state dict
stay; ``isinstance`` holds; a deep copy keeps the new forward; a pickle holds the plain class.
"""

import copy
import copyreg
import types
from functools import cache
from typing import Any


class DynamicSubclass:
    """Mixin of every class made by :func:`make_subclass`: copied as it is, pickled as the plain class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[1] != (type(self),):
            return reduced  # the plain class has a way of its own
        # The usual constructor insists on the object's present class; this one, as old as pickle, does not.
        return copyreg._reconstructor, (original_class(self), object, None), *reduced[2:]  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def make_subclass(base_class: type, *mixins: type, **namespace: Any) -> type:
    """Make a subclass of ``base_class`` that looks the same, with ``mixins`` (Disguised among them) before it.

    One that ``base_class`` has already stands before it again, as a subclass of itself: Python orders bases so.
    """
    mixins = tuple(type(one.__name__, (one,), {}) if issubclass(base_class, one) else one for one in mixins)
    identity = {name: getattr(base_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = namespace | identity
    return types.new_class(base_class.__name__, (*mixins, base_class), exec_body=lambda scope: scope.update(body))


# The same class for the same arguments: what compares classes, as ``torch.compile`` does, takes such modules for alike.
cached_subclass = cache(make_subclass)


def original_class(module: Any) -> type:
    """Return the class that a module had before any disguise."""
    return next(base for base in type(module).__mro__ if not issubclass(base, DynamicSubclass))
