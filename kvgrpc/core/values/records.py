"""`dataclass` for the core's values. It is `dataclasses.dataclass`, but `frozen=True` costs nothing at run time.

A frozen class of the standard library sets each field through a guarded call, so an event of twenty fields takes eight
times as long to make. A pull makes some ninety values. Type checkers see the standard decorator and refuse every
assignment to a frozen value; every caller of the core is checked.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Makes a dataclass. A frozen one has a hash of its fields, unless it is compared by identity (`eq=False`)."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, **options)
        return dataclasses.dataclass(cls, eq=eq, unsafe_hash=frozen and eq, **options)


__all__ = ["dataclass"]
