"""Data paths: move bytes between the memories of two ranks, by one interface (`base`) with one file per library.

Data paths know memory, endpoints and runs, and no gRPC, lease or block id. `mover` is the entry for everyone else.
"""
