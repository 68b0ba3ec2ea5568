"""Send: the source's side: hand-overs and their leases, pushes and the registrations of their destinations.

`access` handles what peers do under the accesses that they opened here.
"""
