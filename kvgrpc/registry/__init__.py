"""Registries: where leads publish themselves, and where readers of a fleet find them.

A registry says who there is, and never who is alive: `kvgrpc.fleet` decides which engines may be used.
"""
