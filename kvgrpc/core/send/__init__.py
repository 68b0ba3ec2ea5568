"""Send: the source's side. Hand-overs and their leases, pushes and the registrations of their destinations.

What peers do under the accesses that they opened here is in `access`.
"""
