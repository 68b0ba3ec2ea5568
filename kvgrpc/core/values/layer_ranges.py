"""Ranges of layers, and the regions that they select."""

from kvgrpc.core.values.layout import Region
from kvgrpc.errors import FieldViolation, InvalidRequest, Reason


def holds(region: Region, layers: tuple[int, int]) -> bool:
    """Returns True if a region holds some of `layers` = (first, count).

    Raises InvalidRequest (INVALID_FIELD) if it also holds others: nothing says which bytes of its blocks belong to
    which layer.
    """
    first, end = layers[0], layers[0] + layers[1]
    region_end = region.first_layer + region.layers
    if region_end <= first or end <= region.first_layer:
        return False
    if region.first_layer < first or end < region_end:
        raise InvalidRequest(
            Reason.INVALID_FIELD,
            "the range of layers cuts a region of the pool",
            violations=(
                FieldViolation(
                    "layers", f"take all or none of layers {region.first_layer} to {region_end - 1}, which lie together"
                ),
            ),
        )
    return True
