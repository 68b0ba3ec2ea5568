"""The tables of what this engine receives."""

from kvgrpc.core.state.caller_budget import CallerBudget
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.state.reservation import ReservationMove


class ReceiveTables:
    """Pulls and reservations that are not forgotten."""

    def __init__(self, renewal_budget: CallerBudget) -> None:
        self.renewal_budget = renewal_budget
        self.transfers: dict[str, PullMove] = {}
        """Pulls and reservations by transfer."""
        self.targets: dict[str, ReservationMove] = {}
        """Reservations by the target in their grant."""
        self.open_writes: dict[bytes, ReservationMove] = {}
        """Reservations by access. Sources may write into them until the contrary is proved."""

    def writing_lives(self) -> dict[str, None]:
        """Returns the lives of sources that may write here. The order of arrival is the same in every process."""
        return dict.fromkeys(reservation.writers[id_].life for id_, reservation in self.open_writes.items())
