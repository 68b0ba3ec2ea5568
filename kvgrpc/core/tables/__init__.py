"""Tables: the memory of a lead, one table in each file. Each table guards its own rules.

The tables hold pins, leases, accesses, peers, transfers, timers and turns. The protocol that fills them is above.
"""
