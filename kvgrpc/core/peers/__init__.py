"""Peers: handshakes with other leads, and the liveness of their engines.

What a peer reads or writes here is in `access`; what is read or written at a peer is in `send` and `receive`.
"""
