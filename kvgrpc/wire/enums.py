"""Numbers of the schema's enums, by the names that the core has for them."""

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_Name = TypeVar("_Name", bound=Enum | str)
_Number = TypeVar("_Number", bound=int)


def numbers(of: "_EnumTypeWrapper[_Number]", names: Iterable[_Name]) -> dict[_Name, _Number]:
    """Returns the number of each name: a member of an enum of the core, or a text; an empty one is UNSPECIFIED. Raises
    ValueError, as the file is imported, for a name that the schema lacks.
    """
    prefix = of.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED")
    return {name: of.Value(prefix + _suffix(name)) for name in names}


def _suffix(name: Enum | str) -> str:
    return name.name if isinstance(name, Enum) else name.upper() or "UNSPECIFIED"
