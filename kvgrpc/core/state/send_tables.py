"""The tables of what this engine hands over: leases, pushes, and work of the ranks ahead of readers."""

from kvgrpc.core.state.push_table import PushTable
from kvgrpc.core.state.waiting_rows import Mirrors, Prefetch
from kvgrpc.core.tables.lacking_requests import LackingRequests
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger
from kvgrpc.core.tables.soft_leases import SoftLeases


class SendTables:
    """Everything handed over in one life. The leases may be older, when a defect ended the last life."""

    def __init__(self, leases: LeaseTable, ledger: Ledger) -> None:
        self.leases = leases
        self.soft_leases = SoftLeases()
        self.pushes = PushTable(ledger)
        self.prefetch = Prefetch()
        self.mirrors = Mirrors()
        self.lacking = LackingRequests()
