"""The error of an address that another process listens at."""

from kvgrpc.errors import Unavailable


class AddressInUse(Unavailable):
    """The listen address is taken."""

    code = "UNAVAILABLE"
