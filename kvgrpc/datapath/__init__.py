"""Moves bytes between the memories of two ranks: one interface (`base`), one file for each library.

Knows memory, endpoints and runs; no gRPC, no lease and no block id. `mover` is the way in for everyone else.
"""
