"""Tables: what a lead remembers, one table a file, each guarding its own rules.

Pins, leases, accesses, peers, transfers, timers, turns. The protocol that fills them is above.
"""
