"""Peers: handshakes with other leads, and the liveness of their engines.

`access` has what a peer reads or writes here, `send` and `receive` what is read or written at a peer.
"""
